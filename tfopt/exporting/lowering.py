"""Makes the graphs that an artifact serves from a model: one for each signature, all in one precision.

int8/kernels.py lowers a single annotated graph, and stored_weights.py stores the weights of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfopt.errors import ConfigError
from tfopt.exporting.config import DEFAULT_SIGNATURE, FLOAT_SIGNATURE, XLA_SIGNATURE, ExportConfig
from tfopt.exporting.formats import FORMATS
from tfopt.exporting.half.choice import in_compute_type
from tfopt.exporting.int8.kernels import lower_to_int8
from tfopt.exporting.int8.selection import CLOCK, select_int8
from tfopt.exporting.int8.time_table import feeds_of
from tfopt.exporting.int8.weights import decode_int8, kernels_that_need_vnni
from tfopt.exporting.paired import may_saturate, with_all_pairs, without_zero_points
from tfopt.exporting.processing.answers import class_output, with_softmax
from tfopt.exporting.processing.images import from_pixels, image_input, to_pixels
from tfopt.exporting.stored_weights import CODEBOOK, encode_weights, encode_zeros, shares_values
from tfopt.graph import FrozenGraph, fold_constants
from tfopt.graph.fold import WEIGHTED
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.quantization import QuantizedModel, WeightOnlyConfig
from tfopt.quantization.annotation.annotate import has_ranges
from tfopt.quantization.calibration.calibrate import CalibrationData, HeldOut, computable, read_calibration_data
from tfopt.quantization.config import check_exclude, matches
from tfopt.quantization.keras_methods import KerasQuantized
from tfopt.quantization.quantize import quantize_frozen
from tfopt.report import Change, PassReport
from tfopt.report.record import RANGE

STILL_SMALLER = "For a smaller file all the same, set float_weights='int8'; int8_nodes='all' keeps the nodes in int8"
STORED = "weights stored in int8"  # the kind of the report's steps for nodes that compute in float32
UNTIMED = "all nodes are in int8, because only TensorFlow's kernels are timed; compare with float32 by tfopt bench"


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """The content of an artifact before it is written.

    Attributes:
        source: The model's own graph, which the artifact is compared with.
        in_variables: Whether the weights are in variables and are decoded at every call.
        sample: The first batch of the calibration data, by input name. None without data.
        held_out: Examples that were not calibrated on.
        needs_vnni: Whether the int8 kernels need VNNI or AMX for right results.
        compute: The type of the products that are not in int8.
    """

    source: FrozenGraph
    graphs: Mapping[str, FrozenGraph]
    in_variables: bool = False
    precision: str
    report: PassReport | None
    sample: Mapping[str, Any] | None = None
    held_out: HeldOut | None = None
    needs_vnni: bool = False
    compute: str = "float32"


def lower(model: Any, config: ExportConfig, calibration_data: Any, evaluation_data: Any) -> Lowered:
    """Returns the graphs of a model in the precision that the config names. The arguments are those of `tfopt.export`.

    Raises:
        ConfigError: The model is quantized and the config names another precision, int8 has no calibration data, or XLA
            cannot compile the model.
    """
    if isinstance(model, KerasQuantized):
        model = model.model
    if config.node_times is not None and not Path(config.node_times).resolve().parent.is_dir():
        raise ConfigError(
            f"node_times must be a file in a directory that exists. Received: node_times={str(config.node_times)!r}."
        )
    if isinstance(model, QuantizedModel) and config.precision not in ("float32", "int8"):
        raise ConfigError(
            f"A QuantizedModel is exported in int8. Received: precision={config.precision!r}. Export the float model."
        )
    if isinstance(model, QuantizedModel) and config.compute == "float16":
        raise ConfigError(
            "The products of a QuantizedModel compute in int8, bfloat16 or float32. Received: compute='float16'. Leave "
            "compute out, or export the float model."
        )
    given = model if isinstance(model, QuantizedModel) else None
    source = freeze_unfolded(model, trusted=config.trusted) if given is None else given.source
    strings = [name for name, spec in source.inputs.items() if spec.dtype.name == "string"]
    if config.xla_signature and (strings or source.tables):
        raise ConfigError(
            "xla_signature must be False for a model with look-up tables or strings, which XLA cannot compile. "
            f"Received: {source.name!r} with {len(source.tables)} tables and the string inputs {strings}. Leave it "
            "out, or export the part that takes numbers."
        )
    _check_processing(source, config)
    calibrates = given is None and config.precision == "int8" and not has_ranges(source)
    calibration = config.quantization if calibrates else None
    data = read_calibration_data(source, calibration_data, evaluation_data, calibration)
    _check_pixels(data, source, config)
    if given is None and config.precision == "int8":
        given = quantize_frozen(source, config.quantization, data if calibrates else None)
    lowered = _without_int8(source, config, data.sample) if given is None else _with_int8(given, config, data.sample)
    unseen = data.held_out(calibrated=lowered.precision == "int8" and not has_ranges(source))
    held_out = (data.evaluation and unseen) or lowered.held_out or unseen
    served = lowered.graphs[DEFAULT_SIGNATURE]
    needs_vnni = lowered.needs_vnni or bool(kernels_that_need_vnni(served))  # while the weights are constants
    lowered = replace(lowered, sample=data.sample, held_out=held_out, needs_vnni=needs_vnni)
    if config.sparse_weights:
        lowered = _without_zeros(lowered)
    return _with_processing(lowered, config)


def _check_processing(source: FrozenGraph, config: ExportConfig) -> None:
    """Raises ConfigError if the steps before or after the model do not fit it."""
    if config.preprocessing is not None:
        image_input(source, config.preprocessing)
    if config.postprocessing is not None:
        class_output(source, config.postprocessing)


def _check_pixels(data: CalibrationData, source: FrozenGraph, config: ExportConfig) -> None:
    """Raises ConfigError, before the work, if the data cannot come from pixels."""
    evaluation = data.held_out() if data.evaluation else None
    for examples in (data.sample, evaluation.inputs if evaluation else None):
        if config.preprocessing is not None and examples is not None:
            to_pixels(examples, image_input(source, config.preprocessing), config.preprocessing)


def _with_processing(lowered: Lowered, config: ExportConfig) -> Lowered:
    """Puts the steps before and after the model into all graphs, and into that of the source, so that they compare.

    The best classes come later: they cannot be compared as numbers.
    """
    before, after = config.preprocessing, config.postprocessing
    source, graphs, sample, held_out = lowered.source, lowered.graphs, lowered.sample, lowered.held_out
    if before is not None:
        name = image_input(source, before)
        sample = None if sample is None else to_pixels(sample, name, before)
        held_out = held_out and replace(held_out, inputs=to_pixels(held_out.inputs, name, before))
        own = config.format == "saved_model"
        source = from_pixels(source, before, for_tensorflow=own)
        graphs = {key: from_pixels(graph, before, for_tensorflow=own) for key, graph in graphs.items()}
    if after is not None and after.softmax:
        name = class_output(source, after)
        source = with_softmax(source, name)
        graphs = {key: with_softmax(graph, name) for key, graph in graphs.items()}
    return replace(lowered, source=source, graphs=graphs, sample=sample, held_out=held_out)


def _without_zeros(lowered: Lowered) -> Lowered:
    """Stores weights without their zeros in all graphs, and reports those of the first."""
    encoded = {name: encode_zeros(graph) for name, graph in lowered.graphs.items()}
    graphs = {name: graph for name, (graph, _) in encoded.items()}
    own = encoded[DEFAULT_SIGNATURE][1]
    if not own.changed:
        own.warn_if_unchanged("no weight has enough zeros" if own.skipped else "the model has no large weight")
    if lowered.report is None:
        return replace(lowered, graphs=graphs, report=own)
    steps = [replace(change, kind=f"{change.kind}, stored without zeros") for change in own.changed]
    metrics = {**lowered.report.metrics, **own.metrics}
    report = replace(lowered.report, steps=[*lowered.report.steps, *steps], metrics=metrics)
    return replace(lowered, graphs=graphs, report=report)


def _with_int8(model: QuantizedModel, config: ExportConfig, sample: Mapping[str, Any] | None) -> Lowered:
    if config.float_weights == "int8":  # before the measurement, which can take long
        names = [node.name for graph in (model.source, model.float_graph) for node in graph.graph_def.node]
        check_exclude(config.weight_only.exclude, names)
        if config.compute == "bfloat16":
            raise ConfigError(
                "float_weights must be 'float32' where products compute in bfloat16, which stores their weights in "
                "bfloat16. Received: float_weights='int8' and compute='bfloat16'. Leave one of them out."
            )
    if config.format != "saved_model":
        return _for_other_runtimes(without_zero_points(model) if config.tensorrt else model, config)
    lowered, kept_float = None, [skip.name for skip in model.report.skipped if skip.kind in WEIGHTED]
    quantized = bool(model.report.changed)
    if config.int8_nodes == "faster" and quantized:
        stored = None if config.node_times is None else Path(config.node_times)
        with computable():
            model, lowered = select_int8(model, feeds_of(model.float_graph, sample, config.batch_sizes), stored)
    in_int8 = bool(model.report.changed)
    if lowered is None:
        lowered = lower_to_int8(model.graph) if in_int8 else model.in_float()
    excluded = [node.name for node in lowered.graph_def.node if matches(node.name, config.quantization.exclude)]
    keep = {*kept_float, *excluded}
    stored_in_int8 = config.float_weights == "int8"
    served, compute, half = in_compute_type(
        lowered, config, sample, beside_int8=in_int8, keep=keep, stored_in_int8=stored_in_int8
    )
    graphs, report, precision = {DEFAULT_SIGNATURE: served}, model.report, "int8" if in_int8 else "float32"
    if not in_int8:  # no range is used
        report = replace(report, notes=[note for note in report.notes if note.kind != RANGE])
    if half is not None:
        report = _with_half(report, half)
    if config.float_weights == "int8":
        graphs[DEFAULT_SIGNATURE], stored_weights, notes = _encode_rest(lowered, config.weight_only, kept_float)
        report = replace(report, steps=[*report.steps, *stored_weights], notes=[*report.notes, *notes])
        precision = "int8" if in_int8 else "int8_weight_only" if stored_weights else "float32"
    if quantized and precision == "float32":
        verdict = "; ".join(step.detail for step in report.steps if step.kind == CLOCK)
        advice = "" if config.float_weights == "int8" else f". {STILL_SMALLER}"
        report.warn_if_unchanged(verdict and verdict + advice)
    # XLA has none of the int8 kernels. A graph without them is its own fallback, and shares all its weights.
    for name, wanted in ((FLOAT_SIGNATURE, config.float_fallback), (XLA_SIGNATURE, config.xla_signature)):
        if wanted:
            own = graphs[DEFAULT_SIGNATURE] if compute == "float32" else lowered
            graphs[name] = decode_int8(model.graph, lowered) if in_int8 else own
        if wanted and in_int8 and config.float_weights == "int8":
            graphs[name] = _encode_rest(graphs[name], config.weight_only, kept_float)[0]
    return Lowered(
        source=model.source,
        graphs=graphs,
        precision=precision,
        report=report,
        held_out=model.held_out,
        compute=compute,
    )


def _with_half(report: PassReport, half: PassReport) -> PassReport:
    """Adds what became of the products that are not in int8, as steps: the report's own changes are those to int8."""
    steps = [replace(change, kind=f"{change.kind}, not in int8") for change in half.changed]
    steps += [Change(name=skip.name, kind=skip.kind, detail=f"float32: {skip.reason}") for skip in half.skipped]
    return replace(
        report,
        steps=[*report.steps, *half.steps, *steps],
        notes=[*report.notes, *half.notes],
        metrics={**report.metrics, **half.metrics},
    )


def _for_other_runtimes(model: QuantizedModel, config: ExportConfig) -> Lowered:
    """Returns the annotated graph: the runtime that reads it chooses its own int8 kernels."""
    in_int8, report = bool(model.report.changed), model.report
    paired = with_all_pairs(model)
    if not in_int8:
        report.warn_if_unchanged()
    elif config.int8_nodes == "faster":
        untimed = Change(name="int8_nodes", kind=FORMATS[config.format].what, detail=UNTIMED)
        report = replace(report, notes=[*report.notes, untimed])
    return Lowered(
        source=model.source,
        graphs={DEFAULT_SIGNATURE: paired if in_int8 else model.in_float()},
        precision="int8" if in_int8 else "float32",
        report=report,
        held_out=model.held_out,
        needs_vnni=FORMATS[config.format].saturates and may_saturate(paired),
    )


def _encode_rest(
    graph: FrozenGraph, config: WeightOnlyConfig, kept_float: Sequence[str]
) -> tuple[FrozenGraph, list[Change], Sequence[Change]]:
    """Stores the float32 weights of a graph in int8, except those of nodes that the quantization left out.

    A pattern of `config.exclude` can match nothing, because the nodes that it names may be in int8. Returns the graph,
    and the steps and the notes of the report.
    """
    present = {node.name for node in graph.graph_def.node}
    named = [pattern for pattern in config.exclude if any(matches(name, (pattern,)) for name in present)]
    exclude = (*named, *(name for name in kept_float if name in present))
    encoded, report = encode_weights(graph, "int8_weight_only", replace(config, decode="load", exclude=exclude))
    steps = [
        replace(change, kind=STORED, detail=f"{change.detail}; {change.kind} computes in float32")
        for change in report.changed
    ]
    return encoded, steps, report.notes


def _without_int8(source: FrozenGraph, config: ExportConfig, sample: Mapping[str, Any] | None) -> Lowered:
    if config.format != "saved_model" and has_ranges(source):
        raise ConfigError(
            f"precision must be 'int8' for a model that was trained with fake quantization, with "
            f"format={config.format!r}. Received: precision={config.precision!r}. Export it in int8."
        )
    graph = fold_constants(source, keep=shares_values if config.precision == CODEBOOK else None)
    if graph.graph_def.ByteSize() > 1.1 * source.graph_def.ByteSize():
        graph = source  # its weights are stored in few bits, for example by Keras in int4, and folding decoded them
    graph, compute, report = in_compute_type(graph, config, sample)
    if config.precision != "float32":
        graph, stored = encode_weights(graph, config.precision, config.weight_only)
        if compute == "float32":
            stored.warn_if_unchanged()
        report = stored if report is None else _joined(report, stored, compute)
    return Lowered(
        source=source,
        graphs={DEFAULT_SIGNATURE: graph, **({XLA_SIGNATURE: graph} if config.xla_signature else {})},
        in_variables=config.precision != "float32" and config.weight_only.decode == "call",
        precision=config.precision,
        report=report,
        compute=compute,
    )


def _joined(report: PassReport, stored: PassReport, compute: str) -> PassReport:
    """Returns the report about the products, and about the other weights; about the weights where all is float32."""
    if compute == "float32":
        return replace(stored, steps=[*report.steps, *stored.steps], notes=[*report.notes, *stored.notes])
    steps = [replace(each, detail=f"stored in {each.detail}") for each in stored.changed]
    notes = [*report.notes, *stored.notes]
    return replace(
        report,
        skipped=[*report.skipped, *stored.skipped],
        steps=[*report.steps, *steps],
        notes=notes,
        metrics={**report.metrics, **stored.metrics},
    )
