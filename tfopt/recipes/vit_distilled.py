"""A small vision transformer that learns from a residual network with four times as many parameters."""

from dataclasses import replace

from tfopt.data.augment.config import AugmentConfig
from tfopt.recipe import DataConfig, ModelConfig, TeacherConfig
from tfopt.recipes import resnet50, vit

FULL, OF_TEACHER = vit.RECIPE.forms["full"], resnet50.RECIPE.forms["full"]

RECIPE = replace(
    vit.RECIPE,
    name="vit_distilled",
    description="A small vision transformer that learns from a residual network, on 1,797 real handwritten digits",
    model=ModelConfig(builder="vit", arguments={"patch_size": 4, "width": 32, "depth": 3, "heads": 4}),
    data=DataConfig(source="digits", arguments={"image_size": 16}, augment=AugmentConfig(crop=2)),
    training=replace(vit.RECIPE.training, epochs=30),
    pruning=None,
    distillation=TeacherConfig(teacher="resnet_cifar", temperature=4.0, teacher_weight=0.9),
    export_dir="saved_models/vit_distilled",
    forms={
        "quick": {
            "data": {"max_examples": 320},
            "training": {"epochs": 3, "warmup_epochs": 1},
            "distillation": {"teacher_form": "quick"},
        },
        # DeiT-small with a ResNet-50 as its teacher, in place of the RegNet of the paper. Both read the same files.
        "full": {
            "description": "DeiT-small that learns from ResNet-50 on ImageNet, to be run on GPUs",
            "model": FULL["model"],
            "data": {**OF_TEACHER["data"], "augment": FULL["data"]["augment"]},
            # The tensors of the teacher come on top of those of the student, which fill most of a card's 80 GB alone.
            "training": {**FULL["training"], "accumulate": 2},
            "distillation": {"teacher": "resnet50", "teacher_form": "full", "temperature": 3.0, "teacher_weight": 0.5},
        },
    },
)
