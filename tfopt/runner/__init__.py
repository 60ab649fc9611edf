"""The run of a recipe: stages that train, prune and quantize, each with its artifact.

Start in recipe_run.py; stages.py has the stages, run_report.py the report at the end.
"""

from tfopt.runner.recipe_run import RunResult, run

__all__ = ["RunResult", "run"]
