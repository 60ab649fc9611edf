"""The commands `tfopt recipes` and `tfopt models`: lists with costs, one recipe or model, and how two recipes differ.

The costs of the lists are in costs.json, which benchmarks/costs.py writes, so that they need no TensorFlow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from annotated_types import Ge

from tfopt.cli.exit_codes import SUCCESS
from tfopt.cli.preparation import arguments_of, look_beside, read_recipe, start_tensorflow
from tfopt.cli.printing import print_json, print_rows, say
from tfopt.errors import ConfigError, unknown_name
from tfopt.report.formatting import short_bytes, short_count
from tfopt.report.sheet import Table
from tfopt.settings.flags import Arguments, parse
from tfopt.settings.validation import check_fields

if TYPE_CHECKING:
    from tfopt.recipe import Difference, ModelConfig

AtLeastOne = Annotated[int, Ge(1)]
COLUMNS = ("task", "parameters", "multiply-adds", "to train")


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
    options = parse(RecipesOptions, words, "tfopt recipes")
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
    options: RecipeOptions = parse(RecipeOptions, words, "tfopt recipes")
    recipe = read_recipe(options.name)
    cost: dict[str, Any] = stored_costs()["recipes"].get(recipe.name, {})
    if options.json:
        print_json({"recipe": recipe.to_dict(), "cost": cost or None})
        return SUCCESS
    say(recipe)
    if cost:
        say()
        forms = {"as it stands": cost, **cost.get("forms", {})}
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
    options = parse(DiffOptions, words, "tfopt recipes diff")
    from tfopt.recipes import diff

    found = diff(options.first, options.second)
    if options.json:
        print_json([each.to_dict() for each in found])
        return SUCCESS
    if not found:
        say(f"{options.first} and {options.second} have the same settings")
        return SUCCESS
    print_rows([(each.setting, f"{_shown(each.first, each)} -> {_shown(each.second, each)}") for each in found])
    return SUCCESS


def _shown(value: object, difference: Difference) -> str:
    if value is None:
        return "off" if "on" in (difference.first, difference.second) else "not set"
    return value if isinstance(value, str) else repr(value)


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Lists the model builders with their arguments, and published models with their costs. tfopt models NAME builds
    one model and counts it.
    """

    json: bool = False
    """Print JSON: "builders" with their arguments, and "models" with their costs."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Builds one model and counts its cost: parameters, multiply-adds per example, memory of a training step."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """A published model or a builder of `tfopt models`, "keras:" with a model of keras.applications, "keras_hub:" with
    a backbone of KerasHub, or package.module:name of your own."""
    arguments: Arguments = field(default_factory=dict)
    """Arguments of the builder, for example depth=56 width=32."""
    input_shape: tuple[int, ...] | None = None
    """Shape of one example, for example 224 224 3. By default that of the published or the small model of the table."""
    outputs: AtLeastOne | None = None
    """Number of classes, tokens or values, by default as in the table."""
    open_size: AtLeastOne = 128
    """Size of an open dimension, such as the length of a sequence."""
    batch_size: AtLeastOne = 32
    """Number of examples of the training step."""
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """Dtype policy of the training step."""
    optimizer: str = "adam"
    """Name of the optimizer."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_fields(self)


def models_command(words: list[str]) -> int:
    if any(not word.startswith("-") for word in words):
        return _model_command(words)
    options = parse(ModelsOptions, words, "tfopt models")
    from tfopt.models import BUILDERS

    arguments = {name: arguments_of(builder) for name, builder in BUILDERS.items()}
    costs = stored_costs()
    if options.json:
        print_json({"builders": arguments, **{key: value for key, value in costs.items() if key != "recipes"}})
        return SUCCESS
    rows = []
    for name, builder in BUILDERS.items():
        rows.append((name, (builder.__doc__ or "").splitlines()[0]))
        rows.append(("", "  ".join(f"{argument}={value}" for argument, value in arguments[name].items())))
    print_rows(rows)
    of, published = costs["memory_of"], costs["models"]
    say()
    print_rows([*zip(("published", *published), cost_texts(published), strict=True)])
    memory = f"a batch of {of['batch_size']} with {of['optimizer']} in {of['precision']}"
    print_rows([("", f"Multiply-adds of one example; memory to train {memory}. {memory_note(costs)}")])
    return SUCCESS


def _model_command(words: list[str]) -> int:
    options: ModelOptions = parse(ModelOptions, words, "tfopt models")
    config, shape, outputs = _model(options)
    start_tensorflow()
    from tfopt.profiling.cost import model_cost
    from tfopt.training import TrainingConfig, plan

    look_beside()  # the name may be code of the user's own
    decided = plan(TrainingConfig(precision=options.precision, jit_compile=False, strategy="none"))
    with decided.scope():
        model = config.build(shape, outputs)
    cost = model_cost(model, batch_size=options.batch_size, optimizer=options.optimizer, open_size=options.open_size)
    if options.json:
        print_json(cost.to_dict())
        return SUCCESS
    print_rows([(name, text) for name, text in {"model": cost.name, **cost.rows()}.items()])
    print_rows([("", memory_note(stored_costs()))])
    return SUCCESS


def _model(options: ModelOptions) -> tuple[ModelConfig, tuple[int | None, ...], int]:
    """Returns the model, the shape of an example and the number of outputs. The table has what the flags leave out."""
    from tfopt.models import BUILDERS
    from tfopt.models.table import PUBLISHED_MODELS, SMALL_MODELS
    from tfopt.recipe import ModelConfig

    name = options.name
    entry = PUBLISHED_MODELS.get(name)
    if entry is not None:
        known = next((builder for builder, function in BUILDERS.items() if function is entry.builder), name)
        config = ModelConfig(builder=known, arguments={**entry.arguments, **options.arguments})
    elif ":" in name or name in BUILDERS:
        config = ModelConfig(builder=name, arguments=options.arguments)
        entry = next((each for each in PUBLISHED_MODELS.values() if each.builder is BUILDERS.get(name)), None)
        entry = entry or SMALL_MODELS.get(name)
    else:
        raise unknown_name("model", name, {**PUBLISHED_MODELS, **BUILDERS})
    shape = options.input_shape or (entry.input_shape if entry else None)
    outputs = options.outputs or (entry.outputs if entry else None)
    if shape is None or outputs is None:
        raise ConfigError(
            "--input-shape and --outputs must be given for a model that is not in the table. "
            f"Received: {name}. Add for example --input-shape 224 224 3 --outputs 1000."
        )
    return config, tuple(shape), outputs


def stored_costs() -> dict[str, Any]:
    """Returns the stored costs: "models" and "recipes" by name, the settings "memory_of", and "memory_error".

    Example:
        >>> stored_costs()["models"]["lenet5"]["parameters"]
        61706
    """
    return dict(json.loads(files("tfopt.cli").joinpath("costs.json").read_text(encoding="utf-8")))


def cost_texts(costs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a head and one line for each cost, with the figures below each other.

    Example:
        >>> cost = {"task": "any", "parameters": 10, "multiply_adds": 8, "memory_bytes": 2000}
        >>> for line in cost_texts({"small": cost}):
        ...     print(line)
        task  parameters  multiply-adds  to train
        any           10              8   2.00 kB
    """
    rows = [
        (
            str(cost["task"]),
            short_count(cost["parameters"]),
            short_count(cost["multiply_adds"]),
            short_bytes(cost["memory_bytes"]),
        )
        for cost in costs.values()
    ]
    return str(Table(head=COLUMNS, rows=rows, figures=range(1, len(COLUMNS)))).splitlines()


def memory_note(costs: Mapping[str, Any]) -> str:
    """Returns how far the estimated memory is from measured peaks.

    Example:
        >>> memory_note({"memory_error": {"median": 0.08, "largest": 0.23}})
        'Training memory is estimated: against measured peaks the error is 8% (median), 23% (largest).'
    """
    error = costs["memory_error"]
    return (
        "Training memory is estimated: against measured peaks the error is "
        f"{error['median']:.0%} (median), {error['largest']:.0%} (largest)."
    )
