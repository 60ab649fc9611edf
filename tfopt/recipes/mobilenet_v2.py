"""A narrow MobileNetV2 on real handwritten digits; in full, MobileNetV2 on ImageNet."""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="mobilenet_v2",
    description="A narrow MobileNetV2 on 1,797 real handwritten digits",
    model=ModelConfig(builder="mobilenet_v2", arguments={"alpha": 0.35, "small_images": True, "norm_momentum": 0.9}),
    data=DataConfig(source="digits", augment=AugmentConfig(crop=4)),
    training=TrainingConfig(epochs=15, global_batch_size=32, learning_rate=5e-3, warmup_epochs=1, label_smoothing=0.1),
    pruning=PruningConfig(target_sparsity=0.5, epochs=8, learning_rate=2e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/mobilenet_v2",
    forms={
        "quick": {"data": {"max_examples": 320}, "training": {"epochs": 2}, "pruning": False},
        "full": {
            "model": {"arguments": {"alpha": 1.0, "small_images": False, "norm_momentum": 0.99}},
            "data": {
                "source": "tfds",
                "arguments": {
                    "name": "imagenet2012",
                    "image_size": 224,
                    "central_crop": 0.875,
                    "test_split": "validation",
                },
                "augment": {"crop": 0, "crop_scale": [0.08, 1.0], "flip": "horizontal"},
            },
            "training": {
                "epochs": 150,
                "optimizer": "sgd",
                "optimizer_arguments": {"momentum": 0.9, "nesterov": True},
                "global_batch_size": 1024,
                "base_batch_size": 256,
                "learning_rate": 0.05,
                "warmup_epochs": 5,
                "weight_decay": 4e-4,  # the usual 4e-5 goes through the momentum, which makes it ten times as strong
            },
            "pruning": {"epochs": 30, "learning_rate": 0.005},
        },
    },
)
