"""The cost of a model: parameters, multiply-adds per example, memory of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras

from tfopt.profiling.cost.flops import count_flops
from tfopt.profiling.cost.memory import TrainingMemory, training_memory
from tfopt.report import Record
from tfopt.report.formatting import short_bytes, short_count
from tfopt.report.sheet import Sheet, Shown, pairs


@dataclass(frozen=True, kw_only=True)
class ModelCost(Record, Shown):
    """What a model costs.

    Attributes:
        name: Name of the model.
        input_shape: Shape of one example, or one for each input.
        parameters: Number of trained parameters.
        multiply_adds: Multiply-adds of a forward pass of one example.
        multiply_adds_by_kind: The same by the kind of operation, the largest first.
        uncounted: What could not be counted, with the reason.
        memory: The estimated memory of a training step.
    """

    name: str
    input_shape: Any
    parameters: int
    multiply_adds: int
    multiply_adds_by_kind: Mapping[str, int]
    uncounted: tuple[str, ...] = ()
    memory: TrainingMemory

    def rows(self) -> dict[str, str]:
        """Returns the figures as text, by what they are."""
        kinds = ", ".join(f"{kind} {short_count(count)}" for kind, count in self.multiply_adds_by_kind.items())
        memory = self.memory
        return {
            "input shape": str(self.input_shape),
            "parameters": f"{self.parameters:,}",
            "multiply-adds": f"{short_count(self.multiply_adds)} per example" + (f": {kinds}" if kinds else ""),
            **({"not counted": "; ".join(self.uncounted)} if self.uncounted else {}),
            "training memory": f"{short_bytes(memory.total_bytes)} for a batch of {memory.batch_size} with "
            f"{memory.optimizer} in {memory.precision}: "
            + ", ".join(f"{part} {short_bytes(size)}" for part, size in memory.parts().items()),
        }

    def _sheet(self) -> Sheet:
        return Sheet(title=self.name, tables=[pairs(self.rows())])


def model_cost(
    model: keras.Model,
    *,
    batch_size: int = 32,
    precision: str | None = None,
    optimizer: str = "adam",
    open_size: int | None = None,
    inputs: Any = None,
) -> ModelCost:
    """Counts the cost of a model: its parameters, its multiply-adds and the memory of its training.

    Args:
        model: A built Keras model.
        batch_size: Number of examples of a training step.
        precision: Name of the dtype policy of the training; None keeps the policies of the layers.
        optimizer: Name of the optimizer.
        open_size: Size of the open dimensions besides the batch, such as the length of a sequence.
        inputs: An array or `tf.TensorSpec` for each input, for a subclassed model of several inputs.
    Raises:
        ConfigError: A setting is wrong.
        UnsupportedModelError: The model is not built, or its layers cannot have another precision.
    Example:
        >>> model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(100)])
        >>> cost = model_cost(model)
        >>> cost.parameters, cost.multiply_adds
        (78500, 78400)
    """
    count = count_flops(model, open_size=open_size, inputs=inputs)
    shapes = getattr(model, "input_shape", None) if getattr(model, "inputs", None) else None
    return ModelCost(
        name=model.name,
        input_shape=None if shapes is None else keras.tree.map_shape_structure(lambda shape: tuple(shape[1:]), shapes),
        parameters=sum(math.prod(variable.shape) for variable in model.trainable_variables),
        multiply_adds=count.multiply_adds,
        multiply_adds_by_kind=count.by_kind,
        uncounted=tuple(count.uncounted),
        memory=training_memory(model, batch_size, precision, optimizer, open_size=open_size, inputs=inputs),
    )
