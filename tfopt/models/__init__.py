"""Builders: functions that return a Keras model.

Start in mlp.py, the shortest builder; structure.py reads the layers of any Keras model.

The first arguments of every builder are `input_shape`, the shape of one example, and `outputs`, the number of classes,
tokens or values. It returns a functional model in NHWC whose outputs are logits (no softmax), in float32 under any
dtype policy.
"""

from collections.abc import Callable
from typing import Any

from tfopt.models.mlp import mlp
from tfopt.models.vision.cnn import simple_cnn
from tfopt.models.vision.convnext import convnext
from tfopt.models.vision.resnet import resnet_cifar
from tfopt.models.vision.unet import unet
from tfopt.models.vision.vit import vit

BUILDERS: dict[str, Callable[..., Any]] = {
    "convnext": convnext,
    "mlp": mlp,
    "resnet_cifar": resnet_cifar,
    "simple_cnn": simple_cnn,
    "unet": unet,
    "vit": vit,
}

__all__ = ["BUILDERS", "convnext", "mlp", "resnet_cifar", "simple_cnn", "unet", "vit"]
