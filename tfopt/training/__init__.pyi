from .compile import compile, float32_outputs, tensor_core_alignment
from .config import TrainingConfig
from .optimizers import scaled_learning_rate
from .plan import Plan, plan
from .step.ledger import Ledger, ledger
from .step.noise_scale import NoiseScale

__all__ = [
    "Ledger",
    "NoiseScale",
    "Plan",
    "TrainingConfig",
    "compile",
    "float32_outputs",
    "ledger",
    "plan",
    "scaled_learning_rate",
    "tensor_core_alignment",
]
