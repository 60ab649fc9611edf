"""A copy of a model must compute what the model does: the outputs of both are compared on a few examples.

Where no data is given, examples are made from the shapes and dtypes of the inputs, with the words and numbers that the
model's own look-up layers know. The models run without training, and what a call changes is not kept.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.layers import input_signature, layers_inside
from tfopt.data.user_data import iterate_batches
from tfopt.errors import TfoptError, UnsupportedLayerError, UnsupportedModelError, warn

EXAMPLES = 4
OPEN_SIZES = (32, 128, 8)  # of an image or a sequence of any size; the first that the model takes
WORDS = ("a", "b", "c", "d")
WIDE = 100.0  # standard deviation of the inputs that reach what is learnt from numbers far from zero
# Largest difference, relative to the largest value of an example. State that is lost makes a larger one.
TOLERANCE = 1e-3
HALF_TOLERANCE = 3e-2
HALF = ("float16", "bfloat16")

Pairs = Sequence[tuple[Any, Any]]


def check_copy(source: keras.Model, copy: keras.Model, pairs: Pairs, inputs: Any = None) -> None:
    """Compares the outputs of a model and its copy, without changing either.

    `pairs` has operations of the model, each with its copy, to name the first layer that differs. Without the inputs of
    a call, and if the model does not take them, examples are made.

    Raises:
        UnsupportedLayerError: The copy of a layer computes something else.
        UnsupportedModelError: The outputs differ, and those of no layer do.
    """
    half = any(getattr(layer, "compute_dtype", "") in HALF for layer in layers_inside(source))
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    found, first = _compared(source, copy, pairs, inputs, lambda one, other: difference(one, other, tolerance))
    if not found:
        # Layers that hold one another, and so share weights, become independent if their configs do so.
        more = len(copy.variables) - len(source.variables)
        if more > 0:
            warn(
                f"The copy of {source.name!r} has {more} variables more: weights that layers share by holding one "
                "another are shared no longer, and training will change them apart. Call the shared layer in the model "
                "itself."
            )
        return
    if first is None:
        raise UnsupportedModelError(
            f"A copy must compute what its model does. Received: {source.name!r}, whose copy gives {found}, though no "
            "layer of its own differs. Keep all state of the model in its layers and in its config."
        )
    layer, found = first
    raise UnsupportedLayerError(
        f"A copy of a layer must compute what the layer does. Received: {layer.name!r} ({type(layer).__name__}), whose "
        f"copy gives {found}. It has state that is neither in its weights nor in its config. Return this state from "
        "get_config, compute it from the weights in a method finalize_state, or write it in save_own_variables and "
        "read it in load_own_variables."
    )


def check_quantized(source: keras.Model, quantized: keras.Model, pairs: Pairs, inputs: Any = None) -> None:
    """Raises UnsupportedLayerError if a quantized copy differs from its model by more than the outputs are large.

    The arguments are those of `check_copy`.
    """
    found, first = _compared(source, quantized, pairs, inputs, _far)
    if found:
        layer, found = first or (source, found)
        raise UnsupportedLayerError(
            f"A quantized model must compute about what the model does. Received: {layer.name!r} "
            f"({type(layer).__name__}), whose quantized copy gives {found}. A layer that reads the weights of another, "
            "such as a tied embedding, gets integers there: give it weights of its own, or call tfopt.quantize with a "
            "tfopt.QuantizationConfig."
        )


def _compared(
    source: keras.Model, copy: keras.Model, pairs: Pairs, inputs: Any, differ: Callable[[Any, Any], str]
) -> tuple[str, tuple[Any, str] | None]:
    """Returns how the outputs of a copy differ, or an empty string, and the first layer that does, with how."""
    for given in [*([inputs] if inputs is not None else []), *example_inputs(source)]:
        try:
            expected = _run(source, given)
        except Exception:  # noqa: BLE001 - the code of any layer; the next examples may suit it
            continue
        break
    else:
        return _warn(source, "it takes no examples that tfopt can make"), None
    try:
        found = differ(expected, _run(copy, given))
    except Exception as error:  # noqa: BLE001 - the code of any layer
        found = _error_in_words(error)
    if found and differ(expected, _run(source, given)):
        return _warn(source, "two calls with the same inputs differ"), None
    return found, _first_difference(source, copy, pairs, given, differ) if found else None


def _far(expected: Any, received: Any) -> str:
    """Returns by how much outputs are off, if by more than the largest of them: zeros would be nearer."""
    for one, other in zip(expected, received, strict=True):
        if one.dtype.kind not in "OSUbiu" and one.shape == other.shape:
            one, other = one.astype("float64"), other.astype("float64")
            both = np.isfinite(one) & np.isfinite(other)
            off = np.abs(one - other).max(where=both, initial=0)
            largest = np.abs(one).max(where=both, initial=1e-3)
            if off > largest:
                return f"a difference of {off / largest:.3g} times the largest value"
    return ""


def _warn(model: Any, reason: str) -> str:
    """Warns that a copy was not compared, and returns an empty string: it is not known to differ."""
    warn(f"The copy of {model.name!r} was not compared with it: {reason}. Compare the outputs of both on your data.")
    return ""


def difference(expected: Any, received: Any, tolerance: float, least: float = 1e-3) -> str:
    """Returns how outputs, as flat arrays, differ, in words, or an empty string.

    The tolerance of floats is relative to the largest value of an example, and at least to `least`.

    Example:
        >>> difference([np.array([1.0, 2.0])], [np.array([1.0, 3.0])], 1e-3)
        'a difference of 0.5 times the largest value'
    """
    if len(expected) != len(received):
        return f"{len(received)} outputs in place of {len(expected)}"
    for one, other in zip(expected, received, strict=True):
        if one.shape != other.shape:
            return f"the shape {other.shape} in place of {one.shape}"
        if one.dtype.kind in "OSU":
            if not np.array_equal(one, other):
                return "other words"
            continue
        exact = one.dtype.kind in "biu"
        one, other = one.astype("float64"), other.astype("float64")
        finite = np.isfinite(one)
        if not np.array_equal(finite, np.isfinite(other)):
            return "other values that are not finite"
        # Each example by itself: the largest may be far larger than the others.
        axes = tuple(range(1, one.ndim))
        off = np.abs(np.where(finite, one - np.where(finite, other, 0), 0)).max(axis=axes, initial=0)
        share = np.max(off / np.abs(np.where(finite, one, 0)).max(axis=axes, initial=least), initial=0)
        if share > (0 if exact else tolerance):
            return f"a difference of {share:.3g} times the largest value"
    return ""


def first_examples(model: keras.Model, data: Any) -> list[Any] | None:
    """Returns the arguments of a call with the first examples of arrays in memory; None for other data.

    To begin a dataset once more would change what a shuffled one gives next, and may take long.
    """
    if not isinstance(data, np.ndarray | tf.Tensor | dict | tuple | list):
        return None
    with contextlib.suppress(TfoptError):  # data of another form, which the pass itself refuses
        for values, _ in iterate_batches(data, EXAMPLES, inputs=len(model.inputs)):
            return [values]
    return None


def example_inputs(model: keras.Model) -> Iterator[list[Any]]:
    """Yields arguments for a call of a model, from those that tell most to those that most models take."""
    try:
        signature = input_signature(model)
    except ValueError:  # it was built, but never called
        shape = (model.get_build_config() or {}).get("input_shape")
        if shape is None:
            return
        signature = [keras.tree.map_shape_structure(lambda sizes: keras.InputSpec(shape=sizes, dtype="float32"), shape)]
    layers = layers_inside(model)
    open_sizes: tuple[int, ...] = OPEN_SIZES
    if all(size is not None for spec in keras.tree.flatten(signature) for size in (spec.shape or ())[1:]):
        open_sizes = OPEN_SIZES[:1]
    for size, (wide, known) in itertools.product(open_sizes, ((True, True), (False, True), (False, False))):
        examples = Examples(layers, size, wide=wide, known=known)
        yield keras.tree.map_structure(lambda spec, make=examples: make(spec.shape, spec.dtype), signature)


class Examples:
    """Makes examples of given shapes and dtypes for the layers of a model, of Keras 3 or of Keras 2.

    Args:
        open_size: Size of open dimensions besides the batch.
        wide: Whether half of the examples have large numbers of both signs. Otherwise all are in [0, 1).
        known: Whether integers are the numbers that the tables of the layers hold. Otherwise they are small.
    """

    def __init__(
        self, layers: Sequence[Any], open_size: int, *, wide: bool, known: bool, examples: int = EXAMPLES
    ) -> None:
        self.open_size, self.wide, self.examples = open_size, wide, examples
        self._generator = np.random.default_rng(0)
        found = list(_known_keys(layers))
        words = [key for key in found if isinstance(key, str)]
        self._words = [*words[: 4 * EXAMPLES], *WORDS]
        # Indices must be in range for every embedding.
        sizes = [getattr(layer, "input_dim", None) or getattr(layer, "num_tokens", None) for layer in layers]
        limit = min((size for size in sizes if isinstance(size, int)), default=2)
        numbers = [int(key) for key in found if not isinstance(key, str)]
        self._numbers = numbers if known and numbers else list(range(min(limit, 1000)))

    def __call__(self, shape: Sequence[int | None], dtype: Any) -> Any:
        batch, *sizes = shape or (None,)
        full = [batch or self.examples, *(self.open_size if size is None else size for size in sizes)]
        dtype = tf.as_dtype(dtype)
        if dtype == tf.string:
            return tf.constant(self._generator.choice(np.array(self._words, dtype=object), full))
        if dtype.is_bool:
            mask = self._generator.integers(0, 2, full, dtype=bool)
            mask[..., :1] = True  # without any True in a row, Keras 2 and Keras 3 attend to other values
            return tf.constant(mask)
        if not dtype.is_floating:
            return tf.cast(self._generator.choice(self._numbers, full), dtype)
        values = self._generator.random(full)
        if self.wide:
            values[1::2] = WIDE * self._generator.standard_normal(values[1::2].shape)
        return tf.constant(values, dtype)


def _known_keys(layers: Iterable[Any]) -> Iterator[Any]:
    """Yields the words, and the numbers, that the look-up layers know."""
    for layer in layers:
        tables = [each for each in vars(layer).values() if hasattr(each, "export") and hasattr(each, "key_dtype")]
        # An empty vocabulary, or a table that is not initialized, or the code of any layer.
        with contextlib.suppress(Exception):
            if hasattr(layer, "get_vocabulary"):
                yield from (_key(key) for key in layer.get_vocabulary(include_special_tokens=False))
        for table in tables:
            with contextlib.suppress(Exception):
                yield from (_key(key) for key in table.export()[0].numpy())


def _key(key: Any) -> str | int:
    return key.decode(errors="replace") if isinstance(key, bytes) else key if isinstance(key, str) else int(key)


def _run(model: keras.Model, arguments: Sequence[Any]) -> list[Any]:
    """Returns the outputs as flat arrays. Changes of seeds, counters and states of the call are not kept."""
    with keras.StatelessScope(), warnings.catch_warnings(action="ignore"):  # a tensor where Keras expects a list of one
        return arrays(model(*arguments, training=False))


def arrays(outputs: Any) -> list[Any]:
    """Returns the tensors of a structure as flat NumPy arrays; without those that are None."""

    def array(tensor: Any) -> Any:
        tensor = tensor.to_tensor() if isinstance(tensor, tf.RaggedTensor) else tensor
        return (
            tensor.numpy() if tf.is_tensor(tensor) and tensor.dtype == tf.string else keras.ops.convert_to_numpy(tensor)
        )

    return [array(tensor) for tensor in keras.tree.flatten(outputs) if tensor is not None]


def _first_difference(
    source: keras.Model, copy: keras.Model, pairs: Pairs, arguments: Any, differ: Callable[[Any, Any], str]
) -> tuple[Any, str] | None:
    """Returns the layer that is the first to compute something else in the copy, and the difference."""
    layers = [(old, new) for old, new in pairs if isinstance(old, keras.Layer)]
    expected = _outputs_of(source, [old for old, _ in layers], arguments)
    received = _outputs_of(copy, [new for _, new in layers], arguments)
    by_call = dict(received)
    for (number, call), outputs in expected:
        layer = layers[number][0]
        other = by_call.get((number, call))
        if isinstance(other, Exception):
            return layer, _error_in_words(other)
        if other is not None and (found := differ(outputs, other)):
            return layer, found
    return None


def _error_in_words(error: Exception) -> str:
    return f"an error: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _outputs_of(model: keras.Model, layers: Sequence[Any], arguments: Any) -> list[tuple[tuple[int, int], Any]]:
    """Runs a model and returns the outputs of its layers, or the error, in the order of computation.

    Each comes with the number of the layer and the number of its call.
    """
    found: list[tuple[tuple[int, int], Any]] = []
    calls: dict[int, int] = {}

    def recording(number: int, call: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            place = (number, calls.get(number, 0))
            calls[number] = place[1] + 1
            try:
                outputs = call(*args, **kwargs)
            except Exception as error:
                found.append((place, error))
                raise
            found.append((place, arrays(outputs)))
            return outputs

        return recorded

    # Keras calls `layer.call`, or `quantized_call`, so an attribute of the object comes before the method of its class.
    places = [(number, name) for number in range(len(layers)) for name in ("call", "quantized_call")]
    before = {place: vars(layers[place[0]]).get(place[1]) for place in places}
    for number, name in places:
        if hasattr(layers[number], name):
            vars(layers[number])[name] = recording(number, getattr(layers[number], name))
    try:
        with contextlib.suppress(Exception):  # of the copy, after the layers that were recorded
            _run(model, arguments)
    finally:
        for number, name in places:
            vars(layers[number]).pop(name, None)
            if before[number, name] is not None:
                vars(layers[number])[name] = before[number, name]
    return found
