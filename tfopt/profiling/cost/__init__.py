"""The cost of a model, counted from its graph: multiply-adds per example, and memory of a training step.

Start in flops.py, which counts multiply-adds, and memory.py, which estimates the memory of training. walk.py lists the
operations that a graph executes.
"""

from tfopt.profiling.cost.flops import FlopCount, OperationCount, count_flops
from tfopt.profiling.cost.memory import TrainingMemory, training_memory
from tfopt.profiling.cost.model_cost import ModelCost, model_cost

__all__ = ["FlopCount", "ModelCost", "OperationCount", "TrainingMemory", "count_flops", "model_cost", "training_memory"]
