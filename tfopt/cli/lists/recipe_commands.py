"""The command `tfopt recipes`: the list of recipes, the settings and the cost of one, and how two differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tfopt.cli.exit_codes import SUCCESS
from tfopt.cli.lists.stored import cost_texts, memory_note, stored_costs
from tfopt.cli.own_code import read_recipe
from tfopt.cli.parsing import parse_words
from tfopt.cli.printing import print_json, print_rows, say
from tfopt.report.formatting import short_bytes, short_count

if TYPE_CHECKING:
    from tfopt.recipe.differences import Difference


@dataclass(frozen=True, kw_only=True)
class RecipesOptions:
    """Lists the recipes, each with its task and its cost. tfopt recipes NAME shows one recipe; tfopt recipes diff A B
    compares two. `tfopt run NAME` runs a recipe.
    """

    json: bool = False
    """Print JSON: "recipes" with all their settings, and "costs"."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Shows one recipe: its settings as TOML, its forms and its cost."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME|FILE.toml")]
    """Name of a recipe, or a .toml file."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Lists the settings in which two recipes differ. A and B are recipes of `tfopt recipes` or .toml files."""

    first: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="A")]
    """Name of a recipe, or a .toml file."""
    second: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="B")]
    """Name of another recipe, or a .toml file."""
    json: bool = False
    """Print JSON."""


def recipes_command(words: list[str]) -> int:
    if words[:1] == ["diff"]:
        return _diff_command(words[1:])
    if any(not word.startswith("-") for word in words):
        return _recipe_command(words)
    options = parse_words(RecipesOptions, words, "tfopt recipes")
    from tfopt.recipes import RECIPES

    costs = stored_costs()
    if options.json:
        recipes = {name: recipe.to_dict() for name, recipe in RECIPES.items()}
        print_json({"recipes": recipes, "costs": costs["recipes"], "memory_error": costs["memory_error"]})
        return SUCCESS
    print_rows([(name, recipe.description) for name, recipe in RECIPES.items()])
    known = {name: cost for name, cost in costs["recipes"].items() if name in RECIPES and "parameters" in cost}
    say()
    print_rows([*zip(("cost", *known), cost_texts(known), strict=True)])
    print_rows([("", f"Multiply-adds of one example; memory to train a batch. {memory_note(costs)}")])
    return SUCCESS


def _recipe_command(words: list[str]) -> int:
    options: RecipeOptions = parse_words(RecipeOptions, words, "tfopt recipes")
    recipe = read_recipe(options.name)
    cost: dict[str, Any] = stored_costs()["recipes"].get(recipe.name, {})
    if options.json:
        print_json({"recipe": recipe.to_dict(), "cost": cost or None})
        return SUCCESS
    say(recipe)
    forms = {"as it stands": cost, **cost.get("forms", {})}
    if cost:
        say()
        print_rows([(f"# {form}", _cost_text(each)) for form, each in forms.items()])
    return SUCCESS


def _cost_text(cost: dict[str, Any] | None) -> str:
    if not cost or "parameters" not in cost:
        return "cost unavailable (the examples are not on the machine that counted)"
    return (
        f"{short_count(cost['parameters'])} parameters, {short_count(cost['multiply_adds'])} multiply-adds per "
        f"example, {short_bytes(cost['memory_bytes'])} to train a batch of {cost['batch_size']}"
    )


def _diff_command(words: list[str]) -> int:
    options = parse_words(DiffOptions, words, "tfopt recipes diff")
    from tfopt.recipes import diff

    found = diff(options.first, options.second)
    if options.json:
        print_json(
            [{"setting": each.setting, "first": _plain(each.first), "second": _plain(each.second)} for each in found]
        )
        return SUCCESS
    if not found:
        say(f"{options.first} and {options.second} have the same settings")
        return SUCCESS
    print_rows([(each.setting, f"{_shown(each.first, each)} -> {_shown(each.second, each)}") for each in found])
    return SUCCESS


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | list | tuple | dict | None) else repr(value)


def _shown(value: object, difference: Difference) -> str:
    if value is None:
        return "off" if "on" in (difference.first, difference.second) else "not set"
    return value if isinstance(value, str) else repr(value)
