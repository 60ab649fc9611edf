from .compile import compile, float32_outputs, tensor_core_alignment
from .config import TrainingConfig
from .plan import Plan, plan
from .step.ledger import Ledger, ledger

__all__ = ["Ledger", "Plan", "TrainingConfig", "compile", "float32_outputs", "ledger", "plan", "tensor_core_alignment"]
