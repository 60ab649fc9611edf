"""The residual network of `resnet_cifar` with channels removed down to half of the multiply-adds."""

from dataclasses import replace

from tfopt.recipe import StructuredPruningConfig
from tfopt.recipes import resnet_cifar

RECIPE = replace(
    resnet_cifar.RECIPE,
    name="resnet_shrunk",
    description="A residual network of 14 layers shrunk to half of its multiply-adds, on 1,797 real handwritten digits",
    shrink=StructuredPruningConfig(target_flops=0.5, round_to=8, epochs=12, learning_rate=1e-3),
    pruning=None,
    export_dir="saved_models/resnet_shrunk",
    forms={
        form: {name: stage for name, stage in changes.items() if name != "pruning"}
        | {"shrink": {"epochs": changes["pruning"]["epochs"]}}
        for form, changes in resnet_cifar.RECIPE.forms.items()
    },
)
