"""The residual network of `resnet_cifar` with 90% zeros, ranked over all layers together."""

from dataclasses import replace

from tfopt.recipe import PruningConfig
from tfopt.recipes import resnet_cifar

RECIPE = replace(
    resnet_cifar.RECIPE,
    name="resnet_sparse",
    description="A residual network of 14 layers with 90% zeros, on 1,797 real handwritten digits",
    pruning=PruningConfig(target_sparsity=0.9, scope="global", epochs=12, learning_rate=1e-3),
    export_dir="saved_models/resnet_sparse",
)
