"""An LSTM that reads real handwritten digits row by row: trained, pruned to 50% zeros, weights in int8.

The products of an LSTM lie inside a loop, where int8 kernels do not run. So the int8 artifact stores the weights in
int8 and computes in float32.
"""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="lstm",
    description="An LSTM on the rows of 1,797 real handwritten digits",
    model=ModelConfig(builder="lstm", arguments={"units": [128], "dropout": 0.2}),
    data=DataConfig(source="digits", arguments={"image_size": 16}, augment=AugmentConfig(crop=1)),
    training=TrainingConfig(epochs=40, global_batch_size=32, learning_rate=3e-3, warmup_epochs=1),
    pruning=PruningConfig(target_sparsity=0.5, epochs=10, learning_rate=1e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/lstm",
    forms={
        "quick": {"training": {"epochs": 4}, "pruning": {"epochs": 2}},
        "full": {
            "data": {"source": "imdb", "arguments": {"length": 400}, "augment": {"crop": 0}},
            "model": {"arguments": {"vocabulary": 20_000, "bidirectional": True, "dropout": 0.5}},
            "training": {"epochs": 6, "global_batch_size": 64, "learning_rate": 1e-3},
            "pruning": {"epochs": 2},
        },
    },
)
