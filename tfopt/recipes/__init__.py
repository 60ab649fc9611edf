"""Named recipes: a builder paired with the settings that train, shrink and export it.

Start in digits_cnn.py; tfopt/recipe/recipe.py defines the settings of a recipe.
"""

from __future__ import annotations

from pathlib import Path

from tfopt.errors import unknown_name
from tfopt.recipe import Difference, Recipe, differences, read_changes
from tfopt.recipes import (
    convnext,
    digits_cnn,
    efficientnet_v2,
    gpt,
    lstm,
    mlp,
    mobilenet_v2,
    mobilenet_v3,
    resnet50,
    resnet_2_4,
    resnet_cifar,
    resnet_distilled,
    resnet_shrunk,
    resnet_sparse,
    tcn,
    text_encoder,
    unet,
    vit,
    vit_distilled,
)

_IN_ORDER = (
    digits_cnn, resnet_cifar, resnet_sparse, resnet_2_4, resnet_shrunk, resnet_distilled, resnet50, mobilenet_v2,
    mobilenet_v3, efficientnet_v2, convnext, vit, vit_distilled, unet, mlp, lstm, tcn, gpt, text_encoder,
)  # fmt: skip
RECIPES: dict[str, Recipe] = {module.RECIPE.name: module.RECIPE for module in _IN_ORDER}

__all__ = ["RECIPES", "compose", "diff", "find_recipe", *RECIPES]

# Names that recipes had in the past.
FORMER_NAMES = {"digits_resnet": "resnet_cifar"}


def find_recipe(recipe: Recipe | str | Path, *, allow_code: bool = False) -> Recipe:
    """Returns the recipe for a recipe, a name, or the path of a .toml file.

    Args:
        recipe: A recipe, its name, or the path of a .toml file.
        allow_code: Whether builder, source and task of a file may be names of the form package.module:name.
    Raises:
        ConfigError: No recipe has the name, or the file has no valid recipe.
    Example:
        >>> find_recipe("digits_cnn").model.builder
        'simple_cnn'
    """
    if isinstance(recipe, Recipe):
        return recipe
    if str(recipe).endswith(".toml"):
        return Recipe.from_toml(recipe, allow_code=allow_code)
    name = FORMER_NAMES.get(str(recipe), str(recipe))
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]


def compose(first: Recipe | str | Path, *others: Recipe | str | Path, allow_code: bool = False) -> Recipe:
    """Returns the first recipe with the settings of others laid over it, one after the other.

    Of a recipe, the settings count that differ from the defaults, and the stages that are on. Of a .toml file, all
    settings count that it holds; `pruning = false` turns the stage off.

    Args:
        first: A recipe, its name, or the path of a .toml file.
        others: More of them.
        allow_code: Whether builder, source and task of a file may be names of the form package.module:name.
    Example:
        >>> from tfopt.pruning import PruningConfig
        >>> both = compose("digits_cnn", Recipe(name="sparse", pruning=PruningConfig(target_sparsity=0.9)))
        >>> both.name, both.pruning.target_sparsity
        ('digits_cnn+sparse', 0.9)
    """
    composed = find_recipe(first, allow_code=allow_code)
    for other in others:
        if not isinstance(other, Recipe) and str(other).endswith(".toml"):
            composed = composed.overlaid(read_changes(Path(other), allow_code=allow_code))
        else:
            composed = composed.compose(find_recipe(other))
    return composed


def diff(first: Recipe | str | Path, second: Recipe | str | Path) -> list[Difference]:
    """Returns the settings in which two recipes differ.

    Args:
        first: A recipe, its name, or the path of a .toml file.
        second: The same.
    Example:
        >>> [each.setting for each in diff("digits_cnn", "resnet_cifar")][:3]
        ['name', 'description', 'model.builder']
    """
    return differences(find_recipe(first, allow_code=True), find_recipe(second, allow_code=True))  # nothing runs here
