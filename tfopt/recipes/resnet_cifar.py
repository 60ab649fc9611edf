"""A small residual network on real handwritten digits: trained, pruned to 75% zeros, quantized to int8."""

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, PruningConfig, QuantizationConfig, Recipe, TrainingConfig

RECIPE = Recipe(
    name="resnet_cifar",
    description="A residual network of 14 layers on 1,797 real handwritten digits",
    # The normalizations follow the weights quickly. With a momentum of 0.99, their statistics would lag behind the
    # pruning by a hundred steps, and the pruned model would lose several points.
    model=ModelConfig(builder="resnet_cifar", arguments={"depth": 14, "width": 16, "norm_momentum": 0.9}),
    data=DataConfig(source="digits", arguments={"image_size": 16}, augment=AugmentConfig(crop=2)),
    training=TrainingConfig(epochs=16, global_batch_size=32, learning_rate=2e-3, warmup_epochs=1, label_smoothing=0.1),
    pruning=PruningConfig(target_sparsity=0.75, epochs=12, learning_rate=1e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/resnet_cifar",
    forms={
        "quick": {"data": {"max_examples": 320}, "training": {"epochs": 3}, "pruning": {"epochs": 2}},
        "full": {
            "model": {"arguments": {"depth": 20, "norm_momentum": 0.99}},
            "data": {"source": "cifar10", "arguments": {}, "augment": {"crop": 4, "flip": "horizontal"}},
            "training": {
                "epochs": 200,
                "optimizer": "sgd",
                "optimizer_arguments": {"momentum": 0.9, "nesterov": True},
                "global_batch_size": 128,
                "base_batch_size": 128,
                "learning_rate": 0.1,
                "warmup_epochs": 5,
                "weight_decay": 1e-3,  # the paper's 1e-4 goes through the momentum, which makes it ten times as strong
            },
            "pruning": {"epochs": 60, "learning_rate": 0.01},
        },
    },
)
