"""Counts the multiply-adds of a model from its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfopt.profiling.cost.multiply_adds import multiply_adds
from tfopt.profiling.cost.trace import checks_open_size, forward_graph, input_specs
from tfopt.profiling.cost.walk import Scope, branches, called, loop, needed_operations
from tfopt.report import Record
from tfopt.report.sheet import Sheet, Shown, Table


@dataclass(frozen=True, kw_only=True)
class OperationCount(Record):
    """An operation of a graph with its multiply-adds.

    Attributes:
        name: Name of the operation.
        kind: Kind of the operation, for example "Conv2D".
        multiply_adds: Multiply-adds of one execution.
        executions: Number of executions in one pass: the rounds of the loops around the operation.
    """

    name: str
    kind: str
    multiply_adds: int
    executions: int = 1

    @property
    def total(self) -> int:
        """Multiply-adds of all executions."""
        return self.multiply_adds * self.executions


@dataclass(frozen=True, kw_only=True)
class FlopCount(Record, Shown):
    """The multiply-adds of a graph, with the operations that have them.

    Attributes:
        operations: The operations with multiply-adds.
        uncounted: What could not be counted, with the reason. The sum is too small if there is anything here.
    """

    operations: Sequence[OperationCount]
    uncounted: Sequence[str] = ()

    @property
    def multiply_adds(self) -> int:
        """Sum of the multiply-adds. Publications call this number MACs, and often FLOPs."""
        return sum(operation.total for operation in self.operations)

    @property
    def flops(self) -> int:
        """Floating-point operations: a multiplication with its addition counts as 2."""
        return 2 * self.multiply_adds

    @property
    def by_kind(self) -> Mapping[str, int]:
        """Sum of the multiply-adds for each kind of operation, the largest first."""
        sums: Counter[str] = Counter()
        for operation in self.operations:
            sums[operation.kind] += operation.total
        return dict(sums.most_common())

    def _sheet(self) -> Sheet:
        counted = Table(rows=[(kind, f"{count:,}") for kind, count in self.by_kind.items()], figures={1})
        uncounted = Table(rows=[("not counted", reason) for reason in self.uncounted])
        return Sheet(title=f"{self.multiply_adds:,} multiply-adds", tables=[counted, uncounted])


def count_flops(
    model: keras.Model, *, batch_size: int = 1, open_size: int | None = None, inputs: Any = None
) -> FlopCount:
    """Counts the multiply-adds of a forward pass in inference.

    The model is traced, not run. Matrix products and convolutions count, as in publications. Elementwise operations,
    reductions, normalization and pooling do not. An operation in a loop counts as often as the loop has rounds. Of
    several branches, the most expensive one counts.

    Args:
        model: A built Keras model: functional, Sequential or subclassed.
        batch_size: Number of examples.
        open_size: Size of the open dimensions besides the batch, such as the length of a sequence.
        inputs: An array or `tf.TensorSpec` for each input, for a subclassed model of several inputs.
    Returns: The count, with `multiply_adds` and `flops`.
    Raises:
        ConfigError: The model has an open dimension, and open_size is None or does not fit the layers.
        UnsupportedModelError: The model is not built, or its inputs are unknown.
    Example:
        >>> model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Conv2D(8, 3, padding="same")])
        >>> count_flops(model).multiply_adds == 32 * 32 * 8 * (3 * 3 * 3)
        True
    """
    specs = input_specs(model, batch_size, open_size, inputs)
    with checks_open_size(open_size):
        graph = forward_graph(model, specs)
    return count_graph(graph)


def count_graph(graph: Any) -> FlopCount:
    """Counts the multiply-adds of the graph of a concrete function, for example of a training step.

    Example:
        >>> import tensorflow as tf
        >>> square = tf.function(lambda x: x @ x).get_concrete_function(tf.TensorSpec((4, 4)))
        >>> count_graph(square.graph).multiply_adds
        64
    """
    uncounted: list[str] = []
    return FlopCount(operations=tuple(_count(Scope(graph), 1, uncounted)), uncounted=tuple(dict.fromkeys(uncounted)))


def _count(scope: Scope, executions: int, uncounted: list[str]) -> Iterator[OperationCount]:
    for operation in needed_operations(scope.graph):
        function = called(operation, scope)
        if function is not None:
            yield from _count(function, executions, uncounted)
        elif choices := branches(operation, scope):
            yield from max((list(_count(choice, executions, uncounted)) for choice in choices), key=_total)
        elif repeated := loop(operation, scope):
            inside = list(_count(repeated.body, executions * (repeated.rounds or 1), uncounted))
            if repeated.rounds is None and inside:
                uncounted.append(f"{operation.name}: the number of rounds is known only in the run; one round counts")
            yield from inside
        else:
            count = multiply_adds(operation)
            if count is None:
                uncounted.append(f"{operation.name} ({operation.type}): a shape is unknown")
            elif count:
                yield OperationCount(
                    name=operation.name, kind=operation.type, multiply_adds=count, executions=executions
                )


def _total(counts: Sequence[OperationCount]) -> int:
    return sum(count.total for count in counts)
