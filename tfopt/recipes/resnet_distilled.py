"""A small residual network that learns from the one of `resnet_cifar`, which has nine times as many parameters."""

from dataclasses import replace

from tfopt.recipe import TeacherConfig
from tfopt.recipes import resnet_cifar

FULL = resnet_cifar.RECIPE.forms["full"]

RECIPE = replace(
    resnet_cifar.RECIPE,
    name="resnet_distilled",
    description="A residual network of 8 layers that learns from one of 14, on 1,797 real handwritten digits",
    model=replace(resnet_cifar.RECIPE.model, arguments={"depth": 8, "width": 8, "norm_momentum": 0.9}),
    # The teacher gives soft targets, so the labels are taken as they are.
    training=replace(resnet_cifar.RECIPE.training, label_smoothing=0.0),
    pruning=None,
    distillation=TeacherConfig(teacher="resnet_cifar", temperature=4.0, teacher_weight=0.9),
    export_dir="saved_models/resnet_distilled",
    forms={
        "quick": {
            "data": {"max_examples": 320},
            "training": {"epochs": 3},
            "distillation": {"teacher_form": "quick"},
        },
        "full": {
            "model": {"arguments": {"depth": 8, "width": 8, "norm_momentum": 0.99}},
            "data": FULL["data"],
            "training": FULL["training"],
            "distillation": {"teacher_form": "full"},
        },
    },
)
