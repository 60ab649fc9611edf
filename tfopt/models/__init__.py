"""Builders: functions that return a Keras model.

Start in simple.py, the shortest builders; keras_models.py has the models of keras.applications and KerasHub by name,
table.py the published models, layers.py the layers that Keras lacks; structure.py reads the layers of any Keras model.

The first arguments of every builder are `input_shape`, the shape of one example, and `outputs`, the number of classes,
tokens or values. It returns a functional model in NHWC whose outputs are logits (no softmax), in float32 under any
dtype policy.
"""

from collections.abc import Callable
from typing import Any

from tfopt.errors import unknown_name
from tfopt.models.keras_models import FAMILIES, keras_builder
from tfopt.models.sequences import lstm, tcn
from tfopt.models.simple import mlp, simple_cnn
from tfopt.models.text.generation import generate
from tfopt.models.text.transformers import gpt, text_encoder
from tfopt.models.vision.applications import efficientnet_v2, mobilenet_v2, mobilenet_v3
from tfopt.models.vision.convolutional import resnet50, resnet_cifar, unet
from tfopt.models.vision.patches import convnext, vit

BUILDERS: dict[str, Callable[..., Any]] = {
    "convnext": convnext,
    "efficientnet_v2": efficientnet_v2,
    "gpt": gpt,
    "lstm": lstm,
    "mlp": mlp,
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v3": mobilenet_v3,
    "resnet50": resnet50,
    "resnet_cifar": resnet_cifar,
    "simple_cnn": simple_cnn,
    "tcn": tcn,
    "text_encoder": text_encoder,
    "unet": unet,
    "vit": vit,
}

__all__ = [
    "BUILDERS", "convnext", "efficientnet_v2", "find_builder", "generate", "gpt", "lstm", "mlp", "mobilenet_v2",
    "mobilenet_v3", "resnet50", "resnet_cifar", "simple_cnn", "tcn", "text_encoder", "unet", "vit",
]  # fmt: skip


def find_builder(name: str) -> Callable[..., Any]:
    """Returns the builder of a name.

    Args:
        name: A registered name, "keras:" with a model of keras.applications, or "keras_hub:" with a backbone of
            KerasHub.
    Raises:
        ConfigError: No builder has the name.
    Example:
        >>> find_builder("mlp") is mlp
        True
        >>> find_builder("keras:MobileNetV2")((32, 32, 1), 10, alpha=0.35).output_shape
        (None, 10)
    """
    if name.partition(":")[0] in FAMILIES:
        return keras_builder(name)
    if name not in BUILDERS:
        raise unknown_name("builder", name, BUILDERS)
    return BUILDERS[name]
