"""The record of `tfopt.inspect`, and how it shows: in the terminal with at most 100 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tfopt.exporting.inspection.contents import Operator, Weight
from tfopt.exporting.manifest import TensorRecord
from tfopt.exporting.serving_settings import in_words
from tfopt.report import Record, TunedServing
from tfopt.report.formatting import short_bytes, short_count, shortened
from tfopt.report.sheet import PROBLEM, Sheet, Shown, Table

WIDTH = 98  # a sheet indents its lines by two
LONGEST_NAME = 40
LARGEST = 5  # layers in a table, and names in a row
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class NodeChoice(Record):
    """A node that the export had a choice for.

    Attributes:
        name: The name of the node in the source model.
        kind: The kind of node, for example "Conv2D".
        quantized: Whether it is stored or computed in the artifact's precision. If not, it is in float.
        reason: How it is quantized, or why it is not.
    """

    name: str
    kind: str
    quantized: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Inspection(Record, Shown):
    """What a model file holds.

    Attributes:
        path: The path that was given.
        format: "saved_model", "onnx", "litert" or "openvino".
        precision: The precision of an artifact of tfopt, for example "int8". None for other files.
        inputs: The inputs by name. An open size is None.
        outputs: The outputs by name.
        operators: The nodes that compute, with the type that each computes in.
        weights: The tensors with the values of the model.
        choices: Which nodes of an artifact are in its precision and which are in float, with the reasons, as the
            export recorded them.
        sizes: The shapes of the inputs at which multiply-adds are counted.
        bytes_on_disk: The bytes of all files.
        versions: What wrote the files, and the versions of their format.
        requires: What an artifact of tfopt needs to run. None for other files.
        tuned: What a server should set, as `tfopt.tune_serving` has written it into the manifest of an artifact.
        as_written: Whether the files are as the export wrote them. None where there is no manifest to tell.
        outside: The ops that touch files, the network or the process, or need code that a runtime does not have.
        open_loops: The loops whose rounds are known only in the run: one round of each counts.
        notes: What else the counts leave out.
        problems: What is wrong with the files.
    """

    path: str
    format: str
    precision: str | None = None
    inputs: Mapping[str, TensorRecord]
    outputs: Mapping[str, TensorRecord]
    operators: Sequence[Operator]
    weights: Sequence[Weight]
    choices: Sequence[NodeChoice] = ()
    sizes: Mapping[str, tuple[int, ...]]
    bytes_on_disk: int
    versions: Mapping[str, str] = field(default_factory=dict)
    requires: str | None = None
    tuned: TunedServing | None = None
    as_written: bool | None = None
    outside: Sequence[str] = ()
    open_loops: Sequence[str] = ()
    notes: Sequence[str] = ()
    problems: Sequence[str] = ()

    @property
    def parameters(self) -> int:
        """The number of values in all weights. Packed values, such as pairs of int4, count as they are stored."""
        return sum(weight.count for weight in self.weights)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all weights."""
        return sum(weight.size_bytes for weight in self.weights)

    @property
    def zeros(self) -> int:
        """The number of values that are exactly zero, of the weights that are in the files that were read."""
        return sum(weight.zeros or 0 for weight in self.weights)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one call with inputs of `sizes`, without those of `uncounted`."""
        return sum(operator.total for operator in self.operators)

    @property
    def uncounted(self) -> Sequence[Operator]:
        """The products and convolutions whose multiply-adds are unknown."""
        return [operator for operator in self.operators if operator.multiply_adds is None]

    @property
    def not_counted(self) -> Sequence[str]:
        """The kinds of `uncounted`."""
        return sorted({operator.kind for operator in self.uncounted})

    def to_dict(self) -> dict[str, Any]:
        totals = ("parameters", "parameter_bytes", "zeros", "multiply_adds", "not_counted")
        return super().to_dict() | {name: getattr(self, name) for name in totals}

    def bytes_of(self, operator: Operator) -> int:
        """Returns the bytes of the weights that an operator reads."""
        held = {weight.name: weight.size_bytes for weight in self.weights}
        return sum(held[name] for name in operator.weights)

    def _sheet(self) -> Sheet:
        tables = [self._facts(), self._tensors(), self._kinds(), *self._largest(), self._choices()]
        return Sheet(title=self.path, tables=tables)

    @cached_property
    def _prefix(self) -> str:
        """What all names of layers begin with: the name of the model, in most files. The tables leave it out."""
        layers = [each.name for each in self.operators if each.weights] + [choice.name for choice in self.choices]
        first = {name.partition("/")[0] if "/" in name else "" for name in layers}
        return f"{first.pop()}/" if len(layers) > 1 and len(first) == 1 and "" not in first else ""

    def _layer(self, name: str) -> str:
        return shortened(name.removeprefix(self._prefix), LONGEST_NAME)

    def _facts(self) -> Table:
        states = {None: "no manifest, so unknown", True: "yes", False: "no"}
        facts = {
            "format": self.format + (f", {self.precision}" if self.precision else ""),
            **self.versions,
            **({"requires": self.requires} if self.requires else {}),
            **({"serving": in_words(self.tuned)} if self.tuned else {}),
            "bytes on disk": f"{self.bytes_on_disk:,}",
            "files as written": states[self.as_written],
            "parameters": self._parameters(),
            "multiply-adds": self._multiply_adds(),
            **({"not counted": ", ".join(self.not_counted)} if self.not_counted else {}),
            **({"names": f"begin with {self._prefix}, which is left out below"} if self._prefix else {}),
        }
        rows = list(facts.items())
        rows += [("reaches outside", text) for text in self.outside] + [("note", text) for text in self.notes]
        return Table(rows=list(_wrapped([*rows, *((PROBLEM, text) for text in self.problems)])))

    def _parameters(self) -> str:
        share = f" ({self.zeros / self.parameters:.1%})" if self.parameters else ""
        unread = sum(weight.zeros is None for weight in self.weights)
        beside = f", the zeros of {unread} unknown" if unread else ""
        size = f"{self.parameters:,} in {len(self.weights)} tensors, {self.parameter_bytes:,} bytes"
        return f"{size}, {self.zeros:,} zeros{share}{beside}"

    def _multiply_adds(self) -> str:
        shapes = ", ".join(f"{name} {list(sizes)}" for name, sizes in self.sizes.items())
        where = f" for {shapes}" if shapes else ""
        missing = {"unknown for": [each.name for each in self.uncounted], "one round counts of": self.open_loops}
        reasons = "".join(f"; {words} {self._some(names)}" for words, names in missing.items() if names)
        return f"{'at least ' if reasons else ''}{self.multiply_adds:,}{where}{reasons}"

    def _some(self, names: Sequence[str]) -> str:
        more = f" and {len(names) - LARGEST} more" if len(names) > LARGEST else ""
        return ", ".join(map(self._layer, names[:LARGEST])) + more

    def _tensors(self) -> Table:
        rows = [
            (word, shortened(name, LONGEST_NAME), str(record))
            for word, records in (("input", self.inputs), ("output", self.outputs))
            for name, record in records.items()
        ]
        return Table(rows=rows)

    def _kinds(self) -> Table:
        """Returns the operators by kind and type, those with the most multiply-adds first."""
        counts, work = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for operator in self.operators:
            counts[operator.kind, operator.dtype] += 1
            work[operator.kind, operator.dtype] += operator.total
        order = sorted(counts, key=lambda key: (-work[key], -counts[key], key))
        rows = [
            (shortened(kind, LONGEST_NAME), dtype, f"{counts[kind, dtype]:,}", _count(work[kind, dtype]))
            for kind, dtype in order
        ]
        return Table(head=("operator", "type", "count", "multiply-adds"), rows=rows, figures={2, 3})

    def _largest(self) -> list[Table]:
        """Returns the layers with the most bytes of weights, and those with the most multiply-adds."""
        head = ("operator", "type", "weights", "multiply-adds")
        by_bytes = sorted(self.operators, key=self.bytes_of, reverse=True)
        by_work = sorted(self.operators, key=lambda operator: operator.total, reverse=True)
        return [
            self._layers(("most weights", *head), [each for each in by_bytes[:LARGEST] if self.bytes_of(each)]),
            self._layers(("most multiply-adds", *head), [each for each in by_work[:LARGEST] if each.total]),
        ]

    def _layers(self, head: Sequence[str], layers: Iterable[Operator]) -> Table:
        rows = []
        for layer in layers:
            work = UNKNOWN if layer.multiply_adds is None else _count(layer.total)
            size = self.bytes_of(layer)
            stored = short_bytes(size) if size else ""
            rows.append((self._layer(layer.name), shortened(layer.kind, 22), layer.dtype, stored, work))
        return Table(head=head, rows=rows, figures={3, 4})

    def _choices(self) -> Table:
        """Returns the nodes in the artifact's precision by kind, and those in float by kind and reason."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for choice in sorted(self.choices, key=lambda choice: not choice.quantized):
            word = (self.precision or UNKNOWN) if choice.quantized else "float"
            groups.setdefault((word, choice.kind, "" if choice.quantized else choice.reason), []).append(choice.name)
        rows = []
        for (word, kind, reason), names in groups.items():
            shown = [self._layer(name) for name in names[:LARGEST]]
            more = [f"{len(names) - LARGEST} more"] if len(names) > LARGEST else []
            text = f"{len(names)} {kind}{f', {reason}' if reason else ''}: {', '.join([*shown, *more])}"
            rows.append((word, text))
        return Table(rows=list(_wrapped(rows)))


def _count(value: int) -> str:
    return short_count(value) if value else ""


def _wrapped(rows: Sequence[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Yields pairs of a name and a text, with the lines of a text that is too long below each other."""
    indent = max((len(name) for name, _ in rows), default=0) + 2
    for name, text in rows:
        first, *others = textwrap.wrap(text, WIDTH - indent) or [""]
        yield name, first
        yield from (("", line) for line in others)
