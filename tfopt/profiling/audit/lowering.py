"""Asks XLA whether it lowers a training step for a GPU. That needs no GPU; to compile the result would need one.

Without a device XLA takes no variables, so the forward pass and the gradient are traced as a function of their values.
The update of the optimizer, which is elementwise, is left out.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.tensorflow import custom_gradients_forgotten, register_xla_kernels


def why_not_lowered(function: Any, *specs: Any) -> Exception | None:
    """Returns the error by which XLA refuses a function for a GPU; None if it lowers it to its own operations (HLO).

    Args:
        function: A tf.function with jit_compile=True that reads no variables.
        specs: The specs of its arguments, with all sizes known.
    Example:
        >>> twice = tf.function(lambda x: 2 * x, jit_compile=True)
        >>> why_not_lowered(twice, tf.TensorSpec((3,))) is None
        True
        >>> words = tf.function(lambda x: tf.strings.as_string(x), jit_compile=True)
        >>> "AsString" in str(why_not_lowered(words, tf.TensorSpec((3,))))
        True
    """
    register_xla_kernels()
    try:
        function.experimental_get_compiler_ir(*specs)(stage="hlo_serialized", platform_name="GPU")
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
        return error
    return None


def gradients_of_values(model: keras.Model, batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the forward pass and the gradient of a compiled model as a function of its variables' values.

    Args:
        model: A model that trains by Keras' `train_step`.
        batch: The specs of a batch: (x, y) or (x, y, sample_weight).
    Returns: A tf.function with jit_compile=True, and the specs of its arguments.
    """
    variables = list({id(each): each for each in (*model.variables, *model.metrics_variables)}.values())
    trained = {id(each) for each in model.trainable_variables}
    flat = [each for each in keras.tree.flatten(batch) if each is not None]

    @custom_gradients_forgotten()
    def gradients(*arguments: Any) -> Any:  # flat, since XLA is told nothing of structures
        values, given = arguments[: len(variables)], iter(arguments[len(variables) :])
        filled = keras.tree.map_structure(lambda spec: None if spec is None else next(given), batch)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(filled)
        sources = [value for variable, value in zip(variables, values, strict=True) if id(variable) in trained]
        scope = keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True)))
        with tf.GradientTape() as tape:
            tape.watch(sources)
            with scope:
                predicted = model(x, training=True)
                loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight, training=True)
        return loss, tape.gradient(loss, sources)

    specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
    return tf.function(gradients, autograph=False, jit_compile=True), (*specs, *flat)
