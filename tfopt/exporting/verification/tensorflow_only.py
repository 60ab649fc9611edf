"""Runs a SavedModel with TensorFlow and NumPy, and without tfopt or Keras. So it proves what the artifact needs.

served.py loads this file in a process of its own.
"""

import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BLOCKED = ("keras", "tf_keras", "tfopt")
if __name__ == "served_runtime":
    # TensorFlow imports Keras if it is installed. With None in sys.modules, no module can import it.
    sys.modules.update(dict.fromkeys(BLOCKED))  # type: ignore[arg-type]

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel  # noqa: E402

try:  # Private, as tfopt.compat.tensorflow.with_constants is, which cannot be imported here.
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
except ImportError as error:
    raise ImportError(
        "tensorflow.python.framework.convert_to_constants.convert_variables_to_constants_v2 must exist, as in "
        f"tensorflow 2.21, with which tfopt was tested. Received: none, in tensorflow {tf.__version__}. "
        "Install the tested version: pip install 'tensorflow==2.21.*'."
    ) from error

# Ops whose weights are counted. The weights are their second input.
COUNTED = (
    *("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv2DBackpropInput", "MatMul", "BatchMatMulV2", "Einsum"),
    *("_FusedQuantizedConv2D", "_FusedQuantizedDepthwiseConv2D", "_QuantizedMatMul"),
)
LOOPS = ("While", "StatelessWhile")
UNKNOWN_OP = "Op type not registered"
CONVERSIONS = ("QuantizeV2", "Dequantize", "QuantizedMaxPool")


class Runtime:
    """A SavedModel that TensorFlow runs, for served.py."""

    blocked = BLOCKED

    def load(self, path: str, signature: str, threads: int | None = None) -> dict[str, Any]:
        if threads is not None:  # before TensorFlow makes its threads
            tf.config.threading.set_intra_op_parallelism_threads(threads)
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)  # it is shared with other artifacts' processes
        started = time.perf_counter()
        try:
            self.model = tf.saved_model.load(path)  # keeps its variables alive
            signatures = self.model.signatures
        except RuntimeError as error:
            if UNKNOWN_OP not in str(error):
                raise
            signatures = {signature: load_signature(path, signature)}
        self.load_ms = (time.perf_counter() - started) * 1e3
        check_signature(signature, signatures)
        self.serve = signatures[signature]
        # Every signature has the same weights, but they cannot be read in the signature that XLA compiles.
        self.default = signatures.get("serving_default", self.serve)
        outputs = self.serve.structured_outputs
        return {
            "inputs": {name: describe(spec) for name, spec in self.serve.structured_input_signature[1].items()},
            "outputs": {name: describe(spec) for name, spec in outputs.items()},
            "runtime": f"TensorFlow {tf.__version__}",
            "tensorflow": tf.__version__,
            "threads": tf.config.threading.get_intra_op_parallelism_threads(),  # 0 is one for each core
            "devices": [device.device_type for device in tf.config.list_physical_devices()],
            "kernels": count_kernels(self.serve),
        }

    def weights(self) -> list[Any]:
        """Returns the weights of products and convolutions, each once."""
        return weights_of(self.default)

    def place(self, inputs: dict[str, Any]) -> dict[str, tf.Tensor]:
        """Returns the inputs of a call as the runtime takes them."""
        return {name: tf.constant(value) for name, value in inputs.items()}

    def call(self, batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the outputs by name when they are computed."""
        outputs = self.serve(**batch)
        next(iter(outputs.values())).numpy()  # waits for a GPU
        return dict(outputs)

    def arrays(self, outputs: dict[str, tf.Tensor]) -> dict[str, Any]:
        arrays = {name: value.numpy() for name, value in outputs.items()}
        return {name: value.astype(np.bytes_) if value.dtype == object else value for name, value in arrays.items()}


def describe(spec: tf.TensorSpec) -> dict[str, Any]:
    return {"shape": spec.shape.as_list() if spec.shape.rank is not None else None, "dtype": spec.dtype.name}


def load_signature(path: str | Path, signature: str) -> Any:
    """Loads one signature of an artifact that TensorFlow cannot load as a whole.

    `tf.saved_model.load` reads the functions of all signatures, and fails on an unknown op in any of them. Builds
    without oneDNN do not know the int8 kernels. So this function gives it a copy without the other signatures.

    Args:
        path: The artifact's directory. Its weights must be constants.
        signature: The signature's name, for example "serving_float".
    Returns: A function of the inputs by name, which returns a dict of the outputs.
    """
    whole = SavedModel.FromString(Path(path, "saved_model.pb").read_bytes()).meta_graphs[0]
    check_signature(signature, whole.signature_def)
    definition = whole.signature_def[signature]
    saved = SavedModel(saved_model_schema_version=1)
    part = saved.meta_graphs.add()
    part.meta_info_def.tags.extend(whole.meta_info_def.tags)
    part.signature_def[signature].CopyFrom(definition)
    part.graph_def.versions.CopyFrom(whole.graph_def.versions)
    needed = sources(whole.graph_def.node, [output.name for output in definition.outputs.values()])
    part.graph_def.node.extend(node for node in whole.graph_def.node if node.name in needed)
    called = called_functions(whole.graph_def, part.graph_def.node)
    part.graph_def.library.function.extend(called.values())
    with tempfile.TemporaryDirectory(prefix="tfopt-") as directory:
        Path(directory, "saved_model.pb").write_bytes(saved.SerializeToString())
        return tf.saved_model.load(directory).signatures[signature]


def check_signature(signature: str, signatures: Iterable[str]) -> None:
    if signature not in signatures:
        raise ValueError(f"it has no signature {signature!r}, only {', '.join(map(repr, signatures))}")


def sources(nodes: Iterable[Any], tensors: Iterable[str]) -> set[str]:
    by_name = {node.name: node for node in nodes}
    waiting = list(tensors)
    found: set[str] = set()
    while waiting:
        name = waiting.pop().lstrip("^").split(":")[0]
        if name not in found:
            found.add(name)
            waiting += by_name[name].input
    return found


def called_functions(graph_def: Any, nodes: Iterable[Any]) -> dict[str, Any]:
    """Returns by name the functions of a graph that nodes call, and all functions that these call."""
    bodies = {body.signature.name: body for body in graph_def.library.function}
    found: dict[str, Any] = {}
    waiting = [nodes]
    while waiting:
        for node in waiting.pop():
            names = {function.name for value in node.attr.values() for function in (value.func, *value.list.func)}
            new = {name: bodies[name] for name in names & bodies.keys() - found.keys()}
            found |= new
            waiting += [body.node_def for body in new.values()]
    return found


def count_kernels(function: Any) -> dict[str, int]:
    """Counts the computing ops of a function and of all functions that it calls."""
    graph = function.graph.as_graph_def()
    bodies = [body.node_def for body in called_functions(graph, graph.node).values()]
    kernels: dict[str, int] = {}
    for node in (node for nodes in (graph.node, *bodies) for node in nodes):
        if node.op in CONVERSIONS or node.op in COUNTED:
            kernels[node.op] = kernels.get(node.op, 0) + 1
    return kernels


def weights_of(function: Any) -> list[Any]:
    """Returns the weights of a function's computing ops. Those of quantized types are plain integers of their size."""
    keep_quantized(function.graph.variables)
    inlined = convert_variables_to_constants_v2(function, lower_control_flow=False)
    bodies = {body.signature.name: body for body in inlined.graph.as_graph_def().library.function}
    sources = {}
    for operation in inlined.graph.get_operations():
        read = [operation.inputs[1]] if operation.type in COUNTED else []
        if operation.type in LOOPS:
            read = [operation.inputs[place] for place in weights_of_loop(bodies[operation.get_attr("body").name])]
        for tensor in read:
            while tensor.op.type == "Identity":
                tensor = tensor.op.inputs[0]
            if is_constant(tensor):
                sources[tensor.name] = tensor
    # A weight in fewer bits is counted after it has been decoded.
    weights = [value.numpy() for value in inlined.prune([], list(sources.values()))()] if sources else []
    return [array.view(plain(array.dtype)) for array in weights]


def keep_quantized(variables: Iterable[Any]) -> None:
    """Lets the NumPy array of a quantized variable be of its dtype. TensorFlow gives plain integers, and fails on them.

    As `tfopt.compat.tensorflow.with_constants` does.
    """
    for variable in variables:
        if variable.dtype.is_quantized:
            values = variable.numpy().view(variable.dtype.as_numpy_dtype)
            variable.numpy = lambda values=values: values


def weights_of_loop(body: Any) -> set[int]:
    """Returns the places of the inputs of a loop that its body computes with and hands on unchanged."""
    nodes = {node.name: node for node in body.node_def}
    places = {argument.name: place for place, argument in enumerate(body.signature.input_arg)}

    def place(tensor: str) -> int | None:
        name = tensor.split(":")[0]
        while name in nodes and nodes[name].op == "Identity":
            name = nodes[name].input[0].split(":")[0]
        return places.get(name)

    kept = {here for here, output in enumerate(body.signature.output_arg) if place(body.ret[output.name]) == here}
    read = {place(node.input[1]) for node in body.node_def if node.op in COUNTED}
    return {here for here in read if here in kept}


def is_constant(tensor: Any) -> bool:
    waiting = [tensor.op]
    seen: set[Any] = set()
    while waiting:
        operation = waiting.pop()
        if operation.type == "Placeholder" or (not operation.inputs and operation.type != "Const"):
            return False
        new = {source.op for source in operation.inputs} - seen
        seen |= new
        waiting += new
    return True


def plain(dtype: Any) -> Any:
    """Returns the integer dtype of a quantized dtype, which NumPy has as a record of one integer."""
    return dtype if dtype.names is None else dtype[0]
