"""The detours of Keras' layers on a CPU, and plain operations in their place while a model is traced.

A detour takes more or slower operations than what the layer computes needs. DETOURS is the one list of them: tfopt's
traces, the diagnosis of a training and the page about single layers all read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import layers

from tfopt.compat.convolutions import plain_convolutions
from tfopt.compat.pooling import plain_pooling
from tfopt.compat.recurrent import short_loops
from tfopt.compat.time_distributed import folded_time
from tfopt.compat.upsampling import resized_once

MOST_UNROLLED = 64  # building a step takes longer for each


@dataclass(frozen=True, kw_only=True)
class Detour:
    """A detour that some layers of Keras take."""

    what: str  # what happens, in words
    layers: tuple[type[keras.Layer], ...]  # the classes of the layers
    takes: Callable[[Any], bool] = lambda layer: True  # whether a layer of these classes takes it
    # Returns the scope in which these layers compute by plain operations. It takes whether gradients are taken.
    plain: Callable[[bool], contextlib.AbstractContextManager[None]] | None = None
    in_training: bool = False  # whether that scope also serves where gradients are taken
    # Attributes of the layer with which Keras itself takes no detour.
    settings: dict[str, Any] = field(default_factory=dict)
    instead: str = ""  # what a script can write that takes no detour

    def is_taken_by(self, layer: keras.Layer) -> bool:
        return isinstance(layer, self.layers) and self.takes(layer)


@contextlib.contextmanager
def plain_operations(*, gradients: bool) -> Iterator[None]:
    """While a model is called or traced, gives Keras' layers fewer and plainer operations, with equal results.

    Args:
        gradients: Whether gradients are taken. Loops of recurrent layers are then as Keras has them.
    Example:
        >>> import tensorflow as tf
        >>> layer = keras.layers.TimeDistributed(keras.layers.AdaptiveMaxPooling2D(2))
        >>> def pools():
        ...     call = tf.function(lambda x: layer(x)).get_concrete_function(tf.TensorSpec((1, 5, 8, 8, 4)))
        ...     return [operation.type for operation in call.graph.get_operations()].count("MaxPool")
        >>> with plain_operations(gradients=False):
        ...     pools()
        1
        >>> pools()
        20
    """
    with contextlib.ExitStack() as scopes:
        for detour in DETOURS.values():
            if detour.plain is not None and (detour.in_training or not gradients):
                scopes.enter_context(detour.plain(gradients))
        yield


def _is_island(layer: Any) -> bool:
    return layer.groups > 1 or (isinstance(layer, layers.Conv3D) and layer.data_format == "channels_first")


def _is_short_loop(layer: Any) -> bool:
    """Returns whether a recurrent layer loops over a known number of steps, and few enough for a copy of each.

    The loop of a convolutional layer cannot be unrolled, and a Bidirectional has its loops in the layers inside it.
    """
    if not isinstance(layer, layers.RNN) or isinstance(layer, CONVOLUTIONAL) or layer.unroll:
        return False
    built = layer.get_build_config() or {}
    shape = built.get("input_shape") or built.get("shapes_dict", {}).get("sequences_shape")
    return shape is not None and shape[1] is not None and shape[1] <= MOST_UNROLLED


CONVOLUTIONAL = (layers.ConvLSTM1D, layers.ConvLSTM2D, layers.ConvLSTM3D)
DETOURS: dict[str, Detour] = {
    "xla_islands": Detour(
        what="XLA compiles single convolutions",
        layers=(layers.Conv1D, layers.Conv2D, layers.Conv3D),
        takes=_is_island,
        plain=lambda gradients: plain_convolutions(gradients=gradients),
        in_training=True,
    ),
    "adaptive_pooling": Detour(
        what="adaptive pooling takes windows of two sizes at all places, axis by axis",
        layers=(
            *(layers.AdaptiveAveragePooling1D, layers.AdaptiveAveragePooling2D, layers.AdaptiveAveragePooling3D),
            *(layers.AdaptiveMaxPooling1D, layers.AdaptiveMaxPooling2D, layers.AdaptiveMaxPooling3D),
        ),
        plain=lambda gradients: plain_pooling(gradients=gradients),
        in_training=True,
        instead="AveragePooling or MaxPooling where the size of the input is a multiple of that of the output",
    ),
    "time_distributed": Detour(
        what="TimeDistributed calls its layer once for each step",
        layers=(layers.TimeDistributed,),
        plain=lambda gradients: folded_time(),
        in_training=True,
        instead="the layer itself where it works on the last axis, such as Dense",
    ),
    "recurrent_loops": Detour(
        what="a loop over the steps; a copy of the step for each takes less time",
        layers=(layers.RNN, layers.Bidirectional),
        takes=_is_short_loop,
        plain=lambda gradients: short_loops(),
        settings={"unroll": True},
        instead="unroll=True, which takes longer to build; a Bidirectional that returns sequences then needs inputs "
        "without a mask",
    ),
    "upsampling": Detour(
        what="rows and then columns are repeated, each by a tile and a reshape",
        layers=(layers.UpSampling2D,),
        takes=lambda layer: layer.interpolation == "nearest",
        plain=lambda gradients: resized_once(),
    ),
    "spectrograms": Detour(
        what="spectrograms as convolutions with a kernel for each frequency",
        layers=(layers.STFTSpectrogram,),
        instead="keras.ops.stft with the window of the layer, unless its kernels are to be trained",
    ),
}
