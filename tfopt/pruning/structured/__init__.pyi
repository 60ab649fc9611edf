from .groups import ChannelGroups, Group
from .schedule import ShrinkSchedule
from .shrink import ShrinkResult, shrink

__all__ = ["ChannelGroups", "Group", "ShrinkResult", "ShrinkSchedule", "shrink"]
