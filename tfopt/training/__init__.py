"""Training: a plan that decides every "auto", and the compilation of a model under it."""

from tfopt.training.compile import compile
from tfopt.training.config import TrainingConfig
from tfopt.training.plan import Plan, plan

__all__ = ["Plan", "TrainingConfig", "compile", "plan"]
