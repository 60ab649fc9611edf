"""Runs a model that was written for another runtime, before its export ends: a converter may be wrong without a word.

The file is compared with the graph that it was made of, in its own runtime and process: on drawn examples, one of them
of zeros, on the first of the calibration data and on those that were not calibrated on. The drawn ones are computed
again one by one, since shapes can be wrong for one batch size only; and with open sizes that are larger by one, since
strides make odd and even ones differ. A runtime that compiles the file for known sizes runs it with open ones too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfopt.errors import ArtifactError, UnsupportedModelError
from tfopt.exporting.config import DEFAULT_SIGNATURE
from tfopt.exporting.formats import FileFormat
from tfopt.exporting.lowering import Lowered
from tfopt.exporting.manifest import ARTIFACT, CheckRecord, TensorRecord
from tfopt.exporting.parity import draw_inputs, error_on, record_output
from tfopt.exporting.unseen import unseen
from tfopt.exporting.verification.measured import FLOAT_TOLERANCE, INT8_TOLERANCE
from tfopt.exporting.verification.process import RuntimeProcess, runs
from tfopt.graph import FrozenGraph
from tfopt.hardware import has_vnni

EXAMPLES, ALONE = 16, 2
ROUNDED_AGAIN = 4  # times the error of the graph; that of an op with another meaning is larger
NOISE = 1e-6  # of an input; a model that amplifies it may amplify rounding as much

Arrays = Mapping[str, np.ndarray]


def check_written(
    directory: Path, lowered: Lowered, check: CheckRecord, file_format: FileFormat, *, values: bool = True
) -> CheckRecord:
    """Returns the check with the outputs and the errors of what was written, in its own runtime.

    Without `values` it must run and give outputs of the right shapes only.

    Raises:
        UnsupportedModelError: The runtime cannot run it, or computes something else than the graph.
    """
    graph = lowered.graphs[DEFAULT_SIGNATURE]
    if lowered.needs_vnni and has_vnni() is False:
        return check  # sums saturate on this machine, as the manifest says
    specs = {name: TensorRecord.of(spec) for name, spec in graph.inputs.items()}
    fixed = next((spec.shape[0] for spec in specs.values() if spec.shape), None)
    size = fixed or EXAMPLES
    shapes = {name: (size, *shape[1:]) for name, shape in check.shapes.items()}
    drawn = draw_inputs(specs, replace(check, shapes=shapes))
    try:
        with runs(directory)(directory) as process:
            compare = partial(_compare, lowered, process, check.compared if values else ())
            compare(_with_zeros(graph, drawn, size), size)
            if lowered.sample is not None:
                compare(_first({name: np.asarray(each) for name, each in lowered.sample.items()}, size), size)
            longer = {name: _longer(shape, specs[name].shape or shape) for name, shape in shapes.items()}
            if longer != shapes:
                compare(draw_inputs(specs, replace(check, shapes=longer)), size)
            if fixed is None:
                compare({name: value[:ALONE] for name, value in drawn.items()}, 1)
            given = draw_inputs(specs, check)  # on which the graph is known to run
            compare(given, size)
            if file_format.compiles:
                compare(given, size, open_sizes=True)
            check = _recorded(check, process.predict(given, size))
            examples = unseen(lowered.sample, lowered.held_out)
            if not check.errors or examples is None:
                return check
            held_out = _whole_batches(examples.inputs, size)
            compare(held_out, size)
            exact = _computed(lowered.source, held_out, size)
            measured = error_on(lowered.source, process.predict(held_out, size), exact)
            return replace(check, errors={**check.errors, ARTIFACT: measured})
    except ArtifactError as error:
        are_open = any(None in (spec.shape or ())[1:] for spec in specs.values())
        whole = "Give keras.Input whole sizes. " if are_open else ""
        float32 = (
            "Export a float32 model, for float64 has few kernels there; or write" if graph.has_doubles else "Write"
        )
        raise UnsupportedModelError(
            f"The {file_format.what} must run in its runtime. Received: {graph.name!r} ({_without(directory, error)}). "
            f"{whole}{float32} format='saved_model', or replace the layer."
        ) from error


def _without(directory: Path, error: ArtifactError) -> str:
    """Returns what an error says, without the path of what is not written yet."""
    return str(error).replace(f"{directory} ", "")


def _longer(shape: Sequence[int], sizes: Sequence[int | None]) -> tuple[int, ...]:
    """Returns the shape of a batch with each open size larger by one, but for the number of examples."""
    return (shape[0], *(length + (size is None) for length, size in zip(shape[1:], sizes[1:], strict=True)))


def _with_zeros(graph: FrozenGraph, drawn: Arrays, size: int) -> Arrays:
    """Returns the examples with zeros in the first, as padding and silence are, if the graph has numbers for them."""
    zeroed = {name: value.copy() for name, value in drawn.items()}
    for value in zeroed.values():
        if value.dtype.kind == "f":
            value[:1] = 0
    try:
        outputs = _computed(graph, zeroed, size)
    except tf.errors.OpError:
        return drawn
    floats = [value for value in outputs.values() if value.dtype.kind == "f"]
    return zeroed if all(np.isfinite(value).all() for value in floats) else drawn


def _first(examples: Arrays, size: int) -> Arrays:
    return {name: value[:size] for name, value in examples.items()}


def _whole_batches(examples: Arrays, size: int) -> Arrays:
    """Returns as many examples as fill batches, or all of too few: outputs may depend on how many are in a call."""
    length = len(next(iter(examples.values())))
    return {name: value[: length - length % size or length] for name, value in examples.items()}


def _recorded(check: CheckRecord, outputs: Arrays) -> CheckRecord:
    """Returns the check with the outputs of the runtime, which the verification compares with its own."""
    before = check.outputs[ARTIFACT]
    given = {name: record_output(outputs[name]) if each.values else each for name, each in before.items()}
    return replace(check, outputs={**check.outputs, ARTIFACT: given})


def _compare(
    lowered: Lowered,
    process: RuntimeProcess,
    names: Sequence[str],
    inputs: Arrays,
    batch_size: int,
    open_sizes: bool = False,
) -> None:
    """Refuses what differs from the graph, unless it is about as near to the source as the graph is.

    In int8 a runtime may round or clip at other places than the graph, such as before a concatenation.
    """
    graph = lowered.graphs[DEFAULT_SIGNATURE]
    try:
        expected = _computed(graph, inputs, batch_size)
    except tf.errors.OpError:
        return  # ids that the model refuses
    found = process.predict(inputs, batch_size, open_sizes=open_sizes)
    what, version = process.format.what, process.loaded["runtime"]
    if open_sizes:
        version += " with open sizes"
    for name, value in expected.items():
        if found[name].shape != value.shape:
            raise UnsupportedModelError(
                f"The {what} must give outputs of the model's shapes. Received: {graph.name!r}, whose output {name!r} "
                f"has {found[name].shape} in {version} for {value.shape}, with inputs of "
                f"{[each.shape for each in inputs.values()]} in calls of {batch_size}. {_remedy(open_sizes)}"
            )
    expected = {name: expected[name] for name in names}
    difference, worst = _worst(found, expected)
    if difference <= (INT8_TOLERANCE if lowered.precision == "int8" else FLOAT_TOLERANCE):
        return
    exact = {name: value for name, value in _computed(lowered.source, inputs, batch_size).items() if name in expected}
    near = max(INT8_TOLERANCE, ROUNDED_AGAIN * _difference(expected, exact))
    is_near = lowered.precision == "int8" and _difference(found, exact) <= near
    reason = "an op of the model has another meaning there"
    if lowered.precision == "int8":
        reason += ", or its kernels round where the model's values are small"
    if not is_near and difference > _difference(_computed(graph, _noisy(inputs), batch_size), expected):
        excluded = ", leave layers out of int8 by `exclude`" if lowered.precision == "int8" else ""
        raise UnsupportedModelError(
            f"The {what} must compute what the model computes. Received: {graph.name!r}, whose outputs differ in "
            f"{version} by {difference:.1e} of their norm, most in {worst!r}: {reason}. "
            f"{_remedy(open_sizes, excluded)}"
        )


def _remedy(open_sizes: bool, excluded: str = "") -> str:
    sizes = "Give keras.Input whole sizes, write" if open_sizes else "Write"
    return f"Nothing was written. {sizes} format='saved_model'{excluded}, or replace the layer."


def _computed(graph: FrozenGraph, inputs: Arrays, batch_size: int) -> dict[str, np.ndarray]:
    parts = [
        graph.predict({name: value[start : start + batch_size] for name, value in inputs.items()})
        for start in range(0, len(next(iter(inputs.values()))), batch_size)
    ]
    return {name: np.concatenate([np.atleast_1d(part[name]) for part in parts]) for name in parts[0]}


def _difference(found: Arrays, expected: Arrays) -> float:
    return _worst(found, expected)[0]


def _worst(found: Arrays, expected: Arrays) -> tuple[float, str]:
    """Returns the largest distance of an output as a share of its norm, and the output's name.

    Values that are not finite must be equal.
    """
    norms, distances = dict[str, float](), dict[str, float]()
    for name, value in expected.items():
        one, other = (np.asarray(each, np.float64) for each in (found[name], value))
        finite = np.isfinite(other)
        if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(one[finite]).all():
            return float("inf"), name
        norms[name] = float(np.linalg.norm(other[finite]))
        distances[name] = float(np.linalg.norm(one[finite] - other[finite]))
    least = NOISE * float(np.linalg.norm(list(norms.values()))) or 1.0  # an output of zeros
    return max(((each / max(norms[name], least), name) for name, each in distances.items()), default=(0.0, ""))


def _noisy(inputs: Arrays) -> Arrays:
    generator = np.random.default_rng(1)
    return {
        name: value * generator.normal(1, NOISE, value.shape).astype(value.dtype) if value.dtype.kind == "f" else value
        for name, value in inputs.items()
    }
