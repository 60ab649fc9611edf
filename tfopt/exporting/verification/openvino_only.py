"""Runs a model of OpenVINO with OpenVINO and NumPy, and without TensorFlow, Keras, ONNX or tfopt.

served.py loads this file in a process of its own.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

BLOCKED = ("tensorflow", "keras", "tf_keras", "onnx", "onnxruntime", "tfopt")
if __name__ == "served_runtime":
    # Its telemetry would fork this process as OpenVINO is imported, and report the use to its maker.
    sys.modules.update(dict.fromkeys((*BLOCKED, "openvino_telemetry")))  # type: ignore[arg-type]

import numpy as np  # noqa: E402
import openvino  # noqa: E402

PRODUCTS = ("Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData", "MatMul")
KERNELS = ("Convolution", "Deconvolution", "FullyConnected", "MatMul")  # of products, where they are executed
MOVES = ("Convert", "Subtract", "Multiply", "Reshape", "Transpose")  # between a constant and the product


class Runtime:
    """A model that OpenVINO runs on the processor, for served.py.

    With `threads` each call has so many. Calls at the same time then need a stream each.
    """

    blocked = BLOCKED
    callers = 1  # at the same time
    open_sizes = False  # whether calls run the model as it was read, and not compiled for their sizes

    def load(self, path: str, threads: int | None = None) -> dict[str, Any]:
        core, self.threads = openvino.Core(), threads
        self.core, self.lock, self.own = core, threading.Lock(), threading.local()
        self.compiled: dict[str, Any] = {}
        started = time.perf_counter()
        self.model = core.read_model(path)
        self.load_ms = (time.perf_counter() - started) * 1e3
        self.names = [each.any_name for each in self.model.outputs]
        return {
            "inputs": {each.any_name: describe(each) for each in self.model.inputs},
            "outputs": {each.any_name: describe(each) for each in self.model.outputs},
            "runtime": f"OpenVINO {openvino.__version__.split('-')[0]}",
            "threads": threads or 0,  # 0 is one for each core
            "devices": ["CPU"],
        }

    def kernels(self) -> dict[str, int]:
        """Counts the products of the graph that OpenVINO executes, for the sizes of the last call if there was one."""
        counts: Counter[str] = Counter()
        executed = next(reversed(self.compiled.values()), None) or self.compile(self.model)
        for node in executed.get_runtime_model().get_ops():
            kind = str(node.rt_info["layerType"].astype(str))
            if kind in KERNELS:
                in_int8 = node.input_value(0).get_element_type() in (openvino.Type.u8, openvino.Type.i8)
                counts[f"{kind}_int8" if in_int8 else kind] += 1
        # A loop is one node there, and so is the attention of a head. Their products are in float.
        inside = len(list(products(self.model))) - sum(counts.values())
        return dict(counts + Counter(MatMul=inside))

    def weights(self) -> list[Any]:
        """Returns the weights of products and convolutions, each once."""
        found: dict[str, Any] = {}
        for node in products(self.model):
            source = node.input_value(1).get_node()
            while source.get_type_name() in MOVES:
                source = source.input_value(0).get_node()
            if source.get_type_name() == "Constant":
                found[source.get_friendly_name()] = source.data
        return list(found.values())

    def place(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the inputs of a call as the runtime takes them."""
        return inputs

    def call(self, batch: dict[str, Any]) -> list[Any]:
        """Returns the outputs when they are computed. They last until this thread's next call."""
        request = self.request({name: value.shape for name, value in batch.items()})
        request.infer(batch, share_inputs=True, share_outputs=True)
        return [each.data for each in request.output_tensors]

    def compile(self, model: Any) -> Any:
        # Without the first hint, OpenVINO computes in bfloat16 where the processor has it, and multiplies stored int8
        # weights with activations that it rounds to 8 bits.
        settings: dict[str, Any] = {"EXECUTION_MODE_HINT": "ACCURACY", "PERFORMANCE_HINT": "LATENCY"}
        if self.threads:
            settings |= {"NUM_STREAMS": self.callers, "INFERENCE_NUM_THREADS": self.callers * self.threads}
        return self.core.compile_model(model, "CPU", settings)

    def request(self, shapes: dict[str, tuple[int, ...]]) -> Any:
        """Returns this thread's request for inputs of these shapes, for each of which the model is compiled once.

        OpenVINO computes with known sizes much faster than with open ones.
        """
        requests = self.own.__dict__
        sizes = "open" if self.open_sizes else shapes
        key = f"{self.callers if self.threads else 1} {sizes}"  # OpenVINO chooses the streams without a number
        if key not in requests:
            with self.lock:
                if key not in self.compiled:
                    model = self.model.clone()
                    if not self.open_sizes:
                        model.reshape(shapes)
                    self.compiled[key] = self.compile(model)
            requests[key] = self.compiled[key].create_infer_request()
        return requests[key]

    def arrays(self, outputs: list[Any]) -> dict[str, Any]:
        return {name: value.copy() for name, value in zip(self.names, outputs, strict=True)}


def describe(port: Any) -> dict[str, Any]:
    sizes = port.get_partial_shape()
    shape = [size.get_length() if size.is_static else None for size in sizes] if sizes.rank.is_static else None
    return {"shape": shape, "dtype": np.dtype(port.get_element_type().to_dtype()).name}


def products(model: Any) -> Iterator[Any]:
    """Yields the products and convolutions of a model, and those of its loops and branches."""
    for node in model.get_ops():
        if node.get_type_name() in PRODUCTS:
            yield node
        for body in bodies(node):
            yield from products(body)


def bodies(node: Any) -> list[Any]:
    if node.get_type_name() in ("Loop", "TensorIterator"):
        return [node.get_function()]
    return [node.get_function(place) for place in range(2)] if node.get_type_name() == "If" else []
