"""A small GPT on the bytes of Python's standard library: trained, pruned to 50% zeros, quantized to int8."""

from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="gpt",
    description="A decoder of 4 blocks on the source files of Python's standard library, byte by byte",
    task="language_model",
    model=ModelConfig(builder="gpt", arguments={"width": 128, "depth": 4, "heads": 4}),
    data=DataConfig(source="text", arguments={"length": 256, "test_fraction": 0.03}),
    training=TrainingConfig(
        epochs=4,
        steps_per_epoch=300,
        global_batch_size=16,
        optimizer="adamw",
        optimizer_arguments={"beta_2": 0.95, "global_clipnorm": 1.0},
        learning_rate=3e-3,
        warmup_epochs=0.3,
        weight_decay=0.1,
    ),
    pruning=PruningConfig(target_sparsity=0.5, epochs=2, learning_rate=2e-3),
    quantization=QuantizationConfig(calibration_examples=64),
    export_dir="saved_models/gpt",
    forms={
        "quick": {
            "data": {"max_examples": 320},
            "model": {"arguments": {"depth": 2}},
            "training": {"epochs": 1, "steps_per_epoch": 40},
        },
        # The size of GPT-2 (124M), on the bytes of the files in a folder.
        "full": {
            "data": {"arguments": {"directory": "data/wikitext-103", "length": 1024}},
            "model": {"arguments": {"width": 768, "depth": 12, "heads": 12, "dropout": 0.1}},
            "training": {
                "epochs": 20,
                "steps_per_epoch": 5000,
                "global_batch_size": 64,
                "accumulate": 2,
                "learning_rate": 6e-4,
            },
            "pruning": {"epochs": 2},
        },
    },
)
