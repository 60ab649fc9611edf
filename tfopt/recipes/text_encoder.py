"""A small text encoder tells the package of a piece of source code: trained, pruned to 50% zeros, quantized to int8."""

from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="text_encoder",
    description="An encoder that tells the package of a piece of Python's standard library",
    model=ModelConfig(
        builder="text_encoder",
        arguments={
            "vocabulary": 16_384,
            "width": 128,
            "depth": 1,
            "heads": 2,
            "units": 256,
            "max_length": 256,
            "dropout": 0.3,
            "token_dropout": 0.4,
            "pool": "wide_and_deep",
        },
    ),
    data=DataConfig(
        source="text_classes", arguments={"tokens": "words", "length": 256, "overlap": 128, "min_files": 4}
    ),
    training=TrainingConfig(
        epochs=6,
        global_batch_size=64,
        optimizer="adamw",
        learning_rate=2e-3,
        warmup_epochs=0.5,
        weight_decay=0.05,
        label_smoothing=0.1,
    ),
    pruning=PruningConfig(target_sparsity=0.5, epochs=2, learning_rate=1e-3),
    quantization=QuantizationConfig(calibration_examples=128),
    export_dir="saved_models/text_encoder",
    forms={
        "quick": {"data": {"max_examples": 640}, "training": {"epochs": 2}, "pruning": {"epochs": 1}},
        # BERT-base, from random weights.
        "full": {
            "data": {"source": "imdb", "arguments": {"num_words": 20_000, "length": 512}},
            "model": {
                "arguments": {
                    "vocabulary": 20_000,
                    "width": 768,
                    "depth": 12,
                    "heads": 12,
                    "units": 3072,
                    "max_length": 512,
                    "token_dropout": 0.1,
                    "pool": "mean",
                }
            },
            "training": {"epochs": 10, "learning_rate": 1e-4, "warmup_epochs": 1.0},
            "pruning": {"learning_rate": 5e-5},
        },
    },
)
