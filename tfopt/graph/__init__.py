"""Frozen inference graphs: how a model becomes one, and how it is edited and simplified.

Start in source.py, which freezes a model. unfolded.py is the first step of every export, and edit.py reads and
rewrites nodes by name.
"""

from tfopt.graph.edit import GraphEditor
from tfopt.graph.fold import fold_constants
from tfopt.graph.frozen import FrozenGraph
from tfopt.graph.source import freeze

__all__ = ["FrozenGraph", "GraphEditor", "fold_constants", "freeze"]
