"""A frozen inference graph: every weight a constant, with the signature that a SavedModel will serve."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.compat.tensorflow import register_functions
from tfopt.errors import ConfigError, warn
from tfopt.graph.checked_sizes import check_sizes
from tfopt.graph.edit import GraphEditor, producer
from tfopt.graph.tables import Table

LARGE = 4096  # bytes; constants from which shapes are computed are smaller
HEAVY = 2**27  # bytes; to free a smaller graph at once is not worth a second
# Words in the lines of a runtime's errors that do not give the reason.
UNTOLD = (
    *("Graph execution error", "Detected at node", "<stack traces", "  File ", "Node: "),
    *("Exception from src/", "Check '"),  # OpenVINO's
)


@dataclass(frozen=True, kw_only=True)
class FrozenGraph:
    """A GraphDef without variables, with its inputs and outputs.

    Attributes:
        graph_def: The nodes. Inputs are Placeholder nodes.
        inputs: Signature name to the placeholder's TensorSpec; the spec's name is the node's.
        outputs: Signature name to (tensor name, TensorSpec).
        origins: The name of each node that a rewrite added in place of another one, to the name of that other node. The
            two have the same values, possibly in another shape or order of axes. A graph that is written to a file
            loses this table.
        tables: The look-up table that each placeholder of a resource stands for, by the node's name.
    """

    graph_def: Any
    inputs: Mapping[str, tf.TensorSpec]
    outputs: Mapping[str, tuple[str, tf.TensorSpec]]
    name: str
    origins: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)

    @property
    def output_nodes(self) -> frozenset[str]:
        """Names of the nodes whose values leave the graph."""
        return frozenset(tensor.split(":")[0] for tensor, _ in self.outputs.values())

    @property
    def has_doubles(self) -> bool:
        """Whether it has tensors of float64, for which other runtimes have few kernels."""
        types = {value.type for node in self.graph_def.node for value in node.attr.values()}
        return tf.float64.as_datatype_enum in types

    def edited(self, editor: GraphEditor, moved: Mapping[str, str] = MappingProxyType({})) -> FrozenGraph:
        """Returns the edited graph: the nodes that the outputs need, and all placeholders.

        An output whose tensor is in `moved` becomes the tensor that took its place.
        """
        outputs = {key: (moved.get(tensor, tensor), spec) for key, (tensor, spec) in self.outputs.items()}
        edited = replace(self, outputs=outputs, origins={**self.origins, **editor.origins})
        placeholders = [spec.name for spec in self.inputs.values()]
        return replace(edited, graph_def=editor.graph_def(edited.output_nodes, keep=placeholders))

    def shapes(self) -> dict[str, tf.TensorShape]:
        """Returns the shape of each tensor by its name, as far as TensorFlow infers it."""
        with tf.Graph().as_default() as graph:
            tf.graph_util.import_graph_def(without_weights(self.graph_def), name="")
        return {
            tensor.name.removesuffix(":0"): tensor.shape
            for operation in graph.get_operations()
            for tensor in operation.outputs
        }

    def as_function(self, fetch: Sequence[str] | None = None, *, unchecked: Collection[str] = ()) -> Callable[..., Any]:
        """Returns a tf.function of the inputs by name.

        Without `fetch` the function raises InvalidArgumentError for an input of other sizes than the signature fixes.

        Args:
            fetch: Names of tensors. The function returns their values as a list, in place of the outputs by name.
            unchecked: Names of inputs that are given in the right shape always.
        """
        placeholders = {spec.name for spec in self.inputs.values()} | self.tables.keys()
        tables = {full_name(name): table.held.resource_handle for name, table in self.tables.items()}
        read = {full_name(tensor) for node in self.graph_def.node for tensor in node.input}
        # With `fetch` a graph runs only a few times. TensorFlow would need longer to optimize a graph that holds the
        # weights than to run it, so the weights are passed in.
        held = {} if fetch is None else _large_constants(self.graph_def, read)
        body = type(self.graph_def)(versions=self.graph_def.versions, library=self.graph_def.library)
        left_out = placeholders.union(producer(tensor) for tensor in held)
        body.node.extend(node for node in self.graph_def.node if node.name not in left_out)
        register_functions(self.graph_def.library.function)
        wanted = [tensor for tensor, _ in self.outputs.values()] if fetch is None else list(fetch)

        def serve(**inputs: Any) -> Any:
            checked = self.inputs.keys() - set(unchecked) if fetch is None else ()
            given = {
                f"{spec.name}:0": check_sizes(spec, inputs[name]) if name in checked else inputs[name]
                for name, spec in self.inputs.items()
            }
            given |= {tensor: tf.identity(value) for tensor, value in (held | tables).items()}
            computed = [tensor for tensor in wanted if full_name(tensor) not in given]
            elements = tf.graph_util.import_graph_def(
                body,
                input_map={key: value for key, value in given.items() if key in read},
                return_elements=[full_name(tensor) for tensor in computed],
                name="",
            )
            values = dict(zip(computed, elements, strict=True))
            tensors = [values[t] if t in values else given[full_name(t)] for t in wanted]
            if fetch is not None:
                return tensors
            for tensor, (_, spec) in zip(tensors, self.outputs.values(), strict=True):
                tensor.set_shape(spec.shape)  # quantized kernels have no shape inference of their own
            return dict(zip(self.outputs, tensors, strict=True))

        signature = {name: tf.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in self.inputs.items()}
        return tf.function(serve, autograph=False).get_concrete_function(**signature)

    def predict(self, inputs: Any) -> dict[str, np.ndarray]:
        """Runs the graph on one batch: an array, a sequence of arrays, or a dict by input name."""
        function = self.as_function(fetch=[tensor for tensor, _ in self.outputs.values()])
        values = function(**self.feed(inputs, warn=False))
        return {name: value.numpy() for name, value in zip(self.outputs, values, strict=True)}

    def feed(self, inputs: Any, *, warn: bool = True) -> dict[str, tf.Tensor]:
        """Returns the arrays of a batch by input name, in the dtypes of the inputs.

        The batch is an array, a sequence of arrays, or a dict. With `warn`, a conversion that may change what the
        values mean gives a warning.

        Raises:
            ConfigError: The batch does not hold the model's inputs, or not in their shapes or dtypes.
        """
        if isinstance(inputs, Mapping):
            arrays = {signature_name(name): value for name, value in inputs.items()}
        else:
            arrays = dict(zip(self.inputs, inputs if isinstance(inputs, (tuple, list)) else [inputs], strict=False))
        try:
            given = {name: tf.convert_to_tensor(arrays[name]) for name in self.inputs}
        except (KeyError, TypeError, ValueError, tf.errors.OpError) as error:
            raise ConfigError(
                f"Each batch must give the model's inputs {list(self.inputs)}. Received: {_describe(inputs)}."
            ) from error
        fed = {name: convert(name, given[name], spec.dtype, warn=warn) for name, spec in self.inputs.items()}
        for name, value in fed.items():
            if not self.inputs[name].shape.is_compatible_with(value.shape):
                raise ConfigError(
                    f"Each batch must have the shape of input {name!r}, {self.inputs[name].shape}. "
                    f"Received: a batch of shape {value.shape}. Pass whole batches of examples."
                )
        return fed


def signature_name(name: str) -> str:
    """Returns the name of an input in a signature, which TensorFlow makes an argument of a function.

    Example:
        >>> signature_name("image-1/x"), signature_name("2nd"), signature_name("self")
        ('image_1_x', 'arg_2nd', 'arg_self')
    """
    letters = "".join(each if each.isascii() and each.isalnum() else "_" for each in name.split(":")[0])
    return letters if letters[:1].isalpha() and letters != "self" else f"arg_{letters}"


def free_graphs(graph_def: Any) -> None:
    """Frees TensorFlow's own copies of a large graph when nothing uses them any more.

    The copies hold the weights several times, and refer to each other in cycles. Python collects cycles after it has
    made many new objects, whatever the size of the old ones.
    """
    if graph_def.ByteSize() > HEAVY:
        gc.collect()


def without_weights(graph_def: Any) -> Any:
    """Returns a graph with placeholders in place of its large constants, which TensorFlow imports faster."""
    light = type(graph_def)(versions=graph_def.versions, library=graph_def.library)
    for node in graph_def.node:
        if _is_large(node):
            placeholder = light.node.add(name=node.name, op="Placeholder")
            placeholder.attr["dtype"].CopyFrom(node.attr["dtype"])
            placeholder.attr["shape"].shape.CopyFrom(node.attr["value"].tensor.tensor_shape)
        else:
            light.node.append(node)
    return light


def _large_constants(graph_def: Any, read: Collection[str]) -> dict[str, tf.Tensor]:
    """Returns the large constants that nodes of a graph read, by tensor name."""
    return {
        full_name(node.name): tf.constant(tf.make_ndarray(node.attr["value"].tensor))
        for node in graph_def.node
        if _is_large(node) and full_name(node.name) in read
    }


def _is_large(node: Any) -> bool:
    return node.op == "Const" and node.attr["value"].tensor.ByteSize() > LARGE


def _describe(inputs: Any) -> str:
    if isinstance(inputs, Mapping):
        return f"a dict with {sorted(inputs)}"
    return f"{len(inputs)} arrays" if isinstance(inputs, (tuple, list)) else f"an array of shape {np.shape(inputs)}"


def reason_of(message: str) -> str:
    """Returns the line of an error of TensorFlow, or of OpenVINO, that gives the reason.

    Example:
        >>> reason_of("RuntimeError: Exception from src/core.cpp:84:\\nCheck 'x' failed at src/a.cpp:1:\\nno weights")
        'no weights'
        >>> reason_of("Graph execution error:\\n\\nDetected at node a\\nindices[0] = 9 is not in [0, 5)")
        'indices[0] = 9 is not in [0, 5)'
    """
    lines = [line for line in message.splitlines() if line.strip()]
    return next((line.strip() for line in lines if not any(word in line for word in UNTOLD)), lines[0])


def full_name(tensor: str) -> str:
    """Returns a tensor name with its output number: "conv" becomes "conv:0".

    Example:
        >>> full_name("conv"), full_name("split:1")
        ('conv:0', 'split:1')
    """
    return tensor if ":" in tensor else f"{tensor}:0"


def convert(name: str, values: Any, dtype: Any, *, warn: bool = True) -> Any:
    """Returns the values of one input, a tensor, in the dtype that the model takes.

    A conversion that changes no meaning is silent: float64 to float32, as Keras does it with NumPy's usual arrays, or
    whole numbers to integers that can hold them. One that may change the meaning (uint8 pixels to float32), or that
    loses digits of a smaller type (float32 to float16), gives a warning. A conversion that loses more is an error: an
    imaginary part, a fraction, a number too large for an integer.

    Raises:
        ConfigError: The values do not fit the dtype.
    Example:
        >>> convert("tokens", tf.constant([1, 2], tf.int64), tf.int32).dtype
        tf.int32
    """
    given = values.dtype
    if given == dtype:
        return values
    if given == tf.string or dtype == tf.string or (given.is_complex and not dtype.is_complex):
        raise ConfigError(
            f"Input {name!r} must be given as {dtype.name}. Received: values of dtype {given.name}. "
            f"Convert them to {dtype.name} in the way that the model was trained on."
        )
    converted = tf.cast(values, dtype)
    if not dtype.is_floating and not dtype.is_complex:
        # The values are converted back to compare them: a number that is too large for its type wraps around.
        if not bool(tf.reduce_all(tf.cast(converted, given) == values)):
            raise ConfigError(
                f"Input {name!r} must be given as {dtype.name}. Received: {given.name} values that {dtype.name} cannot "
                "hold. Pass whole numbers within its range."
            )
    elif warn and not given.is_floating:
        _warn(name, given, dtype, "unscaled; if the model was trained on scaled values, scale these too")
    elif warn and given.size > dtype.size and dtype != tf.float32:
        _warn(name, given, dtype, f"rounded to the digits that {dtype.name} has")
    return converted


def _warn(name: str, given: Any, dtype: Any, how: str) -> None:
    warn(
        f"The examples for input {name!r} were converted from {given.name} to {dtype.name}, {how}. "
        f"Pass {dtype.name} values to avoid this warning."
    )
