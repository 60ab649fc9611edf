"""Triton's config.pbtxt: the inputs and outputs of a served model, how requests are joined, and the threads.

Triton could find out the inputs and outputs by itself. It would not join requests then, nor warm the model up, nor know
the measured number of threads. The file is about all versions of a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfopt.atomic.files import write_text
from tfopt.exporting.manifest import Manifest, TensorRecord
from tfopt.exporting.publishing.batches import batch_of, is_open, words
from tfopt.report import Change, ManyRequests, Skip

CONFIG = "config.pbtxt"
# Triton's backend for a format, and its name for the number of threads that compute one call. The backend for OpenVINO
# answers batches of max_batch_size only, and finds out the inputs and outputs of a model with open sizes by itself.
BACKENDS = {"onnx": ("onnxruntime", "intra_op_thread_count")}
TYPES = {
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
    "bool": "BOOL",
    "string": "STRING",
}


def write(
    model: Path, manifest: Manifest, batch_sizes: Sequence[int], *, warm_up: bool, best: ManyRequests | None = None
) -> Iterator[Change | Skip]:
    """Writes config.pbtxt into the directory of a model, if Triton serves its format and there is none yet.

    `best` is the way to compute many requests that was measured.
    """
    if manifest.model_format not in BACKENDS:
        return
    unknown = [name for name, spec in _specs(manifest).items() if spec.shape is None]
    single = [name for name, spec in _specs(manifest).items() if spec.shape == ()]
    if (model / CONFIG).exists():
        yield Skip(name=CONFIG, kind="Triton", reason="there is one already, which stays as it is")
    elif unknown:
        yield Skip(name=CONFIG, kind="Triton", reason=f"the number of axes of {unknown[0]!r} is open")
    elif single:
        yield Skip(name=CONFIG, kind="Triton", reason=f"{single[0]!r} has no axes, and every tensor needs one")
    else:
        largest = max(*batch_sizes, best.batch_size if best is not None and best.batches_pay else 1)
        write_text(model / CONFIG, config(model.name, manifest, batch_sizes if warm_up else (), largest, best))
        joined = f"joins requests to batches of up to {largest}" if is_open(manifest.signature) else "no batches"
        yield Change(name=CONFIG, kind="Triton", detail=joined)


def _specs(manifest: Manifest) -> Mapping[str, TensorRecord]:
    return {**manifest.signature.inputs, **manifest.signature.outputs}


def config(
    name: str, manifest: Manifest, warm_up: Sequence[int], largest: int, best: ManyRequests | None = None
) -> str:
    """Returns the text of config.pbtxt.

    Args:
        name: The name of the served model.
        manifest: The manifest of a version.
        warm_up: Examples in the calls that warm the model up. Empty means none.
        largest: The most examples of a batch that Triton joins.
        best: The way to compute many requests that was measured.
    """
    backend, _ = BACKENDS[manifest.model_format]
    joins = is_open(manifest.signature)
    lines = [f'name: "{name}"', f'backend: "{backend}"', f"max_batch_size: {largest if joins else 0}"]
    for kind in ("input", "output"):
        specs: Mapping[str, TensorRecord] = getattr(manifest.signature, f"{kind}s")
        tensors = (f"  {{ name: {json.dumps(key)} {_tensor(spec, joins)} }}" for key, spec in specs.items())
        lines += [f"{kind} [", ",\n".join(tensors), "]"]
    if joins:
        lines.append(batching(best))
    if best is not None:
        lines += instances(best, manifest.model_format)
    sizes = sorted({batch_of(manifest.signature, size) for size in warm_up})
    lines += [_call(manifest, size, joins) for size in sizes]
    return "\n".join(lines) + "\n"


def batching(best: ManyRequests | None) -> str:
    """Returns the line that joins requests, without a delay: those that have come while the model computed.

    Triton takes a batch of the preferred size where there are so many requests, and else as many as there are.
    """
    preferred = f"preferred_batch_size: [ {best.batch_size} ] " if best is not None and best.batches_pay else ""
    return f"dynamic_batching {{ {preferred}}}"


def instances(best: ManyRequests, model_format: str) -> list[str]:
    """Returns the lines for the calls at the same time and the threads of each.

    Example:
        >>> print(*instances(ManyRequests(calls=2, threads=1, batch_size=8), "onnx"), sep="\\n")
        instance_group [ { count: 2 kind: KIND_CPU } ]
        parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
    """
    kind = "KIND_GPU" if best.on_gpu else "KIND_CPU"
    return [
        f"instance_group [ {{ count: {best.calls} kind: {kind} }} ]",
        f'parameters {{ key: "{BACKENDS[model_format][1]}" value: {{ string_value: "{best.threads}" }} }}',
    ]


def _tensor(spec: TensorRecord, joins: bool) -> str:
    assert spec.shape is not None
    sizes = [-1 if size is None else size for size in spec.shape[joins:]]
    # Triton wants one axis at least, also of a tensor that has a single value for each example.
    return f"{_kind(spec)} dims: {sizes or [1]}" + ("" if sizes else " reshape { shape: [ ] }")


def _kind(spec: TensorRecord) -> str:
    return f"data_type: TYPE_{TYPES.get(spec.dtype, spec.dtype.upper())}"


def _call(manifest: Manifest, batch_size: int, joins: bool) -> str:
    """Returns a call with zeros, which tables of any size hold, in the sizes of the check for each example."""
    shapes = manifest.check.shapes
    inputs = (
        f"  inputs {{ key: {json.dumps(key)} value: {{ {_kind(spec)} dims: "
        f"{_sizes(spec, shapes[key], batch_size, joins)} zero_data: true }} }}"
        for key, spec in manifest.signature.inputs.items()
    )
    size = f" batch_size: {batch_size if joins else 1}"  # Triton leaves out a call without it
    return "\n".join([f'model_warmup {{ name: "{words([batch_size])}"{size}', *inputs, "}"])


def _sizes(spec: TensorRecord, checked: Sequence[int], batch_size: int, joins: bool) -> list[int]:
    if joins:  # then Triton adds the batch itself
        return list(checked[1:]) or [1]
    assert spec.shape
    return [spec.shape[0] or batch_size, *checked[1:]]
