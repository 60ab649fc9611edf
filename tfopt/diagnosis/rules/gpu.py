"""Rules for what a GPU lacks: kernels for some operations of the step, and machine code of its own."""

from __future__ import annotations

from tfopt.data.measurement.stages import PYTHON_OPS
from tfopt.diagnosis.experiments import CannotMeasureError, measurable
from tfopt.diagnosis.measured import Measured
from tfopt.hardware.machine_code import machine_code
from tfopt.profiling.audit import placements
from tfopt.profiling.cost.training import train_graph
from tfopt.report import Diagnosis
from tfopt.training.xla import layer_of

NAMED = 4


def host_operations(measured: Measured) -> Diagnosis | str:
    """Operations without a kernel for GPUs run on the host, with copies to it and back in each step."""
    if not measured.hardware.gpus:
        raise CannotMeasureError("there is no GPU")
    model = measured.model
    if model.run_eagerly:
        return "the step runs eagerly; see eager"
    if model.jit_compile:
        return "XLA compiles the whole step"
    with measurable():
        graph, _ = train_graph(model, measured.batch_spec)
    found = placements(graph)
    on_host = [each for each in found.on_host if each.kind not in PYTHON_OPS]  # see python_in_step and host_metric
    if not on_host:
        return f"all {found.operations:,} operations of the step have a kernel for GPUs"
    layers = [layer_of(path, model) for each in on_host for path in each.places]
    names = list(dict.fromkeys(layer[0] for layer in layers if layer))
    kinds = ", ".join(f"{each.count} {each.kind}" for each in on_host[:NAMED])
    return Diagnosis(
        cause="host_operations",
        title="operations of the step have no kernel for GPUs",
        evidence=kinds + (f", in {', '.join(names[:NAMED])}" if names else ""),
        gain=None,
        advice="they run on the host, and each step copies to it and back: move them into the input pipeline, or use "
        "other operations. `tfopt devices --audit` lists all of them",
    )


def no_machine_code(measured: Measured) -> Diagnosis | str:
    """Without machine code for the GPU, the driver compiles the kernels when they are first used."""
    capabilities = [gpu.compute_capability for gpu in measured.hardware.gpus]
    if not capabilities:
        raise CannotMeasureError("there is no GPU")
    if capabilities[0] is None:
        raise CannotMeasureError("TensorFlow does not report the compute capability of the GPU")
    code = machine_code(capabilities[0])
    if code.kind not in ("ptx", "none"):
        return code.detail
    advice = "install a TensorFlow built for this card: the kernels of this one fail on it"
    if code.kind == "ptx":
        advice = (
            "the first start takes minutes: keep what the driver compiles, with CUDA_CACHE_MAXSIZE=4294967296 and "
            "CUDA_CACHE_PATH on a disk that stays; or install a TensorFlow built for this card"
        )
    return Diagnosis(
        cause="no_machine_code",
        title="this TensorFlow has no machine code for this GPU",
        evidence=code.detail,
        gain=None,
        advice=advice,
    )
