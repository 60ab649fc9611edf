"""Runs a .tflite file with LiteRT and NumPy, and without TensorFlow, Keras or tfopt.

served.py loads this file in a process of its own.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

BLOCKED = ("tensorflow", "keras", "tf_keras", "tfopt")
if __name__ == "served_runtime":
    sys.modules.update(dict.fromkeys(BLOCKED))  # type: ignore[arg-type]

import numpy as np  # noqa: E402
from ai_edge_litert import schema_py_generated as schema  # noqa: E402
from ai_edge_litert.interpreter import Interpreter  # noqa: E402

WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "CONV_3D", "FULLY_CONNECTED", "BATCH_MATMUL")
COUNTED = (*WEIGHTED, "QUANTIZE", "DEQUANTIZE")
OPERATORS = {code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)}
STORED = {schema.TensorType.FLOAT32: np.float32, schema.TensorType.FLOAT16: np.float16, schema.TensorType.INT8: np.int8}


def leave_memory_to_others() -> None:
    """Limits this process to the memory that is available: a loop that never ends takes what it can get.

    Without the limit the kernel ends some process, which may be another one.
    """
    try:
        import resource

        sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = 1024 * sum(int(sizes[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
        limit, most = resource.getrlimit(resource.RLIMIT_DATA)
        if limit == resource.RLIM_INFINITY or available < limit:
            resource.setrlimit(resource.RLIMIT_DATA, (available, most))
    except (ImportError, OSError, KeyError):
        return  # not Linux


class Runtime:
    """A .tflite file that LiteRT runs, with XNNPACK where that has the operator, for served.py.

    An interpreter serves one caller at a time, so each thread has its own. It keeps the sizes of its last call.
    """

    blocked = BLOCKED

    def load(self, path: str, threads: int | None = None) -> dict[str, Any]:
        leave_memory_to_others()
        self.path = path
        self.threads = threads or cores()  # LiteRT's own default is one
        self.own = threading.local()
        started = time.perf_counter()
        details = self.details()
        if not any(size < 0 for each in details["inputs"].values() for size in each["shape_signature"][1:]):
            self.interpreter().allocate_tensors()  # else call() does: a file stores open sizes as 1, which may not fit
        self.load_ms = (time.perf_counter() - started) * 1e3
        self.places = {kind: {name: each["index"] for name, each in found.items()} for kind, found in details.items()}
        described = {kind: {name: describe(each) for name, each in found.items()} for kind, found in details.items()}
        return {
            **described,
            "runtime": f"LiteRT {version('ai-edge-litert')}",
            "threads": threads or 0,
            "devices": ["CPU"],
        }

    def details(self) -> dict[str, dict[str, Any]]:
        """Returns the inputs and outputs by name: of the one signature, or of a file without one."""
        interpreter = self.interpreter()
        signatures = interpreter.get_signature_list()
        if len(signatures) > 1:
            raise ValueError(f"it has the signatures {', '.join(signatures)}, and one can be called")
        for key, names in signatures.items():
            runner = interpreter.get_signature_runner(key)
            found = {"inputs": runner.get_input_details(), "outputs": runner.get_output_details()}
            return {kind: {name: found[kind][name] for name in names[kind]} for kind in found}
        plain = {"inputs": interpreter.get_input_details(), "outputs": interpreter.get_output_details()}
        return {kind: {each["name"]: each for each in found} for kind, found in plain.items()}

    def interpreter(self) -> Any:
        if not hasattr(self.own, "interpreter"):
            self.own.interpreter = Interpreter(self.path, num_threads=self.threads)
            self.own.shapes = {}
        return self.own.interpreter

    def kernels(self) -> dict[str, int]:
        """Counts the computing operators; those with weights in int8 by names of their own."""
        counts: Counter[str] = Counter()
        for subgraph, operator, name in operators(read(self.path)):
            if name in COUNTED:
                weights = subgraph.tensors[operator.inputs[1]] if name in WEIGHTED else None
                in_int8 = weights is not None and weights.type == schema.TensorType.INT8
                counts[f"{name}_INT8" if in_int8 else name] += 1
        return dict(counts)

    def weights(self) -> list[Any]:
        """Returns the weights of products and convolutions, each once."""
        model = read(self.path)
        decoded = {
            (id(subgraph), operator.outputs[0]): operator.inputs[0]
            for subgraph, operator, name in operators(model)
            if name == "DEQUANTIZE"
        }
        found: dict[int, Any] = {}
        for subgraph, operator, name in operators(model):
            if name in WEIGHTED:
                place = decoded.get((id(subgraph), operator.inputs[1]), operator.inputs[1])
                tensor = subgraph.tensors[place]
                data = model.buffers[tensor.buffer].data
                if data is not None:
                    found[tensor.buffer] = np.frombuffer(data, STORED[tensor.type])
        return list(found.values())

    def place(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the inputs of a call as the runtime takes them."""
        return inputs

    def call(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the outputs by name when they are computed."""
        interpreter = self.interpreter()
        shapes = {name: np.shape(value) for name, value in batch.items()}
        if shapes != self.own.shapes:
            for name, shape in shapes.items():
                interpreter.resize_tensor_input(self.places["inputs"][name], shape, strict=True)
            interpreter.allocate_tensors()
            self.own.shapes = shapes
        for name, value in batch.items():
            interpreter.set_tensor(self.places["inputs"][name], value)
        interpreter.invoke()
        return {name: interpreter.get_tensor(place) for name, place in self.places["outputs"].items()}

    def arrays(self, outputs: dict[str, Any]) -> dict[str, Any]:
        return outputs


def cores() -> int:
    """Returns the number of cores that this process may use: in a container, or by taskset, fewer than there are."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read(path: str) -> Any:
    return schema.ModelT.InitFromPackedBuf(Path(path).read_bytes(), 0)


def operators(model: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yields each operator of a file with its subgraph and its name; of one that is no builtin, its own name."""
    for subgraph in model.subgraphs:
        for operator in subgraph.operators:
            code = model.operatorCodes[operator.opcodeIndex]
            builtin = max(code.builtinCode, code.deprecatedBuiltinCode)  # an older file has the deprecated one alone
            yield subgraph, operator, (code.customCode or b"").decode() or OPERATORS[builtin]


def describe(details: Any) -> dict[str, Any]:
    shape = [size if size >= 0 else None for size in map(int, details["shape_signature"])]
    return {"shape": shape, "dtype": np.dtype(details["dtype"]).name}
