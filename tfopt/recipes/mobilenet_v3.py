"""A narrow MobileNetV3 on real handwritten digits; in full, MobileNetV3-Large on ImageNet."""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="mobilenet_v3",
    description="A narrow MobileNetV3-Small on 1,797 real handwritten digits",
    model=ModelConfig(builder="mobilenet_v3", arguments={"size": "small", "alpha": 0.5, "norm_momentum": 0.9}),
    data=DataConfig(source="digits", augment=AugmentConfig(crop=4)),
    training=TrainingConfig(epochs=20, global_batch_size=32, learning_rate=2e-3, warmup_epochs=1, label_smoothing=0.1),
    pruning=PruningConfig(target_sparsity=0.5, epochs=10, learning_rate=1e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/mobilenet_v3",
    forms={
        "quick": {"data": {"max_examples": 320}, "training": {"epochs": 2}, "pruning": False},
        "full": {
            "model": {"arguments": {"size": "large", "alpha": 1.0, "norm_momentum": 0.99}},
            "data": {
                "source": "tfds",
                "arguments": {
                    "name": "imagenet2012",
                    "image_size": 224,
                    "central_crop": 0.875,
                    "test_split": "validation",
                },
                "augment": {"crop": 0, "crop_scale": [0.08, 1.0], "flip": "horizontal", "rand_augment": 2},
            },
            "training": {
                "epochs": 300,
                "optimizer": "sgd",
                "optimizer_arguments": {"momentum": 0.9, "nesterov": True},
                "global_batch_size": 1024,
                "base_batch_size": 256,
                "learning_rate": 0.1,
                "warmup_epochs": 5,
                "weight_decay": 2e-4,  # 2e-5 goes through the momentum, which makes it ten times as strong
                "ema_momentum": 0.9999,
            },
            "pruning": {"epochs": 30, "learning_rate": 0.01},
        },
    },
)
