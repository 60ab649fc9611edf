"""A layer that XLA cannot compile, which nobody knows before the first step."""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("tests")
class Stubborn(keras.layers.Layer):
    def call(self, inputs):
        return inputs + tf.ensure_shape(tf.py_function(lambda: 0.0, [], tf.float32), [])
