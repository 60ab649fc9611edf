"""Frozen inference graphs: how a model becomes one, and how one is read and edited.

Quantization annotates such graphs and the exporters write them, so both stand on this package and not on each other.
"""

from tfopt.graph.edit import GraphEditor
from tfopt.graph.fold import fold_constants
from tfopt.graph.frozen import FrozenGraph
from tfopt.graph.source import freeze

__all__ = ["FrozenGraph", "GraphEditor", "fold_constants", "freeze"]
