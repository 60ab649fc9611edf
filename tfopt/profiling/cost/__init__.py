"""The cost of a model and of its training, counted from graphs: operations, bytes, memory, and the share of the peak.

Start in flops.py, which counts multiply-adds, and memory.py, which estimates the memory of training. bytes.py counts
what kernels move, training.py the cost of a step, and efficiency.py compares a measured step with the peaks of its
device. walk.py lists the operations that a graph executes.
"""

from tfopt.profiling.cost.bytes import Kernel, kernels, moved_bytes
from tfopt.profiling.cost.efficiency import Efficiency, Roofs, efficiency
from tfopt.profiling.cost.flops import FlopCount, OperationCount, count_flops
from tfopt.profiling.cost.memory import TrainingMemory, training_memory
from tfopt.profiling.cost.model_cost import ModelCost, model_cost
from tfopt.profiling.cost.training import TrainCost, train_cost

__all__ = [
    "Efficiency",
    "FlopCount",
    "Kernel",
    "ModelCost",
    "OperationCount",
    "Roofs",
    "TrainCost",
    "TrainingMemory",
    "count_flops",
    "efficiency",
    "kernels",
    "model_cost",
    "moved_bytes",
    "train_cost",
    "training_memory",
]
