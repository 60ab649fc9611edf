"""Which operators take the time of the traced steps, and how long the device runs none.

With a GPU, the operators are its kernels. Copies between host and device are counted apart, and are no operators: while
only a copy runs, the device is idle. With several GPUs, every figure is the mean of them.

Without a GPU, the operators are those that TensorFlow's executor runs on the threads of the host. An operator of a
graph has an event named NAME:TYPE. An operator that Python calls alone has none: there the event
`EagerLocalExecute: TYPE` contains `EagerKernelExecute`, which is the time of the operator without its dispatch. An
operator that runs another on its thread counts without the time of the other. Operators run on several threads, so
their sum may exceed the time of a step. Operators of the input pipeline are left out, as with a GPU: while only they
run, the step waits for its batch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from tfopt.errors import ArtifactError, ConfigError
from tfopt.profiling.trace.events import HOST_PLANE, Event, Line, newest_trace, read_lines, read_spaces
from tfopt.report import OperatorTime, TraceSummary
from tfopt.settings.validation import check_value

COPIES = ("MemcpyH2D", "MemcpyD2H")
MEMORY = ("Memcpy", "Memset")
# tf.data calls a function of the user, such as that of `map`, in an event of this name.
INPUT_CALL, INPUT_THREAD = "InstantiatedCapturedFunction::", "tf_data"
# They wait for a batch. This is the time in which a step has nothing to do.
WAITING = frozenset({"IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional"})
# TensorFlow puts it before the names of a function that it has inlined.
INLINED = "StatefulPartitionedCall/"
EAGER_CALL, EAGER_KERNEL, FUNCTION = "EagerLocalExecute: ", "EagerKernelExecute", "__"
# The name of a kernel on tensor cores holds the shape of the matrix instruction: `h884` of Volta, `s1688` of Turing,
# `s16816` of Ampere. Newer ones hold the instruction (`hmma`, `wgmma`), the kind of operation (`tensorop`) or the
# family (`xmma`, `nvjet`). A kernel of these families that computes with ordinary arithmetic says `ffma` or `simt`.
# Triton's names tell nothing.
_TENSOR_CORES = re.compile(
    r"[a-z](?:884|1688|16816|8816|8832|16832|16864)(?!\d)|[hiq]mma|w?gmma|utcmma|tcgen05|wmma|tensorop|xmma|nvjet"
)
_ORDINARY = re.compile(r"ffma|simt|dfma")
_UNKNOWN = re.compile(r"^(?:triton_)?gemm_fusion")


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator that ran. `own_ps` is its time without other operators inside it."""

    name: str
    kind: str
    start_ps: int
    end_ps: int
    own_ps: int
    tensor_cores: bool | None = None

    @property
    def is_kernel(self) -> bool:
        """Whether it computes, and does not only copy or set memory."""
        return not self.name.startswith(MEMORY)


def uses_tensor_cores(kernel: str) -> bool | None:
    """Returns whether a kernel uses tensor cores, or None if its name does not say.

    Reference:
        XProf, kernel_stats_utils.cc (IsKernelUsingTensorCore): a list of such names, up to Ampere.
    Example:
        >>> uses_tensor_cores("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn")
        True
        >>> uses_tensor_cores("ampere_sgemm_128x64_nn"), uses_tensor_cores("gemm_fusion_dot_12")
        (False, None)
    """
    name = kernel.lower()
    if _ORDINARY.search(name):
        return False
    if _TENSOR_CORES.search(name):
        return True
    return None if _UNKNOWN.search(name) else False


def kernels(line: Line) -> Iterator[Operator]:
    """Yields the kernels of one stream, and what copies or sets memory inside the GPU."""
    for event in line.events:
        if event.end_ps == event.start_ps or event.name.startswith(COPIES):
            continue
        is_memory = event.name.startswith(MEMORY)
        yield Operator(
            name=event.name,
            kind=str(event.stats.get("tf_op", "")).rpartition(":")[2] or ("memory" if is_memory else "kernel"),
            start_ps=event.start_ps,
            end_ps=event.end_ps,
            own_ps=event.end_ps - event.start_ps,
            tensor_cores=None if is_memory else uses_tensor_cores(event.name),
        )


def input_calls(lines: Iterable[Line]) -> frozenset[Any]:
    """Returns the ids of the calls that tf.data made. The executor's events inside them carry the same id."""
    return frozenset(
        event.stats["id"]
        for line in lines
        for event in line.events
        if event.name.startswith(INPUT_CALL) and "id" in event.stats
    )


def host_operators(line: Line, of_input: Set[Any]) -> Iterator[Operator]:
    """Yields the operators of one thread, without those inside the calls of the input pipeline."""
    if line.name.startswith(INPUT_THREAD):
        return
    found: list[Operator] = []
    inside: list[int] = []  # for each operator, the time of the operators directly inside it
    around: list[tuple[Event, int | None]] = []  # the events that are open, with the index of their operator
    for event in line.events:
        while around and around[-1][0].end_ps <= event.start_ps:
            around.pop()
        outer = [each for each, _ in around]
        name, kind = _named(event, outer)
        index = None
        is_work = kind and kind not in WAITING and event.end_ps > event.start_ps
        if is_work and not any(each.stats["id"] in of_input for each in outer if "id" in each.stats):
            index, duration = len(found), event.end_ps - event.start_ps
            parent = next((each for _, each in reversed(around) if each is not None), None)
            if parent is not None:
                inside[parent] += duration
            found.append(Operator(name, kind, event.start_ps, event.end_ps, duration))
            inside.append(0)
        around.append((event, index))
    yield from (replace(each, own_ps=max(each.own_ps - ps, 0)) for each, ps in zip(found, inside, strict=True))


def _named(event: Event, outer: list[Event]) -> tuple[str, str]:
    """Returns the name and the type of an operator; empty for another event."""
    if event.kind:
        return event.name.removeprefix(INLINED), event.kind
    if event.name == EAGER_KERNEL:
        call = next((each.name for each in reversed(outer) if each.name.startswith(EAGER_CALL)), EAGER_CALL)
        kind = call.removeprefix(EAGER_CALL)
        return (kind, kind) if not kind.startswith(FUNCTION) else ("", "")
    return "", ""


PS_PER_MS = 1e9
MOST_OPERATORS = 40
NO_GPU = "the trace has no events of a GPU"


def summarize(directory: str | Path, steps: int | None = None) -> TraceSummary:
    """Returns what the newest trace in a directory says of its steps.

    Args:
        directory: Directory that `record_trace`, TensorBoard or tf.profiler.experimental wrote.
        steps: Number of traced steps. None counts the marks of steps in the trace.
    Raises:
        ArtifactError: There is no trace, it is broken, or it has no operator.
        ConfigError: `steps` is not positive, or it is None and the trace has no marks.
    Example:
        >>> summarize("no_such_directory")
        Traceback (most recent call last):
        ...
        tfopt.errors.ArtifactError: A trace must contain plugins/profile/TIME/HOST.xplane.pb. Received: ...
    """
    steps = check_value("steps", steps, Annotated[int, Ge(1)] | None)
    trace = newest_trace(directory)
    lines = list(read_lines(read_spaces(trace)))
    steps = steps or _count_steps(lines, trace)
    on_gpu = any(line.is_gpu and line.events for line in lines)
    ran = [line for line in lines if line.events and (line.is_gpu if on_gpu else line.plane == HOST_PLANE)]
    of_input = input_calls(ran)
    by_device: dict[tuple[str, str], list[Operator]] = {(line.host, line.plane): [] for line in ran}
    for line in ran:
        by_device[line.host, line.plane] += kernels(line) if on_gpu else host_operators(line, of_input)
    operators = [operator for found in by_device.values() for operator in found]
    if not operators:
        raise ArtifactError(
            f"A trace must hold at least one operator. Received: {trace}. Run a step of the model inside the block."
        )
    copies: list[Event] = [event for line in ran for event in line.events if event.name.startswith(COPIES)]
    first = min(each.start_ps for found in (operators, copies) for each in found)
    last = max(each.end_ps for found in (operators, copies) for each in found)
    devices = len(by_device)
    busy = sum(_union_ps(found) for found in by_device.values()) / devices
    return TraceSummary(
        directory=str(directory),
        steps=steps,
        span_ms=(last - first) / PS_PER_MS,
        idle_share=1 - busy / (last - first) if last > first else 0.0,
        tensor_core_share=_tensor_core_share(operators) if on_gpu else None,
        copy_ms_per_step=_sum_ms(event.end_ps - event.start_ps for event in copies) / steps / devices
        if on_gpu
        else None,
        operators=_longest(operators, steps * devices, on_gpu),
        unavailable={} if on_gpu else {"tensor_core_share": NO_GPU, "copy_ms_per_step": NO_GPU},
    )


def _count_steps(lines: Sequence[Line], trace: Path) -> int:
    marks = {event.stats["step_num"] for line in lines for event in line.events if "step_num" in event.stats}
    if not marks:
        raise ConfigError(
            f"steps must be given for a trace without marks of steps. Received: steps=None for {trace}. "
            "Pass the number of steps that were traced, or mark them: `with record_trace(...) as step`."
        )
    return len(marks)


def _union_ps(operators: Iterable[Operator]) -> int:
    """Returns the time in which at least one operator runs."""
    total, end = 0, 0
    for each in sorted(operators, key=lambda operator: operator.start_ps):
        total += max(0, each.end_ps - max(each.start_ps, end))
        end = max(end, each.end_ps)
    return total


def _tensor_core_share(operators: Sequence[Operator]) -> float:
    kernels = [each for each in operators if each.is_kernel]
    total = sum(each.own_ps for each in kernels)
    return sum(each.own_ps for each in kernels if each.tensor_cores) / total if total else 0.0


def _longest(operators: Sequence[Operator], runs: int, on_device: bool) -> list[OperatorTime]:
    groups: dict[tuple[str, str], list[Operator]] = defaultdict(list)
    for each in operators:
        groups[each.name, each.kind].append(each)
    total = sum(each.own_ps for each in operators)
    times = [
        OperatorTime(
            name=name,
            kind=kind,
            ms_per_step=_sum_ms(each.own_ps for each in group) / runs,
            share=sum(each.own_ps for each in group) / total,
            calls_per_step=len(group) / runs,
            on_device=on_device,
            tensor_cores=group[0].tensor_cores,
        )
        for (name, kind), group in groups.items()
    ]
    return sorted(times, key=lambda time: -time.ms_per_step)[:MOST_OPERATORS]


def _sum_ms(durations_ps: Iterable[int]) -> float:
    return sum(durations_ps) / PS_PER_MS
