"""The private base class of a tf.data.Dataset that is made in Python. In a module of its own, since it is a base."""

from __future__ import annotations

from typing import Any

from tfopt.compat.checks import imported

# Has the elements of the data set that it is given: tf.data.Dataset itself has no public way to make a subclass.
SameElements: Any = imported(
    "tensorflow.python.data.ops.dataset_ops",
    "UnaryUnchangedStructureDataset",
    takes=("input_dataset", "variant_tensor"),
)
