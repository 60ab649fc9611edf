"""The command `tfopt`.

Exit codes: 0 done, 1 checked and found wanting, 2 wrong use, 3 could not be done, 70 unexpected (a fault of tfopt),
130 interrupted, 141 nobody reads the output any more. An error is one line on standard error, behind `--json` also JSON
on standard output. TensorFlow takes seconds to import, so it is imported when the words of the command are found right.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from tfopt.errors import (
    ArtifactError,
    ConfigError,
    TfoptError,
    UnsupportedModelError,
    check_keras_backend,
    unknown_name,
)

DONE, WANTING, WRONG_USE, FAILED, UNEXPECTED, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 70, 130, 141
LONGEST_MESSAGE = 300
# What the machine lacks, where no error of tfopt says so.
OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)

HELP = """\
usage: tfopt COMMAND [OPTIONS]

  run NAME|FILE.toml   run a recipe: train, prune, quantize, export, verify, report
  recipes              list the recipes
  models               list the model builders and their arguments
  devices              show what this machine has
  export IN OUT        write a model (.keras or SavedModel) as a SavedModel: float32, int8, ...
  verify DIR           measure an exported artifact in a fresh process
  launch SCRIPT        run a script in several workers that train together

tfopt COMMAND --help tells more. --version prints the version. All commands but launch take
  --json        print what a machine can read, errors too
  --traceback   with an error, show where in the program it arose

Exit codes: 0 done, 1 checked and found wanting, 2 wrong use, 3 could not be done (the disk is full, the loss is not
finite), 70 unexpected: a fault of tfopt, 130 interrupted. launch ends with the exit code of the worker that failed.
"""

RUN_HELP = """\
usage: tfopt run NAME|FILE.toml [--quick] [--json] [OPTIONS]

  NAME          a recipe; `tfopt recipes` lists them
  FILE.toml     a recipe of your own
  --quick       cut it down, to see it run
  --json        print the report as JSON, progress on standard error
  --traceback   with an error, show where in the program it arose
  --no-pruning, --no-quantization   leave a stage out

tfopt run NAME --help lists every setting of the recipe with its value. A flag may be given by its last part alone,
for example --target-sparsity for --pruning.target-sparsity.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    Example:
        >>> main(["recipes"])
        digits_cnn     Two convolutions and three dense layers on 1,797 real handwritten digits
        digits_resnet  A residual network of 14 layers on 1,797 real handwritten digits
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        print(end="", flush=True)  # noqa: T201 - a broken pipe shows here, and not when the interpreter ends
    except BrokenPipeError:
        # `tfopt ... | head` has what it wants. The exit code is the one of a program that SIGPIPE ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _run(words: list[str]) -> int:
    show_traceback = "--traceback" in _own(words)
    if show_traceback:
        words = [word for word in words if word != "--traceback"]
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")  # noqa: T201
        return DONE if words else WRONG_USE
    if words[0] == "--version":
        print(f"tfopt {version('tfopt')}")  # noqa: T201
        return DONE
    try:
        if words[0] not in COMMANDS:
            raise unknown_name("command", words[0], COMMANDS)
        with _plain_warnings():
            return COMMANDS[words[0]](words[1:])
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever it was, it gets one line and a code
        return _report(error, as_json="--json" in _own(words), show_traceback=show_traceback)


def _own(words: Sequence[str]) -> Sequence[str]:
    """Returns the words that are tfopt's: behind launch stand those of a script."""
    command = next((word for word in words if not word.startswith("-")), None)
    return words[: words.index("launch")] if command == "launch" else words


def _report(error: BaseException, *, as_json: bool, show_traceback: bool) -> int:
    """Says what went wrong, and returns the exit code for it. Every error of every command ends here."""
    code = _exit_code(error)
    if isinstance(error, _CheckError):
        error = error.found
    kind = type(error).__name__
    message = " ".join(str(error).split()) or kind
    if as_json:
        _print_json({"error": {"type": kind, "message": message, "exit_code": code}})
    if show_traceback:
        traceback.print_exception(error)
    if code == INTERRUPTED:
        message = "interrupted"
    elif code == UNEXPECTED:
        shown = message if len(message) <= LONGEST_MESSAGE else f"{message[: LONGEST_MESSAGE - 1]}…"
        hint = "" if show_traceback else "; --traceback shows where it arose"
        message = f"unexpected {kind}: {shown} (this is a fault of tfopt{hint})"
    print(f"tfopt: {message}", file=sys.stderr)  # noqa: T201
    return code


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, _CheckError):
        return WANTING
    if isinstance(error, ConfigError | UnsupportedModelError | ArtifactError):
        return WRONG_USE  # the same words will never do
    lacking = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in OF_THE_MACHINE)
    return FAILED if lacking or isinstance(error, TfoptError) else UNEXPECTED


class _CheckError(Exception):
    """What was to be checked was found wanting so badly that there is no receipt."""

    def __init__(self, found: TfoptError) -> None:
        super().__init__(str(found))
        self.found = found


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to `main`, where rich would end the process with code 1."""
        raise BrokenPipeError


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Shows warnings as one line each, where Python adds the file and the line of source they came from."""

    def show(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
        print(f"tfopt: warning: {' '.join(str(message).split())}", file=sys.stderr)  # noqa: T201

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _start_tensorflow() -> None:
    """Imports TensorFlow, and has it look for GPUs, without the notices that it writes whatever its log level is.

    Where no GPU answers, `tfopt devices` says why.
    """
    check_keras_backend()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # what it does respect, from its first operation on
    with tempfile.TemporaryFile() as notices:
        stderr = os.dup(2)
        os.dup2(notices.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()
        except BaseException:
            notices.seek(0)
            os.write(stderr, notices.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def run_command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(RUN_HELP, end="")  # noqa: T201
        return DONE if words else WRONG_USE
    quick, as_json = "--quick" in words, "--json" in words
    name, *rest = [word for word in words if word not in ("--quick", "--json")] or [""]
    if not name or name.startswith("-"):
        raise ConfigError(f"The recipe must come first. Received: {' '.join(words)}. Write tfopt run NAME [OPTIONS].")
    from tfopt.recipe import Recipe
    from tfopt.recipes import find_recipe

    recipe = find_recipe(name)
    if quick:
        recipe = recipe.quick()
    recipe, rest = _switch_stages(recipe, rest)
    recipe = _parse(Recipe, rest, f"tfopt run {name}", recipe)
    _start_tensorflow()
    from tfopt.runner import run

    result = run(recipe, console=_Console(stderr=as_json))
    if as_json:
        print(result.report.to_json())  # noqa: T201
    return DONE if result.ok else WANTING


def recipes_command(words: list[str]) -> int:
    options = _parse(RecipesOptions, words, "tfopt recipes")
    from tfopt.recipes import RECIPES

    if options.json:
        return _print_json({name: recipe.to_dict() for name, recipe in RECIPES.items()})
    return _print_rows([(name, recipe.description) for name, recipe in RECIPES.items()])


def models_command(words: list[str]) -> int:
    options = _parse(ModelsOptions, words, "tfopt models")
    from tfopt.models import BUILDERS

    arguments = {name: _arguments(builder) for name, builder in BUILDERS.items()}
    if options.json:
        return _print_json(arguments)
    rows = []
    for name, builder in BUILDERS.items():
        rows.append((name, (builder.__doc__ or "").splitlines()[0]))
        rows.append(("", "  ".join(f"{argument}={value}" for argument, value in arguments[name].items())))
    return _print_rows(rows)


def devices_command(words: list[str]) -> int:
    options = _parse(DevicesOptions, words, "tfopt devices")
    _start_tensorflow()
    from tfopt.hardware import detect

    hardware = detect()
    print(hardware.to_json() if options.json else hardware)  # noqa: T201
    return DONE


def export_command(words: list[str]) -> int:
    from tfopt.exporting.options import ExportOptions

    options = _parse(ExportOptions, words, "tfopt export")
    _start_tensorflow()
    from tfopt.atomic.directories import MARK
    from tfopt.data.files import load_examples
    from tfopt.exporting import export

    data = None if options.calibration_data is None else load_examples(options.calibration_data, training=True)
    held_out = None if options.evaluation_data is None else load_examples(options.evaluation_data, training=False)
    baseline = options.baseline
    in_place = Path(options.source).resolve() == Path(options.out).resolve()
    if baseline is None and options.precision != "float32" and Path(options.source, MARK).is_file() and not in_place:
        baseline = options.source
    artifact = export(
        options.source, options.out, options, calibration_data=data, evaluation_data=held_out, baseline=baseline
    )
    if options.json:
        return _print_json(artifact.to_dict())
    if artifact.report is not None:
        print(artifact.report)  # noqa: T201
    print(f"exported {artifact.path}, {artifact.precision}, {artifact.bytes_on_disk:,} bytes")  # noqa: T201
    return DONE


def verify_command(words: list[str]) -> int:
    options = _parse(VerifyOptions, words, "tfopt verify")
    _start_tensorflow()
    from tfopt.data.files import load_examples
    from tfopt.exporting import verify
    from tfopt.exporting.manifest import check_is_artifact

    check_is_artifact(Path(options.artifact))  # not an artifact at all: wrong use
    data = None if options.data is None else load_examples(options.data, training=False)
    try:
        receipt = verify(
            options.artifact,
            baseline=options.baseline,
            data=data,
            metric=options.metric,
            batch_size=options.batch_size,
            signature=options.signature,
        )
    except ArtifactError as error:
        raise _CheckError(error) from error
    print(receipt.to_json() if options.json else receipt)  # noqa: T201
    return DONE if receipt.ok else WANTING


def launch_command(words: list[str]) -> int:
    # The script's own flags may look like ours, so ours end where it begins.
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "-m":
        place += 1 if "=" in words[place] or words[place] in ("-h", "--help") else 2
    options = _parse(LaunchOptions, words[:place], "tfopt launch")
    _start_tensorflow()
    from tfopt.training.distributed.launch import launch

    return launch(words[place:], options.workers, options.devices_per_worker)


@dataclass(frozen=True, kw_only=True)
class RecipesOptions:
    """Lists the recipes by name, each with what it trains; `tfopt run NAME` runs one."""

    json: bool = False
    """Print JSON: every recipe with all its settings."""


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Lists the model builders that a recipe can name, each with its arguments and their defaults."""

    json: bool = False
    """Print JSON: every builder with its arguments."""


@dataclass(frozen=True, kw_only=True)
class DevicesOptions:
    """Shows what this machine has: processor, instructions that matter, memory, GPUs; what is unknown with why."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Measures an exported artifact in a fresh process that imports only TensorFlow."""

    artifact: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """The artifact's directory."""
    baseline: str | None = None
    """The float artifact to compare with; by default the one that its manifest names."""
    data: str | None = None
    """Labelled examples for the accuracy: a .npz file with x and y, or the name of a data source (its test part)."""
    metric: str = "accuracy"
    """What the examples are scored by: accuracy, which works out what kind of classifier it is, or
    categorical_accuracy, binary_accuracy (of probabilities), binary_accuracy_from_logits."""
    batch_size: int = 1
    """Examples per timed call."""
    signature: str | None = None
    """Which signature to call, for example serving_float; by default serving_default where TensorFlow can run it."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Runs SCRIPT [ARGS...], a Python file or -m MODULE, in workers that train together. It stands after the options.

    The exit code is that of the worker that failed first, 143 after SIGTERM, 130 after Ctrl-C.
    """

    workers: int
    """How many processes."""
    devices_per_worker: int | None = None
    """GPUs of each, by default an equal share; without GPUs logical CPU devices, by default one."""


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": run_command,
    "recipes": recipes_command,
    "models": models_command,
    "devices": devices_command,
    "export": export_command,
    "verify": verify_command,
    "launch": launch_command,
}


def _parse(cls: type, words: Sequence[str], command: str, default: Any = None) -> Any:
    from tfopt.settings.flags import parse

    try:
        return parse(cls, words, command, default)
    except SystemExit:
        print(end="", flush=True)  # noqa: T201 - the help is printed; see main
        raise


def _switch_stages(recipe: Any, words: list[str]) -> tuple[Any, list[str]]:
    """Turns off the stages named by --no-STAGE, and on those that are off and have a flag of their own."""
    from tfopt.settings.flags import expand, stages

    for name, config in stages(type(recipe)).items():
        if f"--no-{name}" in words:
            recipe = replace(recipe, **{name: None})
            words = [word for word in words if word != f"--no-{name}"]
        elif getattr(recipe, name) is None and any(
            word.startswith(f"--{name}.") for word in expand(type(recipe), words)
        ):
            recipe = replace(recipe, **{name: config()})
    return recipe, words


def _arguments(builder: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(builder).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _print_json(values: Any) -> int:
    print(json.dumps(values, indent=2))  # noqa: T201
    return DONE


def _print_rows(rows: Sequence[tuple[str, str]]) -> int:
    width = max(len(name) for name, _ in rows)
    for name, words in rows:
        print(f"{name:{width}}  {words}".rstrip())  # noqa: T201
    return DONE


if __name__ == "__main__":
    sys.exit(main())
