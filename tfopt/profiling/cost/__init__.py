"""The cost of a model, counted from its graph: multiply-adds per example, and memory of a training step.

Start in flops.py, which counts multiply-adds, and memory.py, which estimates the memory of training. walk.py lists the
operations that a graph executes.
"""

from tfopt.profiling.cost.flops import FlopCount, OperationCount, count_flops
from tfopt.profiling.cost.memory import TrainingMemory, training_memory

__all__ = ["FlopCount", "OperationCount", "TrainingMemory", "count_flops", "training_memory"]
