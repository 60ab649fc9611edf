"""A residual network of bottleneck blocks on real handwritten digits; in full, ResNet-50 on ImageNet."""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="resnet50",
    description="A small residual network of bottleneck blocks on 1,797 real handwritten digits",
    model=ModelConfig(
        builder="resnet50", arguments={"depths": [1, 1, 1], "width": 16, "small_images": True, "norm_momentum": 0.9}
    ),
    data=DataConfig(source="digits", arguments={"image_size": 16}, augment=AugmentConfig(crop=2)),
    training=TrainingConfig(epochs=16, global_batch_size=32, learning_rate=2e-3, warmup_epochs=1, label_smoothing=0.1),
    pruning=PruningConfig(target_sparsity=0.5, epochs=12, learning_rate=1e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/resnet50",
    forms={
        "quick": {"data": {"max_examples": 320}, "training": {"epochs": 3}, "pruning": {"epochs": 2}},
        "full": {
            "model": {"arguments": {"depths": [3, 4, 6, 3], "width": 64, "small_images": False, "norm_momentum": 0.9}},
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
                "epochs": 90,
                "optimizer": "sgd",
                "optimizer_arguments": {"momentum": 0.9, "nesterov": True},
                "global_batch_size": 1024,
                "base_batch_size": 256,
                "learning_rate": 0.1,
                "warmup_epochs": 5,
                "weight_decay": 1e-3,  # the usual 1e-4 goes through the momentum, which makes it ten times as strong
            },
            "pruning": {"epochs": 30, "learning_rate": 0.01},
        },
    },
)
