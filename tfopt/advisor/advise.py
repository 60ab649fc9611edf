"""Compares the GPUs of the table for a recipe: memory, step time, examples per second and per watt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf

from tfopt.advisor.device import CUDA_CORE_SHARE, MEMORY_SHARE, TENSOR_CORE_SHARE, Device, of_card, step_seconds
from tfopt.advisor.recipe_step import RecipeStep, ThisMachine, first_batch, plan_on, recipe_step, this_machine
from tfopt.data import Examples
from tfopt.hardware import GPU_CARDS, KERNEL_START_US, Gpu, GpuCard, Hardware, detect
from tfopt.recipe import Recipe
from tfopt.report import Record
from tfopt.report.formatting import short_bytes
from tfopt.report.sheet import Sheet, Shown, Table, lines
from tfopt.training import Plan

# Memory that TensorFlow, its CUDA context and the work space of kernels take besides the tensors of a step.
RESERVED_BYTES = 2**30
HEAD = ("GPU", "precision", "memory", "fits", "step ms", "examples/s", "per watt", "")


@dataclass(frozen=True, kw_only=True)
class CardEstimate(Record):
    """What a recipe would do on one GPU."""

    name: str  # the GPU, as in the table of tfopt.hardware
    precision: str  # name of the dtype policy that the plan chooses for it
    memory_bytes: int  # estimated memory of a step, with what TensorFlow itself takes
    fits: bool  # whether that is at most the memory of the GPU
    step_ms: float | None  # estimated time of a step; None if it is unknown
    examples_per_s: float | None  # examples in a second
    examples_per_joule: float | None  # examples in a second for each watt of the board
    is_best: bool = False  # whether it has the most examples per joule of the GPUs with enough memory
    unavailable: Mapping[str, str] = field(default_factory=dict)  # for each attribute above that is None, the reason


@dataclass(frozen=True, kw_only=True)
class Advice(Record, Shown):
    """The GPUs of the table for a recipe."""

    recipe: str  # name of the recipe
    examples: int  # number of examples of a step
    gradient_bytes: int  # bytes of the gradients, which several GPUs would sum
    cards: Sequence[CardEstimate]  # the GPUs, the most examples per joule first, those without enough memory last
    here: ThisMachine | None = None  # this machine; None if it was not measured
    assumptions: Sequence[str] = ()  # what the estimates assume

    @property
    def best(self) -> CardEstimate | None:
        """The GPU with the most examples per joule of those with enough memory."""
        return next((card for card in self.cards if card.is_best), None)

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the table as text, without its head."""
        return [
            (
                card.name,
                card.precision,
                short_bytes(card.memory_bytes),
                "yes" if card.fits else "no",
                _figure(card.step_ms, ".2f"),
                _figure(card.examples_per_s, ",.0f"),
                _figure(card.examples_per_joule, ".2f"),
                "best per watt" if card.is_best else "",
            )
            for card in self.cards
        ]

    def _sheet(self) -> Sheet:
        here = [] if self.here is None else [str(self.here)]
        return Sheet(
            title=f"{self.recipe}: steps of {self.examples} examples",
            tables=[Table(head=HEAD, rows=self.rows(), figures=range(2, 7)), lines([*here, *self.assumptions])],
        )


def advise(
    recipe: Recipe,
    *,
    examples: Examples | None = None,
    cards: Sequence[str] | None = None,
    hardware: Hardware | None = None,
    measure: bool = True,
) -> Advice:
    """Estimates the memory and the step time of a recipe on the GPUs of the table.

    The model is built and its training step traced, once for each precision. Nothing runs but the measured steps of
    this machine.

    Args:
        recipe: The recipe.
        examples: Examples that give the shapes of a batch; None loads those of the recipe.
        cards: Keys of tfopt.hardware.GPU_CARDS; None means all.
        hardware: This machine; None detects it.
        measure: Whether to measure some steps on this machine, and state the error of the estimate for it.
    Example:
        >>> from tfopt.data.config import DataConfig
        >>> from tfopt.recipe import ModelConfig
        >>> small = Recipe(
        ...     name="small",
        ...     model=ModelConfig(builder="mlp", arguments={"units": [64]}),
        ...     data=DataConfig(source="synthetic", arguments={"examples": 100, "input_shape": [8]}),
        ... )
        >>> advice = advise(small, cards=["A100", "L4"], measure=False)
        >>> advice.best.name, [card.fits for card in advice.cards]
        ('L4', [True, True])
    """
    examples = recipe.data.load() if examples is None else examples
    batch = first_batch(recipe, examples)
    traced: dict[tuple[str, bool], RecipeStep] = {}

    def step_under(decided: Plan) -> RecipeStep:
        key = decided.precision, decided.jit_compile
        if key not in traced:
            traced[key] = recipe_step(recipe, examples, batch, decided)
        return traced[key]

    estimates = []
    for name in cards or GPU_CARDS:
        decided = plan_on(recipe, machine_with(name, GPU_CARDS[name]))
        estimates.append(_estimate(of_card(name, GPU_CARDS[name]), decided.precision, step_under(decided)))
    estimates.sort(key=lambda card: (not card.fits, -(card.examples_per_joule or 0.0)))
    if estimates[0].fits and estimates[0].examples_per_joule:
        estimates[0] = replace(estimates[0], is_best=True)
    here = None
    if measure:
        decided = plan_on(recipe, hardware or detect())
        here = this_machine(recipe, examples, batch, decided, step_under(decided))
    step = next(iter(traced.values()))
    return Advice(
        recipe=recipe.name,
        examples=step.examples,
        gradient_bytes=step.gradient_bytes,
        cards=estimates,
        here=here,
        assumptions=_assumptions(),
    )


def machine_with(name: str, card: GpuCard) -> Hardware:
    """Returns a machine with one GPU of the table, for a plan."""
    gpu = Gpu(
        name=name,
        compute_capability=card.compute_capability,
        memory_bytes=card.memory_bytes,
        peak_tflops=card.peak_tflops,
    )
    return Hardware(logical_cores=1, memory_bytes=0, gpus=(gpu,), tensorflow_version=tf.__version__)


def _estimate(device: Device, precision: str, step: RecipeStep) -> CardEstimate:
    seconds = step_seconds(step.kernels, device)
    rate = None if seconds is None else step.examples / (seconds * step.accumulate)
    needed = step.memory_bytes + RESERVED_BYTES
    reason = f"{device.name} has no known rate in {precision}"
    unknown = ("step_ms", "examples_per_s", "examples_per_joule")
    return CardEstimate(
        name=device.name,
        precision=precision,
        memory_bytes=needed,
        fits=needed <= device.memory_bytes,
        step_ms=None if seconds is None else 1e3 * seconds * step.accumulate,
        examples_per_s=rate,
        examples_per_joule=None if rate is None or device.watts is None else rate / device.watts,
        unavailable=dict.fromkeys(unknown, reason) if rate is None else {},
    )


def _assumptions() -> list[str]:
    shares = f"{TENSOR_CORE_SHARE:.0%} of the dense peak of its tensor cores, {CUDA_CORE_SHARE:.0%} of its CUDA cores"
    return [
        f"Assumed of a GPU: {shares}, {MEMORY_SHARE:.0%} of its memory bandwidth, "
        f"{KERNEL_START_US:g} us for the start of a kernel. The input keeps up.",
        "Assumed of a step: a kernel reads its inputs and writes its outputs once; XLA fuses elementwise operations.",
        f"Memory: the tensors of a step, and {RESERVED_BYTES / 2**30:g} GiB for TensorFlow. Watts: those of the board.",
    ]


def _figure(value: float | None, form: str) -> str:
    return "unavailable" if value is None else format(value, form)
