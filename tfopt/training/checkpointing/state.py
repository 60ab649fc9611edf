"""Reads all variables of a training run into arrays, and writes them back bit by bit.

The names of Keras' layers contain counters that differ between processes. So the key of an array is its role and its
position: `model/0007` (weights, statistics, seeds), `metrics/0001` (also the loss tracker), `optimizer/0003`
(iterations, slots, loss scale, averages), `constraint/0007/kept` (a variable that the constraint of model variable 7
holds, such as a pruning mask).

Under tf.distribute, most variables have the same value on every replica and are read once. Two kinds do not. The
variables of metrics are summed over the replicas when they are read. Variables that a layer assigns by itself, such as
BatchNormalization's moving statistics, have a copy on each replica that Keras never combines (their aggregation is
NONE). A run continues bit by bit only if each replica gets its own value back. So these values are saved one by one:
`metrics/0001/0-of-2`. For another number of replicas they are combined: a sum keeps its value (the first replica gets
all of it, the others zero), floating-point statistics become their mean, and of other values (seeds, counters) every
replica gets the first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.optimizers import averages, trained_variables, updating_optimizers
from tfopt.compat.tensorflow import strategy_of
from tfopt.compat.trainer import symbolic_build
from tfopt.errors import ArtifactError, UnsupportedModelError

_PER_REPLICA = re.compile(r"(.+)/(\d+)-of-(\d+)")


def build_state(model: keras.Model, batch: Any) -> None:
    """Creates the variables that Keras would create in the first step: those of metrics, losses and the optimizer.

    Call it before `write_state` in a new process: without a tf.distribute strategy, `fit` has not made the variables of
    metrics when it calls `on_train_begin` or `on_epoch_begin`. Nothing is computed, and no seed advances. The batch is
    `(x, y)` or `(x, y, sample_weight)` of objects with a shape and a dtype.
    """
    with model.distribute_strategy.scope():
        symbolic_build(model, batch)


def read_state(model: keras.Model, only: Sequence[Any] | None = None) -> dict[str, np.ndarray]:
    """Returns the values of all variables of the training, with those of each replica of this process.

    With several workers, the values of the other workers are missing; `gather_state` adds them. An optimizer that is
    not built yet is built.

    Raises:
        UnsupportedModelError: The model is not built.
    """
    state = {}
    wanted = None if only is None else {id(variable) for variable in only}
    for key, variable in _variables(model, is_built=model.built):
        if wanted is not None and id(variable) not in wanted:
            continue
        replicas = local_replicas(variable.value)
        if not _differs_between_replicas(key, variable):
            state[key] = np.asarray(replicas[min(replicas)])
            continue
        total = variable.value.distribute_strategy.num_replicas_in_sync
        state |= {f"{key}/{number}-of-{total}": np.asarray(replica) for number, replica in replicas.items()}
    return state


def averaged_variables(model: keras.Model) -> list[Any]:
    """Returns the weights with moving averages in the optimizer, and these averages; nothing without `use_ema`."""
    averaging = [each for each in updating_optimizers(model.optimizer) if each.use_ema]
    return [variable for each in averaging for variable in (*trained_variables(each), *averages(each))]


def gather_state(state: Mapping[str, np.ndarray], strategy: tf.distribute.Strategy) -> dict[str, np.ndarray]:
    """Adds the values of the other workers' replicas to a state from `read_state`.

    It is a collective operation: every worker calls it at the same step, and gets all values. Then the chief can save
    a complete checkpoint. If all replicas are in this process, it returns the state unchanged.
    """
    local: dict[int, dict[str, np.ndarray]] = {}
    for key, value in state.items():
        if match := _PER_REPLICA.fullmatch(key):
            local.setdefault(int(match[2]), {})[match[1]] = value
    total = strategy.num_replicas_in_sync
    if not local or len(local) == total:
        return dict(state)
    # All values of a replica are one vector, so that one collective operation is enough. Every replica has the same
    # variables. The dtype is int64, because every communication library copies it without changing bits.
    vectors = {number: _packed(values.values()) for number, values in local.items()}
    per_replica = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(vectors[int(context.replica_id_in_sync_group)])
    )
    gathered = _gather(strategy)(per_replica).numpy().reshape(total, -1)
    template = next(iter(local.values()))
    merged = {key: value for key, value in state.items() if not _PER_REPLICA.fullmatch(key)}
    for number, vector in enumerate(gathered):
        for key, value in _unpacked(vector, template).items():
            merged[f"{key}/{number}-of-{total}"] = value
    return merged


def write_state(model: keras.Model, state: Mapping[str, np.ndarray], *, only: str = "") -> None:
    """Gives every variable the value that `read_state` read, in this process or another.

    Everything is checked before the first change. If it raises an error, the model is unchanged. `fit` resets the
    metrics at the start of an epoch. So to resume within an epoch, call this in `on_epoch_begin`, which Keras calls
    after that, or later. The model must be built and compiled as the saved one, with the same optimizer, metrics and
    masks; see `build_state`. Only keys with the prefix `only` are written; all are checked.

    Raises:
        ArtifactError: The state is of another model. The message names the differences.
        UnsupportedModelError: The model is not built.
    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> state = read_state(model)
        >>> model.layers[0].bias.assign([5.0]) is None
        False
        >>> write_state(model, state)
        >>> model.layers[0].bias.numpy()
        array([0.], dtype=float32)
    """
    variables = dict(_variables(model, is_built=model.built))
    saved = _by_variable(state)
    _check_same(variables, saved)
    for key, variable in variables.items():
        if not key.startswith(only):
            continue
        replicas = local_replicas(variable.value)
        strategy = strategy_of(variable.value)
        own = _differs_between_replicas(key, variable)
        values = _for_replicas(saved[key], strategy.num_replicas_in_sync if own else 1, variable.aggregation)
        for number, replica in replicas.items():
            # One by one: an assignment to a variable that is summed when read would divide the value by the number of
            # replicas.
            replica.assign(values[number] if own else values[0])


def hold_state(model: keras.Model) -> Callable[[], None]:
    """Returns a function that gives the present variables of a training their present values back, in this process.

    Unlike for `read_state`, the model may be without `call`, as those are that train several networks. The optimizers
    that it keeps beside its own count too, and the variables of losses. Variables that are made later, as those of
    metrics, are not changed. An optimizer that is not built yet is built.

    Raises:
        UnsupportedModelError: The model is not built.
    """
    variables = [variable for _, variable in _variables(model, is_built=has_variables(model))]
    for optimizer in own_optimizers(model).values():
        variables += optimizer.variables
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        variables += [each for each in getattr(loss, "__dict__", {}).values() if isinstance(each, keras.Variable)]
    held = [(replica, np.asarray(replica)) for each in variables for replica in local_replicas(each.value).values()]

    def give_back() -> None:
        for replica, value in held:
            replica.assign(value)

    return give_back


def has_variables(model: keras.Model) -> bool:
    """Returns whether a model is built, or, if it has no `call`, its layers are."""
    return model.built or (bool(model.layers) and all(layer.built for layer in model.layers))


def own_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Returns the optimizers that a model keeps as attributes beside the one of `compile`, by name."""
    compiled = getattr(model, "optimizer", None)
    return {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not compiled
    }


def _variables(model: keras.Model, *, is_built: bool) -> Iterator[tuple[str, Any]]:
    """Yields each variable once, with its key."""
    if not is_built:
        raise UnsupportedModelError(
            f"model must be built, or it has no variables. Received: model={model.name!r}. Call it on a batch first."
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
    seen: set[int] = set()
    own = list(_once(model.variables, seen))
    of_optimizer = optimizer.variables if optimizer else []
    roles = {"model": own, "metrics": _once(model.metrics_variables, seen), "optimizer": _once(of_optimizer, seen)}
    for role, variables in roles.items():
        for position, variable in enumerate(variables):
            yield f"{role}/{position:04d}", variable
    for position, variable in enumerate(own):
        yield from _held(variable.constraint, f"constraint/{position:04d}", seen)


def _once(variables: Sequence[Any], seen: set[int]) -> Iterator[Any]:
    for variable in variables:
        if id(variable) not in seen:
            seen.add(id(variable))
            yield variable


def _held(constraint: Any, key: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields the variables of a constraint. It finds them by type, since this package must not import pruning."""
    for name, value in sorted(vars(constraint).items()) if constraint is not None else ():
        if isinstance(value, keras.Variable) and id(value) not in seen:
            seen.add(id(value))
            yield f"{key}/{name}", value
        elif isinstance(value, keras.constraints.Constraint):
            yield from _held(value, f"{key}/{name}", seen)


def local_replicas(value: Any) -> dict[int, tf.Variable]:
    """Returns the plain variables of this process's replicas, by the replica's number in the whole training."""
    if not isinstance(value, tf.distribute.DistributedValues):
        return {0: value}
    strategy = value.distribute_strategy
    numbers = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    local = strategy.experimental_local_results
    return {int(number): replica for number, replica in zip(local(numbers), local(value), strict=True)}


def differs_between_replicas(variable: Any) -> bool:
    """Returns whether each replica updates a variable of a model or metric by itself."""
    value = variable.value
    if not isinstance(value, tf.distribute.DistributedValues):
        return False
    # `value.trainable` is set when the variable is made. A frozen layer's weights have the same value on all replicas.
    return value.synchronization == tf.VariableSynchronization.ON_READ or not value.trainable


def _differs_between_replicas(key: str, variable: Any) -> bool:
    # Optimizers and constraints do not train their variables either, but update them alike on all replicas.
    return key.startswith(("model/", "metrics/")) and differs_between_replicas(variable)


def _by_variable(state: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Returns each variable's values, one or one per replica."""
    found: dict[str, dict[int, np.ndarray]] = {}
    totals: dict[str, int] = {}
    for key, value in state.items():
        match = _PER_REPLICA.fullmatch(key)
        base, number, total = (match[1], int(match[2]), int(match[3])) if match else (key, 0, 1)
        found.setdefault(base, {})[number] = np.asarray(value)
        totals[base] = total
    for base, values in found.items():
        if sorted(values) != list(range(totals[base])):
            raise ArtifactError(
                f"The state must hold the values of all {totals[base]} replicas. Received: those of "
                f"{sorted(values)} for {base}. Call gather_state on every worker before saving."
            )
    return {base: [values[number] for number in sorted(values)] for base, values in found.items()}


def _check_same(variables: Mapping[str, Any], saved: Mapping[str, list[np.ndarray]]) -> None:
    problems = [f"{key} ({variables[key].path}) is missing" for key in variables if key not in saved]
    problems += [f"{key} of shape {saved[key][0].shape} is not in the model" for key in saved if key not in variables]
    for key in variables.keys() & saved.keys():
        variable, values = variables[key], saved[key]
        shape, dtype = tuple(variable.shape), variable.value.dtype.as_numpy_dtype
        for value in values:
            if (value.shape, value.dtype) != (shape, dtype):
                words = f"{value.dtype} of shape {value.shape} and the model's is {np.dtype(dtype)} of shape {shape}"
                problems.append(f"{key} ({variable.path}) is {words}")
                break
    if not problems:
        return
    problems.sort()
    remedies = {
        "model/": "Build the model that was saved.",
        "optimizer/": "Compile with the optimizer that was saved.",
        "metrics/": "Compile with the metrics that were saved.",
        "constraint/": "Attach the same masks: use PruningSchedule, or prune first, as the saved run had or had not.",
    }
    advice = [remedy for role, remedy in remedies.items() if any(text.startswith(role) for text in problems)]
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    raise ArtifactError(
        "A checkpoint can only be restored to the model, optimizer, metrics and masks it was saved from. Received: "
        + "; ".join(problems[:5])
        + f"{more}. "
        + " ".join(advice)
    )


def _for_replicas(saved: list[np.ndarray], count: int, aggregation: str) -> list[np.ndarray]:
    """Returns one value for each of `count` replicas."""
    if len(saved) == count:
        return saved
    first = saved[0]
    if aggregation == "sum":
        return [np.sum(saved, axis=0, dtype=first.dtype), *[np.zeros_like(first)] * (count - 1)]
    if len(saved) > 1 and keras.backend.is_float_dtype(first.dtype.name):
        first = np.mean([value.astype(np.float64) for value in saved], axis=0).astype(first.dtype)
    return [first] * count


@functools.cache
def _gather(strategy: tf.distribute.Strategy) -> Callable[[Any], tf.Tensor]:
    """Returns a function made once for each strategy. Otherwise TensorFlow traces one for every save, and warns."""
    return tf.function(lambda values: strategy.gather(values, axis=0))


def _packed(values: Any) -> np.ndarray:
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in values)
    return np.frombuffer(data + bytes(-len(data) % 8), dtype=np.int64)


def _unpacked(vector: np.ndarray, template: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    data, position, values = vector.tobytes(), 0, {}
    for key, like in template.items():
        values[key] = np.frombuffer(data, like.dtype, like.size, position).reshape(like.shape)
        position += like.nbytes
    return values
