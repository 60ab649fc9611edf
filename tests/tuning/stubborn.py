"""A layer that fails in micro-batches, which nobody knows before the first step."""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("tests")
class Stubborn(keras.layers.Layer):
    def call(self, inputs):
        tf.debugging.assert_equal(tf.shape(inputs)[0] % 32, 0, "a batch must have 32 examples")
        return inputs
