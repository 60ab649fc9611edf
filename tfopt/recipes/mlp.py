"""Dense layers on rows of real measurements: a regression."""

from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="mlp",
    description="A regression on 442 real records of diabetes patients",
    task="regression",
    model=ModelConfig(builder="mlp", arguments={"units": [64, 64], "dropout": 0.3}),
    data=DataConfig(source="diabetes"),
    training=TrainingConfig(epochs=40, global_batch_size=32, learning_rate=2e-3, weight_decay=0.01, optimizer="adamw"),
    pruning=PruningConfig(target_sparsity=0.5, epochs=20, learning_rate=1e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/mlp",
    forms={
        "quick": {"training": {"epochs": 5}, "pruning": {"epochs": 3}},
        # Any table: tfopt run mlp --full --data.arguments path=rows.csv target=price
        "full": {
            "model": {"arguments": {"units": [256, 256]}},
            "data": {"source": "csv", "arguments": {"path": "rows.csv", "target": "value"}},
            "training": {"epochs": 100, "global_batch_size": 256},
        },
    },
)
