"""The figures of the HTML pages, drawn by matplotlib as inline SVG.

Start in drawing.py, which has what all figures share. Each of the other files draws one kind.
"""

from tfopt.reporting.figures.artifact_bars import bars, show_bytes
from tfopt.reporting.figures.drawing import Line, Plot
from tfopt.reporting.figures.step_bars import step_stack
from tfopt.reporting.figures.timeline import utilization
from tfopt.reporting.figures.training_curves import curves

__all__ = ["Line", "Plot", "bars", "curves", "show_bytes", "step_stack", "utilization"]
