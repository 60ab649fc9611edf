from .compile import compile
from .config import TrainingConfig
from .ledger import Ledger, ledger
from .plan import Plan, plan
from .precision import float32_outputs, tensor_core_alignment

__all__ = ["Ledger", "Plan", "TrainingConfig", "compile", "float32_outputs", "ledger", "plan", "tensor_core_alignment"]
