"""Runs one ONNX file in its own process, which imports ONNX Runtime and NumPy, but not TensorFlow, Keras or tfopt.

It answers the commands of tensorflow_only.py. `tfopt.exporting.verification.process` starts it.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCKED = ("tensorflow", "keras", "tf_keras", "tfopt")
if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])  # where the caller finds ONNX Runtime
    sys.modules.update(dict.fromkeys(BLOCKED))  # type: ignore[arg-type]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402

FLOAT_KERNELS = ("Conv", "FusedConv", "ConvTranspose", "MatMul", "FusedMatMul", "Gemm", "FusedGemm")
INT8_KERNELS = (
    *("QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat"),
    *("DynamicQuantizeMatMul", "ConvTranspose"),
)
COUNTED = (*FLOAT_KERNELS, *INT8_KERNELS, "QuantizeLinear", "DequantizeLinear")
DTYPES = {"float": "float32", "double": "float64"}
FASTEST_FIRST = ("CUDAExecutionProvider", "CPUExecutionProvider")


class Runner:
    """Answers the commands, as that of tensorflow_only.py does."""

    def __init__(self, show_life: Callable[[], None]) -> None:
        self.show_life = show_life
        self.cold: dict[str, float | None] = {}

    def load(self, path: str) -> dict[str, Any]:
        self.path = path
        model = onnx.load(path, load_external_data=False)
        outside = [each.name for each in initializers(model.graph) if each.data_location == onnx.TensorProto.EXTERNAL]
        if outside:
            raise ValueError(f"its weights must be in the file itself, and {outside[0]} is in another one")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # what it rewrites is no concern of the user's
        available = onnxruntime.get_available_providers()
        with tempfile.TemporaryDirectory(prefix="tfopt-") as directory:
            options.optimized_model_filepath = str(Path(directory, "executed.onnx"))
            started = time.perf_counter()
            self.session = onnxruntime.InferenceSession(
                path, options, providers=[each for each in FASTEST_FIRST if each in available]
            )
            self.cold = {"load_ms": (time.perf_counter() - started) * 1e3}
            executed = onnx.load(options.optimized_model_filepath, load_external_data=False)
        kernels = Counter(node.op_type for node in nodes(executed.graph))
        return {
            "inputs": {each.name: describe(each) for each in self.session.get_inputs()},
            "outputs": {each.name: describe(each) for each in self.session.get_outputs()},
            "runtime": f"ONNX Runtime {onnxruntime.__version__}",
            "devices": [each.removesuffix("ExecutionProvider") for each in self.session.get_providers()],
            "imported": [name for name in BLOCKED if sys.modules.get(name) is not None],
            "kernels": {name: count for name, count in kernels.items() if name in COUNTED},
        }

    def cold_start(self) -> dict[str, float | None]:
        return self.cold

    def count(self) -> dict[str, int]:
        """Counts the weights of products and convolutions, and the zeros among them."""
        model = onnx.load(self.path)
        held = {each.name: each for each in initializers(model.graph)}
        made = {name: node for node in nodes(model.graph) for name in node.output}
        found: dict[str, Any] = {}
        for node in nodes(model.graph):
            if node.op_type in FLOAT_KERNELS:
                name = node.input[1]
                while name in made and made[name].op_type in ("DequantizeLinear", "Cast"):
                    name = made[name].input[0]
                if name in held:
                    found[name] = onnx.numpy_helper.to_array(held[name])
        return {
            "weights": int(sum(array.size for array in found.values())),
            "zeros": int(sum(array.size - np.count_nonzero(array) for array in found.values())),
        }

    def predict(self, inputs: str, outputs: str, batch_size: int) -> dict[str, Any]:
        with np.load(inputs) as arrays:
            fed = {name: arrays[name] for name in arrays.files}
        length = len(next(iter(fed.values())))
        first = [each.shape[0] for each in self.session.get_inputs() if each.shape]
        fixed = next((size for size in first if isinstance(size, int)), None)
        size, short = fixed or batch_size, -length % fixed if fixed else 0
        if short:
            fed = {name: np.concatenate([value, np.repeat(value[-1:], short, axis=0)]) for name, value in fed.items()}
        names = [each.name for each in self.session.get_outputs()]
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for start in range(0, length, size):
            batch = {name: value[start : start + size] for name, value in fed.items()}
            started = time.perf_counter()
            for name, value in zip(names, self.session.run(names, batch), strict=True):
                parts[name].append(value)
            if "first_call_ms" not in self.cold:
                self.cold["first_call_ms"] = (time.perf_counter() - started) * 1e3
                self.cold["memory_peak_bytes"] = memory_peak()
            self.show_life()
        joined: Any = {name: np.concatenate(values)[: -short or None] for name, values in parts.items()}
        np.savez(outputs, **joined)
        return {}

    def time(self, inputs: str, seconds: float, at_least: int) -> dict[str, Any]:
        with np.load(inputs) as arrays:
            batch = {name: arrays[name] for name in arrays.files}
        for _ in range(2):
            self.session.run(None, batch)
            self.show_life()
        milliseconds: list[float] = []
        until = time.perf_counter() + seconds
        while len(milliseconds) < at_least or time.perf_counter() < until:
            start = time.perf_counter()
            self.session.run(None, batch)
            milliseconds.append((time.perf_counter() - start) * 1e3)
            self.show_life()
        return {"ms": milliseconds}


def describe(value: Any) -> dict[str, Any]:
    dtype = value.type.removeprefix("tensor(").removesuffix(")")
    shape = [size if isinstance(size, int) else None for size in value.shape]
    return {"shape": shape, "dtype": DTYPES.get(dtype, dtype)}


def graphs(graph: Any) -> Iterator[Any]:
    """Yields a graph and those of its loops and branches."""
    yield graph
    for node in graph.node:
        for value in node.attribute:
            for body in [value.g] if value.HasField("g") else value.graphs:
                yield from graphs(body)


def nodes(graph: Any) -> Iterator[Any]:
    return (node for each in graphs(graph) for node in each.node)


def initializers(graph: Any) -> Iterator[Any]:
    return (held for each in graphs(graph) for held in each.initializer)
