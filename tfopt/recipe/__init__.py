"""A recipe: the model, the data and the settings of every stage, as plain data that TOML can hold.

Start in recipe.py; changes.py lays other settings over a recipe, plain_values.py writes and checks plain values.
"""

from tfopt.recipe.changes import with_changes
from tfopt.recipe.differences import Difference, differences
from tfopt.recipe.model import ModelConfig
from tfopt.recipe.recipe import QUICK_EPOCHS, QUICK_EXAMPLES, QUICK_STEPS, Recipe, read_changes

__all__ = [
    "QUICK_EPOCHS",
    "QUICK_EXAMPLES",
    "QUICK_STEPS",
    "Difference",
    "ModelConfig",
    "Recipe",
    "differences",
    "read_changes",
    "with_changes",
]
