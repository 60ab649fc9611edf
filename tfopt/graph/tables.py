"""Look-up tables of a frozen graph: their content, from which TensorFlow makes a table where the graph runs.

A table maps strings or integers to numbers or strings, in layers such as StringLookup and TextVectorization. It is no
tensor, so it cannot become a constant of the graph. A frozen graph has a placeholder of a resource in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedModelError

LOOK_UP = "LookupTableFindV2"
REMEDY = "Keep this part outside the model and export the part that takes numbers."


@dataclass(frozen=True, eq=False)
class Table:
    """The content of a table: a vector of keys, and the value of each."""

    keys: tf.Tensor
    values: tf.Tensor

    def make(self) -> tf.lookup.StaticHashTable:
        """Returns a new table in the current graph, or outside of any. Each look-up brings its own default value."""
        dtypes = self.keys.dtype, self.values.dtype
        content = tf.lookup.KeyValueTensorInitializer(self.keys.numpy(), self.values.numpy(), *dtypes)
        return tf.lookup.StaticHashTable(content, tf.zeros((), self.values.dtype))

    @cached_property
    def held(self) -> tf.lookup.StaticHashTable:
        """The table that functions of a graph refer to. A SavedModel with these functions must hold it too."""
        with tf.init_scope():
            return self.make()


def read_tables(handles: Mapping[str, Any], readers: Mapping[str, Any], name: str) -> dict[str, Table]:
    """Returns the content of each table that a graph reads. Tables that no node reads are left out.

    The handles and the nodes that read a table are by the name of its placeholder.

    Raises:
        UnsupportedModelError: A resource is no table, or one that cannot be kept.
    """
    tables = {}
    for placeholder, handle in handles.items():
        reader = readers.get(placeholder)
        if reader is None:
            continue
        if reader.op != LOOK_UP:
            raise UnsupportedModelError(
                f"A frozen model may hold variables and look-up tables, and no other state. Received: {name!r} with "
                f"{reader.op} at {reader.name!r}. {REMEDY}"
            )
        try:
            of_keys, of_values = (tf.as_dtype(reader.attr[key].type) for key in ("Tin", "Tout"))
            keys, values = tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=of_keys, Tvalues=of_values)
            tables[placeholder] = table = Table(keys, values)
            table.held  # noqa: B018 - TensorFlow has no kernel for every pair of types
        except (tf.errors.OpError, TypeError, ValueError) as error:
            reason = str(getattr(error, "message", error)).splitlines()[0]
            raise UnsupportedModelError(
                f"The look-up tables of a frozen model must be filled, and must map single keys to single values. "
                f"Received: {name!r} with {reader.op} at {reader.name!r} ({reason}). {REMEDY}"
            ) from error
    return tables


def words_of(tables: Mapping[str, Table]) -> list[str]:
    """Returns the strings that are keys of tables."""
    found = [table.keys.numpy() for table in tables.values() if table.keys.dtype == tf.string]
    return [key.decode("utf-8", "replace") for key in np.concatenate(found)] if found else []
