"""Private names of Keras and TensorFlow: only tfopt/compat uses them, and each that is missing or changed is an error.

The error comes before the name is used. Without it some would be missed in silence: gradients summed twice, a resumed
training that begins at epoch 0.
"""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

import tfopt
from tfopt.compat import (
    checks,
    convolutions,
    datasets,
    layers,
    optimizers,
    pooling,
    recurrent,
    tensorflow,
    time_distributed,
    trainer,
    upsampling,
)
from tfopt.compat.replace import first_callback, replaced
from tfopt.errors import UnsupportedVersionError

ROOT = Path(__file__).parents[1]
FILES = sorted(path for path in (ROOT / "tfopt").rglob("*.py") if path.parent.name != "compat")
PRIVATE_PACKAGES = ("keras.src", "tf_keras.src", "tensorflow.python")
# It runs where tfopt cannot be imported, so it has a check of its own; see the last canary.
ALONE = "tfopt/exporting/verification/tensorflow_only.py"
# Of os and of tf2onnx, which is pinned.
OTHERS = ("_exit", "_get_optimizers")
ASKING = ("getattr", "hasattr", "setattr", "delattr", "private", "imported")


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_names(tree):
    """Returns what a file defines: functions, classes, variables, fields and attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def private_uses(tree, own, theirs=frozenset()):
    """Returns each private name in a file that is not tfopt's own, and each use of a private package.

    A name that is both is tfopt's on `self`, and theirs on anything else.
    """
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            on_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr not in own or (node.attr in theirs and not on_self):
                yield node.lineno, node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING:
            words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            yield from ((node.lineno, word) for word in words if is_private(word))
        if isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Attribute) and node.attr in ("src", "python"):
            modules = [ast.unparse(node)]
        yield from ((node.lineno, module) for module in modules if module.startswith(PRIVATE_PACKAGES))


def names_in_compat():
    for path in sorted((ROOT / "tfopt/compat").glob("*.py")):
        words = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        yield from (word for word in words if isinstance(word, str) and word.isidentifier() and is_private(word))


def test_no_private_name_of_keras_or_tensorflow_is_used_outside_compat():
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}
    own = {name for tree in trees.values() for name in own_names(tree)}
    theirs = set(names_in_compat())
    found = [
        f"{path}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in private_uses(tree, own, theirs)
        if not (path == ALONE and "convert_to_constants" in name) and name not in OTHERS
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "from keras.src.losses import loss",
        "from tensorflow.python import eager",
        "import tensorflow.python.eager.context",
        "keras.src.random.seed_generator",
        "model._initial_epoch = 3",
        "getattr(tensor, '_keras_mask', None)",
    ],
)
def test_the_rule_finds(line):
    assert list(private_uses(ast.parse(line), own={"_own"}))


def test_the_rule_lets_own_names_pass():
    own, theirs = {"_own", "_inputs"}, {"_inputs"}
    assert not list(private_uses(ast.parse("runtime._own = self._inputs"), own, theirs))
    assert list(private_uses(ast.parse("dataset._inputs"), own, theirs))


def test_no_class_of_tfopt_overrides_a_private_name_of_keras_or_tensorflow():
    """A hook that is overridden by its name is no longer called once it is renamed."""
    overridden = []
    for module in pkgutil.walk_packages(tfopt.__path__, "tfopt."):
        if module.name.endswith("_only") or module.name == "tfopt.__main__":
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(kind) or kind.__module__ != module.name:
                continue
            theirs = [base for base in kind.__mro__ if base.__module__.split(".")[0] in ("keras", "tensorflow")]
            names = {name for name, value in vars(kind).items() if is_private(name) and callable(value)}
            overridden += [(kind, name) for base in theirs for name in names & vars(base).keys()]
    assert overridden == []


def test_the_tested_versions_are_installed_and_no_newer_ones_are_taken():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for package, version in checks.TESTED.items():
        assert importlib.metadata.version(package).startswith(f"{version}.")
        major, minor = version.split(".")
        assert f"{package}>={version},<{major}.{int(minor) + 1}" in wanted


@pytest.fixture(scope="module")
def things(two_replicas, tmp_path_factory):
    saved_model = str(tmp_path_factory.mktemp("saved_model"))
    tf.saved_model.save(tf.Module(), saved_model)
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    averaging = keras.optimizers.SGD(use_ema=True)
    averaging.build(model.trainable_variables)
    model.compute_loss(None, tf.zeros((2, 1)), tf.zeros((2, 1)))
    iterator = importlib.import_module("keras.src.backend.tensorflow.trainer").TFEpochIterator(
        x=tf.zeros((2, 2)), y=tf.zeros((2, 1)), distribute_strategy=tf.distribute.get_strategy()
    )
    attention = keras.layers.GroupQueryAttention(4, 2, 1)
    attention.build((1, 3, 4), (1, 3, 4))
    per_replica = importlib.import_module("tensorflow.python.distribute.values").PerReplicaSpec(tf.TensorSpec(()))
    with two_replicas.scope():
        mirrored = tf.Variable(1.0)
    graph = tf.function(lambda x: tf.function(tf.abs)(x)).get_concrete_function(tf.TensorSpec(())).graph
    return SimpleNamespace(
        model=model,
        layer=model.layers[-1],
        optimizer=model.optimizer,
        averaging=averaging,
        scaled=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        variable=keras.Variable(1.0),
        tensor=keras.KerasTensor((2,)),
        iterator=iterator,
        board=keras.callbacks.TensorBoard(),
        attention=attention,
        per_replica=per_replica,
        mirrored=mirrored,
        dataset=tf.data.Dataset.range(2).batch(1),
        graph=graph,
        saved_model=saved_model,
        called=next(each.get_attr("f").name for each in graph.get_operations() if each.type == "PartitionedCall"),
        tf_keras=SimpleNamespace(_is_graph_network=True),
        call=lambda operation, *args, **options: operation(*args, **options),
    )


@dataclass(frozen=True)
class Name:
    """A private name: where it is, and what of compat uses it.

    Attributes:
        owner: An expression; `t` are the things above. A class is the one that defines the name.
        name: The private name.
        use: An expression.
        takes: Whether its arguments are checked.
        reader: Instead, a function of the owner that must read the name.
    """

    owner: str
    name: str
    use: str
    takes: bool = False
    reader: str = ""


FIT = "trainer.check_fit()"
SUMMED = "enter(optimizers.gradients_already_summed(t.optimizer))"
HOOKS = "enter(optimizers.update_hooks(t.optimizer, id, id))"
DECAY = "optimizers.decay_only(t.optimizer, lambda variable: True)"
SCALED = "enter(trainer.losses_not_scaled())"
VISITED = "enter(trainer.reductions_visited(print))"
SPEC = "trainer.element_spec(t.iterator)"
BASE = "keras.optimizers.Optimizer"
AVERAGE = "_overwrite_model_variables_with_average_value"
CONSTANTS = "of_tf('framework.convert_to_constants')"
CUDNN = "importlib.import_module('keras.src.backend.tensorflow.rnn')"
SLURM = "of_tf('distribute.cluster_resolver.slurm_cluster_resolver')"
CONSTANT = "tensorflow.with_constants(tf.function(abs).get_concrete_function(tf.TensorSpec(())))"
PLAIN = "enter(convolutions.plain_convolutions(gradients=True))"
SHORT = "enter(recurrent.short_loops())"
POOLING = "enter(pooling.plain_pooling(gradients=True))"
FOLDED = "enter(time_distributed.folded_time())"
RESIZED = "enter(upsampling.resized_once())"
FUNCTION = "tensorflow.function_graph(t.graph, t.called)"
NAMES = [
    # layers and graphs
    Name("keras.Layer", "_flatten_layers", "layers.layers_inside(t.model)", takes=True),
    Name("t.layer", "_layers", "layers.direct_layers(t.layer)"),
    Name("t.layer", "_losses", "layers.added_losses(t.layer)"),
    Name("t.layer", "_trainable_variables", "layers.own_trainable_variables(t.layer)"),
    Name("t.layer", "_non_trainable_variables", "layers.own_non_trainable_variables(t.layer)"),
    Name("t.model", "_call_has_training_arg", "layers.takes_training(t.model)"),
    Name("t.model", "_call_has_mask_arg", "layers.takes_mask(t.model)"),
    Name("t.layer", "_call_context_args", "layers.is_given_training(t.layer)"),
    Name("keras.src.backend", "get_keras_mask", "layers.mask_of(t.tensor)", takes=True),
    Name("keras.src.backend", "set_keras_mask", "layers.set_mask(t.tensor, None)", takes=True),
    Name("t.model", "_nodes_by_depth", "layers.calls_in_order(t.model)"),
    Name("type(t.model)", "_standardize_inputs", "layers.standardize_inputs(t.model, tf.zeros((1, 2)))", takes=True),
    Name("t.tensor", "_dtype", "layers.set_dtype(t.tensor, 'float32')"),
    Name("t.model.output", "_keras_history", "layers.history(t.model.output)"),
    Name("t.layer", "_inbound_nodes", "layers.calls_of(t.layer)"),
    Name("keras.src.models.functional", "Functional", "layers.functional_class()"),
    Name("type(t.model)", "_run_through_graph", "layers.run_through_graph(t.model, t.model.input, t.call)", takes=True),
    Name("keras.src.backend.common.variables", "AutocastScope", "layers.no_autocast()", takes=True),
    Name("keras.src.export.export_utils", "get_input_signature", "layers.input_signature(t.model)", takes=True),
    Name("t.attention", "_output_dense", "layers.output_projection(t.attention)"),
    *[
        Name("t.attention", f"_{name}_dense", "layers.grouped_projections(t.attention)")
        for name in ("query", "key", "value")
    ],
    Name("t.tf_keras", "_is_graph_network", "layers.is_tf_keras_graph(t.tf_keras)"),
    Name("keras.src.backend.tensorflow.nn", "conv", PLAIN, takes=True),
    Name("keras.ops", "conv", PLAIN, reader="conv"),
    Name("keras.layers.RNN", "inner_loop", SHORT, takes=True),
    Name("keras.layers.RNN", "inner_loop", SHORT, reader="call"),
    Name("keras.src.backend.tensorflow.nn", "adaptive_average_pool", POOLING, takes=True),
    Name("keras.ops", "adaptive_average_pool", POOLING, reader="adaptive_average_pool"),
    Name("keras.src.backend.tensorflow.nn", "adaptive_max_pool", POOLING, takes=True),
    Name("keras.ops", "adaptive_max_pool", POOLING, reader="adaptive_max_pool"),
    Name("keras.layers.TimeDistributed", "call", FOLDED, takes=True),
    Name("keras.layers.UpSampling2D", "call", RESIZED, takes=True),
    Name("tf.Operation", "_set_attr", "upsampling.mark(t.graph.get_operations()[0], (2, 2))", takes=True),
    # fit and evaluate
    Name("keras.Model", "_maybe_symbolic_build", FIT, takes=True),
    Name("keras.Model", "make_train_function", FIT, takes=True),
    Name("keras.Model", "make_test_function", FIT, takes=True),
    *[
        Name("keras.Model", name, FIT, reader="fit")
        for name in ("_maybe_symbolic_build", "make_train_function", "train_function", "_initial_epoch")
    ],
    *[
        Name("keras.Model", name, FIT, reader="evaluate")
        for name in ("_maybe_symbolic_build", "make_test_function", "test_function")
    ],
    *[Name("keras.Model", name, FIT, reader="predict") for name in ("make_predict_function", "predict_function")],
    Name("keras.Model", "_symbolic_build", "trainer.symbolic_build(t.model, None)", takes=True),
    *[
        Name("keras.callbacks.CallbackList", "callbacks", "trainer.running_callbacks()", reader=reader)
        for reader in ("on_train_begin", "on_train_end")
    ],
    Name("t.model", "_compile_config", "trainer.compile_config(t.model)"),
    Name("t.model", "_initial_epoch", "trainer.set_initial_epoch(t.model, None)"),
    Name("keras.Model", "_initial_epoch", "trainer.set_initial_epoch(t.model, None)", reader="fit"),
    Name("t.model", "_distribute_strategy", "trainer.built_under(t.model)"),
    Name("t.board", "_should_trace", "trainer.profiles_batches(t.board)"),
    Name("keras.Model", "_compute_loss", "trainer.loss_of(t.model, **LOSS)", takes=True),
    Name("t.model", "_loss_tracker", "trainer.loss_tracker(t.model)"),
    Name("t.model", "_compile_loss", "trainer.output_loss_means(t.model)"),
    Name("type(t.model._compile_loss)", "metrics", "trainer.output_loss_means(t.model)"),
    Name("type(t.model._compile_loss)", "update_state", "trainer.output_loss_means(t.model)", reader="call"),
    Name("t.iterator", "_distributed_dataset", SPEC),
    *[Name("t.iterator", name, SPEC) for name in ("steps_per_epoch", "steps_per_execution", "data_adapter")],
    *[Name("type(t.iterator)", name, SPEC) for name in ("num_batches", "catch_stop_iteration", "_enumerate_iterator")],
    *[
        Name("type(t.iterator)", name, SPEC, reader="_enumerate_iterator")
        for name in ("steps_per_epoch", "steps_per_execution")
    ],
    Name("keras.src.losses.loss", "scale_loss_for_distribution", SCALED, takes=True),
    Name("keras.src.losses.loss", "unscale_loss_for_distribution", SCALED, takes=True),
    Name("keras.src.losses.loss", "reduce_values", SCALED),
    Name("keras.src.losses.loss", "scale_loss_for_distribution", SCALED, reader="reduce_values"),
    Name("keras.Model", "_aggregate_additional_loss", SCALED, takes=True),
    Name("keras.src.trainers.compile_utils", "CompileLoss", SCALED),
    Name("keras.src.trainers.compile_utils.CompileLoss", "unscale_loss_for_distribution", SCALED, reader="call"),
    Name("keras.src.losses.loss", "reduce_weighted_values", VISITED, takes=True),
    Name("keras.losses.Loss", "reduce_weighted_values", VISITED, reader="__call__"),
    Name("keras.src.losses.loss", "apply_mask", "trainer.masked_weights(None, None)", takes=True),
    Name("keras.src.backend", "compute_output_spec", "trainer.symbolic_call(lambda: None)", takes=True),
    # optimizers and variables
    Name("t.scaled", "inner_optimizer", "optimizers.inner_optimizer(t.scaled)"),
    Name(BASE, "_all_reduce_sum_gradients", SUMMED, takes=True),
    Name(BASE, AVERAGE, SUMMED, takes=True),
    Name(BASE, "_backend_update_step", SUMMED),
    Name(BASE, "_backend_apply_gradients", SUMMED),
    Name(BASE, "_all_reduce_sum_gradients", SUMMED, reader="_backend_update_step"),
    Name(BASE, "_backend_update_step", SUMMED, reader="_backend_apply_gradients"),
    Name(BASE, AVERAGE, SUMMED, reader="_backend_apply_gradients"),
    Name(BASE, "update_step", HOOKS, takes=True),
    Name(BASE, "_apply_weight_decay", HOOKS, takes=True),
    Name(BASE, "_distributed_tf_update_step", HOOKS),
    Name(BASE, "_backend_apply_gradients", HOOKS),
    Name(BASE, "update_step", HOOKS, reader="_distributed_tf_update_step"),
    Name(BASE, "_apply_weight_decay", HOOKS, reader="_backend_apply_gradients"),
    Name(BASE, "_use_weight_decay", DECAY, takes=True),
    Name(BASE, "_use_weight_decay", DECAY, reader="_apply_weight_decay"),
    Name("t.averaging", "_model_variables_moving_average", "optimizers.averages(t.averaging)"),
    Name("t.optimizer", "_trainable_variables", "optimizers.trained_variables(t.optimizer)"),
    Name("t.optimizer", "_variables", "optimizers.own_variables(t.optimizer)"),
    Name("t.optimizer", "_trainable_variables_indices", "optimizers.find_slots_anew(t.optimizer)"),
    Name(BASE, "_var_key", "optimizers.find_slots_anew(t.optimizer)", takes=True),
    Name("t.optimizer", "_learning_rate", "optimizers.learning_rate_as_given(t.optimizer)"),
    Name("t.optimizer", "_distribution_strategy", "optimizers.set_strategy(t.optimizer, None)"),
    Name("t.variable", "_value", "optimizers.value_of(t.variable)"),
    Name("t.variable", "_value", "optimizers.make_anew(t.variable)"),
    # TensorFlow
    Name("of_tf('framework.ops').gradient_registry", "_registry", "enter(tensorflow.custom_gradients_forgotten())"),
    Name(
        "of_tf('framework.ops')", "get_gradient_function", "enter(tensorflow.custom_gradients_forgotten())", takes=True
    ),
    Name("of_tf('eager.context')", "context", "tensorflow.eager_context()", takes=True),
    Name("of_tf('eager.context').context()", "_seed", "tensorflow.eager_seed()"),
    Name("of_tf('eager.context').context()", "_rng", "tensorflow.eager_generator()"),
    Name("of_tf('eager.context').context()", "_context_handle", "tensorflow.has_started()"),
    Name("of_tf('eager.context').Context", "has_function", "tensorflow.register_functions([])", takes=True),
    Name("of_tf('eager.context').Context", "add_function_def", "tensorflow.register_functions([])", takes=True),
    Name("of_tf('ops.stateful_random_ops')", "global_generator", "tensorflow.global_generator()"),
    Name(
        "keras.src.random.seed_generator", "global_seed_generator", "tensorflow.keras_generator(make=True)", takes=True
    ),
    Name("keras.src.random.seed_generator", "GLOBAL_SEED_GENERATOR", "tensorflow.keras_generator(make=False)"),
    Name("keras.src.backend.common.global_state", "get_global_attribute", "tensorflow.keras_generator(make=False)"),
    Name(
        "of_tf('framework.config')", "is_op_determinism_enabled", "tensorflow.is_op_determinism_enabled()", takes=True
    ),
    Name("of_tf('util._pywrap_util_port')", "IsMklEnabled", "tensorflow.uses_onednn()"),
    Name(SLURM, "expand_hostlist", "tensorflow.expand_hostlist('a')", takes=True),
    Name(SLURM, "expand_tasks_per_node", "tensorflow.expand_tasks_per_node('1')", takes=True),
    Name("of_tf('distribute.values')", "PerReplicaSpec", "tensorflow.spec_of_first_replica(t.per_replica)"),
    Name("t.per_replica", "_value_specs", "tensorflow.spec_of_first_replica(t.per_replica)"),
    Name("of_tf('framework.op_def_registry')", "get", "fresh(tensorflow.find_op)()", takes=True),
    Name(
        "of_tf('framework.kernels')", "get_registered_kernels_for_op", "fresh(tensorflow.kernels_of)('Abs')", takes=True
    ),
    Name(CUDNN, "_is_gpu_available", "enter(recurrent.as_on_a_gpu())", takes=True),
    Name(CUDNN, "cudnn_ok", "enter(recurrent.as_on_a_gpu())"),
    Name(CUDNN, "_is_gpu_available", "enter(recurrent.as_on_a_gpu())", reader="cudnn_ok"),
    Name(CONSTANTS, "_run_inline_graph_optimization", CONSTANT),
    Name(CONSTANTS, "as_graph_def", CONSTANT, reader="_run_inline_graph_optimization"),
    Name(CONSTANTS, "_FunctionConverterDataInEager", CONSTANT),
    Name(CONSTANTS, "_replace_variables_by_constants", CONSTANT, takes=True),
    Name(CONSTANTS, "_construct_concrete_function", CONSTANT, takes=True),
    Name(f"{CONSTANTS}._FunctionConverterDataInEager", "_build_node_defs_list", CONSTANT, takes=True),
    Name(
        "of_tf('saved_model.loader_impl')",
        "parse_saved_model",
        "tensorflow.parse_saved_model(t.saved_model)",
        takes=True,
    ),
    Name("of_tf('util.nest')", "flatten_with_tuple_paths", "tensorflow.leaves_with_paths([1])"),
    Name("of_tf('framework.func_graph').FuncGraph", "_get_function", FUNCTION, takes=True),
    Name("type(t.dataset)", "_inputs", "tensorflow.inputs_of(t.dataset)", takes=True),
    Name("type(t.dataset)", "_functions", "tensorflow.ops_of_functions(t.dataset)", takes=True),
    Name("type(t.mirrored)", "distribute_strategy", "tensorflow.strategy_of(t.mirrored)"),
    Name(
        "importlib.import_module('tensorflow.tsl.profiler.protobuf.xplane_pb2')", "XSpace", "tensorflow.empty_xspace()"
    ),
    Name("of_tf('data.ops.dataset_ops')", "UnaryUnchangedStructureDataset", "importlib.reload(datasets)", takes=True),
    Name(CONSTANTS, "convert_variables_to_constants_v2", "load_alone()"),
]
LOSS = {"x": None, "y": tf.zeros((2, 1)), "y_pred": tf.zeros((2, 1)), "sample_weight": None, "training": True}


def enter(scope):
    with scope:
        pass


def fresh(function):
    function.cache_clear()
    return function


def of_tf(name):
    return importlib.import_module(f"tensorflow.python.{name}")


def load_alone():
    spec = importlib.util.spec_from_file_location("alone", ROOT / ALONE)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


KNOWN = {
    "keras": keras,
    "tf": tf,
    "importlib": importlib,
    "convolutions": convolutions,
    "pooling": pooling,
    "recurrent": recurrent,
    "time_distributed": time_distributed,
    "datasets": datasets,
    "layers": layers,
    "optimizers": optimizers,
    "tensorflow": tensorflow,
    "trainer": trainer,
    "upsampling": upsampling,
    "enter": enter,
    "fresh": fresh,
    "of_tf": of_tf,
    "load_alone": load_alone,
    "LOSS": LOSS,
}


def evaluated(expression, things):
    return eval(expression, {**KNOWN, "t": things})


def defining(owner, name):
    """Returns the classes of an inheritance that define a name; of anything else what was given."""
    return [base for base in owner.__mro__ if name in vars(base)] if inspect.isclass(owner) else [owner]


def other(unexpected, *arguments):
    """Takes other arguments, and reads nothing."""


def shown(case):
    return f"{case.reader} reads {case.name}" if case.reader else f"{case.name} for {case.use.split('(')[0]}"


@pytest.mark.parametrize("case", [case for case in NAMES if not case.reader], ids=shown)
def test_without_the_name_its_use_fails_and_says_so(case, things, monkeypatch):
    evaluated(case.use, things)
    for owner in defining(evaluated(case.owner, things), case.name):
        monkeypatch.delattr(owner, case.name)
    with pytest.raises((UnsupportedVersionError, ImportError), match=rf"{case.name} must .* tensorflow 2\.21"):
        evaluated(case.use, things)


@pytest.mark.parametrize("case", [case for case in NAMES if case.takes], ids=shown)
def test_with_other_arguments_its_use_fails_and_says_so(case, things, monkeypatch):
    monkeypatch.setattr(defining(evaluated(case.owner, things), case.name)[0], case.name, other)
    with pytest.raises(
        UnsupportedVersionError, match=rf"{case.name} must take .*Received: \(.*keras 3\.15.*pip install"
    ):
        evaluated(case.use, things)


@pytest.mark.parametrize("case", [case for case in NAMES if case.reader], ids=shown)
def test_where_nothing_reads_the_name_its_use_fails_and_says_so(case, things, monkeypatch):
    """As if the function read it under another name."""
    owner = defining(evaluated(case.owner, things), case.reader)[0]
    function = inspect.unwrap(getattr(owner, case.reader))
    names = (*function.__code__.co_names, *(name for code in inner_codes(function) for name in code.co_names))
    kept = [name for name in names if name != case.name and name.isidentifier()]
    exec(f"def renamed(*arguments):\n    {'; '.join(['pass', *kept])}", namespace := {})
    monkeypatch.setattr(owner, case.reader, namespace["renamed"])
    with pytest.raises(UnsupportedVersionError, match=rf"must use {case.name}\b"):
        evaluated(case.use, things)


def inner_codes(function):
    return [code for code in function.__code__.co_consts if inspect.iscode(code)]


def test_every_private_name_in_compat_has_a_canary():
    assert set(names_in_compat()) - {case.name for case in NAMES} == set()


def test_what_is_set_on_a_model_is_as_before_in_the_end():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    before, function = dict(vars(model)), object()
    model.train_function = function
    with replaced(model, jit_compile=True, compute_metrics=len, train_function=None):
        assert (model.jit_compile, model.compute_metrics, model.train_function) == (True, len, None)
    assert model.jit_compile is False
    assert model.train_function is function
    assert vars(model).keys() == before.keys()


def test_a_callback_comes_first_in_a_list_and_leaves_a_callback_list_as_it_was():
    model, first, other = keras.Sequential(), keras.callbacks.Callback(), keras.callbacks.History()
    for given in (None, other, [other]):
        with first_callback(model, first, given) as callbacks:
            assert callbacks == [first, *([other] if given else [])]
    listed = keras.callbacks.CallbackList([other], epochs=3)
    with first_callback(model, first, listed) as callbacks:
        assert callbacks is listed
        assert listed.callbacks == [first, other]
        assert (first.model, first.params) == (model, {"epochs": 3})
    assert listed.callbacks == [other]
