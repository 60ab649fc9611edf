"""The operators in the lines of a trace: kernels on a GPU, otherwise what TensorFlow runs on the threads of the host.

An operator of a graph has an event named NAME:TYPE. An operator that Python calls alone has none: there the event
`EagerLocalExecute: TYPE` contains `EagerKernelExecute`, which is the time of the operator without its dispatch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

from tfopt.profiling.trace.events import Event, Line

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
        if kind and kind not in WAITING and event.end_ps > event.start_ps and not _is_input(outer, of_input):
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


def _is_input(outer: list[Event], of_input: Set[Any]) -> bool:
    return any(each.stats["id"] in of_input for each in outer if "id" in each.stats)
