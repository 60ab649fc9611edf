"""What in a script keeps the plan away from a model or a fit: the place, the reason and the remedy."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.trainer import built_under
from tfopt.report import Skip
from tfopt.scripts.hook import place
from tfopt.training.distributed.strategy import is_multi_worker
from tfopt.training.step.fit_callback import per_batch_callback

UNKNOWN = int(tf.data.UNKNOWN_CARDINALITY)

# The methods of a model that keep it with Keras, and what to do instead.
REMEDIES = {
    "train_step": "Override compute_loss instead",
    "make_train_function": "Leave it out",
    "compute_metrics": "Add values to those of get_metrics_result instead",
}


def obstacle(model: keras.Model, compile_place: str) -> Skip | None:
    """Returns the reason why a compiled model keeps Keras' own training step, or None.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse", run_eagerly=True)
        >>> print(obstacle(model, "train.py:7").reason)
        run_eagerly=True runs each operation from Python. Leave it out once the model works
    """
    kind = type(model).__name__
    for name, remedy in REMEDIES.items():
        method = getattr(model, name)
        if getattr(method, "__func__", method) is not getattr(keras.Model, name):
            return Skip(name=_place_of(method, compile_place), kind=kind, reason=f"it has its own {name}. {remedy}")
    reason = None
    strategy = built_under(model)
    if model.run_eagerly:
        reason = "run_eagerly=True runs each operation from Python. Leave it out once the model works"
    elif model.steps_per_execution != 1:  # Keras may run more steps than steps_per_epoch, and counts them otherwise
        reason = f"it asks for steps_per_execution={model.steps_per_execution} itself. Leave it out"
    elif model.optimizer is None:
        reason = "it has no optimizer. Pass one to compile"
    elif model.jit_compile and strategy is not None:
        reason = "jit_compile=True under a strategy. Leave it out, as Keras' choice does"
    elif strategy is not None and is_multi_worker(strategy) and strategy.cluster_resolver.cluster_spec().jobs:
        reason = "the fit of Keras fails with several workers. Call tfopt.plan and tfopt.compile in the script"
    elif not _takes_callbacks(type(model).fit):
        return Skip(
            name=_place_of(type(model).fit, compile_place),
            kind=kind,
            reason="its fit takes no callbacks, and tfopt adds one. Let it take **kwargs, and pass them to super().fit",
        )
    return None if reason is None else Skip(name=compile_place, kind=kind, reason=reason)


def why_single_steps(model: keras.Model, given: Mapping[str, Any]) -> str | None:
    """Returns why a fit with the given arguments must have one step per call into TensorFlow, or None.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> each_batch = keras.callbacks.LambdaCallback(on_train_batch_end=print)
        >>> why_single_steps(model, {"callbacks": [each_batch]}), why_single_steps(model, {})
        ('LambdaCallback acts on each batch', None)
    """
    validates = bool(given.get("validation_data") is not None or given.get("validation_split"))
    callback = per_batch_callback(given.get("callbacks"), validates=validates)
    if callback is not None:
        return f"{callback} acts on each batch"
    if type(model).test_step is not keras.Model.test_step:
        return f"{type(model).__name__} has its own test_step"
    if tf.config.functions_run_eagerly():
        return "tf.config.run_functions_eagerly is on"
    if given.get("steps_per_epoch") is None and has_unknown_length(given.get("x")):
        return "the number of batches is unknown: set it with assert_cardinality"
    return None


def has_unknown_length(x: Any) -> bool:
    """Returns whether the data of a fit decides where an epoch ends.

    Keras then runs a step that finds no data. Parts of that step that need no data still take place: the optimizer
    counts it, and so the weights of Adam depend on it.
    """
    if isinstance(x, tf.data.Dataset | tf.distribute.DistributedDataset):
        return int(x.cardinality() if callable(x.cardinality) else x.cardinality) == UNKNOWN
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches is None
    return isinstance(x, Iterator)


def gpus_unused(model: keras.Model, compile_place: str, gpus: int) -> Skip | None:
    """Returns the remedy for a model that trains on one of several GPUs, or None."""
    if gpus < 2 or built_under(model) is not None:
        return None
    reason = (
        f"it trains on one of {gpus} GPUs, because it was built outside of a strategy. Build and compile it within "
        "`with tf.distribute.MirroredStrategy().scope():`"
    )
    return Skip(name=compile_place, kind=type(model).__name__, reason=reason)


def own_loops(script: str) -> list[Skip]:
    """Returns the lines of a script that train without `fit`: the gradient tapes, and calls of `train_on_batch`.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        ...     _ = file.write("import tensorflow as tf\\ndef step(x):\\n    with tf.GradientTape() as t: pass")
        ...     file.flush()
        ...     [found] = own_loops(file.name)
        >>> found.name.endswith(".py:3"), found.reason.split(". ")[1]
        (True, 'Decorate step with @tf.function, or put the loss into compute_loss of a model and call fit')
    """
    try:
        tree = ast.parse(Path(script).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    found = []
    for line, name, function in _calls(tree, None):
        if name == "GradientTape":
            put = "Put"
            if function is not None and not any("function" in ast.unparse(each) for each in function.decorator_list):
                put = f"Decorate {function.name} with @tf.function, or put"
            reason = "a loop of its own, without fit: nothing is applied. "
            reason += f"{put} the loss into compute_loss of a model and call fit"
        elif name == "train_on_batch":
            reason = "train_on_batch returns to Python after each step. Call fit with the data instead"
        else:
            continue
        found.append(Skip(name=f"{script}:{line}", kind=name, reason=reason))
    return found


def _calls(node: ast.AST, function: ast.FunctionDef | None) -> Iterator[tuple[int, str, ast.FunctionDef | None]]:
    """Yields the line and the last name of each call, with the function around it."""
    function = node if isinstance(node, ast.FunctionDef) else function
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        yield node.lineno, name, function
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, function)


def _takes_callbacks(fit: Any) -> bool:
    parameters = inspect.signature(fit).parameters
    return "callbacks" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _place_of(method: Any, otherwise: str) -> str:
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    return otherwise if code is None else place(code.co_filename, code.co_firstlineno)
