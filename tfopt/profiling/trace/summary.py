"""Which operators take the time of the traced steps, and how long the device runs none.

With a GPU, the operators are its kernels. Copies between host and device are counted apart, and are no operators: while
only a copy runs, the device is idle. With several GPUs, every figure is the mean of them.

Without a GPU, the operators are those that TensorFlow's executor runs. An operator that runs another on its thread
counts without the time of the other. Operators run on several threads, so their sum may exceed the time of a step.
Operators of the input pipeline are left out, as with a GPU: while only they run, the step waits for its batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from tfopt.errors import ArtifactError, ConfigError
from tfopt.profiling.trace.events import HOST_PLANE, Event, Line, newest_trace, read_lines, read_spaces
from tfopt.profiling.trace.operators import COPIES, Operator, host_operators, input_calls, kernels
from tfopt.report import OperatorTime, TraceSummary
from tfopt.settings.validation import check_value

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


def _tensor_core_share(operators: Sequence[Operator]) -> float | None:
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
