"""How a TFRecord file holds an example: as a tf.train.Example, with the raw bytes of each array.

An example is a tuple or dict of tensors, also nested. A ragged or sparse tensor consists of several plain ones. Each
plain tensor is one feature:

    dtype string    the strings as they are
    other dtypes    one string: the bytes of the array, little-endian, in C order; `tf.io.decode_raw` reads it
    open shape      in addition the feature NAME.shape, int64

Bytes keep every value bit for bit, whatever the dtype, and are read without a conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError

TOP = ("inputs", "targets", "weight")
SHAPE = ".shape"
# `decode_raw` does not know these dtypes, but those of the same size.
READ_AS = {
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.qint8: tf.int8,
    tf.quint8: tf.uint8,
    tf.qint32: tf.int32,
}
RAW = {
    *(tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.int64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
}


class Feature(NamedTuple):
    """One plain tensor of an example. An open length of its shape is None; so is a whole shape of open rank."""

    name: str
    dtype: tf.DType
    shape: tuple[int | None, ...] | None

    @property
    def is_open(self) -> bool:
        return self.shape is None or None in self.shape


def features_of(spec: Any) -> tuple[Feature, ...]:
    """Returns the features of an example, in the order of `flatten`.

    Raises:
        ConfigError: The examples hold something that is no tensor, or tensors of a dtype that has no bytes.
    Example:
        >>> spec = ({"a": tf.TensorSpec((3,), tf.uint8), "b": tf.TensorSpec((None,))}, tf.TensorSpec((), tf.int64))
        >>> [feature.name for feature in features_of(spec)]
        ['inputs/a', 'inputs/b', 'targets']
    """
    return tuple(_features("", spec))


def _features(name: str, spec: Any) -> list[Feature]:
    if isinstance(spec, dict):
        # In the order of tf.nest, which sorts the keys.
        return [each for key in sorted(spec) for each in _features(f"{name}/{key}".lstrip("/"), spec[key])]
    if isinstance(spec, tuple):
        names = TOP if not name and len(spec) in (2, 3) else tuple(map(str, range(len(spec))))
        pairs = zip(names, spec, strict=False)
        return [each for key, inner in pairs for each in _features(f"{name}/{key}".lstrip("/"), inner)]
    if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec):
        raise ConfigError(
            "TFRecord files hold tensors, ragged tensors and sparse tensors. "
            f"Received: {name or 'records'} of type {type(spec).__name__}. Leave it out of the examples."
        )
    if spec.dtype not in RAW | {*READ_AS, tf.string}:
        raise ConfigError(
            f"TFRecord files hold numbers and strings. Received: {name or 'records'} of dtype {spec.dtype.name}. "
            "Cast it."
        )
    if isinstance(spec, tf.TensorSpec):
        parts = {name or "value": spec}
    else:
        parts = {f"{name}.{i}": part for i, part in enumerate(tf.nest.flatten(spec, expand_composites=True))}
    return [
        Feature(each, part.dtype, None if part.shape.rank is None else tuple(part.shape))
        for each, part in parts.items()
    ]


def flatten(*example: Any) -> tuple[tf.Tensor, ...]:
    """Returns the plain tensors of an example, in TensorFlow."""
    whole = example if len(example) > 1 else example[0]
    return tuple(tf.nest.flatten(whole, expand_composites=True))


def serialize(features: Sequence[Feature], values: Sequence[Any]) -> bytes:
    """Returns an example, its plain tensors, as a tf.train.Example. The same example always has the same bytes."""
    written = {}
    for feature, value in zip(features, values, strict=True):
        # As objects: NumPy's own strings lose zero bytes at their end, which files of images may have.
        array = np.asarray(value, object if feature.dtype == tf.string else None)
        if feature.dtype == tf.string:
            content = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel().tolist()]
        else:
            content = [array.tobytes()]
        written[feature.name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=content))
        if feature.is_open:
            lengths = tf.train.Int64List(value=array.shape)
            written[feature.name + SHAPE] = tf.train.Feature(int64_list=lengths)
    example = tf.train.Example(features=tf.train.Features(feature=written))
    return example.SerializeToString(deterministic=True)


def parser(spec: Any) -> Callable[[Any], Any]:
    """Returns the function in TensorFlow that makes an example of the bytes that `serialize` returned.

    Example:
        >>> spec = tf.TensorSpec((2,), tf.float32)
        >>> parser(spec)(serialize(features_of(spec), [np.float32([1, 2])])).numpy().tolist()
        [1.0, 2.0]
    """
    features = features_of(spec)
    layout: dict[str, Any] = {}
    for feature in features:
        many = feature.dtype == tf.string and (feature.is_open or 0 in (feature.shape or ()))
        if many:
            layout[feature.name] = tf.io.FixedLenSequenceFeature((), tf.string, allow_missing=True)
        else:
            shape = feature.shape if feature.dtype == tf.string else ()
            layout[feature.name] = tf.io.FixedLenFeature(shape, tf.string)
        if feature.is_open:
            layout[feature.name + SHAPE] = tf.io.FixedLenSequenceFeature((), tf.int64, allow_missing=True)

    def parse(serialized: Any) -> Any:
        parsed = tf.io.parse_single_example(serialized, layout)
        values = [_value(feature, parsed) for feature in features]
        return tf.nest.pack_sequence_as(spec, values, expand_composites=True)

    return parse


def _value(feature: Feature, parsed: dict[str, tf.Tensor]) -> tf.Tensor:
    value = parsed[feature.name]
    if feature.dtype != tf.string:
        value = tf.io.decode_raw(value, READ_AS.get(feature.dtype, feature.dtype))
        if feature.dtype in READ_AS:
            value = tf.bitcast(value, feature.dtype)
    if not feature.is_open:
        return tf.reshape(value, feature.shape)
    return tf.ensure_shape(tf.reshape(value, parsed[feature.name + SHAPE]), feature.shape)


def structure_of(spec: Any) -> Any:
    """Returns the structure of an example in terms of JSON; `spec_of` is the reverse."""
    if isinstance(spec, dict):
        return {"dict": {key: structure_of(spec[key]) for key in sorted(spec)}}
    if isinstance(spec, tuple):
        return {"tuple": [structure_of(each) for each in spec]}
    kind = {tf.RaggedTensorSpec: "ragged", tf.SparseTensorSpec: "sparse"}.get(type(spec), "tensor")
    shape = None if spec.shape.rank is None else spec.shape.as_list()
    leaf = {"tensor": kind, "dtype": spec.dtype.name, "shape": shape}
    if kind == "ragged":
        leaf |= {"ragged_rank": spec.ragged_rank, "row_splits_dtype": spec.row_splits_dtype.name}
    return leaf


def spec_of(structure: Any) -> Any:
    """Returns the types and shapes of an example from its structure in JSON.

    Example:
        >>> spec_of(structure_of((tf.TensorSpec((None, 2)), tf.RaggedTensorSpec((None, None), tf.int32))))
        (TensorSpec(shape=(None, 2), dtype=tf.float32, name=None),
         RaggedTensorSpec(TensorShape([None, None]), tf.int32, 1, tf.int64))
    """
    if "dict" in structure:
        return {key: spec_of(each) for key, each in structure["dict"].items()}
    if "tuple" in structure:
        return tuple(spec_of(each) for each in structure["tuple"])
    shape, dtype = structure["shape"], tf.as_dtype(structure["dtype"])
    if structure["tensor"] == "ragged":
        splits = tf.as_dtype(structure["row_splits_dtype"])
        return tf.RaggedTensorSpec(shape, dtype, structure["ragged_rank"], splits)
    return (tf.SparseTensorSpec if structure["tensor"] == "sparse" else tf.TensorSpec)(shape, dtype)
