"""A small CNN on real handwritten digits: trained, pruned to 75% zeros, quantized to int8."""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="digits_cnn",
    description="Three convolutions and three dense layers on 1,797 real handwritten digits",
    model=ModelConfig(builder="simple_cnn", arguments={"filters": [32, 64, 64], "kernel_size": 3, "dropout": 0.3}),
    data=DataConfig(source="digits", augment=AugmentConfig(crop=4)),
    training=TrainingConfig(epochs=20, global_batch_size=32, learning_rate=2e-3, label_smoothing=0.1),
    pruning=PruningConfig(target_sparsity=0.75, epochs=12, learning_rate=1e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/digits_cnn",
    forms={
        "quick": {"data": {"max_examples": 320}, "training": {"epochs": 4}, "pruning": {"epochs": 2}},
        # MNIST is downloaded. LeCun et al. 1998 reach 99.2% with a similar network.
        "full": {
            "data": {"source": "mnist", "augment": {"crop": 2}},
            "training": {"epochs": 20, "global_batch_size": 128},
            "pruning": {"epochs": 10},
        },
    },
)
