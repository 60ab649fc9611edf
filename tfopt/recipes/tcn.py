"""A temporal convolutional network on the rows of real handwritten digits: trained, pruned to 75% zeros, int8."""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="tcn",
    description="A temporal convolutional network on the rows of 1,797 real handwritten digits",
    model=ModelConfig(builder="tcn", arguments={"filters": 64, "blocks": 3, "dropout": 0.1, "norm_momentum": 0.9}),
    data=DataConfig(source="digits", arguments={"image_size": 16}, augment=AugmentConfig(crop=1)),
    training=TrainingConfig(epochs=40, global_batch_size=32, learning_rate=3e-3, warmup_epochs=1),
    pruning=PruningConfig(target_sparsity=0.75, epochs=15, learning_rate=1e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/tcn",
    forms={
        "quick": {"training": {"epochs": 4}, "pruning": {"epochs": 2}},
        # The network of Bai et al. for sequential MNIST: every pixel is a step.
        "full": {
            "data": {"source": "mnist", "arguments": {}, "augment": {"crop": 0}},
            "model": {"arguments": {"steps": 784, "filters": 25, "kernel_size": 7, "blocks": 8, "dropout": 0.05}},
            "training": {"epochs": 20, "global_batch_size": 64, "learning_rate": 2e-3},
            "pruning": {"epochs": 5},
        },
    },
)
