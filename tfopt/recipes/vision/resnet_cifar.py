"""A small residual network on real handwritten digits: trained, pruned to 75% zeros, quantized to int8."""

from tfopt.data.config import DataConfig
from tfopt.pruning import PruningConfig
from tfopt.quantization import QuantizationConfig
from tfopt.recipe import ModelConfig, Recipe
from tfopt.training import TrainingConfig

RECIPE = Recipe(
    name="resnet_cifar",
    description="A residual network of 14 layers on 1,797 real handwritten digits",
    model=ModelConfig(builder="resnet_cifar", arguments={"depth": 14, "width": 16}),
    data=DataConfig(source="digits", random_shift=4),
    training=TrainingConfig(epochs=12, global_batch_size=32, learning_rate=2e-3),
    pruning=PruningConfig(target_sparsity=0.75, epochs=8, learning_rate=1e-3),
    quantization=QuantizationConfig(),
    export_dir="saved_models/resnet_cifar",
)
