"""The outputs of a model on drawn inputs: export records them, and verify computes them again.

Inputs are drawn with a fixed seed, uniformly over the range of the model's inputs, or from some words for an input of
strings. So the manifest need not hold them. Of each output, the manifest holds some values, spread evenly over the
whole, and sums that cover all values. For the sums, an output is cut into consecutive parts, and the values of each
part are added with random signs. The squared difference between two such sums is, on average, the squared distance
between the two parts. So a few numbers give an estimate of the distance between two outputs of any size, and each
changed value changes a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import ConfigError, UnsupportedModelError, warn
from tfopt.exporting.config import DEFAULT_SIGNATURE
from tfopt.exporting.half.overflow import refuse_overflow, warn_of_lost_digits
from tfopt.exporting.manifest import (
    ARTIFACT,
    FIRST_FORMAT,
    RANDOM,
    RECOMBINED,
    SOURCE,
    CheckRecord,
    ErrorRecord,
    OutputRecord,
    TensorRecord,
)
from tfopt.exporting.stored_weights import READERS
from tfopt.exporting.unseen import around, unseen
from tfopt.exporting.words import bytes_of, first_words, text_of
from tfopt.graph import FrozenGraph, GraphEditor
from tfopt.graph.frozen import reason_of
from tfopt.graph.inputs import open_size, table_rows
from tfopt.graph.output_ops import output_ops
from tfopt.graph.tables import words_of
from tfopt.quantization.calibration.calibrate import HeldOut, computable
from tfopt.quantization.calibration.range_use import usual_limit

CHECKED_EXAMPLES = 2
CHECKED_VALUES = 128
CHECKED_SUMS = 64
FIRST_VALUES = 64  # the number of first values of each output in the first format
SMALL_IDS = 9  # the largest integer for an input that looks up no table
EXACT = 2**53  # integers up to this are exact in a manifest


Ranges = dict[str, tuple[float, float]]


def make_check(
    source: FrozenGraph,
    graphs: Mapping[str, FrozenGraph],
    sample: Mapping[str, np.ndarray] | None,
    held_out: HeldOut | None = None,
    compute: str = "float32",
) -> CheckRecord:
    """Returns the outputs of the source and of the artifact's graphs on the same inputs. verify compares with them.

    The sample gives the range and the shape of real inputs. The check also has the artifact's error on the held-out
    examples, because an int8 model can be right in the range of its calibration data, and wrong on all others.

    Raises:
        ConfigError: The data holds NaN or infinity, or the model cannot compute with the examples, or `compute` is
            "float16" and a node overflows where the source's outputs are finite.
        UnsupportedModelError: An input has no axes, the model fails on inputs of its own shapes, or its outputs hold
            NaN.
    """
    specs = {name: TensorRecord.of(spec) for name, spec in graphs[DEFAULT_SIGNATURE].inputs.items()}
    for name, spec in specs.items():
        if spec.shape == ():
            raise UnsupportedModelError(
                f"Each input must have an axis for the examples. Received: {source.name!r}, whose input {name!r} is a "
                f"single {spec.dtype}. Give it the shape [batch, 1], or make it a constant."
            )
    strings = [name for name, spec in specs.items() if spec.dtype == "string"]
    words: dict[str, tuple[str, ...]] = {}
    if sample is None:
        length = open_size(source)
        shapes = {name: [size or length for size in (spec.shape or [None])] for name, spec in specs.items()}
        words = dict.fromkeys(strings, first_words(words_of(source.tables)))
        candidates = [ranges | _places(words) for ranges in _ranges_without_data(source, specs)]
    else:
        held_out = unseen(sample, held_out)
        shapes = {name: list(value.shape) for name, value in sample.items()}
        words = {name: first_words(text_of(value) for value in sample[name].reshape(-1)) for name in strings}
        whole = {name: _range_of(name, value) for name, value in sample.items() if name not in words} | _places(words)
        # An input that never changes shows nothing of a model that was calibrated on it.
        changing = {
            name: around(low) if low == high and specs[name].numpy_dtype.kind == "f" else (low, high)
            for name, (low, high) in whole.items()
        }
        candidates = [whole] if changing == whole else [changing, whole]
    for name, shape in shapes.items():
        shape[:1] = [(specs[name].shape or [None])[0] or CHECKED_EXAMPLES]
    models = {SOURCE: source, ARTIFACT: graphs[DEFAULT_SIGNATURE]}
    models |= {name: graph for name, graph in graphs.items() if name != DEFAULT_SIGNATURE}
    problem: UnsupportedModelError | None = None
    for ranges in candidates:
        sizes = {name: tuple(shape) for name, shape in shapes.items()}
        check = CheckRecord(ranges=ranges, shapes=sizes, outputs={}, words=words)
        try:
            drawn = draw_inputs(specs, check)
            if compute == "float16":
                _refuse_overflow(source, graphs, drawn)
            outputs = _outputs(models, drawn, check)
        except UnsupportedModelError as error:
            problem = problem or error
            continue
        recorded = {
            kind: {name: record_output(value) for name, value in values.items()} for kind, values in outputs.items()
        }
        compared = _on_held_out(models, specs, held_out)
        if compute == "float16" and held_out is not None and compared:
            _refuse_overflow(
                source, graphs, {name: value[: _fixed_size(specs)] for name, value in held_out.inputs.items()}
            )
        scales = _scales(source, [outputs[SOURCE], *([compared[SOURCE]] if compared else [])])
        recorded[SOURCE] = {name: replace(each, scale=_short(scales[name])) for name, each in recorded[SOURCE].items()}
        errors = {kind: error_on(source, own, compared[SOURCE]) for kind, own in compared.items() if kind != SOURCE}
        if compute == "float16":
            own = errors.get(ARTIFACT) or _error(outputs[ARTIFACT], outputs[SOURCE], scales)
            warn_of_lost_digits(own.relative)
        _warn_of_infinite_weights(source, outputs[SOURCE])
        return replace(check, outputs=recorded, examples=_origin(sample, held_out, compared), errors=errors)
    assert problem is not None
    raise problem


def _warn_of_infinite_weights(source: FrozenGraph, outputs: Mapping[str, np.ndarray]) -> None:
    """Masks may be infinite, and outputs that have one; a weight that is infinite is of a training that diverged."""
    if not any(np.isinf(value).any() for value in outputs.values() if value.dtype.kind == "f"):
        return
    editor = GraphEditor(source.graph_def)
    read = [(node.name, node.input[place]) for node in editor.nodes.values() for place in READERS.get(node.op, ())]
    weights = {name: editor.constant(tensor, behind="Identity") for name, tensor in read}
    floats = {name: values for name, values in weights.items() if values is not None and values.dtype.kind == "f"}
    infinite = [name for name, values in floats.items() if np.isinf(values).any()]
    if infinite:
        warn(
            f"The weights of {source.name!r} should be finite. Received: infinity in those of "
            f"{', '.join(map(repr, infinite))}, and among the outputs. Export a checkpoint from before the training "
            "diverged."
        )


def draw_inputs(specs: Mapping[str, TensorRecord], check: CheckRecord) -> dict[str, np.ndarray]:
    """Returns the inputs of the check. They are the same in every process."""
    generator = np.random.default_rng(0)
    first = check.format == FIRST_FORMAT  # it drew integers as floats and truncated them, so ids from 0 to 1 were 0
    inputs = {}
    for name, spec in specs.items():
        (low, high), shape = check.ranges[name], check.shapes[name]
        if name in check.words:
            words = np.array([bytes_of(word) for word in check.words[name]])
            inputs[name] = words[generator.integers(int(low), int(high), shape, endpoint=True)]
            continue
        if spec.numpy_dtype.kind in "biu" and not first:
            drawn: np.ndarray = generator.integers(max(int(low), -EXACT), min(int(high), EXACT), shape, endpoint=True)
        else:
            drawn = generator.uniform(low, high, shape)
        inputs[name] = drawn.astype(spec.numpy_dtype)
    return inputs


def draw_batch(specs: Mapping[str, TensorRecord], check: CheckRecord, batch_size: int) -> dict[str, np.ndarray]:
    """Returns one batch of inputs. Its size is `batch_size`, or the size that the signature fixes."""
    fixed = next((spec.shape[0] for spec in specs.values() if spec.shape), None)
    inputs = draw_inputs(specs, check)
    return {name: np.repeat(value[:1], fixed or batch_size, axis=0) for name, value in inputs.items()}


def are_numbers(outputs: Mapping[str, np.ndarray], recorded: Mapping[str, OutputRecord]) -> bool:
    """Whether outputs hold no NaN, and as many infinite values as at export."""
    floats = {name: value for name, value in outputs.items() if value.dtype.kind == "f"}
    return all(
        not np.isnan(value).any() and np.isinf(value).sum() == recorded[name].infinite for name, value in floats.items()
    )


def compare(
    outputs: Mapping[str, np.ndarray], recorded: Mapping[str, OutputRecord], first: bool
) -> tuple[float, float]:
    """Returns the largest and the relative difference between outputs and the recorded ones.

    The relative one is the larger ratio of norms: of the recorded values, or of the sums, which cover all values.
    """
    recorded = {name: record for name, record in recorded.items() if record.values}  # not of what is chosen, as classes
    values = np.concatenate([_values(outputs[name], first) for name in recorded])
    held = np.concatenate([np.asarray(record.values, np.float64) for record in recorded.values()])
    if values.shape != held.shape:
        return math.inf, math.inf
    usual = math.hypot(*(each.scale * math.sqrt(len(each.values)) for each in recorded.values()))
    largest = float(np.abs(values - held).max(initial=0.0))
    relative = _ratio(values - held, max(float(np.linalg.norm(held)), usual))
    summed = {name: record for name, record in recorded.items() if record.sums}
    if summed:
        sums = np.concatenate([_signed_sums(outputs[name]) - record.sums for name, record in summed.items()])
        norms = [max(each.norm, each.scale * math.sqrt(outputs[name].size)) for name, each in summed.items()]
        relative = max(relative, _ratio(sums, math.hypot(*norms)))
    return largest, relative


def _fixed_size(specs: Mapping[str, TensorRecord]) -> int | None:
    """Returns the batch size that the inputs are fixed to, if they are."""
    return next((spec.shape[0] for spec in specs.values() if spec.shape), None)


def _on_held_out(
    models: Mapping[str, FrozenGraph], specs: Mapping[str, TensorRecord], held_out: HeldOut | None
) -> dict[str, dict[str, np.ndarray]]:
    """Returns the outputs of each model on these examples. Empty where the source's own are not finite, or too few."""
    size = _fixed_size(specs)
    if held_out is None or (size and any(len(value) < size for value in held_out.inputs.values())):
        return {}
    inputs = {name: value[:size] for name, value in held_out.inputs.items()}
    with computable():
        outputs = {kind: model.predict(inputs) for kind, model in models.items()}
    numbers = all(np.isfinite(value).all() for value in outputs[SOURCE].values() if value.dtype.kind == "f")
    return outputs if numbers else {}


def _scales(source: FrozenGraph, outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Returns the scale of each output; see OutputRecord."""
    ops = output_ops(source)
    scales = {}
    for name, value in outputs[0].items():
        if ops.get(name) == "Sigmoid":
            scales[name] = 1.0
        elif ops.get(name) == "Softmax":
            scales[name] = value.shape[-1] ** -0.5
        else:
            squares = [np.square(_finite(given[name])) for given in outputs]
            scales[name] = max(float(np.sqrt(np.mean(each))) if each.size else 0.0 for each in squares)
    return scales


def _error(
    given: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray], scales: Mapping[str, float]
) -> ErrorRecord:
    differences = np.concatenate([_finite(given[name]) - _finite(value) for name, value in exact.items()])
    norm = math.hypot(*(scales[name] * math.sqrt(value.size) for name, value in exact.items()))
    return ErrorRecord(max_abs=float(np.abs(differences).max(initial=0.0)), relative=_short(_ratio(differences, norm)))


def error_on(source: FrozenGraph, given: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> ErrorRecord:
    """Returns the error of outputs against those of the source model on the same examples."""
    return _error(given, exact, _scales(source, [exact]))


def _origin(sample: Any, held_out: HeldOut | None, compared: Mapping[str, Any]) -> str:
    if held_out is None or not compared:
        return RANDOM if sample is None else f"{RANDOM} in the range of calibration_data"
    count = len(next(iter(held_out.inputs.values())))
    return held_out.origin if held_out.origin == RECOMBINED else f"{count} examples of {held_out.origin}"


def _outputs(
    models: Mapping[str, FrozenGraph], inputs: Mapping[str, np.ndarray], check: CheckRecord
) -> dict[str, dict[str, np.ndarray]]:
    graph = models[ARTIFACT]
    try:
        outputs = {kind: model.predict(inputs) for kind, model in models.items()}
    except tf.errors.OpError as error:
        shapes = {name: list(shape) for name, shape in check.shapes.items()}
        raise UnsupportedModelError(
            f"The model must run on inputs of the shapes {shapes}. Received: {graph.name!r}, which fails "
            f"({reason_of(str(error))}). Pass calibration_data with examples that it accepts: of a right size, with "
            "ids that its tables hold, and independent of each other along the first axis. Replace a layer that this "
            "processor cannot compute."
        ) from error
    for kind, values in outputs.items():
        for name, value in values.items():
            if value.dtype.kind == "f" and np.isnan(value).any():
                ranges = ", ".join(f"{key} from {low:g} to {high:g}" for key, (low, high) in check.ranges.items())
                raise UnsupportedModelError(
                    f"The outputs must be numbers on finite inputs. Received: {graph.name!r}, whose output {name!r} "
                    f"{'' if kind == SOURCE else f'of the {kind} '}holds NaN for {ranges}. Look for NaN among its "
                    "weights. If the outputs are numbers on real inputs, pass such inputs as calibration_data."
                )
    return outputs


def _refuse_overflow(source: FrozenGraph, graphs: Mapping[str, FrozenGraph], inputs: Mapping[str, Any]) -> None:
    try:
        outputs = source.predict(inputs)
    except tf.errors.OpError:
        return  # it does not run on these inputs, which `_outputs` reports
    if all(np.isfinite(value).all() for value in outputs.values() if value.dtype.kind == "f"):
        refuse_overflow(graphs[DEFAULT_SIGNATURE], inputs)


def _ranges_without_data(source: FrozenGraph, specs: Mapping[str, TensorRecord]) -> list[Ranges]:
    """Returns the ranges to draw inputs from, best first. A model may refuse inputs that its graph seems to accept."""
    rows = table_rows(source)
    whole: Ranges = {}
    small: Ranges = {}
    for name, spec in specs.items():
        dtype = spec.numpy_dtype
        whole[name] = small[name] = (0.0, 1.0)
        if name in rows:
            whole[name] = (0, rows[name] - 1)
        elif dtype.kind in "iu" and dtype.itemsize == 1:
            whole[name] = (float(np.iinfo(dtype).min), float(np.iinfo(dtype).max))  # pixels and the like
        elif dtype.kind in "iu":
            whole[name] = (0, SMALL_IDS)
    zeros = {name: (0.0, 0.0) if specs[name].numpy_dtype.kind in "iu" else each for name, each in small.items()}
    candidates: list[Ranges] = []
    for ranges in (whole, small, zeros):
        if ranges not in candidates:
            candidates.append(ranges)
    return candidates


def _places(words: Mapping[str, tuple[str, ...]]) -> Ranges:
    return {name: (0.0, len(known) - 1.0) for name, known in words.items()}


def _range_of(name: str, values: np.ndarray) -> tuple[float, float]:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ConfigError(
            f"calibration_data must be finite. Received: NaN or infinity in the first batch of input {name!r}, of "
            f"shape {values.shape}. Remove these examples, or export without calibration_data, which only int8 needs."
        )
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    # A single value far beyond all others would make inputs that are like none of them.
    limit = usual_limit([values]) if values.dtype.kind == "f" else math.inf
    return max(low, -limit), min(high, limit)


def record_output(output: np.ndarray) -> OutputRecord:
    record = OutputRecord(
        values=tuple(_short(value) for value in _values(output)),
        infinite=int(np.isinf(output).sum()) if output.dtype.kind == "f" else 0,
    )
    if output.size <= CHECKED_VALUES:
        return record
    sums = tuple(_short(value) for value in _signed_sums(output))
    return replace(record, sums=sums, norm=_short(float(np.linalg.norm(_finite(output)))))


def _values(output: np.ndarray, first: bool = False) -> np.ndarray:
    flat = output.reshape(-1)
    if first or flat.size <= CHECKED_VALUES:
        return _finite(flat[: FIRST_VALUES if first else CHECKED_VALUES])
    return _finite(flat[np.linspace(0, flat.size - 1, CHECKED_VALUES).astype(np.int64)])


def _signed_sums(output: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(0)
    parts = np.array_split(_finite(output), CHECKED_SUMS)
    return np.array([part @ (2.0 * generator.integers(0, 2, part.size, dtype=np.int8) - 1.0) for part in parts])


def _finite(output: np.ndarray) -> np.ndarray:
    """Returns all values as a vector, with 0 for each infinite value, which would hide the others in a sum."""
    return np.nan_to_num(output.reshape(-1).astype(np.float64), posinf=0.0, neginf=0.0)


def _ratio(difference: np.ndarray, norm: float) -> float:
    return float(np.linalg.norm(difference)) / max(norm, 1e-12)


def _short(value: float) -> float:
    return float(f"{value:.7g}")
