"""The sizes of inputs that are made for a graph with open axes."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from tfopt.graph import freeze
from tfopt.graph.inputs import MOST_PLACES, open_size


@pytest.mark.parametrize(("rank", "size"), [(1, 64), (2, 64), (3, 16)])
def test_an_input_has_no_more_places_than_an_image(rank, size):
    """Eight volumes of 64 by 64 by 64 took the memory of the machine, and the process with it."""
    inputs = keras.Input((*[None] * rank, 2))
    graph = freeze(keras.Model(inputs, getattr(layers, f"Conv{rank}D")(2, 3)(inputs)))
    assert open_size(graph) == size
    assert size**rank <= MOST_PLACES


class Positions(layers.Layer):
    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(20, 4)

    def call(self, x):
        return x + self.table(tf.range(tf.shape(x)[1]))


def test_a_size_that_a_layer_refuses_is_not_taken():
    inputs = keras.Input((None, 4))
    assert open_size(freeze(keras.Model(inputs, Positions()(inputs)))) == 16
