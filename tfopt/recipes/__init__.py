"""Named recipes: a builder paired with the settings that train, shrink and export it.

Start in vision/digits_cnn.py; tfopt/recipe/recipe.py defines the settings of a recipe.
"""

from __future__ import annotations

from pathlib import Path

from tfopt.errors import unknown_name
from tfopt.recipe import Recipe
from tfopt.recipes.sequences import lstm, tcn
from tfopt.recipes.text import gpt
from tfopt.recipes.vision import digits_cnn, resnet_cifar

RECIPES: dict[str, Recipe] = {module.RECIPE.name: module.RECIPE for module in (digits_cnn, gpt, lstm, resnet_cifar, tcn)}

__all__ = ["RECIPES", "digits_cnn", "find_recipe", "gpt", "lstm", "resnet_cifar", "tcn"]


def find_recipe(recipe: Recipe | str | Path) -> Recipe:
    """Returns the recipe for a recipe, a name, or the path of a .toml file.

    Raises:
        ConfigError: No recipe has the name, or the file has no valid recipe.
    Example:
        >>> find_recipe("digits_cnn").model.builder
        'simple_cnn'
    """
    if isinstance(recipe, Recipe):
        return recipe
    if str(recipe).endswith(".toml"):
        return Recipe.from_toml(recipe)
    if str(recipe) not in RECIPES:
        raise unknown_name("recipe", str(recipe), RECIPES)
    return RECIPES[str(recipe)]
