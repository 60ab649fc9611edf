"""The cost of a model, counted from its graph: multiply-adds per example, and memory of a training step.

Start in flops.py; walk.py lists the operations that a graph executes, multiply_adds.py counts one of them.
"""

from tfopt.profiling.cost.flops import FlopCount, OperationCount, count_flops

__all__ = ["FlopCount", "OperationCount", "count_flops"]
