"""Pruning: weights set to zero and held there through training. The model keeps its layers and its size in memory."""

from tfopt.pruning.callback import PruningSchedule
from tfopt.pruning.config import PruningConfig
from tfopt.pruning.criteria import CRITERIA
from tfopt.pruning.masks import Mask
from tfopt.pruning.prune import prune
from tfopt.pruning.schedules import SCHEDULES

__all__ = ["CRITERIA", "SCHEDULES", "Mask", "PruningConfig", "PruningSchedule", "prune"]
