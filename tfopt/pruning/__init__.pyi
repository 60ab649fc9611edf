from .callback import PruningSchedule
from .config import PruningConfig
from .criteria.scores import CRITERIA
from .masks import Mask
from .prune import prune
from .schedules import SCHEDULES

__all__ = ["CRITERIA", "SCHEDULES", "Mask", "PruningConfig", "PruningSchedule", "prune"]
