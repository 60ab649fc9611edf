"""Training: a plan that decides every "auto", and the compilation of a model under it."""

from tfopt.training.compile import compile, ledger
from tfopt.training.config import TrainingConfig
from tfopt.training.ledger import Ledger
from tfopt.training.plan import Plan, plan
from tfopt.training.precision import float32_outputs, tensor_core_alignment

__all__ = ["Ledger", "Plan", "TrainingConfig", "compile", "float32_outputs", "ledger", "plan", "tensor_core_alignment"]
