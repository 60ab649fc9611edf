from .callback import PruningSchedule
from .config import PruningConfig, StructuredPruningConfig
from .criteria import CRITERIA
from .masks import Mask
from .prune import keep_zeros, prune
from .schedules import SCHEDULES
from .structured import ChannelGroups, ShrinkResult, ShrinkSchedule, shrink

__all__ = [
    "CRITERIA",
    "ChannelGroups",
    "SCHEDULES",
    "Mask",
    "PruningConfig",
    "PruningSchedule",
    "ShrinkResult",
    "ShrinkSchedule",
    "StructuredPruningConfig",
    "keep_zeros",
    "prune",
    "shrink",
]
