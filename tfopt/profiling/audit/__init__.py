"""What TensorFlow's registry of kernels and XLA say of a graph on a GPU, without a GPU.

Start in placement.py, which finds the operations without a kernel for GPUs; lowering.py asks XLA, products.py looks at
tensor cores.
"""

from tfopt.profiling.audit.lowering import gradients_of_values, why_not_lowered
from tfopt.profiling.audit.placement import Placements, placements
from tfopt.profiling.audit.products import tensor_core_share

__all__ = ["Placements", "gradients_of_values", "placements", "tensor_core_share", "why_not_lowered"]
