from .config import StructuredPruningConfig
from .criteria import CRITERIA
from .groups import ChannelGroups, Group
from .shrink import ShrinkResult, shrink

__all__ = ["CRITERIA", "ChannelGroups", "Group", "ShrinkResult", "StructuredPruningConfig", "shrink"]
