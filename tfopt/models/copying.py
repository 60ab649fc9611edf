"""The one way to copy a Keras model: new layers of the same config, with all state of the old ones.

The state of a layer is more than its weights. Keras saves it in four forms, and all of them go over:

- its variables, seeds and masks among them;
- what `save_own_variables` and `save_assets` write, such as a vocabulary, which is no variable;
- constants that are computed from variables, such as the mean of a Normalization: `load_own_variables` or
  `finalize_state` computes them again;
- variables and tables that are no part of `variables`: those of TensorFlow itself, and states of recurrent layers.

A layer may keep state in yet another place. Then no copy can be right, and `check_copy` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tfopt.atomic.scratch import scratch_directory
from tfopt.compat.layers import functional_class, history, layers_inside, run_through_graph
from tfopt.compat.tensorflow import strategy_of
from tfopt.errors import UnsupportedLayerError, UnsupportedModelError
from tfopt.models.copy_check import check_copy, example_inputs, first_examples

TABLES = (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)

STATE = (keras.Variable, tf.Variable, *TABLES)

Part = Callable[[Any, Any], Any]
"""Returns the part of an array that a copy keeps, given the variable of the source and the array of its shape."""


def _all(variable: Any, values: Any) -> Any:
    return values


def copy_model(model: keras.Model, data: Any = None) -> keras.Model:
    """Returns a copy of a built model, on the devices of the model. It is not compiled.

    Args:
        model: A functional or Sequential model, or one of a class with `get_config`.
        data: Arrays of inputs or of (inputs, targets), or a list of batches of them. The copy is compared with the
            model on the first ones. With None or other data, examples are made.
    Raises:
        UnsupportedLayerError: A layer cannot be rebuilt from its config, or its copy does not compute the same.
        UnsupportedModelError: The same of a subclassed model.
    Example:
        >>> norm = keras.layers.Normalization()
        >>> norm.adapt(keras.ops.array([[10.0], [30.0]]))
        >>> copy = copy_model(keras.Sequential([keras.Input((1,)), norm]))
        >>> keras.ops.convert_to_numpy(copy(keras.ops.ones((1, 1)) * 30)).tolist()
        [[1.0]]
    """
    return on_devices_of(model, _copied, model, data)


def on_devices_of(model: keras.Model, make: Callable[..., Any], *args: Any) -> Any:
    """Returns `make(*args)`, whose new variables lie on the devices of a model."""
    strategy = strategy_of(model.variables[0].value) if model.variables else None
    if strategy is None:
        return make(*args)
    with strategy.scope():
        return make(*args)


def _copied(model: keras.Model, data: Any) -> keras.Model:
    if is_plain(model):
        rebuild = Rebuild()
        copy = rebuild.model(model)
        check_copy(model, copy, rebuild.pairs, first_examples(model, data))
        return copy
    classes = {type(layer).__name__: type(layer) for layer in layers_inside(model)}
    try:
        with keras.saving.custom_object_scope(classes):
            copy = type(model).from_config(model.get_config())
        if not copy.built:
            copy.build_from_config(model.get_build_config())
        if len(copy.variables) < len(model.variables):  # layers that are built by their first call
            copy(*next(example_inputs(model)), training=False)
    except (ValueError, TypeError, NotImplementedError, StopIteration) as error:
        reason = (str(error) or "it cannot be called").splitlines()[0]
        raise UnsupportedModelError(
            f"model must be one that Keras can rebuild from its config. Received: {model.name!r} "
            f"({type(model).__name__}; {reason}). Give its class a get_config()."
        ) from error
    copy_state(model, [copy])
    check_copy(model, copy, list(zip(layers_inside(model)[1:], layers_inside(copy)[1:], strict=False)))
    return copy


class Rebuild:
    """Builds a functional or Sequential model anew, with its nested models. A subclass may change sizes.

    Attributes:
        pairs: Each operation of the model with its copy.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self._made: dict[int, Any] = {}  # the new operation of each old one, since a layer may be called twice
        self._copied: set[int] = set()

    def model(self, model: Any) -> Any:
        """Returns the new model, whose name, inputs and outputs are those of the old one."""
        graph = as_functional(model)
        inputs = keras.tree.map_structure(lambda x: new_input(x, self.input_shape(x)), graph.input)
        outputs = run_through_graph(graph, inputs, self._call)
        if isinstance(model, keras.Sequential):
            made = [self._made[id(layer)] for layer in model.layers]
            return keras.Sequential([*keras.tree.flatten(inputs), *made], name=model.name)
        return keras.Model(inputs, outputs, name=model.name)

    def input_shape(self, tensor: Any) -> Sequence[int | None]:
        """Returns the shape of the new input for an old one."""
        return tuple(tensor.shape)

    def operation(self, operation: Any) -> Any:
        """Returns a new operation for an old one, without its state."""
        return plain_copy(operation)

    def part(self, variable: Any, values: Any) -> Any:
        """Returns the part of an array, of the shape of a variable, that the copy keeps."""
        return values

    def _call(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        if id(operation) not in self._made:
            made = self.model(operation) if is_plain(operation) else self.operation(operation)
            self._made[id(operation)] = made
            self.pairs.append((operation, made))
        made = self._made[id(operation)]
        if is_plain(operation):
            return made(inputs_in_order(made, args[0]), **kwargs)
        return called_with_state(operation, [made], lambda: made(*args, **kwargs), self._copied, self.part)


def called_with_state(
    source: Any,
    targets: Sequence[Any],
    call: Callable[[], Any],
    copied: set[int],
    part: Part = _all,
    into: Callable[[], Sequence[Any]] | None = None,
) -> Any:
    """Returns `call()`, which calls and builds the new layers of a layer, and copies the state at the first call.

    The other arguments are those of `copy_state`; `copied` has the ids of the old layers whose state has been copied.
    An operation that is no layer has no state.
    """
    first = isinstance(source, keras.Layer) and id(source) not in copied
    copied.add(id(source))
    early = first and not source.variables  # the state, such as a vocabulary, may decide on the shape of the output
    if early:
        copy_state(source, targets, part)
    outputs = call()
    if first and not early:
        copy_state(source, targets, part, into() if into else None)
    return outputs


def copy_state(source: Any, targets: Sequence[Any], part: Part = _all, into: Sequence[Any] | None = None) -> None:
    """Copies all state of a layer to the built layers that replace it.

    Args:
        source: The old layer, or a model.
        targets: The new layers: one, or several that together have the variables of the old one in the same order.
        part: What the copies keep of each array.
        into: The variables of the new layers that get those of the old one. None means all.
    """
    if len(targets) == 1:
        parts = list(zip(layers_inside(source), layers_inside(targets[0]), strict=False))
        if all(type(old) is type(new) for old, new in parts):
            for old, new in parts:
                _copy_own_state(old, new, part)
    variables = [variable for target in targets for variable in target.variables] if into is None else into
    kept = [part(variable, variable.numpy()) for variable in source.variables]
    if [values.shape for values in kept] != [tuple(variable.shape) for variable in variables]:
        raise UnsupportedLayerError(
            f"A layer that is rebuilt from its config must have the same weights. Received: {source.name!r} "
            f"({type(source).__name__}) with {[values.shape for values in kept]}, rebuilt with "
            f"{[tuple(variable.shape) for variable in variables]}. Give the class a get_config that returns its "
            "constructor's arguments."
        )
    for old, values, new in zip(source.variables, kept, variables, strict=True):
        new.assign(values)
        if hasattr(old.constraint, "carry_over"):
            old.constraint.carry_over(new, lambda values, old=old: part(old, values))
    for target in targets:
        for layer in layers_inside(target):
            finalize(layer)


def finalize(layer: Any) -> None:
    """Computes again what a layer computes from its variables, if they were assigned.

    Only of layers whose `load_own_variables` does not do so: a Discretization would forget what it has.
    """
    if isinstance(layer, keras.layers.Normalization) or (
        hasattr(layer, "finalize_state") and not _overrides(layer, "load_own_variables")
    ):
        layer.finalize_state()


def _copy_own_state(old: Any, new: Any, part: Part) -> None:
    """Copies what one layer, without those inside it, saves besides its variables."""
    saves = _overrides(old, "save_own_variables") or _overrides(old, "load_own_variables")
    assets = hasattr(old, "save_assets") and hasattr(old, "load_assets")
    untracked = _untracked(old)
    try:
        if (saves or assets or untracked) and old.built and not new.built:
            new.build_from_config(old.get_build_config() or {})
        if saves:
            store: dict[str, Any] = {}
            old.save_own_variables(store)
            new.load_own_variables(
                {key: part(each, each.numpy()) if hasattr(each, "constraint") else each for key, each in store.items()}
            )
        if assets:
            with scratch_directory() as directory:
                old.save_assets(str(directory))
                new.load_assets(str(directory))
        made = _untracked(new)
        for place, each in untracked.items():
            own = made.get(place)
            if isinstance(each, TABLES) and isinstance(own, TABLES):
                own.insert(*each.export())
            elif own is not None and each.shape == own.shape:  # that of a smaller recurrent layer starts anew
                own.assign(each)
    except Exception as error:  # of code that is not ours
        raise UnsupportedLayerError(
            f"A layer must be able to load the state that it saves. Received: {old.name!r} ({type(old).__name__}): "
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]} Adapt or build the layer first, or mend "
            "its save_own_variables and load_own_variables, or save_assets and load_assets."
        ) from error
    if old.trainable != new.trainable:
        new.trainable = old.trainable


def _untracked(layer: Any) -> dict[tuple[str, int], Any]:
    """Returns the variables and tables in the attributes of a layer that are not among its `variables`, by place."""
    known = {id(variable) for variable in layer.variables}
    found = {(name, place): each for name, value in vars(layer).items() for place, each in enumerate(_leaves(value))}
    return {place: each for place, each in found.items() if isinstance(each, STATE) and id(each) not in known}


def _leaves(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list | tuple) else [value]


def _overrides(layer: Any, method: str) -> bool:
    return getattr(type(layer), method) is not getattr(keras.Layer, method)


def new_input(tensor: Any, shape: Sequence[int | None] | None = None) -> Any:
    """Returns a new input of a model for an old one."""
    return keras.Input(
        batch_shape=tensor.shape if shape is None else shape,
        dtype=tensor.dtype,
        sparse=tensor.sparse,
        ragged=tensor.ragged,
        name=tensor.name,
        optional=bool(getattr(history(tensor)[0], "optional", False)),
    )


def is_plain(model: Any) -> bool:
    """Returns whether a model is functional or Sequential itself. A subclass may compute something else."""
    return type(model) in (functional_class(), keras.Sequential)


def as_functional(model: Any) -> Any:
    """Returns a functional model of the same layers, if the model is Sequential."""
    return keras.Model(model.inputs, model.outputs) if isinstance(model, keras.Sequential) else model


def inputs_in_order(model: Any, given: Any) -> Any:
    """Returns the inputs in the order of the model, if they are given as a dict and the model takes no dict."""
    if isinstance(given, dict) and not isinstance(model.input, dict):
        return [given[tensor.name] for tensor in model.inputs]
    return given


def plain_copy(layer: Any, /, **changes: Any) -> Any:
    """Returns a new layer, or operation, of the same class and config, apart from `changes`."""
    if isinstance(layer, layers.Lambda):  # its config holds the function's bytecode, but no closure or globals
        return layers.Lambda(layer.function, name=layer.name, dtype=layer.dtype_policy, arguments=layer.arguments)
    try:
        return type(layer).from_config({**layer.get_config(), **changes})
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UnsupportedLayerError(
            f"Layers must be rebuildable from their config. Received: {layer.name!r} ({type(layer).__name__}): "
            f"{str(error).splitlines()[0]} Give the class a get_config that returns its constructor's arguments."
        ) from error
