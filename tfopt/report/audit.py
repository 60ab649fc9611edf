"""What is known of a training step, or of an artifact, on a GPU that is not at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic

from tfopt.report.formatting import memory_size
from tfopt.report.record import Record
from tfopt.report.sheet import PROBLEM, Sheet, Shown, Table, pairs

NAMED = 4  # layers of an operation that are shown


@dataclass(frozen=True, kw_only=True)
class OpWithoutKernel(Record):
    """A kind of operation that a device has no kernel for."""

    kind: str  # kind of the operation, for example "Unique"
    dtypes: tuple[str, ...] = ()  # the types of its attributes
    count: int  # number of operations of this kind and these types in the graph
    places: tuple[str, ...]  # the layers with these operations, or their names
    harmless: str = ""  # why it costs a step next to nothing on the host; empty if it costs something

    def __str__(self) -> str:
        types = f" of {', '.join(self.dtypes)}" if self.dtypes else ""
        more = f" and {len(self.places) - NAMED} more" if len(self.places) > NAMED else ""
        return f"{self.count} {self.kind}{types}, in {', '.join(self.places[:NAMED])}{more}"


@dataclass(frozen=True, kw_only=True)
class Audit(Record, Shown):
    """What is known of a graph on a GPU without running it.

    Attributes:
        name: Name of the recipe, the model, the script or the artifact.
        subject: What was looked at: "training step" or "serving function".
        batch_size: Number of examples of the step on the GPU at a time.
        card: The GPU, as in tfopt.hardware.GPU_CARDS.
        precision: Name of the dtype policy; of an artifact, what its manifest says.
        jit_compile: Whether XLA is to compile the step.
        operations: Number of operations that the graph executes.
        on_host: Operations without a kernel for GPUs: in each step they are computed on the host, with copies to it and
            back.
        not_in_xla: Operations that XLA has no kernel for on a GPU.
        lowers: Whether XLA lowers the step for a GPU; None if that was not tried.
        memory_bytes: Estimated memory of the step, with what TensorFlow itself takes.
        card_memory_bytes: Memory of the GPU.
        tensor_core_share: Share of the multiply-adds that tensor cores compute, by their types.
        not_in_tensor_cores: Share of the multiply-adds by the reason why tensor cores do not compute them.
        misaligned: Widths inside the model that do not fit the tiles of the tensor cores.
        machine_code: Whether this TensorFlow holds code for the GPU: "native", "ptx" (the driver compiles it at the
            first start) or "none".
        machine_code_detail: Why, in words.
        unavailable: For each attribute above that is None, the reason; for `lowers` also the error of XLA.
    Example:
        >>> found = OpWithoutKernel(kind="Unique", dtypes=("int64",), count=1, places=("table",))
        >>> audit = Audit(
        ...     name="mine", subject="training step", batch_size=32, card="A100", precision="mixed_bfloat16",
        ...     jit_compile=False, operations=20, on_host=(found,), card_memory_bytes=40 * 2**30, machine_code="native",
        ...     machine_code_detail="machine code for 8.0",
        ... )
        >>> audit.problems
        ['on the host: 1 Unique of int64, in table']
        >>> Audit.from_dict(audit.to_dict()) == audit
        True
    """

    name: str
    subject: str
    batch_size: int | None
    card: str
    precision: str
    jit_compile: bool
    operations: int
    on_host: tuple[OpWithoutKernel, ...] = ()
    not_in_xla: tuple[OpWithoutKernel, ...] = ()
    lowers: bool | None = None
    memory_bytes: int | None = None
    card_memory_bytes: int
    tensor_core_share: float | None = None
    not_in_tensor_cores: Mapping[str, float] = field(default_factory=dict)
    misaligned: tuple[str, ...] = ()
    machine_code: str | None = None
    machine_code_detail: str = ""
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        """Whether the step fits into the memory of the GPU; None if its memory is unknown."""
        return None if self.memory_bytes is None else self.memory_bytes <= self.card_memory_bytes

    @property
    def problems(self) -> list[str]:
        """What is wanting, in words; empty if nothing is."""
        found = [f"on the host: {each}" for each in self.on_host if not each.harmless]
        if self.lowers is False and self.jit_compile:
            found.append(self.unavailable.get("lowers", "XLA does not lower the step for a GPU"))
        if self.fits is False and self.memory_bytes is not None:
            needed, there = memory_size(self.memory_bytes), memory_size(self.card_memory_bytes)
            found.append(f"memory: {needed} are needed, {self.card} has {there}")
        if self.machine_code == "none":
            found.append(f"machine code: {self.machine_code_detail}")
        return found

    @property
    def _is_off(self) -> bool:
        """Whether XLA is not to compile the step; an artifact has no such setting."""
        return self.subject == "training step" and not self.jit_compile

    @property
    def ok(self) -> bool:
        """Whether nothing is wanting."""
        return not self.problems

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Audit:
        """Returns the record of the values that `to_dict` gave.

        Raises:
            pydantic.ValidationError: A value is missing or has another type.
        """
        return pydantic.TypeAdapter(cls).validate_python(dict(values))

    def rows(self) -> dict[str, str]:
        """Returns what was found, as text."""
        part = self.tensor_core_share
        share = "unavailable" if part is None else f"{part:.1%} of the multiply-adds"
        slow = "".join(f", {part:.1%} {why} not" for why, part in self.not_in_tensor_cores.items())
        memory = "unavailable" if self.memory_bytes is None else memory_size(self.memory_bytes)
        not_known = "off" if self._is_off else "unavailable"
        rows = {
            "precision": f"{self.precision}, XLA {'on' if self.jit_compile else 'off'}",
            "operations": f"{self.operations:,}, of which {sum(each.count for each in self.on_host):,} on the host",
            "xla": "lowers it for a GPU" if self.lowers else "refuses it" if self.lowers is False else not_known,
            "tensor cores": f"{share}{slow}",
            "memory": f"{memory} of {memory_size(self.card_memory_bytes)}",
            "machine code": f"{self.machine_code or 'unavailable'}: {self.machine_code_detail}",
        }
        keys = {"xla": "lowers", "tensor cores": "tensor_core_share", "memory": "memory_bytes"}
        reasons = {row: self.unavailable[key] for row, key in keys.items() if key in self.unavailable}
        return {row: f"{text} ({reasons[row]})" if row in reasons else text for row, text in rows.items()}

    def _sheet(self) -> Sheet:
        of = "" if self.batch_size is None else f" of {self.batch_size} examples"
        notes = [("note", f"no multiple of a tile of tensor cores: {each}") for each in self.misaligned]
        notes += [("note", f"on the host: {each}: {each.harmless}") for each in self.on_host if each.harmless]
        if not (self.lowers or self._is_off):
            notes += [("note", f"XLA has no kernel for {each}") for each in self.not_in_xla]
        return Sheet(
            title=f"{self.name}: {self.subject}{of} on {self.card}",
            tables=[
                pairs(self.rows()),
                Table(rows=[*((PROBLEM, each) for each in self.problems), *notes], folded=""),
            ],
        )
