"""From a Keras model or a SavedModel directory to a frozen graph in float32."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.forks import check_not_forked
from tfopt.compat.layers import called_in_training, input_signature, layers_inside
from tfopt.compat.plain import plain_operations
from tfopt.compat.tensorflow import leaves_with_paths, with_constants
from tfopt.errors import ArtifactError, ConfigError, UnsupportedModelError, warn
from tfopt.graph.checked_sizes import drop_size_checks
from tfopt.graph.convolutions import add_bias_of_groups_apart
from tfopt.graph.edit import AttrValue, GraphEditor, producer
from tfopt.graph.fold import fold_constants
from tfopt.graph.frozen import FrozenGraph, free_graphs, signature_name
from tfopt.graph.islands import islands, open_islands
from tfopt.graph.keras_file import first_line, load_keras
from tfopt.graph.loops import free_control_flow
from tfopt.graph.tables import REMEDY, read_tables
from tfopt.graph.unsafe_ops import check_graph, check_saved_model
from tfopt.graph.updates import drop_updates
from tfopt.settings.validation import check_stored
from tfopt.terminal import without_colors

HALF = (tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum)
FLOAT = tf.float32.as_datatype_enum
WIDENED = "_float32"
WHOLE = 64  # places on an axis, in place of an open size
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
TABLE_OPS = frozenset({"HashTable", "HashTableV2", "MutableHashTable", "MutableHashTableV2"})


def freeze(
    source: keras.Model | str | Path, signature: str = "serving_default", *, fold: bool = True, trusted: bool = False
) -> FrozenGraph:
    """Freezes a model for inference: its weights become constants, and half precision is widened.

    A model that was trained with mixed precision computes in float32 afterwards: its variables are float32 already, and
    only the training needs the casts to half precision.

    Args:
        source: A built Keras model (functional, Sequential or subclassed), a .keras file, or a SavedModel
            directory.
        signature: The signature to take from a SavedModel directory.
        fold: Whether to simplify the graph: constant parts are computed, and batch normalisation is folded into the
            weights before it.
        trusted: Whether the model may touch files and the network when it runs, and a .keras file may hold code.
    Returns: The graph.
    Raises:
        UnsupportedModelError: The model is not built, its graph keeps state that cannot become a constant, or it would
            touch files, the network or Python when it runs. Of a SavedModel this is found before it is loaded.
        ArtifactError: The directory holds no loadable SavedModel, or the .keras file cannot be loaded.
        ConfigError: The SavedModel has no such signature.
    Warns:
        TfoptWarning: The model calls layers with training=True, which inference does not follow.
    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="tiny")
        >>> frozen = freeze(model)
        >>> list(frozen.inputs), list(frozen.outputs)
        (['keras_tensor...'], ['output_0'])
    """
    check_not_forked()
    if isinstance(source, (str, Path)) and Path(source).suffix == ".keras":
        source = load_keras(Path(source), trusted)
    if isinstance(source, (str, Path)):
        function, name = saved_model_function(Path(source), signature, trusted), Path(source).name
        outputs = _name_outputs(function.structured_outputs)  # sorted, as they are flattened
    elif isinstance(source, keras.Model):
        function, name = _keras_function(source), source.name
        _warn_of_training(source)
        outputs = _name_outputs(function.structured_outputs)
    else:
        raise ConfigError(
            "source must be a keras.Model or the directory of a SavedModel. "
            f"Received: {type(source).__name__}. Pass the model itself, or its directory as a str or Path."
        )
    check_graph(function.graph.as_graph_def(), name, trusted=trusted)
    returned, readers = [tensor.name for tensor in function.outputs], dict[str, Any]()
    try:
        frozen = with_constants(
            function, lambda graph_def: readers.update(drop_updates(graph_def, returned, name)), open_islands
        )
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedModelError(
            f"A frozen model must not change its own variables. Received: {name!r} ({reason}). "
            "Stateful recurrent layers, counters and random layers that run at inference cannot be frozen; make them "
            "stateless or leave them outside the exported part."
        ) from error
    graph_def = frozen.graph.as_graph_def()
    stateful = sorted({node.op for node in graph_def.node} & TABLE_OPS)
    if stateful:
        raise UnsupportedModelError(
            f"A frozen model must not make look-up tables when it runs. Received: {name!r} with the ops "
            f"{', '.join(stateful)}. {REMEDY}"
        )
    held = {producer(inner.name): outer for outer, inner in function.graph.captures if outer.dtype == tf.resource}
    names = [producer(tensor.name) for tensor in frozen.inputs]
    handles = {node: held[node] for node in names if node in held}
    tables = read_tables(handles, readers, name)
    names = [node for node in names if node not in handles]
    specs = {
        signature_name(spec.name or node): tf.TensorSpec(tensor.shape, _widened(tensor.dtype), name=node)
        for spec, node, tensor in zip(_input_specs(function), names, frozen.inputs[: len(names)], strict=True)
    }
    if len(specs) < len(names):
        raise UnsupportedModelError(
            f"The inputs of a model must have names that differ in letters and digits. Received: {name!r} with "
            f"{[spec.name or node for spec, node in zip(_input_specs(function), names, strict=True)]}. Rename one."
        )
    strings = [key for key, tensor in zip(outputs, frozen.outputs, strict=True) if tensor.dtype == tf.string]
    if strings:
        raise UnsupportedModelError(
            f"The outputs of a frozen model must be numbers. Received: {name!r} with the string outputs {strings}. "
            "Look the strings up outside the model and export the part that gives numbers."
        )
    if not isinstance(source, keras.Model):  # a loaded SavedModel sorts its inputs alphabetically: x_10 before x_9
        specs = dict(sorted(specs.items(), key=lambda item: _numbers_by_value(item[0])))
    widened = _widen(graph_def)
    free_control_flow(widened)
    for node, reason in islands(widened).items():
        warn(f"XLA still compiles {node!r} of {name!r} alone, as in the source: {reason}. It may run slowly on a CPU.")
    graph = FrozenGraph(
        graph_def=widened,
        inputs=specs,
        outputs={
            key: (_short(tensor.name), tf.TensorSpec(tensor.shape, _widened(tensor.dtype)))
            for key, tensor in zip(outputs, frozen.outputs, strict=True)
        },
        name=name,
        tables=tables,
    )
    del function, frozen
    free_graphs(graph_def)
    checked = any(node.op == "EnsureShape" for node in widened.node)
    if checked or len(tables) < len(handles):  # nodes that no output needs read a table or change one
        editor = GraphEditor(graph.graph_def)
        graph = graph.edited(editor, drop_size_checks(editor, specs))
    return fold_constants(graph) if fold else _runs_anywhere(graph)


def _runs_anywhere(graph: FrozenGraph) -> FrozenGraph:
    """Returns a graph whose grouped convolutions every processor computes, as folding leaves them."""
    if not any(node.op == "Conv2D" for node in graph.graph_def.node):
        return graph
    editor = GraphEditor(graph.graph_def, graph.origins)
    add_bias_of_groups_apart(editor, graph.shapes)
    return graph.edited(editor)


def _check_names(model: keras.Model) -> None:
    """Refuses names that TensorFlow does not take: Keras' scopes are not what they were after such an error."""
    for layer in layers_inside(model):
        if isinstance(layer, keras.layers.InputLayer):  # which has no scope
            continue
        if not re.fullmatch(r"[A-Za-z0-9._\\/>-]*", layer.name) or (layer is model and layer.name[:1] in "_\\/>-"):
            raise UnsupportedModelError(
                "model and its layers must have names of ASCII letters, digits and _.-, which TensorFlow takes. "
                f"Received: {layer.name!r}. Make the layer with another name, and take the weights over."
            )


def _keras_function(model: keras.Model) -> Any:
    _check_names(model)
    try:
        specs = input_signature(model)
    except (ValueError, AttributeError) as error:  # the latter of a Sequential with a layer that could not be called
        raise UnsupportedModelError(
            f"model must be built. Received: {model.name!r} "
            f"({type(model).__name__}), which has no input shape yet. Call it once on a batch of real shape."
        ) from error
    named = [tf.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in _name_inputs(specs)]

    def serve(*tensors: Any) -> Any:
        with plain_operations(gradients=False):
            return model(*tf.nest.pack_sequence_as(specs, tensors), training=False)

    try:
        return tf.function(serve, autograph=False).get_concrete_function(*named)
    except (ValueError, TypeError) as error:
        raise _not_traced(model, serve, named, error) from error


def _warn_of_training(model: keras.Model) -> None:
    layers = called_in_training(model)
    if layers:
        warn(
            f"{model.name!r} was built with training=True for {', '.join(map(repr, layers))}. Frozen for inference, it "
            "computes what model.predict computes: with training=False, so nothing is random. If you need the random "
            "outputs of model(x), as for Monte Carlo dropout, call the Keras model; if not, leave training=True out."
        )


def _not_traced(
    model: keras.Model, serve: Callable[..., Any], inputs: Sequence[tf.TensorSpec], error: Exception
) -> UnsupportedModelError:
    """Returns the error for a model that cannot be called with its inputs."""
    lines = [line.strip() for line in without_colors(str(error)).splitlines() if line.strip()]
    received = f"{model.name!r} ({' '.join(lines[:2])[:300]})"
    shapes = {spec.name: spec.shape.as_list() if spec.shape.rank else [] for spec in inputs}
    if any(None in sizes[1:] for sizes in shapes.values()) and _runs_with_whole_sizes(serve, inputs):
        return UnsupportedModelError(
            f"Each layer must compute with the open sizes of the model's inputs, {shapes}. Received: {received}. Give "
            "keras.Input whole sizes in place of None, and copy the weights with set_weights; or use a layer that "
            "takes open sizes, such as UpSampling2D with interpolation='nearest'."
        )
    if _takes_several_arguments(model):
        return UnsupportedModelError(
            f"model must run on its first argument alone. Received: {received}. Let its call() take several inputs as "
            "one list or dict."
        )
    return UnsupportedModelError(
        f"model must run on inputs of its shapes, {shapes}. Received: {received}. Call it on a batch of data to see "
        "which layer fails."
    )


def _takes_several_arguments(model: keras.Model) -> bool:
    """Returns whether call() has further arguments behind the inputs."""
    parameters = inspect.signature(model.call).parameters.values()
    return len([each for each in parameters if each.kind in POSITIONAL and each.name not in ("training", "mask")]) > 1


def _runs_with_whole_sizes(serve: Callable[..., Any], inputs: Sequence[tf.TensorSpec]) -> bool:
    """Returns whether a function takes inputs whose open sizes are whole, such as UpSampling2D(bilinear) needs."""
    whole = [[size or WHOLE for size in spec.shape.as_list()] if spec.shape.rank else spec.shape for spec in inputs]
    try:
        tf.function(serve, autograph=False).get_concrete_function(
            *(tf.TensorSpec(shape, spec.dtype, name=spec.name) for shape, spec in zip(whole, inputs, strict=True))
        )
    except (ValueError, TypeError):
        return False
    return True


def _name_inputs(specs: Any) -> list[tuple[str, Any]]:
    """Returns the inputs of a Keras model with names: of the Input layer, else the key in a dict, else input_0, ...

    Names that TensorFlow does not take for a node become those that it gives their arguments, without its warning.
    """
    unnamed = (f"input_{number}" for number in itertools.count())
    paths = leaves_with_paths(specs)
    named = [(spec.name or (path[-1] if isinstance(path[-1], str) else next(unnamed)), spec) for path, spec in paths]
    taken = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
    return [(name if taken.fullmatch(name) else signature_name(name), spec) for name, spec in named]


def saved_model_function(directory: Path, signature: str, trusted: bool) -> Any:
    """Returns the concrete function of a signature of a SavedModel. It is refused if it would touch files or Python."""
    if directory.is_file():
        raise ArtifactError(
            f"source must be a .keras file or the directory of a SavedModel. Received: {directory}, another file. Load "
            "it with keras.models.load_model, and pass the model."
        )
    check_stored("A file of a SavedModel", directory / "saved_model.pb")
    if not (directory / "saved_model.pb").is_file():
        raise ArtifactError(
            f"source must be the directory of a SavedModel. Received: {directory}, which holds no saved_model.pb. "
            "Check the path."
        )
    for file in directory.rglob("*"):
        check_stored("A file of a SavedModel", file)  # TensorFlow would wait for the writer of a pipe
    if not trusted:
        check_saved_model(directory)
    try:
        loaded = tf.saved_model.load(str(directory))
    except Exception as error:  # a damaged file fails in many ways, from IndexError to RuntimeError
        raise ArtifactError(
            f"source must be a loadable SavedModel. Received: {directory} ({first_line(error)}). Save it again."
        ) from error
    if signature not in loaded.signatures:
        raise ConfigError(
            f"The SavedModel must have the signature {signature!r}. Received: {directory}, which has "
            f"{', '.join(map(repr, loaded.signatures)) or 'none'}. Save it with this one."
        )
    function = loaded.signatures[signature]
    function.tfopt_keep_alive = loaded  # its variables are freed together with the loaded object
    return function


def _input_specs(function: Any) -> list[Any]:
    return [spec for spec in tf.nest.flatten(function.structured_input_signature) if isinstance(spec, tf.TensorSpec)]


def _numbers_by_value(name: str) -> list[Any]:
    """Returns a sort key that keeps the inputs that Keras numbers in the order in which they were created."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _name_outputs(outputs: Any) -> dict[str, Any]:
    """Names a Keras model's outputs as `model.export` does: dict keys as they are, else output_0, output_1, ..."""
    if isinstance(outputs, Mapping) and not any(tf.nest.is_nested(value) for value in outputs.values()):
        return {key: outputs[key] for key in sorted(outputs)}
    return {f"output_{index}": tensor for index, tensor in enumerate(tf.nest.flatten(outputs))}


def _short(tensor: str) -> str:
    return tensor.removesuffix(":0")


def _widened(dtype: Any) -> Any:
    return tf.float32 if dtype.as_datatype_enum in HALF else dtype


def _widen(graph_def: Any) -> Any:
    """Rewrites every half-precision type in the graph to float32."""
    result = type(graph_def)()
    result.CopyFrom(graph_def)
    nodes = [*result.node, *(node for function in result.library.function for node in function.node_def)]
    _widen_functions(result, nodes)
    for node in nodes:
        halves = [key for key, value in node.attr.items() if value.type in HALF]
        for key in halves:
            node.attr[key].type = FLOAT
        for value in node.attr.values():
            listed = [FLOAT if kind in HALF else kind for kind in value.list.type]
            if listed:
                value.list.ClearField("type")
                value.list.type.extend(listed)
        if halves and node.op == "Const":
            array = tf.make_ndarray(node.attr["value"].tensor).astype(np.float32)
            node.attr["value"].CopyFrom(AttrValue(tensor=tf.make_tensor_proto(array)))
    # A function body keeps such casts, since its tensor names contain the name of the op's output. They cost nothing.
    for node in result.node:
        if node.op == "Cast" and node.attr["SrcT"].type == node.attr["DstT"].type:
            node.op = "Identity"
            kind = node.attr["DstT"].type
            node.ClearField("attr")
            node.attr["T"].type = kind
    return result


def _widen_functions(graph_def: Any, nodes: list[Any]) -> None:
    """Widens the signatures of the bodies of loops and branches.

    They get new names. Otherwise TensorFlow would use the function of this name that it knows already.
    """
    if not any(value.type in HALF for node in nodes for value in node.attr.values()):
        return
    for function in graph_def.library.function:
        function.signature.name += WIDENED
        for argument in (*function.signature.input_arg, *function.signature.output_arg):
            argument.type = FLOAT if argument.type in HALF else argument.type
    for node in nodes:
        for value in node.attr.values():
            for called in [value.func, *value.list.func]:
                if called.name:
                    called.name += WIDENED
