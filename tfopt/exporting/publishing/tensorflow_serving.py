"""What TensorFlow Serving reads beside a SavedModel: requests that warm it up, and settings of its batches.

The first calls of a model take longer than all others: TensorFlow optimizes the graph and decodes weights in them. The
server makes the calls of `assets.extra/tf_serving_warmup_requests` before it sends requests to a version. This is a
TFRecord file of `PredictionLog` messages, each with one request. A tensor with one value for all cells takes a few
bytes in it, whatever its shape. The value does not matter for the time, but the model must accept it, so it is one that
the check of the manifest draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError
from tfopt.exporting.config import FLOAT_SIGNATURE
from tfopt.exporting.manifest import Manifest
from tfopt.exporting.parity import draw_inputs
from tfopt.exporting.publishing.batches import batch_of, is_open, words
from tfopt.report import Change, ManyRequests, Skip

PACKAGE = "tensorflow_serving"
WARM_UP = "assets.extra/tf_serving_warmup_requests"
BATCHING = "batching_params.pbtxt"
FILES = {WARM_UP, BATCHING}


def check_package() -> None:
    """Raises ConfigError if the messages of TensorFlow Serving are missing."""
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            "warm_up needs the package tensorflow-serving-api, which has the messages of TensorFlow Serving. Received: "
            "an environment without it. Install it: pip install 'tfopt[serving]'. Or pass warm_up=False "
            "(--no-warm-up)."
        )


def write(
    directory: Path, name: str, manifest: Manifest, batch_sizes: Sequence[int], best: ManyRequests | None = None
) -> Iterator[Change | Skip]:
    """Writes the files into the directory of a version. Without batch sizes nothing is warmed up.

    `best` is the way to compute many requests that was measured.
    """
    if batch_sizes:
        yield _write_warm_up(directory / WARM_UP, name, manifest, batch_sizes)
    parameters, reason = _batching(manifest, batch_sizes, best)
    if parameters:
        (directory / BATCHING).write_text(parameters, encoding="utf-8")
        yield Change(name=BATCHING, kind="TensorFlow Serving", detail=reason)
    else:
        yield Skip(name=BATCHING, kind="TensorFlow Serving", reason=reason)


def _write_warm_up(path: Path, name: str, manifest: Manifest, batch_sizes: Sequence[int]) -> Change:
    path.parent.mkdir()
    # "serving_float" is for machines without int8 kernels, on which the server cannot load the other signatures.
    signatures = [each for each in manifest.signatures if each != FLOAT_SIGNATURE]
    sizes = sorted({batch_of(manifest.signature, size) for size in batch_sizes})
    with tf.io.TFRecordWriter(str(path)) as file:
        for signature in signatures:
            for size in sizes:
                file.write(_log(name, signature, manifest, size).SerializeToString(deterministic=True))
    calls = f"calls {' and '.join(signatures)} with {words(sizes)}"
    return Change(name=WARM_UP, kind="TensorFlow Serving", detail=calls)


def _log(name: str, signature: str, manifest: Manifest, batch_size: int) -> Any:
    """Returns the message of one request."""
    from tensorflow_serving.apis import prediction_log_pb2

    log = prediction_log_pb2.PredictionLog()
    request = log.predict_log.request
    request.model_spec.name, request.model_spec.signature_name = name, signature
    for key, drawn in draw_inputs(manifest.signature.inputs, manifest.check).items():
        shape = (batch_size, *drawn.shape[1:]) if drawn.ndim else ()
        dtype = manifest.signature.inputs[key].dtype
        value = drawn.flat[0] if drawn.size else np.zeros((), drawn.dtype)
        request.inputs[key].CopyFrom(tf.make_tensor_proto(value, dtype, shape))
    return log


def _batching(manifest: Manifest, sizes: Sequence[int], best: ManyRequests | None) -> tuple[str, str]:
    """Returns the settings of batches and what they do, or "" and the reason why there are none."""
    if not is_open(manifest.signature):
        return "", "the batch size is fixed"
    others = [name for name, spec in manifest.signature.inputs.items() if None in (spec.shape or (None,))[1:]]
    if others:
        return "", f"the server joins requests of equal sizes only, and those of {others[0]!r} are open"
    if best is None:
        return "", "no times were measured; tfopt tune measures them"
    if not best.batches_pay:
        return "", f"calls at the same time, {best.calls} of them, compute no fewer examples"
    most = max((best.batch_size, *sizes))  # the server refuses larger requests, those of the warm-up too
    return "".join(f"{line}\n" for line in batching(best, most)), f"joins requests to batches of up to {most}"


def batching(best: ManyRequests, most: int) -> list[str]:
    """Returns the lines of batching_params.pbtxt for batches of at most so many examples.

    A batch is made of what has come while the one before was computed: no request waits for others.

    Example:
        >>> batching(ManyRequests(calls=2, threads=1, batch_size=16), 16)[1]
        'num_batch_threads { value: 2 }'
    """
    settings = {"max_batch_size": most, "num_batch_threads": best.calls, "batch_timeout_micros": 0}
    return [f"{key} {{ value: {value} }}" for key, value in settings.items()]
