"""Unmodified training scripts: run one in this process, look at its fits, and speed them up.

Start in run_script.py, which runs the script; hook.py tells a hook of every compile and fit.
"""

from tfopt.scripts.hook import FitHook
from tfopt.scripts.run_script import run_script

__all__ = ["FitHook", "run_script"]
