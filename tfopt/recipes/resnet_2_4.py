"""The residual network of `resnet_cifar` in the pattern 2:4, which sparse tensor cores compute."""

from dataclasses import replace

from tfopt.recipe import PruningConfig
from tfopt.recipes import resnet_cifar

RECIPE = replace(
    resnet_cifar.RECIPE,
    name="resnet_2_4",
    description="A residual network of 14 layers with two zeros in four weights, on 1,797 real handwritten digits",
    # The first layer has 9 weights for each channel, which are no multiple of four, and few in all.
    pruning=PruningConfig(pattern="2:4", target_sparsity=0.5, keep_first=True, epochs=12, learning_rate=1e-3),
    export_dir="saved_models/resnet_2_4",
)
