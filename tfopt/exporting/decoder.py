"""The nodes that decode a stored weight, of plain TensorFlow ops.

To decode once, at the first call, TensorFlow's own optimizer (grappler) is used. It evaluates nodes that depend on
constants alone, except nodes that make more than 100 KiB out of less (kMaxConstantSize in its constant_folding.cc). So
a weight is decoded in pieces of at most 96 KiB. They are then joined, and scaled or looked up, which makes no node
larger. The optimizer folds all of this into one float32 constant, and the kernels read the same as in a float32
artifact. Without the optimizer the result is the same, but slower.

To decode at every call, one op decodes a whole weight. The weight must then not be a constant (see signatures.py).

Steps of 4 bits are stored in pairs, two in a byte. The first half of a piece is in the low four bits, and the second
half in the high four bits. Arithmetic shifts restore their sign.

Weights with many zeros are stored as a bitmap and the other values, and decoded to the same bits. A piece is

    GatherV2([0, values...], Cumsum(bits) * bits)

with `bits` from the bytes of the bitmap. A float32 weight needs 1 bit, and 32 more if it is not zero.

Weights that share few values are stored as these and a place for each weight: GatherV2(values, first + steps).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from tfopt.graph import GraphEditor
from tfopt.graph.edit import FLOAT32, INT32, AttrValue, copy_attributes, dtype_attr
from tfopt.quantization.weight_only import Codebook, Grouped

PIECE = 24 * 1024  # values; 96 KiB when decoded
BYTE = dtype_attr(tf.uint8)


class Decoder:
    """Adds the nodes for one weight to a graph. The names of all nodes begin with the weight's name.

    With `whole` the weight is decoded at once and not in pieces.
    """

    def __init__(self, editor: GraphEditor, name: str, *, whole: bool = False) -> None:
        self._editor = editor
        self._name = name
        self._whole = whole

    def halves(self, stored: np.ndarray) -> str:
        """Stores values in float16 or bfloat16, and returns the float32 tensor of them."""
        return self._reshape(self._in_pieces(stored, self._cast_constant), stored.shape)

    def integers(self, grouped: Grouped, bits: int, shape: tuple[int, ...]) -> str:
        """Stores a matrix in integers of `bits` bits, and returns the float32 tensor of it in `shape`."""
        unpack = self._unpack_constant if bits == 4 else self._cast_constant
        steps = self._reshape(self._in_pieces(grouped.steps, unpack), grouped.steps.shape)
        filled = self._multiply(steps, self._scales(grouped, bits))
        return self._reshape(self._cut(filled, grouped, grouped.shape[0]), shape)

    def codebook(self, book: Codebook, shape: tuple[int, ...]) -> str:
        """Stores a matrix as places in a codebook, and returns the float32 tensor of it in `shape`."""
        unpack = self._unpack_constant if book.bits == 4 else self._cast_constant
        steps = self._reshape(self._in_pieces(book.steps, unpack), book.steps.shape)
        return self._reshape(self._look_up(book, steps, self._constant(book.first)), shape)

    def gathered_halves(self, gather: Any, stored: np.ndarray) -> str:
        """Stores a table in float16 or bfloat16, and returns in float32 the rows that a Gather node reads."""
        return self._cast(self._gather(gather, self._constant(stored), stored.dtype), stored.dtype)

    def gathered_integers(self, gather: Any, grouped: Grouped, bits: int) -> str:
        """Stores a table in integers, each row as a channel, and returns the rows that a Gather node reads."""
        rows, groups, size = grouped.steps.shape
        indices = self._flat_indices(gather)
        steps = self._gathered_steps(gather, grouped.steps.reshape(rows, -1), bits, indices)
        scales = self._gather(gather, self._scales(grouped, bits), np.float32, indices)
        values = self._cut(self._multiply(self._reshape(steps, (-1, groups, size)), scales), grouped, rows=-1)
        return self._rows(gather, values, grouped.shape[1])

    def gathered_codebook(self, gather: Any, book: Codebook) -> str:
        """Stores a table as places in a codebook, and returns the rows that a Gather node reads."""
        indices, first = self._flat_indices(gather), self._constant(book.first)
        if book.first.size > 1:
            first = self._gather(gather, first, np.float32, indices)
        steps = self._gathered_steps(gather, book.steps, book.bits, indices)
        return self._rows(gather, self._look_up(book, steps, first), book.steps.shape[1])

    def _flat_indices(self, gather: Any) -> str:
        return self._reshape(gather.input[1], (-1,), gather.attr["Tindices"])

    def _gathered_steps(self, gather: Any, table: np.ndarray, bits: int, indices: str) -> str:
        """Returns in float32 the rows of a table of integers that a Gather node reads."""
        if bits == 8:
            return self._cast(self._gather(gather, self._constant(table), np.int8, indices), np.int8)
        low, high = self._unpack(self._gather(gather, self._constant(_pack(table)), np.int8, indices))
        return self._slice(self._concatenate([low, high], axis=1), (0, 0), (-1, table.shape[1]))

    def _rows(self, gather: Any, values: str, width: int) -> str:
        """Returns rows in the shape that a Gather node gives them."""
        sizes = self._add("Shape", [gather.input[1]], T=gather.attr["Tindices"], out_type=INT32)
        shape = self._concatenate([sizes, self._constant(np.asarray([width], np.int32))], axis=0, kind=INT32)
        return self._add("Reshape", [values, shape], T=FLOAT32, Tshape=INT32)

    def _look_up(self, book: Codebook, steps: str, first: str) -> str:
        added = self._add("AddV2", [steps, first], T=FLOAT32)
        places = self._add("Cast", [added], SrcT=FLOAT32, DstT=INT32)
        inputs = [self._constant(book.values), places, self._constant(np.int32(0))]
        return self._add("GatherV2", inputs, Tparams=FLOAT32, Tindices=INT32, Taxis=INT32)

    def without_zeros(self, values: Any, dtype: tf.DType) -> str:
        flat = values.reshape(-1)
        pieces = [self._piece_without_zeros(flat[start : start + PIECE], dtype) for start in range(0, flat.size, PIECE)]
        return self._reshape(self._concatenate(pieces, axis=0, kind=dtype_attr(dtype)), values.shape, dtype_attr(dtype))

    def _piece_without_zeros(self, values: Any, dtype: tf.DType) -> str:
        # -0.0 is stored as a value, so that the decoded weight has the same bits.
        stored = values.view(f"u{values.itemsize}") != 0
        packed = np.packbits(stored, bitorder="little")[:, None]
        shifts = self._constant(np.arange(8, dtype=np.uint8))
        shifted = self._add("RightShift", [self._constant(packed), shifts], T=BYTE)
        masked = self._add("BitwiseAnd", [shifted, self._constant(np.uint8(1))], T=BYTE)
        bits = self._add("Cast", [self._reshape(masked, (-1,), BYTE)], SrcT=BYTE, DstT=INT32)
        if values.size % 8:
            limits = [self._constant(np.array([limit], np.int32)) for limit in (0, values.size)]
            bits = self._add("Slice", [bits, *limits], T=INT32, Index=INT32)
        counts = self._add("Cumsum", [bits, self._constant(np.int32(0))], T=INT32, Tidx=INT32)
        places = self._add("Mul", [counts, bits], T=INT32)
        table = np.concatenate([np.zeros(1, values.dtype), values[stored]])
        kept = self._constant(table, dtype if dtype == tf.qint8 else None)
        inputs = [kept, places, self._constant(np.int32(0))]
        return self._add("GatherV2", inputs, Tparams=dtype_attr(dtype), Tindices=INT32, Taxis=INT32)

    def _in_pieces(self, values: np.ndarray, decode: Callable[[np.ndarray], Sequence[str]]) -> str:
        """Returns the flat tensor of stored values in float32."""
        flat = values.reshape(-1)
        size = flat.size if self._whole else PIECE
        pieces = [flat[start : start + size] for start in range(0, flat.size, size)]
        joined = self._concatenate([part for piece in pieces for part in decode(piece)], axis=0)
        # Only the last piece can have an odd length. Half a byte of it is then unused.
        odd = decode == self._unpack_constant and flat.size % 2
        return self._slice(joined, (0,), (flat.size,)) if odd else joined

    def _cast_constant(self, values: np.ndarray) -> Sequence[str]:
        return [self._cast(self._constant(values), values.dtype)]

    def _unpack_constant(self, values: np.ndarray) -> Sequence[str]:
        return self._unpack(self._constant(_pack(values[None])[0]))

    def _unpack(self, packed: str) -> Sequence[str]:
        """Returns the low and the high four bits of bytes in float32."""
        four, kind = self._constant(np.int8(4)), dtype_attr(tf.int8)
        low = self._add("RightShift", [self._add("LeftShift", [packed, four], T=kind), four], T=kind)
        high = self._add("RightShift", [packed, four], T=kind)
        return [self._cast(low, np.int8), self._cast(high, np.int8)]

    def _scales(self, grouped: Grouped, bits: int) -> str:
        scales = grouped.scales
        return self._constant(scales) if bits == 8 else self.halves(scales.astype(ml_dtypes.bfloat16))

    def _cut(self, filled: str, grouped: Grouped, rows: int) -> str:
        """Removes the values that fill up the last groups."""
        if grouped.filled_shape == grouped.shape:
            return filled
        matrix = self._reshape(filled, (-1, grouped.filled_shape[1]))
        return self._slice(matrix, (0, 0), (rows, grouped.shape[1]))

    def _gather(self, node: Any, table: str, dtype: Any, indices: str | None = None) -> str:
        inputs = [table, indices or node.input[1], *node.input[2:]]
        attributes = copy_attributes(node, ("Tindices", "Taxis", "batch_dims", "validate_indices"))
        return self._add(node.op, inputs, Tparams=dtype_attr(tf.as_dtype(dtype)), **attributes)

    def _cast(self, tensor: str, dtype: Any) -> str:
        return self._add("Cast", [tensor], SrcT=dtype_attr(tf.as_dtype(dtype)), DstT=FLOAT32)

    def _multiply(self, one: str, other: str) -> str:
        return self._add("Mul", [one, other], T=FLOAT32)

    def _reshape(self, tensor: str, shape: Sequence[int], kind: AttrValue = FLOAT32) -> str:
        return self._add("Reshape", [tensor, self._constant(np.asarray(shape, np.int32))], T=kind, Tshape=INT32)

    def _slice(self, tensor: str, begin: Sequence[int], size: Sequence[int]) -> str:
        limits = [self._constant(np.asarray(begin, np.int32)), self._constant(np.asarray(size, np.int32))]
        return self._add("Slice", [tensor, *limits], T=FLOAT32, Index=INT32)

    def _concatenate(self, tensors: Sequence[str], axis: int, kind: AttrValue = FLOAT32) -> str:
        if len(tensors) == 1:
            return tensors[0]
        count = AttrValue(i=len(tensors))
        return self._add("ConcatV2", [*tensors, self._constant(np.int32(axis))], N=count, T=kind, Tidx=INT32)

    def _constant(self, value: Any, dtype: tf.DType | None = None) -> str:
        return self._editor.add_constant(f"{self._name}/stored", np.asarray(value), dtype)

    def _add(self, op: str, inputs: Sequence[str], **attributes: AttrValue) -> str:
        return self._editor.add(op, f"{self._name}/{op}", inputs, **attributes)


def _pack(table: np.ndarray) -> np.ndarray:
    """Packs each row of int4 values. Its first half is in the low four bits of bytes, its second in the high ones."""
    even = np.pad(table, [(0, 0), (0, table.shape[1] % 2)])
    low, high = np.split(even.astype(np.uint8), 2, axis=1)
    return ((low & 0xF) | (high << 4)).view(np.int8)
