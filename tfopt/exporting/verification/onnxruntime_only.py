"""Runs an ONNX file with ONNX Runtime and NumPy, and without TensorFlow, Keras or tfopt.

served.py loads this file in a process of its own.
"""

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCKED = ("tensorflow", "keras", "tf_keras", "tfopt")
if __name__ == "served_runtime":
    sys.modules.update(dict.fromkeys(BLOCKED))  # type: ignore[arg-type]
    # Otherwise it sends events, and leaves files in TMPDIR. Whoever sets the variable decides.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnx  # noqa: E402
import onnxruntime  # noqa: E402

FLOAT_KERNELS = ("Conv", "FusedConv", "ConvTranspose", "MatMul", "FusedMatMul", "Gemm", "FusedGemm")
INT8_KERNELS = ("QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat")
COUNTED = (*FLOAT_KERNELS, *INT8_KERNELS, "QuantizeLinear", "DequantizeLinear")
DTYPES = {"float": "float32", "double": "float64"}
FASTEST_FIRST = ("CUDAExecutionProvider", "CPUExecutionProvider")


class Runtime:
    """An ONNX file that ONNX Runtime runs, for served.py."""

    blocked = BLOCKED

    def load(self, path: str, threads: int | None = None) -> dict[str, Any]:
        self.path = path
        model = onnx.load(path, load_external_data=False)
        for each in tensors(model):
            location = next((item.value for item in each.external_data if item.key == "location"), "")
            if each.data_location == onnx.TensorProto.EXTERNAL and not lies_beside(Path(path), location):
                raise ValueError(
                    f"its weights must be in the file itself or in one beside it, and {each.name} is in {location!r}"
                )
        # ONNX Runtime shows an open rank as that of a scalar.
        open_rank = {each.name: {"shape": None} for each in model.graph.input if not has_shape(each)}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0  # 0 is one for each core
        options.log_severity_level = 3  # what it rewrites is no concern of the user's
        available = onnxruntime.get_available_providers()
        providers = [each for each in FASTEST_FIRST if each in available]
        started = time.perf_counter()
        self.session = onnxruntime.InferenceSession(path, options, providers=providers)
        self.load_ms = (time.perf_counter() - started) * 1e3
        self.names = [each.name for each in self.session.get_outputs()]
        return {
            "inputs": {each.name: describe(each) | open_rank.get(each.name, {}) for each in self.session.get_inputs()},
            "outputs": {each.name: describe(each) for each in self.session.get_outputs()},
            "runtime": f"ONNX Runtime {onnxruntime.__version__}",
            "threads": options.intra_op_num_threads,
            "devices": ["GPU" if "CUDA" in each else "CPU" for each in self.session.get_providers()],
        }

    def kernels(self) -> dict[str, int]:
        return count_kernels(self.path, self.session.get_providers())

    def weights(self) -> list[Any]:
        """Returns the weights of products and convolutions, each once."""
        model = onnx.load(self.path)
        held = {each.name: each for each in initializers(model.graph)}
        made = {name: node for node in nodes(model.graph) for name in node.output}
        found: dict[str, Any] = {}
        for node in nodes(model.graph):
            if node.op_type in FLOAT_KERNELS:
                name = node.input[1]
                while name in made and made[name].op_type in ("DequantizeLinear", "Cast", "Mul"):
                    name = made[name].input[0]
                if name in held:
                    found[name] = onnx.numpy_helper.to_array(held[name])
        return list(found.values())

    def place(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the inputs of a call as the runtime takes them."""
        return inputs

    def call(self, batch: dict[str, Any]) -> list[Any]:
        """Returns the outputs when they are computed."""
        return list(self.session.run(self.names, batch))

    def arrays(self, outputs: list[Any]) -> dict[str, Any]:
        return dict(zip(self.names, outputs, strict=True))


def count_kernels(path: str, providers: list[str]) -> dict[str, int]:
    """Counts the computing ops of the graph that ONNX Runtime makes of a file, and executes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory(prefix="tfopt-") as directory:
        options.optimized_model_filepath = str(Path(directory, "executed.onnx"))
        onnxruntime.InferenceSession(path, options, providers=providers)
        executed = onnx.load(options.optimized_model_filepath, load_external_data=False)
    kernels = Counter(node.op_type for node in nodes(executed.graph))
    return {name: count for name, count in kernels.items() if name in COUNTED}


def has_shape(value: Any) -> bool:
    return bool(value.type.tensor_type.HasField("shape"))


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


def tensors(message: Any) -> Iterator[Any]:
    """Yields all tensors in a message, as tfopt/exporting/onnx/external.py does, which this process cannot import."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in [value] if hasattr(value, "ListFields") else value:
                yield from tensors(each)


def lies_beside(path: Path, location: str) -> bool:
    """As in tfopt/exporting/onnx/external.py."""
    linked, is_name = (path.parent / location).resolve().parent, Path(location).name == location not in ("", "..")
    return is_name and linked in (path.parent.resolve(), path.resolve().parent)
