"""A small ConvNeXt on real handwritten digits; in full form ConvNeXt-tiny on ImageNet."""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="convnext",
    description="A ConvNeXt of 4 blocks on 1,797 real handwritten digits",
    model=ModelConfig(
        builder="convnext", arguments={"depths": [2, 2], "widths": [64, 128], "patch_size": 2, "layer_scale": 1.0}
    ),
    data=DataConfig(source="digits", augment=AugmentConfig(crop=3, rotation_degrees=10, zoom=0.1)),
    training=TrainingConfig(
        epochs=16, global_batch_size=32, optimizer="adamw", learning_rate=1e-3, warmup_epochs=1, weight_decay=0.05
    ),
    pruning=PruningConfig(target_sparsity=0.5, epochs=6, learning_rate=1e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/convnext",
    forms={
        "quick": {"training": {"epochs": 2}, "pruning": {"epochs": 1}},
        # The settings of the paper, without random erasing, which tfopt does not have.
        "full": {
            "description": "ConvNeXt-tiny on ImageNet, to be run on GPUs",
            "model": {
                "arguments": {
                    "depths": [3, 3, 9, 3],
                    "widths": [96, 192, 384, 768],
                    "patch_size": 4,
                    "layer_scale": 1e-6,
                    "drop_path": 0.1,
                }
            },
            "data": {
                "source": "image_folder",
                "arguments": {"directory": "imagenet", "image_size": 224, "central_crop": 0.875},
                "augment": {
                    "crop": 0,
                    "crop_scale": [0.08, 1.0],
                    "rotation_degrees": 0.0,
                    "zoom": 0.0,
                    "flip": "horizontal",
                    "mixup": 0.8,
                    "cutmix": 1.0,
                    "rand_augment": 2,
                },
            },
            "training": {
                "epochs": 300,
                "global_batch_size": 4096,
                "base_batch_size": 4096,
                "accumulate": 8,
                "learning_rate": 4e-3,
                "warmup_epochs": 20,
                "label_smoothing": 0.1,
                "ema_momentum": 0.9999,
            },
            "pruning": {"epochs": 30, "learning_rate": 1e-4},
        },
    },
)
