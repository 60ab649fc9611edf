"""The command `tfopt compress`, which searches for smaller and faster artifacts of a model within a budget."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfopt.cli.exit_codes import CHECK_FAILED, SUCCESS
from tfopt.cli.preparation import look_beside, read_recipe, start_tensorflow
from tfopt.cli.printing import ProgressConsole, say
from tfopt.errors import ArtifactError, ConfigError
from tfopt.settings.flags import parse
from tfopt.terminal import working

if TYPE_CHECKING:
    from tfopt.compression import CompressionConfig
    from tfopt.data import Examples


def compress_command(words: list[str]) -> int:
    from tfopt.compression.config import CompressionConfig, CompressOptions

    options = parse(CompressOptions, words, "tfopt compress")
    is_file = options.source.endswith(".keras")
    if is_file == (options.data is None):
        wanted = "A .keras file needs the examples" if is_file else "A recipe has examples of its own"
        raise ConfigError(
            f"{wanted}. Received: {options.source} with data={options.data!r}. "
            f"{'Give them, for example --data digits.' if is_file else 'Leave --data out.'}"
        )
    config = CompressionConfig(**{each.name: getattr(options, each.name) for each in fields(CompressionConfig)})
    start_tensorflow()
    from tfopt.compression import compress

    if is_file:
        model, data = _loaded(options.source), _examples(options.data or "")
    else:
        model, data, config = _of_recipe(options.source, Path(options.out), config, as_json=options.json)
    with working(f"compressing {model.name}") as now:
        report = compress(model, data, config, directory=options.out, on_step=now)
    say(report.to_json() if options.json else report)
    return SUCCESS if report.within else CHECK_FAILED


def _loaded(file: str | Path) -> Any:
    import keras

    try:
        return keras.saving.load_model(file)
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(
            f"source must be a readable .keras file. Received: {file} ({error}). Save the model again."
        ) from error


def _examples(name: str) -> Examples:
    from tfopt.cli.example_data import find_example_data

    found = find_example_data(name).examples
    if found is None:
        raise ConfigError(
            f"data must be a source or a recipe, which has examples to train on and to test with. Received: "
            f"data={name!r}. In Python, tfopt.data.arrays makes them of arrays."
        )
    return found


def _of_recipe(
    name: str, out: Path, config: CompressionConfig, *, as_json: bool
) -> tuple[Any, Examples, CompressionConfig]:
    """Returns the trained model of a recipe, its examples, and the settings with the recipe's own as defaults."""
    from tfopt.compression.config import CompressionConfig
    from tfopt.compression.trial import MODEL
    from tfopt.distillation.config import TeacherConfig
    from tfopt.recipe.recipe import NOT_KL
    from tfopt.runner import run

    recipe = read_recipe(name)
    look_beside()
    data = recipe.data.load()
    score = recipe.find_task().score(data)
    loss: Any = NOT_KL.get(recipe.find_task().name, "kl")
    own: dict[str, Any] = {
        "metric": score if isinstance(score, str) else score.name,
        "shrink": recipe.shrink or config.shrink,
        "training": recipe.training,
        "augment": recipe.data.augment,
        "distillation": recipe.distillation or TeacherConfig(loss=loss),
    }
    defaults = CompressionConfig()
    changed = {key: value for key, value in own.items() if getattr(config, key) == getattr(defaults, key)}
    config = replace(config, **changed)  # before the training: it may be refused
    if (out / MODEL).is_file():  # of an earlier call
        return _loaded(out / MODEL), data, config
    off: dict[str, Any] = dict.fromkeys(("shrink", "pruning", "quantization", "distillation", "export_dir"))
    return run(replace(recipe, **off, forms={}), console=ProgressConsole(stderr=as_json)).model, data, config
