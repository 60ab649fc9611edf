"""The commands for recipes and this machine: `tfopt run`, `tfopt init` and `tfopt devices`."""

from __future__ import annotations

import itertools
import os
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Ge

from tfopt.atomic.files import write_text
from tfopt.cli.exit_codes import CHECK_FAILED, SUCCESS, WRONG_USE
from tfopt.cli.preparation import look_beside, read_recipe, start_tensorflow
from tfopt.cli.printing import ProgressConsole, print_json, print_rows, say
from tfopt.errors import ConfigError, unknown_name
from tfopt.settings.flags import expand, parse, stages
from tfopt.settings.validation import check_fields

if TYPE_CHECKING:
    from tfopt.advisor import Advice, ScalingTable
    from tfopt.data import Examples
    from tfopt.recipe import Recipe

AtLeastOne = Annotated[int, Ge(1)]
# The name of each file in a project, and of its text in the folder new_project.
FILES = {"train.py": "train.py.txt", "recipe.toml": "recipe.toml"}
RUN_HELP = """\
usage: tfopt run NAME|FILE.toml... [--quick | --full | --form FORM] [--json] [OPTIONS]

  NAME          a recipe; `tfopt recipes` lists them
  FILE.toml     a recipe of your own
  NAME FILE...  the first recipe with the settings of the others laid over it
  --quick       a short trial run; without a form "quick" it takes few epochs on few examples
  --full        the form "full" of the recipe, on its usual data set
  --form FORM   another form of the recipe
  --json        print the report as JSON on standard output, and the progress on standard error
  --traceback   with an error, show where in the program it occurred
  --no-pruning, --no-quantization   leave a stage out

tfopt run NAME --help lists every setting of the recipe with its value. The last part of a flag is enough, for example
--target-sparsity for --pruning.target-sparsity.
"""


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Writes the start of a project of your own to DIR: train.py with a model and examples, and recipe.toml with the
    settings. Both run as they are.
    """

    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Directory of the project. It must not have these files yet."""
    json: bool = False
    """Print JSON: the paths of the files."""


@dataclass(frozen=True, kw_only=True)
class DevicesOptions:
    """Shows the processor, its instructions for fast arithmetic, the memory and the GPUs of this machine.

    An unknown value is shown with the reason. With --advise, estimates what a recipe would do on the GPUs that tfopt
    knows.
    """

    advise: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.toml")] = None
    """Recipe whose memory and step time are estimated on each known GPU, and measured on this machine."""
    form: str | None = None
    """Form of the recipe, for example full."""
    input_shape: tuple[int, ...] | None = None
    """Shape of one example, for a recipe of classification whose examples are not on this machine."""
    outputs: AtLeastOne | None = None
    """Number of classes, together with --input-shape."""
    measure: bool = True
    """Measure some steps on this machine, and state the error of the estimate for it."""
    gpus: tuple[AtLeastOne, ...] = ()
    """Numbers of GPUs, for example 1 8 64 512: the step of the recipe on so many, with its batch on each."""
    card: str | None = None
    """GPU for --gpus, as the advice names it. By default the best per watt."""
    gpus_per_host: AtLeastOne = 8
    """Number of GPUs of each host, for --gpus."""
    network: str = "infiniband_8x200"
    """Network between the hosts, for --gpus: ethernet_10, ethernet_25, ethernet_50, ethernet_100, infiniband_100,
    infiniband_200, infiniband_8x200 or infiniband_8x400 (Gbit/s of each host)."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.advise is None:
            others = (each for each in fields(self) if each.name not in ("advise", "json"))
            for each in others:
                if getattr(self, each.name) != each.default:
                    flag = f"--{each.name.replace('_', '-')}"
                    raise ConfigError(f"{flag} needs a recipe. Received: no --advise. Add --advise NAME.")


def run_command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        say(RUN_HELP, end="")
        return SUCCESS if words else WRONG_USE
    as_json = "--json" in words
    form, words = _asked_form([word for word in words if word != "--json"])
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    rest = words[len(names) :]
    if not names:
        raise ConfigError(f"The recipe must come first. Received: {' '.join(words)}. Write tfopt run NAME [OPTIONS].")
    from tfopt.recipe import Recipe

    recipe, rest = _switch_stages(read_recipe(*names, form=form), rest)
    recipe = parse(Recipe, rest, f"tfopt run {' '.join(names)}", recipe)
    start_tensorflow()
    look_beside()  # a flag may name code too
    from tfopt.runner import run

    result = run(recipe, console=ProgressConsole(stderr=as_json))
    if as_json:
        say(result.report.to_json())
    return SUCCESS if result.ok else CHECK_FAILED


def init_command(words: list[str]) -> int:
    options = parse(InitOptions, words, "tfopt init")
    script, recipe = write_project(options.directory)
    if options.json:
        print_json([str(script), str(recipe)])
        return SUCCESS
    print_rows([(str(script), "a model and examples"), (str(recipe), "the settings")])
    say(f"\nRun it: python {shlex.quote(str(script))}")
    say(f"or:     tfopt run {shlex.quote(str(recipe))} --allow-code")
    return SUCCESS


def write_project(directory: str | Path) -> list[Path]:
    """Writes a script, train.py, and its settings, recipe.toml, and returns their paths. Both run as they are.

    The directory is made if it is missing.

    Raises:
        ConfigError: The directory has a file of that name, or is no directory. Nothing is written then.
    Example:
        >>> import tempfile
        >>> [path.name for path in write_project(tempfile.mkdtemp())]
        ['train.py', 'recipe.toml']
    """
    if not str(directory).strip():
        raise ConfigError(f"directory must be a path. Received: {str(directory)!r}. '.' is the working directory.")
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"directory must be a directory. Received: {folder}, which is a file. Name another one.")
    found = [name for name in FILES if os.path.lexists(folder / name)]
    if found:
        raise ConfigError(
            f"The directory of a new project must not have its files yet. Received: {folder} with {', '.join(found)}. "
            "Name another directory."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        write_text(folder / name, Path(__file__).with_name("new_project").joinpath(text).read_text(encoding="utf-8"))
    return [folder / name for name in FILES]


def devices_command(words: list[str]) -> int:
    options = parse(DevicesOptions, words, "tfopt devices")
    start_tensorflow()
    if options.advise is not None:
        _print_advice(options)
        return SUCCESS
    from tfopt.hardware import detect

    hardware = detect()
    say(hardware.to_json() if options.json else hardware)
    return SUCCESS


def _asked_form(words: list[str]) -> tuple[str | None, list[str]]:
    """Returns the form that the words ask for, and the other words."""
    asked, others = [], []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if word in ("--quick", "--full"):
            asked.append(word.removeprefix("--"))
        elif flag == "--form":
            asked.append(value if equals else next(rest, ""))
        else:
            others.append(word)
    if len(asked) > 1:
        raise ConfigError(f"A run has one form at most. Received: {', '.join(asked)}. Give one of them.")
    return (asked[0] if asked else None), others


def _switch_stages(recipe: Any, words: list[str]) -> tuple[Any, list[str]]:
    """Turns off each stage named by --no-STAGE."""
    known = stages(type(recipe))
    off = {name for name in known if f"--no-{name}" in words}
    words = [word for word in words if word not in {f"--no-{name}" for name in off}]
    for name in off:
        if given := [word for word in expand(type(recipe), words) if word.startswith(f"--{name}.")]:
            raise ConfigError(f"A stage that is left out has no settings. Received: --no-{name} with {given[0]}.")
    return replace(recipe, **dict.fromkeys(off)), words


def _print_advice(options: DevicesOptions) -> None:
    """Prints the advice for the recipe that the options name."""
    from tfopt.advisor import LINKS, advise
    from tfopt.hardware.gpus import card_name

    if options.card is not None:
        options = replace(options, card=card_name(options.card))
    if options.network not in LINKS:
        raise unknown_name("network", options.network, LINKS)
    assert options.advise is not None
    recipe = read_recipe(options.advise, form=options.form)
    look_beside()
    advice = advise(recipe, examples=_examples(options, recipe), measure=options.measure)
    scaling = _scaling(options, advice) if options.gpus else None
    if options.json:
        print_json({**advice.to_dict(), "scaling": None if scaling is None else scaling.to_dict()})
        return
    say(advice)
    if scaling is not None:
        say(f"\n{options.card or advice.cards[0].name}\n{scaling}")


def _scaling(options: DevicesOptions, advice: Advice) -> ScalingTable:
    """Returns the steps on several numbers of one GPU: the one that the options name, or the best."""
    from tfopt.advisor import LINKS, Hosts, link_inside, scale
    from tfopt.hardware import GPU_CARDS

    name = options.card or advice.cards[0].name
    step_ms = next(card.step_ms for card in advice.cards if card.name == name)
    if step_ms is None:
        raise ConfigError(
            f"--gpus needs a GPU whose step time is known. Received: --card {name!r}, whose rate in the precision of "
            "the recipe is unknown. Name another card."
        )
    hosts = Hosts(
        inside=link_inside(GPU_CARDS[name]), between=LINKS[options.network], gpus_per_host=options.gpus_per_host
    )
    return scale(step_ms / 1e3, advice.examples, advice.gradient_bytes, hosts, options.gpus)


def _examples(options: DevicesOptions, recipe: Recipe) -> Examples | None:
    """Returns examples of zeros in the shape that the options give; None without a shape."""
    if options.input_shape is None and options.outputs is None:
        return None
    if options.input_shape is None or options.outputs is None or recipe.find_task().name != "classification":
        raise ConfigError(
            "--input-shape and --outputs must be given together, for a recipe of classification. Received: "
            f"--input-shape {options.input_shape}, --outputs {options.outputs}, task {recipe.find_task().name!r}. "
            "Give both, or leave both out if the examples are on this machine."
        )
    import tensorflow as tf

    from tfopt.data import Examples

    zeros = tf.data.Dataset.from_tensors((tf.zeros(options.input_shape), tf.constant(0))).repeat(8)
    return Examples(name="zeros", train=zeros, test=zeros, outputs=options.outputs)
