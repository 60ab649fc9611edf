"""Named recipes, one per file, each a builder paired with the settings that train, shrink and export it."""

from tfopt.recipe import Recipe
from tfopt.recipes import digits_cnn, digits_resnet

RECIPES: dict[str, Recipe] = {module.RECIPE.name: module.RECIPE for module in (digits_cnn, digits_resnet)}

__all__ = ["RECIPES", "digits_cnn", "digits_resnet"]
