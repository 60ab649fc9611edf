from .compile import compile, tensor_core_alignment
from .config import TrainingConfig
from .plan import Plan, plan
from .precision import float32_outputs
from .step.ledger import Ledger, ledger

__all__ = ["Ledger", "Plan", "TrainingConfig", "compile", "float32_outputs", "ledger", "plan", "tensor_core_alignment"]
