"""Private names of TensorFlow, and the global random generators of both."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfopt.compat.checks import check_reads, imported, private
from tfopt.compat.replace import replaced
from tfopt.terminal import notices_hidden


def eager_seed() -> int | None:
    """Returns the seed of `tf.random.set_seed`: `_seed` of the eager context; None if it was not called."""
    return private(eager_context(), "_seed")


def eager_generator() -> Any:
    """Returns the random.Random that seeds eager operations: `_rng` of the eager context; it has no public state."""
    return private(eager_context(), "_rng")


def eager_context() -> Any:
    """Returns the state of eager execution: `context()` of tensorflow.python.eager; there is no public access."""
    return imported("tensorflow.python.eager.context", "context", takes=())()


@contextlib.contextmanager
def custom_gradients_forgotten() -> Iterator[None]:
    """Removes what TensorFlow registers of `tf.custom_gradient` in each trace, for what is traced in its block.

    The registry, `gradient_registry` of tensorflow.python.framework.ops, never lets go of an entry. Each holds the
    graph and what it has captured: all variables of the model and of its optimizer, whose sum over replicas has such a
    gradient even on one device. So each model that was trained stays in memory. A tape does not ask the registry for
    operations of its own graph, but the block must take all gradients that it needs. Functions that it calls keep
    theirs.
    """
    entries = private(imported("tensorflow.python.framework.ops", "gradient_registry"), "_registry")
    gradient_of = imported("tensorflow.python.framework.ops", "get_gradient_function", takes=("op",))
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    try:
        yield
    finally:
        found = set()
        for operation in graph.get_operations()[before:]:
            if operation.type == "IdentityN":
                with contextlib.suppress(LookupError):  # a block in this one has removed it
                    found.add(gradient_of(operation))
        for name, entry in list(entries.items()):
            if name.startswith("CustomGradient-") and entry["type"] in found:
                entries.pop(name, None)


def has_started() -> bool:
    """Returns whether TensorFlow has started its devices: `_context_handle` of the eager context.

    Every public question for the devices starts them, after which memory growth cannot be set.
    """
    return private(eager_context(), "_context_handle") is not None


def global_generator() -> tf.random.Generator | None:
    """Returns TensorFlow's generator if there is one: `tf.random.get_global_generator()` would make it."""
    return imported("tensorflow.python.ops.stateful_random_ops", "global_generator")


def keras_generator(*, make: bool) -> Any:
    """Returns Keras' global seed generator: keras.src.random.seed_generator. None if there is none and `make` is False.

    A layer without a seed of its own draws from it; there is no public access.
    """
    if make:
        return imported("keras.src.random.seed_generator", "global_seed_generator", takes=())()
    name = imported("keras.src.random.seed_generator", "GLOBAL_SEED_GENERATOR")
    return imported("keras.src.backend.common.global_state", "get_global_attribute")(name)


def is_op_determinism_enabled() -> bool:
    """Returns whether `tf.config.experimental.enable_op_determinism` was called; there is no getter."""
    return bool(imported("tensorflow.python.framework.config", "is_op_determinism_enabled", takes=())())


def uses_onednn() -> bool:
    """Returns whether TensorFlow computes with oneDNN: `IsMklEnabled` of tensorflow.python.util; there is no getter.

    TensorFlow turns oneDNN on where the processor has VNNI, bfloat16 or AMX, and on others where
    TF_ENABLE_ONEDNN_OPTS=1 was set when it was imported.
    """
    return bool(imported("tensorflow.python.util._pywrap_util_port", "IsMklEnabled")())


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the names in Slurm's abbreviated list of nodes; the public resolver sorts them."""
    return list(_slurm("expand_hostlist", "hostlist")(hostlist))


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns the numbers in Slurm's abbreviated list of tasks, one for each node."""
    return list(_slurm("expand_tasks_per_node", "tasks_per_node")(tasks_per_node))


def _slurm(name: str, *takes: str) -> Any:
    return imported("tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver", name, takes=takes)


def spec_of_first_replica(spec: Any) -> Any:
    """Returns the spec of the first replica's part: `_value_specs`, which is hidden in a spec of all replicas."""
    per_replica = imported("tensorflow.python.distribute.values", "PerReplicaSpec")
    return private(spec, "_value_specs")[0] if isinstance(spec, per_replica) else spec


@functools.cache  # asked for each node of a graph
def find_op() -> Any:
    """Returns what finds an operation's OpDef by its name, checked once."""
    return imported("tensorflow.python.framework.op_def_registry", "get", takes=("name",))


def op_definition(op: str) -> Any:
    """Returns TensorFlow's OpDef of an operation, or None: `op_def_registry.get`; `tf.raw_ops` has functions only."""
    return find_op()(op)


@functools.cache  # asked for each node of a graph
def kernels_of(op: str) -> tuple[Any, ...]:
    """Returns the KernelDefs of an operation for all devices: `get_registered_kernels_for_op`; none is public.

    TensorFlow's package for Linux holds the kernels for GPUs, so a machine without a GPU lists them too. Those of XLA
    are registered when XLA first compiles.
    """
    module = "tensorflow.python.framework.kernels"
    return tuple(imported(module, "get_registered_kernels_for_op", takes=("name",))(op).kernel)


@functools.cache
def register_xla_kernels() -> None:
    """Lets XLA lower something for a GPU, for `kernels_of`. Where there is none, its search for one complains."""
    one = tf.function(lambda: tf.constant(1) + 1, jit_compile=True)
    with notices_hidden():
        one.experimental_get_compiler_ir()(stage="hlo", platform_name="GPU")
    kernels_of.cache_clear()


def has_cpu_kernel(op: str) -> bool:
    """Returns whether an operation runs on a CPU without XLA."""
    return any(kernel.device_type in ("CPU", "DEFAULT") for kernel in kernels_of(op))


def converter_error() -> type[Exception]:
    """Returns the error of the converter to LiteRT: `ConverterError`, whose `errors` name ops and nodes."""
    error: type[Exception] = imported("tensorflow.lite.python.convert_phase", "ConverterError")
    return error


def register_functions(functions: Iterable[Any]) -> None:
    """Tells TensorFlow the bodies of a graph's loops and branches: methods of the eager context; none is public."""
    context = eager_context()
    has = private(context, "has_function", takes=("name",))
    add = private(context, "add_function_def", takes=("fdef",))
    for function in functions:
        if not has(function.signature.name):
            add(function)


def with_constants(
    function: Any, edit: Callable[[Any], None] = lambda _: None, before: Callable[[Any], None] = lambda _: None
) -> Any:
    """Returns a concrete function with constants for variables: `convert_variables_to_constants_v2`, not v1.

    `edit` changes the GraphDef, in which calls of functions are inlined, while its variables are still placeholders.
    The function of TensorFlow has no place for this, so its three parts are called here one by one. `before` changes
    the GraphDef before calls are inlined: what TensorFlow reads of the graph is replaced.

    Raises:
        ValueError: The function changes its variables.
    """
    module = "tensorflow.python.framework.convert_to_constants"
    read = imported(module, "_FunctionConverterDataInEager")
    list_nodes = private(read, "_build_node_defs_list", takes=())
    replace = imported(module, "_replace_variables_by_constants", takes=("converter_data",))
    construct = imported(
        module, "_construct_concrete_function", takes=("func", "output_graph_def", "converted_input_indices")
    )
    # Keras' tables leave an initialiser that is None, about which TensorFlow warns.
    function.graph.get_collection_ref(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS).clear()
    for variable in function.graph.variables:
        if variable.dtype.is_quantized:  # its array has plain integers, which the readers of the constant do not take
            values = variable.numpy().view(variable.dtype.as_numpy_dtype)
            variable.numpy = lambda values=values: values
    check_reads(imported(module, "_run_inline_graph_optimization"), "as_graph_def")
    kind, graph = type(function.graph), function.graph
    original = kind.as_graph_def

    def as_graph_def(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph_def = original(self, *args, **kwargs)
        if self is graph:
            before(graph_def)
        return graph_def

    with replaced(kind, as_graph_def=as_graph_def):  # of the class, since a graph takes no attributes of its own
        read_data = read(func=function, lower_control_flow=False, aggressive_inlining=False)
    edit(read_data.graph_def)
    list_nodes(read_data)
    return construct(function, *replace(converter_data=read_data))


def parse_saved_model(directory: str) -> Any:
    """Returns the SavedModel protobuf of a directory as the loader reads it: `parse_saved_model`; nothing is run.

    Raises:
        OSError: The directory holds no SavedModel, or its file cannot be read.
    """
    parse = imported("tensorflow.python.saved_model.loader_impl", "parse_saved_model", takes=("export_dir",))
    return parse(directory)


def leaves_with_paths(structure: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns (path, leaf) in the order of `tf.nest.flatten`: `flatten_with_tuple_paths`, which tf.nest leaves out."""
    return list(imported("tensorflow.python.util.nest", "flatten_with_tuple_paths")(structure))


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the data sets that a data set was made of: `_inputs`; there is no public list."""
    return list(private(dataset, "_inputs", takes=())())


def ops_of_functions(dataset: tf.data.Dataset) -> set[str]:
    """Returns the kinds of ops in the functions of one stage of a data set: `_functions`; there is no public list.

    Example:
        >>> "Square" in ops_of_functions(tf.data.Dataset.range(3).map(tf.square))
        True
    """
    ops: set[str] = set()
    for each in private(dataset, "_functions", takes=())():
        graph = each.function.graph.as_graph_def()
        for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
            ops.update(node.op for node in nodes)
    return ops


def strategy_of(value: Any) -> tf.distribute.Strategy:
    """Returns the strategy that a variable was made under, or the current one where it is on one device only."""
    if isinstance(value, tf.distribute.DistributedValues):
        return private(value, "distribute_strategy")
    return tf.distribute.get_strategy()


# Where TensorFlow says that the failed operation was made.
DEFINED = (
    r"^Graph execution error: Detected at node \S+ defined at \(most recent call last\): "
    r'(?:<stack traces unavailable>|(?:File "[^"]*", line \d+, in \S+ ?)+)'
)


def words_of(error: Any) -> str:
    """Returns the message of TensorFlow's error without the names of data sets and graph nodes around it.

    Example:
        >>> import tensorflow as tf
        >>> words_of(tf.errors.NotFoundError(None, None, "Iterator::Root::Map: a.jpg; No such file [[{{node Read}}]]"))
        'a.jpg; No such file'
    """
    words = re.sub(DEFINED, "", " ".join(str(error.message).split()))
    words = re.sub(r"^.*Iterator::\S*|\{\{function_node \S*\}\}|\[\[.*|\[Op:.*", "", words)
    return words.strip().removesuffix(".")[:400]


def function_graph(graph: Any, name: str) -> Any:
    """Returns the graph of a function that an operation of a graph calls: `_get_function`; there is no public access.

    Example:
        >>> import tensorflow as tf
        >>> outer = tf.function(lambda x: tf.function(tf.abs)(x)).get_concrete_function(tf.TensorSpec(())).graph
        >>> call = next(each for each in outer.get_operations() if each.type == "PartitionedCall")
        >>> [each.type for each in function_graph(outer, call.get_attr("f").name).get_operations()]
        ['Placeholder', 'Abs', 'Identity']
    """
    return private(graph, "_get_function", takes=("name",))(name).graph


def empty_xspace() -> Any:
    """Returns an empty XSpace, the protobuf in which TensorFlow's profiler writes a trace; no public module has it."""
    return imported("tensorflow.tsl.profiler.protobuf.xplane_pb2", "XSpace")()
