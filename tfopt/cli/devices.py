"""The command `tfopt devices`: this machine, estimates for other GPUs, and what is known of a step on a GPU."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from annotated_types import Ge

from tfopt.cli.exit_codes import CHECK_FAILED, SUCCESS
from tfopt.cli.preparation import look_beside, read_recipe, start_tensorflow
from tfopt.cli.printing import print_json, say
from tfopt.errors import ConfigError, unknown_name
from tfopt.settings.flags import parse
from tfopt.settings.validation import check_fields

if TYPE_CHECKING:
    from tfopt.advisor import Advice, ScalingTable
    from tfopt.advisor.shapes import Shape
    from tfopt.data import Examples
    from tfopt.recipe import Recipe
    from tfopt.report import Audit

AtLeastOne = Annotated[int, Ge(1)]
AS_IT_STANDS = "none"
OF_AUDIT = ("form", "input_shape", "outputs", "card", "trusted")
OF_ADVICE = ("form", "input_shape", "outputs", "measure", "gpus", "card", "gpus_per_host", "network")


@dataclass(frozen=True, kw_only=True)
class DevicesOptions:
    """Shows the processor, its instructions for fast arithmetic, the memory and the GPUs of this machine.

    An unknown value is shown with the reason. With --advise, estimates what a recipe would do on the GPUs that tfopt
    knows. With --audit, says what is known of a training step or an artifact on a GPU, without one. The words of a
    script follow after --.
    """

    advise: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.toml")] = None
    """Recipe whose memory and step time are estimated on each known GPU."""
    audit: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.toml|SCRIPT.py|DIR")] = None
    """Recipe, script or artifact whose graph is traced from shapes: operations without a kernel for GPUs, XLA, tensor
    cores, memory, machine code. The exit code is 1 if something is wanting."""
    form: str = "full"
    """Form of the recipe. none is the recipe as it stands, as is a recipe without the form full."""
    input_shape: tuple[int, ...] | None = None
    """Shape of one example, for a recipe whose examples are not known."""
    outputs: AtLeastOne | None = None
    """Number of classes, tokens or values, together with --input-shape."""
    measure: bool = False
    """Measure some steps of the recipe on this machine, and state the error of the estimate for it."""
    gpus: tuple[AtLeastOne, ...] = ()
    """Numbers of GPUs, for example 1 8 64 512: the step of the recipe on so many, with its batch on each."""
    card: str | None = None
    """GPU for --gpus and --audit, as NVML or the advice names it, or in short, such as H100 or A100-80GB. By default
    the best per watt; for --audit the GPU of this machine, or the A100 with 80 GB."""
    gpus_per_host: AtLeastOne = 8
    """Number of GPUs of each host, for --gpus."""
    network: str = "infiniband_8x200"
    """Network between the hosts, for --gpus: ethernet_10, ethernet_25, ethernet_50, ethernet_100, infiniband_100,
    infiniband_200, infiniband_8x200 or infiniband_8x400 (Gbit/s of each host)."""
    trusted: bool = False
    """For --audit, load an artifact that may touch files or the network. Without it, such an artifact is refused."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.advise is not None and self.audit is not None:
            raise ConfigError("--advise and --audit must not be given together. Received: both. Give one of them.")
        allowed = OF_ADVICE if self.advise is not None else OF_AUDIT if self.audit is not None else ()
        needs = "--audit" if self.advise is not None else "--advise"
        for each in fields(self):
            if each.name not in ("advise", "audit", "json", *allowed) and getattr(self, each.name) != each.default:
                flag = f"--{each.name.replace('_', '-')}"
                raise ConfigError(f"{flag} needs a recipe. Received: no {needs}. Add {needs} NAME.")


def devices_command(words: list[str]) -> int:
    place = words.index("--") if "--" in words else len(words)
    options: DevicesOptions = parse(DevicesOptions, words[:place], "tfopt devices")
    if options.audit is not None:
        return _print_audit(options, options.audit, words[place + 1 :])
    if place < len(words):
        raise ConfigError("Words after -- are for the script of --audit. Received: no --audit. Leave them out.")
    if options.advise is not None and options.advise.endswith(".py"):
        raise ConfigError(
            f"--advise takes a recipe. Received: {options.advise}, a script. Audit it with --audit {options.advise}."
        )
    start_tensorflow()
    if options.advise is not None:
        _print_advice(options, options.advise)
        return SUCCESS
    from tfopt.hardware import detect

    hardware = detect()
    say(hardware.to_json() if options.json else hardware)
    return SUCCESS


def _print_audit(options: DevicesOptions, target: str, script_words: list[str]) -> int:
    """Prints what is known of a recipe, a script or an artifact, and returns the exit code."""
    if target.endswith(".py"):
        found = _audited_script(options, target, script_words)
    else:
        if script_words:
            raise ConfigError(f"Words after -- are for a script. Received: --audit {target}. Leave them out.")
        start_tensorflow()
        from tfopt.advisor import audit
        from tfopt.recipes import RECIPES

        is_recipe = target in RECIPES or not Path(target).exists() or target.endswith(".toml")
        if is_recipe:
            look_beside()
        found = audit(
            _recipe(options, target) if is_recipe else target,
            card=options.card,
            form=None,
            input_shape=options.input_shape,
            outputs=options.outputs,
            trusted=options.trusted,
        )
    say(found.to_json() if options.json else found)
    return SUCCESS if found.ok else CHECK_FAILED


def _audited_script(options: DevicesOptions, path: str, words: list[str]) -> Audit:
    # TensorFlow is not started, but told to be quiet: the script may set other variables before it imports it.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfopt.cli.audit_script import audit_script

    # The standard output is for the JSON alone.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        return audit_script(path, words, options.card)


def _recipe(options: DevicesOptions, name: str) -> Recipe:
    """Returns a recipe in the form that the options ask for, which is as it stands where there is no form "full"."""
    recipe = read_recipe(name)
    has_no_full = options.form == "full" and "full" not in recipe.forms
    return recipe if has_no_full or options.form == AS_IT_STANDS else read_recipe(name, form=options.form)


def _print_advice(options: DevicesOptions, name: str) -> None:
    """Prints the advice for a recipe."""
    from tfopt.advisor import LINKS, advise
    from tfopt.advisor.shapes import known_shape, zeros_like
    from tfopt.hardware.gpus import card_name

    if options.card is not None:
        options = replace(options, card=card_name(options.card))
    if options.network not in LINKS:
        raise unknown_name("network", options.network, LINKS)
    look_beside()
    recipe = _recipe(options, name)
    shape = _shape(options)
    of_shape = shape is not None or (not options.measure and known_shape(recipe.data) is not None)
    examples = zeros_like(recipe, shape) if of_shape else _loaded(recipe)
    advice = advise(recipe, examples=examples, measure=options.measure)
    scaling = _scaling(options, advice) if options.gpus else None
    if options.json:
        print_json({**advice.to_dict(), "scaling": None if scaling is None else scaling.to_dict()})
        return
    say(advice)
    if scaling is not None:
        say(f"\n{options.card or advice.cards[0].name}\n{scaling}")


def _loaded(recipe: Recipe) -> Examples:
    try:
        return recipe.data.load()
    except ConfigError as error:
        raise ConfigError(
            f"The examples of a recipe, or their shape, must be known. Received: {recipe.name!r}, whose source "
            f"{recipe.data.source!r} cannot be read ({error}). Give --input-shape and --outputs, for example "
            "--input-shape 32 --outputs 10."
        ) from error


def _shape(options: DevicesOptions) -> Shape | None:
    """Returns the shape of an example that the options give; None without one."""
    from tfopt.advisor.shapes import Shape

    if options.input_shape is None and options.outputs is None:
        return None
    if options.input_shape is None or options.outputs is None:
        raise ConfigError(
            "--input-shape and --outputs must be given together. Received: "
            f"--input-shape {options.input_shape}, --outputs {options.outputs}. "
            "Give both, or leave both out if the examples are known."
        )
    return Shape(options.input_shape, options.outputs)


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
