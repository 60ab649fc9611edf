"""All that a training run carries in variables, read to arrays and written back bit by bit.

Keras names layers with counters that differ from process to process, so an array's key is its role and position:
`model/0007` (weights, statistics, seeds), `metrics/0001` (the loss tracker too), `optimizer/0003` (iterations, slots,
loss scale, averages), `constraint/0007/kept` (what the constraint of model variable 7 holds: a pruning mask).

Under tf.distribute most variables are the same on every replica and are read once. Two kinds are not. Metric variables
are summed over the replicas when read. And what a layer assigns by itself, such as BatchNormalization's moving
statistics, is a copy per replica that Keras never brings together (its aggregation is NONE). A run continues bit by
bit only if each replica gets back its own value, so these are kept one by one: `metrics/0001/0-of-2`. On another
number of replicas they are brought together: a sum stays the same sum (the first replica gets all of it, the others
zero), floating-point statistics become their mean, and of the rest (seeds, counters) the first replica's counts.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compat.optimizers import averages, inner_optimizer, trained_variables
from tfopt.compat.tensorflow import eager_generator, eager_seed, global_generator, keras_generator
from tfopt.compat.trainer import symbolic_build
from tfopt.errors import ArtifactError, UnsupportedModelError

_PER_REPLICA = re.compile(r"(.+)/(\d+)-of-(\d+)")


def build_state(model: keras.Model, batch: Any) -> None:
    """Creates the variables that Keras would create in the first step: those of metrics, losses and the optimizer.

    To be called before `write_state` in a fresh process: without a tf.distribute strategy, `fit` has not made the
    metrics' variables when it calls `on_train_begin` or `on_epoch_begin`. Nothing is computed, no seed advances.

    Args:
        model: Built and compiled.
        batch: `(x, y)` or `(x, y, sample_weight)` of anything with a shape and a dtype; a `tf.data.Dataset`'s
            `element_spec` will do.
    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse", metrics=["mae"])
        >>> build_state(model, (tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1))))
        >>> [key for key in read_state(model) if key.startswith("metrics/")]
        ['metrics/0000', 'metrics/0001', 'metrics/0002', 'metrics/0003']
    """
    with model.distribute_strategy.scope():
        symbolic_build(model, batch)


def read_state(model: keras.Model, only: Sequence[Any] | None = None) -> dict[str, np.ndarray]:
    """Returns every variable that training carries, with this process's replicas' own values.

    With several workers the other workers' values are missing; `gather_state` adds them.

    Args:
        model: Built. The optimizer is built if it is not.
        only: The variables to read; all if None.
    Raises:
        UnsupportedModelError: The model is not built.
    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> [(key, value.shape) for key, value in read_state(model).items()][:3]
        [('model/0000', (2, 1)), ('model/0001', (1,)), ('metrics/0000', ())]
    """
    state = {}
    wanted = None if only is None else {id(variable) for variable in only}
    for key, variable in _variables(model):
        if wanted is not None and id(variable) not in wanted:
            continue
        replicas = _replicas(variable.value)
        if not _differs_between_replicas(key, variable):
            state[key] = _read(replicas[min(replicas)])
            continue
        total = variable.value.distribute_strategy.num_replicas_in_sync
        state |= {f"{key}/{number}-of-{total}": _read(replica) for number, replica in replicas.items()}
    return state


def averaged_variables(model: keras.Model) -> list[Any]:
    """Returns the weights of which the optimizer keeps moving averages, and these averages; none without `use_ema`.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(use_ema=True), "mse")
        >>> model.optimizer.build(model.trainable_variables)
        >>> len(averaged_variables(model))
        4
    """
    optimizer = inner_optimizer(model.optimizer)
    found: list[Any] = []
    for each in getattr(optimizer, "optimizers", [optimizer]):
        if getattr(each, "use_ema", False):
            found += [*trained_variables(each), *averages(each)]
    return found


def gather_state(state: Mapping[str, np.ndarray], strategy: tf.distribute.Strategy) -> dict[str, np.ndarray]:
    """Adds the values of the other workers' replicas to what `read_state` returned.

    A collective: every worker calls it at the same step, and every worker gets all values. One of them, the chief,
    then saves a checkpoint that is complete. Where all replicas are in this process, it returns the state as it is.

    Example:
        >>> gather_state({"model/0000": np.zeros(2)}, tf.distribute.get_strategy())
        {'model/0000': array([0., 0.])}
    """
    local: dict[int, dict[str, np.ndarray]] = {}
    for key, value in state.items():
        if match := _PER_REPLICA.fullmatch(key):
            local.setdefault(int(match[2]), {})[match[1]] = value
    total = strategy.num_replicas_in_sync
    if not local or len(local) == total:
        return dict(state)
    # All of a replica's values as one vector, so that it is one collective. Every replica has the same variables. As
    # int64, which every communication library moves without touching the bits.
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
    """Gives every variable the value it had when `read_state` was called, in this process or another.

    Everything is checked first: when it raises, the model is as it was. `fit` resets the metrics at the start of an
    epoch, so to go on within an epoch, restore in `on_epoch_begin` (which comes after that) or later.

    Args:
        model: Built as the saved one was, compiled with the same optimizer and metrics, its masks attached; see
            `build_state`.
        state: From `read_state`; with several workers, completed by `gather_state`.
        only: What the keys of those that are written begin with; all are checked.
    Raises:
        ArtifactError: The state is not of such a model; the message names what differs.
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
    variables = dict(_variables(model))
    saved = _by_variable(state)
    _check_same(variables, saved)
    for key, variable in variables.items():
        if not key.startswith(only):
            continue
        replicas = _replicas(variable.value)
        strategy = getattr(variable.value, "distribute_strategy", tf.distribute.get_strategy())
        own = _differs_between_replicas(key, variable)
        values = _for_replicas(saved[key], strategy.num_replicas_in_sync if own else 1, variable.aggregation)
        for number, replica in replicas.items():
            # Replica by replica: assigning to a variable that is summed when read would divide by their number.
            replica.assign(values[number] if own else values[0])


def read_random() -> dict[str, Any]:
    """Returns the state of the global random generators, as JSON can hold it.

    They are Python's, NumPy's, Keras' (for layers and functions without a seed of their own), the one from which
    TensorFlow seeds eager operations and, if there is one, `tf.random.get_global_generator()`. Layers' own seeds are
    variables of the model. Not among them: operations of TensorFlow's own with a state inside their kernel, such as
    `tf.random.uniform` in a compiled step. `keras.random` and `tf.random.stateless_*` have none.

    Example:
        >>> state = read_random()
        >>> first = random.random()
        >>> write_random(state)
        >>> random.random() == first
        True
    """
    kind, keys, *rest = np.random.get_state()
    of_keras, generator = keras_generator(make=False), global_generator()
    seed = eager_seed()  # None where there was no tf.random.set_seed: nothing then repeats
    return {
        "python": _listed(random.getstate()),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "keras": _read(next(iter(_replicas(of_keras.state.value).values()))).tolist() if of_keras else None,
        "tensorflow": [int(generator.algorithm), generator.state.numpy().tolist()] if generator else None,
        "tensorflow_eager": None if seed is None else [int(seed), _listed(eager_generator().getstate())],
    }


def write_random(state: Mapping[str, Any]) -> None:
    """Sets the global random generators as they were at `read_random`.

    One that did not exist then is left alone; one that does not exist yet is made, under the current strategy.
    """
    if state["keras"] is not None:
        generator = keras_generator(make=True)
        for replica in _replicas(generator.state.value).values():
            replica.assign(state["keras"])
    if state["tensorflow"] is not None:
        algorithm, values = state["tensorflow"]
        tf.random.set_global_generator(tf.random.Generator.from_state(values, algorithm))
    if state["tensorflow_eager"] is not None:
        seed, drawn = state["tensorflow_eager"]
        tf.random.set_seed(seed)
        eager_generator().setstate(_tupled(drawn))
    # Last, since making Keras' generator draws from Python's.
    random.setstate(_tupled(state["python"]))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))


def _variables(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yields each variable once, with its key."""
    if not model.built:
        raise UnsupportedModelError(
            f"model must be built, or it has no variables. Received: model={model.name!r}. Call it on a batch first."
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
    own = list(_once(model.variables))
    seen = {id(variable) for variable in own}
    for position, variable in enumerate(own):
        yield f"model/{position:04d}", variable
    for position, variable in enumerate(_once(model.metrics_variables, seen)):
        yield f"metrics/{position:04d}", variable
    for position, variable in enumerate(_once(optimizer.variables if optimizer else [], seen)):
        yield f"optimizer/{position:04d}", variable
    for position, variable in enumerate(own):
        yield from _held(variable.constraint, f"constraint/{position:04d}", seen)


def _once(variables: Sequence[Any], seen: set[int] | None = None) -> Iterator[Any]:
    seen = set() if seen is None else seen
    for variable in variables:
        if id(variable) not in seen:
            seen.add(id(variable))
            yield variable


def _held(constraint: Any, key: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields what a constraint holds. Told by type, since pruning's Mask is nothing this package may import."""
    for name, value in sorted(vars(constraint).items()) if constraint is not None else ():
        if isinstance(value, keras.Variable) and id(value) not in seen:
            seen.add(id(value))
            yield f"{key}/{name}", value
        elif isinstance(value, keras.constraints.Constraint):
            yield from _held(value, f"{key}/{name}", seen)


def _replicas(value: Any) -> dict[int, tf.Variable]:
    """Returns the plain variables of this process's replicas, by the replica's number in the whole training."""
    if not isinstance(value, tf.distribute.DistributedValues):
        return {0: value}
    strategy = value.distribute_strategy
    numbers = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    local = strategy.experimental_local_results
    return {int(number): replica for number, replica in zip(local(numbers), local(value), strict=True)}


def _differs_between_replicas(key: str, variable: Any) -> bool:
    value = variable.value
    if not isinstance(value, tf.distribute.DistributedValues):
        return False
    if value.synchronization == tf.VariableSynchronization.ON_READ:
        return True
    # As made, not `variable.trainable`: freezing a layer does not make its weights differ.
    return key.startswith(("model/", "metrics/")) and not value.trainable


def _read(variable: tf.Variable) -> np.ndarray:
    return np.asarray(variable.numpy())


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
    problems += [
        f"{key} of shape {saved[key][0].shape} is nothing the model has" for key in saved if key not in variables
    ]
    for key in variables.keys() & saved.keys():
        variable, values = variables[key], saved[key]
        expected = (tuple(variable.shape), variable.value.dtype.as_numpy_dtype)
        for value in values:
            if (value.shape, value.dtype) != expected:
                problems.append(
                    f"{key} ({variable.path}) is {value.dtype} of shape {value.shape} "
                    f"and the model's is {np.dtype(expected[1])} of shape {expected[0]}"
                )
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
    """Returns one value per replica from as many as were saved."""
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
    """Made once, or TensorFlow traces a function for every save and warns of it."""
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


def _listed(state: tuple[Any, ...]) -> list[Any]:
    version, internal, gauss = state
    return [version, list(internal), gauss]


def _tupled(state: Sequence[Any]) -> tuple[Any, ...]:
    version, internal, gauss = state
    return version, tuple(internal), gauss
