"""A recipe: the model, the data and the settings of every stage, as plain data that TOML can hold.

Start in recipe.py; changes.py lays other settings over a recipe, tables.py makes tables of its settings.
"""

from tfopt.recipe.changes import with_changes
from tfopt.recipe.recipe import QUICK_EPOCHS, QUICK_EXAMPLES, QUICK_STEPS, ModelConfig, Recipe, read_changes
from tfopt.recipe.tables import Difference, differences

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
