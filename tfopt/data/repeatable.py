"""Whether a data set gives the same examples in every epoch and in every process, so that a cache may stand for it."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from tfopt.compat.tensorflow import inputs_of, ops_of_functions

# Random numbers of their own state. Those of a seed alone ("Stateless...") repeat, unless a variable counts the seeds.
RANDOM = ("Random", "StatefulRandom", "StatefulUniform", "StatefulStandardNormal", "RngRead", "Multinomial")
RANDOM_BY_SEED = ("StatelessRandom", "StatelessSample")
COUNTING = ("AssignVariableOp", "AssignAddVariableOp")
COMPARED = 8
PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


def changes_every_epoch(dataset: tf.data.Dataset) -> bool:
    """Returns whether the functions of a data set draw random numbers, which a cache would repeat in every epoch.

    Python functions are called twice for the first examples. A generator is not: it may give each example only once.

    Example:
        >>> numbers = tf.data.Dataset.range(3)
        >>> noisy = numbers.map(lambda n: tf.cast(n, tf.float32) + tf.random.normal(()))
        >>> changes_every_epoch(numbers), changes_every_epoch(noisy), changes_every_epoch(noisy.cache())
        (False, True, False)
    """
    every: set[str] = set()
    for stage in _stages(dataset):
        ops = ops_of_functions(stage)
        by_seed = any(op.startswith(RANDOM_BY_SEED) for op in ops) and any(op in COUNTING for op in ops)
        if by_seed or any(op.startswith(RANDOM) for op in ops) or type(stage).__name__ == "_RandomDataset":
            return True
        every |= {*ops, *(["Shuffle"] if "Shuffle" in type(stage).__name__ else [])}
    if every.isdisjoint(PYTHON) or not every.isdisjoint(("GeneratorDataset", "Shuffle")):
        return False
    return _first(dataset) != _first(dataset)


def _first(dataset: tf.data.Dataset) -> list[bytes]:
    parts = [part for example in dataset.take(COMPARED) for part in tf.nest.flatten(example, expand_composites=True)]
    return [tf.io.serialize_tensor(part).numpy() for part in parts]


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Returns whether a data set calls Python code, of which TensorFlow knows nothing but a number."""
    return any(op in PYTHON for stage in _stages(dataset) for op in ops_of_functions(stage))


def _stages(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields the stages of a data set, from its end to its sources or to a cache of its own."""
    if "Cache" in type(dataset).__name__:
        return
    yield dataset
    for each in inputs_of(dataset):
        yield from _stages(each)
