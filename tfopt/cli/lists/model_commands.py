"""The command `tfopt models`: the list of builders and published models, and the cost of one model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from annotated_types import Ge

from tfopt.cli.exit_codes import SUCCESS
from tfopt.cli.lists.stored import cost_texts, memory_note, stored_costs
from tfopt.cli.own_code import look_beside
from tfopt.cli.parsing import arguments_of, parse_words, start_tensorflow
from tfopt.cli.printing import print_json, print_rows, say
from tfopt.errors import ConfigError, unknown_name
from tfopt.settings.flags import Arguments
from tfopt.settings.validation import check_fields

if TYPE_CHECKING:
    from tfopt.recipe import ModelConfig

AtLeastOne = Annotated[int, Ge(1)]


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
    options = parse_words(ModelsOptions, words, "tfopt models")
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
    options: ModelOptions = parse_words(ModelOptions, words, "tfopt models")
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
    """Returns the model, the shape of an example and the number of outputs. The table gives what the flags leave out.

    Raises:
        ConfigError: The name or an argument is unknown, or a flag is missing.
    """
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
