"""What a reader finds in a file: its tensors, its weights and its operators.

Each reader lists the nodes of a graph in an order in which each follows those that it reads. `Storage` then gives each
weight to the operators that read it: a weight may first be decoded, cast or reshaped by nodes that read nothing else.
It belongs to the first node that also reads what the model's inputs decide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from tfopt.exporting.manifest import TensorRecord
from tfopt.report import Record

PRODUCT = re.compile(r"matmul|gemm|conv(?!ert)|attention|lstm|gru|rnn|svdf|einsum|dot_general|moe", re.IGNORECASE)
BITS = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4e2m1": 4}  # of a value, where several share a byte


@dataclass(frozen=True, kw_only=True)
class Weight(Record):
    """A tensor that a file holds and that a model computes with.

    Attributes:
        name: Its name in the file.
        shape: Its sizes, as it is stored. Packed values, such as pairs of int4, are in bytes.
        dtype: Its dtype as it is stored.
        size_bytes: The bytes of its values.
        zeros: The number of its values that are exactly zero. None if they are in another file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    zeros: int | None = None

    @classmethod
    def of(cls, name: str, values: np.ndarray, dtype: str = "", zero_point: int = 0) -> Weight:
        """Returns the record of an array. Quantized values are zero where they are the zero point."""
        dtype = dtype or values.dtype.name
        return cls(
            name=name,
            shape=tuple(values.shape),
            dtype=dtype,
            size_bytes=packed_bytes(values.size, BITS.get(dtype, 8 * values.itemsize)),
            zeros=int(values.size - np.count_nonzero(values != zero_point if zero_point else values)),
        )

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Operator(Record):
    """A node that computes.

    Attributes:
        name: Its name in the file.
        kind: The kind of operator, by the format's name for it.
        dtype: The type that it computes in. Where pairs of quantize and dequantize surround it, the integers' type.
        weights: The names of the weights that it reads.
        multiply_adds: The multiply-adds of one execution. None if they are unknown.
        executions: The rounds of the loops around it, for one call.
    """

    name: str
    kind: str
    dtype: str
    weights: tuple[str, ...] = ()
    multiply_adds: int | None = 0
    executions: int = 1

    @property
    def total(self) -> int:
        return (self.multiply_adds or 0) * self.executions


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as a reader sees it: an operator, with the names of the tensors that it reads and writes."""

    name: str
    kind: str
    dtype: str
    reads: Sequence[str]
    writes: Sequence[str]
    multiply_adds: int | None = 0
    executions: int = 1


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a reader returns.

    Attributes:
        versions: What wrote the file, and the version of its format.
        sizes: The shape of each input at which multiply-adds are counted.
        outside: Each op that reaches outside of the model: its node and what it touches, in words.
        open_loops: The loops whose rounds are known only in the run: one round of each counts.
        notes: What else a reader of the counts should know.
    """

    inputs: Mapping[str, TensorRecord]
    outputs: Mapping[str, TensorRecord]
    operators: tuple[Operator, ...]
    weights: tuple[Weight, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    open_loops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def rounds_between(first: int | None, limit: int | None, step: int | None) -> int | None:
    """Returns the rounds of a loop that ends when its counter has reached a limit; None if one of them is unknown.

    Example:
        >>> rounds_between(0, 7, 2), rounds_between(0, None, 1)
        (4, None)
    """
    if first is None or limit is None or step is None or step < 1:
        return None
    return max(math.ceil((limit - first) / step), 0)


class Reader(Protocol):
    """A module of a format."""

    @staticmethod
    def read(path: Path, open_size: int) -> Contents:
        """Reads a file. A damaged one may raise any exception."""


class Storage:
    """Which weights tensors hold that nothing but weights and constants decide: `known` has their names by tensor.

    Example:
        >>> storage = Storage({"w": ["w"]})
        >>> cast = Node(name="cast", kind="Cast", dtype="float32", reads=["w"], writes=["c"])
        >>> product = Node(name="product", kind="MatMul", dtype="float32", reads=["x", "c"], writes=["y"])
        >>> [storage.operator(node).weights for node in (cast, product)]
        [(), ('w',)]
    """

    def __init__(self, known: Mapping[str, Iterable[str]]) -> None:
        self.known = {tensor: tuple(weights) for tensor, weights in known.items()}

    def of(self, tensor: str) -> tuple[str, ...] | None:
        """Returns the names of the weights that a tensor holds. None if the model's inputs decide its values."""
        return self.known.get(tensor)

    def operator(self, node: Node) -> Operator:
        """Returns a node as an operator, with its weights. It must follow the nodes that it reads."""
        parts = [self.known.get(tensor) for tensor in node.reads if tensor]
        joined = tuple(dict.fromkeys(name for part in parts if part for name in part))
        stored = None not in parts
        if stored:
            self.known |= dict.fromkeys(node.writes, joined)
        return Operator(
            name=node.name,
            kind=node.kind,
            dtype=node.dtype,
            weights=() if stored else joined,
            multiply_adds=node.multiply_adds,
            executions=node.executions,
        )


def assumed(shape: Sequence[int | None], open_size: int) -> tuple[int, ...]:
    """Returns a shape of one example, with `open_size` for open sizes.

    Example:
        >>> assumed((None, None, 3), 128)
        (1, 128, 3)
    """
    return tuple((1 if axis == 0 else open_size) if size is None else size for axis, size in enumerate(shape))


def packed_bytes(count: int, bits: int) -> int:
    """Returns the bytes of values of so many bits each.

    Example:
        >>> packed_bytes(5, 4)
        3
    """
    return -(-count * bits // 8)


def without_formula(kind: str) -> int | None:
    """Returns the multiply-adds of a kind of operator that no formula is known for: None if its name is a product's.

    Example:
        >>> without_formula("QAttention"), without_formula("Convert")
        (None, 0)
    """
    return None if PRODUCT.search(kind) else 0


def attention(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Returns the multiply-adds of attention: of each query with each key, and of the weights with the values.

    The shapes end with the steps and the features; those before them are the query's.

    Example:
        >>> attention((1, 2, 7, 16), (1, 2, 9, 16), (1, 2, 9, 8)) == 2 * 7 * 9 * (16 + 8)
        True
    """
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def convolution(result: Sequence[int], weights: Sequence[int], channels: int) -> int:
    """Returns the multiply-adds of a convolution with this many output channels.

    Of a transposed one, `result` is the input's shape and `channels` are the input's: each input is multiplied with one
    filter.

    Example:
        >>> convolution((1, 8, 30, 30), (8, 3, 3, 3), 8) == 8 * 30 * 30 * (3 * 3 * 3)
        True
    """
    return math.prod(result) * math.prod(weights) // channels
