"""The measured tables of exports: the speed and size of int8, of other runtimes, of weights in few bits."""

from __future__ import annotations

from statistics import mean
from typing import Any

from page_tables import Table, measured_on, read

import tfopt

MODELS = {
    "resnet50": "ResNet-50",
    "mobilenetv2": "MobileNetV2",
    "efficientnetv2_b0": "EfficientNetV2-B0",
    "vit_small": "ViT-small",
    "bert_base": "BERT-base, 128 tokens",
    "tcn": "TCN, 1024 steps",
}
RUNTIMES = {
    "tfopt_int8": "tfopt",
    "tfopt_int8_caller_thread": "tfopt, calling thread at work",
    "inc": "Neural Compressor",
    "litert": "LiteRT",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}
STORED = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8_weight_only": "int8_weight_only",
    "int8_weight_only, call": 'int8_weight_only, decode="call"',
    "int4_weight_only": "int4_weight_only",
    "int4_weight_only, group_size 32": "int4_weight_only, group_size 32",
    "int8": "int8",
    "int8, serving_float": "int8, serving_float",
}
EXPORTS = {"keras_export": "`model.export` of Keras", "tfopt_float32": "tfopt float32", "tfopt_int8": "tfopt int8"}
INSTRUCTIONS = ("DEFAULT", "AVX512_CORE", "AVX2", "SSE41")


def speeds(names: tuple[str, ...] = tuple(MODELS)) -> Table:
    """Milliseconds per call and the speed against Keras' own export."""
    rows = [["model", "batch", "`model.export` of Keras", "tfopt float32", "tfopt int8"]]
    for name in names:
        for each in read("int8_savedmodel")["models"][name]["latency"]:
            times, ratios = each["median_ms"], each["speed_against_keras_export"]
            ours = [f"{times[side]} ms, {ratios[side]}x" for side in ("tfopt_float32", "tfopt_int8")]
            rows.append([MODELS[name], str(each["batch_size"]), f"{times['keras_export']} ms", *ours])
    return rows


def kernels() -> Table:
    """Milliseconds of a call by kind of kernel."""
    graphs = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "int8+bfloat16": "int8 and bfloat16"}
    rows = [["model", "batch", "kernels", *graphs.values(), "processor"]]
    for name, found in read("time_by_op")["models"].items():
        for batch in found["batches"]:
            times = batch["kernel_ms"]
            start = [MODELS[name], str(batch["batch_size"])]
            measured = {graph: times[graph] for graph in reversed(graphs) if graph in times}
            for kind in [*dict.fromkeys(kind for kinds in measured.values() for kind in kinds), "all"]:
                cells = [f"{_of_kind(measured[graph], kind):.1f}" if graph in measured else "" for graph in graphs]
                rows.append([*start, kind, *cells, measured_on(found)])
    return rows


def upsampling() -> Table:
    """Speed of each format with one resize over that with repeated rows and columns."""
    names = {"unet": "U-Net", "feature_pyramid": "feature pyramid", "decoder": "decoder"}
    precisions = ("float32", "int8")
    heads = [f"{precision}, batch {size}" for precision in precisions for size in (1, 8)]
    rows = [["network", "format", *heads]]
    for name, found in read("upsampling")["networks"].items():
        for each in found["float32"]:
            gains = [
                f"{found[precision][each][f'batch_{size}']['gain']:.2f}x" for precision in precisions for size in (1, 8)
            ]
            rows.append([names[name], f"`{each}`", *gains])
    return rows


def _of_kind(kinds: dict, kind: str) -> float:
    return sum(each["ms"] for name, each in kinds.items() if kind in (name, "all"))


def resnet50() -> Table:
    """The ResNet-50 of the README: size, time and speed of the three exports."""
    found = read("int8_savedmodel")["models"]["resnet50"]
    rows = [["ResNet-50, 224x224", "size", "batch 1", "batch 8"]]
    sides = {
        "keras_export": "`model.export` of Keras",
        "tfopt_float32": "tfopt, float32",
        "tfopt_int8": "tfopt, int8",
    }
    for side, title in sides.items():
        calls = [
            f"{each['median_ms'][side]:.1f} ms, {each['speed_against_keras_export'][side]:.2f}x"
            for each in found["latency"]
        ]
        rows.append([title, f"{found['bytes_on_disk'][side] / 1e6:.1f} MB", *calls])
    return rows


def cold_starts() -> Table:
    """The time to the first result of a fresh process, and its peak memory."""
    rows = [["model", "artifact", "load", "first call", "peak memory"]]
    for name, title in MODELS.items():
        for side, artifact in EXPORTS.items():
            found = read("int8_savedmodel")["models"][name]["cold_start"][side]
            times = [f"{found[key]:.0f} ms" for key in ("load_ms", "first_call_ms")]
            rows.append([title, artifact, *times, f"{found['memory_peak_bytes'] / 1e6:.0f} MB"])
    return rows


def runtimes() -> Table:
    """The int8 of other runtimes: speed against Keras' own export."""
    rows = [["int8 by", *(f"{MODELS[name]}, {size}" for name in ("resnet50", "mobilenetv2") for size in (1, 8))]]
    for runtime, title in RUNTIMES.items():
        cells = []
        for name in ("resnet50", "mobilenetv2"):
            for each in read("int8_runtimes")["models"][name]["latency"]:
                ratio = each["speed_against_keras_export"].get(runtime)
                cells.append("not run" if ratio is None else f"{ratio}x")
        rows.append([title, *cells])
    return rows


def applications() -> Table:
    rows = [["model", "nodes in int8", "agreement", "size", "speed, batch 1", "speed, batch 8"]]
    for name, found in read("applications")["models"].items():
        if found["precision"] == "float32":
            rows.append([name, "stays float32", "", "", "", ""])
            continue
        nodes = f"{found['int8_nodes']} of {found['int8_nodes'] + found['float_nodes']}"
        faster = [f"{found['speedup'][size]}x" for size in ("1", "8")]
        rows.append([name, nodes, f"{found['agreement']:.1%}", f"{found['size_ratio']:.2f}x", *faster])
    return rows


def weights() -> Table:
    rows = [["SavedModel", "bytes on disk", "size", "batch 1", "float32 in the same turns", "speed", "relative error"]]
    found = read("weight_only")["models"]["resnet50"]
    for name, title in STORED.items():
        each = found[name]
        rows.append(
            [
                title,
                f"{each['bytes_on_disk']:,}",
                f"{each['size_against_float32']:.2f}x",
                f"{each['median_ms']} ms",
                f"{each['float32_median_ms']} ms",
                f"{each['speed_against_float32']:.2f}x",
                f"{each['relative_error']:.4f}",
            ]
        )
    return rows


def instructions() -> Table:
    """The error of 8-bit and of reduced weights under each instruction set."""
    names = ["AVX-512", "AVX2", "SSE4.1"]
    rows = [["model", "8 bits: VNNI", *names, "reduced: VNNI", *names]]
    for name, found in read("reduce_range")["saturation"].items():
        rows.append([name, *(f"{found[side][one]:.1%}" for side in ("full", "reduced") for one in INSTRUCTIONS)])
    return rows


def reduced() -> Table:
    """What reduced weights cost in accuracy."""
    rows = [["model", "trainings", "float", "8 bits", "reduced", "cost in points"]]
    rows[0] += ["reduced, worst loss in points", "error, 8 bits", "error, reduced"]
    results = read("reduce_range")
    for name, runs in results["accuracy"].items():

        def average(key: str, runs: Any = runs) -> float:
            return mean(run[key] for run in runs)

        lost = results["points_lost"]["models"][name]
        rows.append(
            [
                name,
                str(len(runs)),
                *(f"{average(f'{side}_accuracy'):.2%}" for side in ("float", "full", "reduced")),
                f"{lost['reduced'] - lost['full']:+.2f}",
                f"{lost['reduced_worst']:.2f}",
                *(f"{average(f'{side}_error'):.4f}" for side in ("full", "reduced")),
            ]
        )
    return rows


def your_own_model() -> str:
    """What the first two blocks of the README print."""
    found = read("front_door")
    return "\n".join(["```text", found["ledger"], str(tfopt.Receipt(**found["receipt"])), "```"])


TABLES = {
    "your own model": your_own_model,
    "int8 speeds": speeds,
    "kinds of kernels": kernels,
    "cold starts": cold_starts,
    "upsampling": upsampling,
    "ResNet-50": resnet50,
    "other runtimes": runtimes,
    "keras.applications": applications,
    "weights in few bits": weights,
    "instruction sets": instructions,
    "reduced weights": reduced,
}
