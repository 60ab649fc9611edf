"""A narrow EfficientNetV2 on real handwritten digits; in full, EfficientNetV2-B0 on ImageNet."""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="efficientnet_v2",
    description="A narrow EfficientNetV2-B0 on 1,797 real handwritten digits",
    model=ModelConfig(builder="efficientnet_v2", arguments={"size": "b0", "alpha": 0.25}),
    data=DataConfig(source="digits", augment=AugmentConfig(crop=4)),
    training=TrainingConfig(epochs=20, global_batch_size=32, learning_rate=4e-3, warmup_epochs=1, label_smoothing=0.1),
    pruning=PruningConfig(target_sparsity=0.5, epochs=10, learning_rate=2e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/efficientnet_v2",
    forms={
        "quick": {"data": {"max_examples": 320}, "training": {"epochs": 2}, "pruning": False},
        "full": {
            "model": {"arguments": {"alpha": 1.0}},
            "data": {
                "source": "tfds",
                "arguments": {
                    "name": "imagenet2012",
                    "image_size": 224,
                    "central_crop": 0.875,
                    "test_split": "validation",
                },
                "augment": {
                    "crop": 0,
                    "crop_scale": [0.08, 1.0],
                    "flip": "horizontal",
                    "rand_augment": 2,
                    "mixup": 0.2,
                },
            },
            "training": {
                "epochs": 350,
                "optimizer": "adamw",
                "global_batch_size": 1024,
                "base_batch_size": 1024,
                "learning_rate": 1e-3,
                "warmup_epochs": 5,
                "weight_decay": 0.05,
                "ema_momentum": 0.9999,
            },
            "pruning": {"epochs": 30, "learning_rate": 1e-4},
        },
    },
)
