"""The settings that `tfopt.tune` searches: only those that this machine and this training offer a choice of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tfopt.data import PREFETCH
from tfopt.hardware import Hardware
from tfopt.report import Record
from tfopt.training import TrainingConfig
from tfopt.training.choices import STEPS_PER_CALL, choose_precision
from tfopt.tuning.advice import advise
from tfopt.tuning.facts import Facts
from tfopt.tuning.trial import STEP, TFOPT

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
MANY_STEPS, MANY_BATCHES = 50, 8  # of an execution, and in advance
LEAST_PART = 8  # examples of a micro-batch
# Where a setting stands in a recipe. Those that promise most come first, since time may end the search.
PATHS = {
    STEP: (STEP,),
    "precision": ("training", "precision"),
    "jit_compile": ("training", "jit_compile"),
    "strategy": ("training", "strategy"),
    "augment": ("data", "augment", "where"),
    "cache": ("data", "cache"),
    "steps_per_execution": ("training", "steps_per_execution"),
    "accumulate": ("training", "accumulate"),
    "global_batch_size": ("training", "global_batch_size"),
    "remat": ("training", "remat"),
    "communication": ("training", "communication"),
    "prefetch": ("training", "prefetch"),
}
OF_TFOPT = ("precision", "jit_compile", "steps_per_execution", "accumulate", "strategy", "remat", "communication")
THREADS = "the pipeline decodes on all logical cores"
ALLOW = "it changes the training; allow it with other_batches"


@dataclass(frozen=True, kw_only=True)
class Space(Record):
    """The values of each setting, that of the start first, and why other settings are left out."""

    choices: Mapping[str, tuple[Any, ...]]
    left_out: Mapping[str, str]

    def changes(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns in which settings a trial differs from the start, with what they need.

        Example:
            >>> choices = {"step": ("keras", "tfopt"), "jit_compile": (False, True), "prefetch": (2, 8)}
            >>> space = Space(choices=choices, left_out={})
            >>> space.changes({"step": "keras", "jit_compile": True, "prefetch": 2})
            {'step': 'tfopt', 'jit_compile': True}
        """
        found = {
            name: settings[name]
            for name, values in self.choices.items()
            if name in settings and settings[name] != values[0]
        }
        if found.get("strategy") == "none":
            found.pop("communication", None)
        if STEP in self.choices and not found.keys().isdisjoint(OF_TFOPT):
            found = {STEP: TFOPT, **found}
        return found

    def singles(self) -> list[dict[str, Any]]:
        """Returns the changes of one setting each, without doubles."""
        every = [self.changes({name: value}) for name, values in self.choices.items() for value in values[1:]]
        return [each for place, each in enumerate(every) if each and each not in every[:place]]

    def full(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the value of every setting of a trial."""
        return {name: changes.get(name, values[0]) for name, values in self.choices.items()}


def space_of(facts: Facts, machine: Hardware, *, of_model: bool = False, other_batches: bool = False) -> Space:
    """Returns the settings to search.

    Example:
        >>> machine = Hardware(logical_cores=2, memory_bytes=2**33, tensorflow_version="2.21.0")
        >>> values = {"precision": "float32", "jit_compile": False, "steps_per_execution": 10, "prefetch": 2}
        >>> found = space_of(Facts(values=values, steps=30), machine)
        >>> dict(found.choices)
        {'jit_compile': (False, True), 'steps_per_execution': (10, 1), 'prefetch': (2, 8)}
        >>> found.left_out["precision"][:26]
        'mixed_bfloat16: no GPU; wi'
    """
    values, left_out = facts.values, dict(facts.fixed)
    found: dict[str, tuple[Any, ...]] = {}

    def add(name: str, others: Iterable[Any], otherwise: str) -> None:
        if name in left_out or name not in values:
            return
        choices = tuple(dict.fromkeys([values[name], *others]))
        if len(choices) > 1:
            found[name] = choices
        else:
            left_out[name] = otherwise

    many = len(machine.gpus) > 1
    reasons = {each: choose_precision(each, machine)[1].removeprefix("as asked; ") for each in PRECISIONS}
    drawbacks = [f"{each}: {reason}" for each, reason in reasons.items() if reason != "as asked"]
    add(STEP, (TFOPT,), "")
    if of_model:
        left_out["precision"] = "the layers of a built model keep their dtypes; build it in the scope of a plan"
    add("precision", [each for each in PRECISIONS if reasons[each] == "as asked"], "; ".join(drawbacks))
    add("jit_compile", (False, True), "")
    add("strategy", ("none", "mirrored") if many else (), "there is one device")
    add("augment", ("host", "device"), "")
    add("cache", ("memory", "off"), "")
    counts = [1, STEPS_PER_CALL, MANY_STEPS] if values.get("steps_per_execution") != "auto" else [MANY_STEPS]
    fitting_counts = [each for each in counts if facts.steps is None or each <= facts.steps]
    add("steps_per_execution", fitting_counts, f"an epoch has {facts.steps} steps, too few for {max(counts)} in a call")
    batch, now = values.get("global_batch_size", 0), values.get("accumulate", 1)
    parts = [now * factor for factor in (2, 4)]
    each_part = batch // max(facts.replicas, 1)
    fitting = [each for each in parts if each_part % each == 0 and each_part // each >= LEAST_PART]
    add("accumulate", fitting, f"a batch of {each_part} examples is small")
    if not other_batches:
        left_out.setdefault("global_batch_size", ALLOW)
        left_out.setdefault("remat", f"it makes room for larger batches, and takes time; {ALLOW}")
    larger = [batch * factor for factor in (2, 4) if facts.examples is None or batch * factor <= facts.examples]
    add("global_batch_size", larger, f"there are {facts.examples} examples")
    add("remat", (None, "activations"), "")
    add("communication", ("auto", "nccl", "hierarchical_copy") if many else (), "there is one device")
    add("prefetch", (PREFETCH, MANY_BATCHES), "")
    left_out.setdefault("threads", THREADS)
    if of_model:
        left_out |= dict.fromkeys(("cache", "augment"), "the examples of a model are given as they are")
    return Space(choices={name: found[name] for name in PATHS if name in found}, left_out=left_out)


def tables_of(changes: Mapping[str, Any], training: TrainingConfig, facts: Facts) -> dict[str, Any]:
    """Returns changes as the nested tables of a recipe. Another batch brings its learning rate along.

    Example:
        >>> training = TrainingConfig(global_batch_size=32)
        >>> tables_of({"augment": "device", "global_batch_size": 64}, training, Facts(values={}, examples=6400))
        {'data': {'augment': {'where': 'device'}}, 'training': {'global_batch_size': 64, 'base_batch_size': 32, \
'warmup_epochs': 3.0}}
    """
    tables: dict[str, Any] = {}
    if STEP in changes:  # what Keras' own step has had, and a plan would choose
        tables["training"] = {"precision": training.precision, "global_batch_size": training.global_batch_size}
    for name, value in changes.items():
        *path, last = PATHS[name]
        table = tables
        for each in path:
            table = table.setdefault(each, {})
        table[last] = value
    size = changes.get("global_batch_size")
    if size is not None:
        parts = changes.get("accumulate", training.accumulate)
        largest = -(-size // facts.replicas // parts)
        advice = advise(
            training, largest=largest, replicas=facts.replicas, examples=facts.examples, global_batch_size=size
        )
        tables["training"] |= advice.settings
    return tables
