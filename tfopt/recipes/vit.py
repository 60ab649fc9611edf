"""A small vision transformer on real handwritten digits; in full form DeiT-small on ImageNet."""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig
from tfopt.recipes import convnext

RECIPE = Recipe(
    name="vit",
    description="A vision transformer of 4 blocks, as wide as ViT-tiny, on 1,797 real handwritten digits",
    model=ModelConfig(builder="vit", arguments={"patch_size": 4, "width": 192, "depth": 4, "heads": 3}),
    data=DataConfig(source="digits", augment=AugmentConfig(crop=3, rotation_degrees=10, zoom=0.1)),
    training=TrainingConfig(
        epochs=18, global_batch_size=32, optimizer="adamw", learning_rate=1e-3, warmup_epochs=2, weight_decay=0.05
    ),
    pruning=PruningConfig(target_sparsity=0.5, epochs=8, learning_rate=7e-4),
    quantization=QuantizationConfig(),
    export_dir="saved_models/vit",
    forms={
        "quick": {
            "model": {"arguments": {"patch_size": 8}},
            "training": {"epochs": 3, "warmup_epochs": 1},
            "pruning": {"epochs": 1},
        },
        # The settings of DeiT, without repeated augmentation and random erasing, which tfopt does not have.
        "full": {
            "description": "DeiT-small with patches of 16 on ImageNet, to be run on GPUs",
            "model": {"arguments": {"patch_size": 16, "width": 384, "depth": 12, "heads": 6, "drop_path": 0.1}},
            "data": convnext.RECIPE.forms["full"]["data"],
            "training": {
                "epochs": 300,
                "global_batch_size": 1024,
                "base_batch_size": 1024,
                "warmup_epochs": 5,
                "label_smoothing": 0.1,
                "ema_momentum": 0.9999,
            },
            "pruning": {"epochs": 30, "learning_rate": 1e-4},
        },
    },
)
