"""Builders: functions that return a Keras model.

Start in mlp.py, the shortest builder; structure.py reads the layers of any Keras model.

The first arguments of every builder are `input_shape`, the shape of one example, and `outputs`, the number of classes,
tokens or values. It returns a functional model in NHWC whose outputs are logits (no softmax), in float32 under any
dtype policy.
"""

from collections.abc import Callable
from typing import Any

from tfopt.models.mlp import mlp
from tfopt.models.sequences.convolutional import tcn
from tfopt.models.sequences.recurrent import lstm
from tfopt.models.text.decoder import gpt
from tfopt.models.text.encoder import text_encoder
from tfopt.models.text.generation import generate
from tfopt.models.vision.cnn import simple_cnn
from tfopt.models.vision.resnet import resnet_cifar

BUILDERS: dict[str, Callable[..., Any]] = {
    "gpt": gpt,
    "lstm": lstm,
    "mlp": mlp,
    "resnet_cifar": resnet_cifar,
    "simple_cnn": simple_cnn,
    "tcn": tcn,
    "text_encoder": text_encoder,
}

__all__ = ["BUILDERS", "generate", "gpt", "lstm", "mlp", "resnet_cifar", "simple_cnn", "tcn", "text_encoder"]
