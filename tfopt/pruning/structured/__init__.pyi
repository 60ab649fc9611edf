from .config import StructuredPruningConfig
from .criteria import CRITERIA
from .groups import ChannelGroups, Group
from .schedule import ShrinkSchedule
from .shrink import ShrinkResult, shrink

__all__ = ["CRITERIA", "ChannelGroups", "Group", "ShrinkResult", "ShrinkSchedule", "StructuredPruningConfig", "shrink"]
