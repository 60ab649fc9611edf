"""A small U-Net on masks of real handwritten digits; in full form U-Net on the pets of Oxford."""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="unet",
    description="A U-Net of 3 steps on masks of 1,797 real handwritten digits: paper, and the ink of each digit",
    task="segmentation",
    model=ModelConfig(builder="unet", arguments={"width": 16, "depth": 3, "norm_momentum": 0.9}),
    data=DataConfig(source="digit_masks", augment=AugmentConfig(crop=3)),
    training=TrainingConfig(epochs=15, global_batch_size=32, learning_rate=2e-3),
    pruning=PruningConfig(target_sparsity=0.5, epochs=6, learning_rate=2e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/unet",
    forms={
        "quick": {"training": {"epochs": 2}, "pruning": {"epochs": 1}},
        "full": {
            "description": "U-Net of 4 steps on the masks of the Oxford-IIIT pets, to be run on a GPU",
            "model": {"arguments": {"width": 64, "depth": 4, "norm_momentum": 0.99}},
            "data": {
                "source": "image_folder",
                "arguments": {
                    "directory": "oxford_pets/images",
                    "masks": "oxford_pets/annotations/trimaps",
                    "image_size": 256,
                    # The masks count from 1, and 3 is the edge of the pet.
                    "class_names": ["unused", "pet", "background"],
                    "ignored_target": 3,
                    "max_unreadable": 0.01,
                },
                "augment": {"crop": 16, "flip": "horizontal", "rotation_degrees": 15, "zoom": 0.2},
            },
            "training": {"epochs": 60, "global_batch_size": 32, "learning_rate": 1e-3, "warmup_epochs": 2},
            "pruning": {"epochs": 20, "learning_rate": 5e-4},
        },
    },
)
