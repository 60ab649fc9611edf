"""The command `tfopt compress`, which searches for smaller and faster artifacts of a model within a budget."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfopt.cli.exit_codes import CHECK_FAILED, SUCCESS
from tfopt.cli.preparation import look_beside, read_recipe, start_tensorflow
from tfopt.cli.printing import ProgressConsole, say
from tfopt.errors import ConfigError
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
    from tfopt.compression.directory import source_of
    from tfopt.compression.search import compress_from
    from tfopt.training.memory import set_memory_growth
    from tfopt.training.xla import leave_convolutions_unfused

    set_memory_growth()  # the processes of the trials share the GPUs with this one
    leave_convolutions_unfused()  # here, because the examples start TensorFlow's devices
    if is_file:
        model, data = _loaded(options.source), _examples(options.data or "")
    else:
        model, data, config = _of_recipe(options.source, Path(options.out), config, as_json=options.json)
    try:
        with working(f"compressing {model.name}") as now:
            report = compress_from(options.source, model, data, config, options.out, now)
    except KeyboardInterrupt:
        if source_of(Path(options.out)) is not None:
            say(f"what was measured is kept in {options.out}; the same command goes on", error=True)
        raise
    say(report.to_json() if options.json else report)
    return SUCCESS if report.within else CHECK_FAILED


def _loaded(file: str | Path) -> Any:
    from tfopt.graph.keras_file import load_keras

    remedy = (
        "The trials of a compression load it in processes of their own: write such a layer as a class of a module, "
        "with keras.saving.register_keras_serializable."
    )
    return load_keras(Path(file), trusted=False, compiled=True, remedy=remedy)


def _examples(name: str) -> Examples:
    from tfopt.cli.example_data import ARRAYS, find_example_data

    if Path(name).suffix in ARRAYS:
        raise ConfigError(
            f"data must be a source or a recipe, which has examples to train on and to test with. Received: "
            f"data={name!r}. In Python, tfopt.data.arrays makes them of arrays."
        )
    found = find_example_data(name, files=False).examples
    assert found is not None  # it is of no file
    return found


def _of_recipe(
    name: str, out: Path, config: CompressionConfig, *, as_json: bool
) -> tuple[Any, Examples, CompressionConfig]:
    """Returns the trained model of a recipe, its examples, and the settings with the recipe's own as defaults."""
    from tfopt.compression.config import CompressionConfig
    from tfopt.compression.directory import source_of
    from tfopt.compression.trial import MODEL
    from tfopt.distillation.config import TeacherConfig
    from tfopt.recipe.recipe import NOT_KL
    from tfopt.runner import run
    from tfopt.runner.model_check import are_shares
    from tfopt.runner.teacher import teacher_recipe
    from tfopt.tasks.label_smoothing import smoothed

    earlier = source_of(out)
    if earlier is not None and earlier != name:
        raise ConfigError(
            f"out must be new, or of the same recipe. Received: {str(out)!r}, which has a compression of another model"
            f"{earlier and f', of {earlier}'}. Choose another directory, or remove it."
        )
    recipe = read_recipe(name)
    look_beside()
    data = recipe.data.load()
    task, augment = recipe.find_task(), recipe.data.augment
    score = task.score(data)
    loss: Any = NOT_KL.get(task.name, "kl")
    taught = None if teacher_recipe(recipe) else recipe.distillation  # the run alone trains a teacher
    own: dict[str, Any] = {
        "metric": score if isinstance(score, str) else score.name,
        "shrink": config.shrink if recipe.shrink is None else replace(recipe.shrink.with_ratios({}), rounds=1),
        "training": recipe.training,
        "augment": replace(augment, mixup=0.0, cutmix=0.0),
        "distillation": TeacherConfig(loss=loss)
        if taught is None
        else replace(taught, teacher_form=None, teacher_cache=None),
    }
    defaults = CompressionConfig()
    changed = {key: value for key, value in own.items() if getattr(config, key) == getattr(defaults, key)}
    config = replace(config, **changed)  # before the training: it may be refused
    if augment.mixes_examples and "augment" in changed:
        say("the smaller models are trained without mixup and cutmix", error=True)
    if recipe.shrink is not None and recipe.shrink.rounds > 1 and "shrink" in changed:
        say("the smaller models lose their channels at once, not in rounds", error=True)
    if earlier is not None:
        return _loaded(out / MODEL), data, config
    off: dict[str, Any] = dict.fromkeys(
        ("shrink", "pruning", "clustering", "quantization", "distillation", "export_dir")
    )
    model = run(replace(recipe, **off, forms={}), console=ProgressConsole(stderr=as_json)).model
    if augment.mixes_examples and not are_shares(data, task):  # it was trained with the loss of shares
        model.compile(loss=smoothed(task.loss(data), recipe.training.label_smoothing))
    return model, data, config
