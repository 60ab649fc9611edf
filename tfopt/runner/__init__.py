"""The run of a recipe: stages that train, prune and quantize, each with its artifact.

Start in recipe_run.py; stages.py has the stages, work.py what they work on, teacher.py who teaches, run_report.py the
result.
"""

from tfopt.runner.recipe_run import run
from tfopt.runner.run_report import RunResult

__all__ = ["RunResult", "run"]
