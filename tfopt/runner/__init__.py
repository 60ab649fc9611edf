"""The run of a recipe: a list of stages that train, prune and quantize, each with its artifact, and the report.

Start in recipe_run.py; stages.py has the stages.
"""

from tfopt.runner.recipe_run import RunResult, run

__all__ = ["RunResult", "run"]
