"""Fusions are found by what a graph computes, not by the order in which it happens to hold its nodes."""

import dataclasses
import random

import keras
from keras import layers

from tfopt.graph import GraphEditor, freeze
from tfopt.quantization.annotation.fusion import find_fusions


def test_of_two_like_branches_the_same_one_takes_the_sum_in_any_order_of_nodes():
    inputs = keras.Input((8, 8, 3))
    one, other = (layers.Conv2D(4, 3, name=name)(inputs) for name in ("one", "other"))
    total = layers.ReLU()(layers.Add()([one, other]))
    graph = freeze(keras.Model(inputs, layers.Conv2D(4, 1, name="last")(total)))
    expected, _ = find_fusions(graph, GraphEditor(graph.graph_def))
    assert [fusion.summand is not None for fusion in expected] == [False, True, False]
    generator = random.Random(0)
    for _ in range(10):
        nodes = list(graph.graph_def.node)
        generator.shuffle(nodes)
        shuffled = type(graph.graph_def)(versions=graph.graph_def.versions, node=nodes)
        found, _ = find_fusions(dataclasses.replace(graph, graph_def=shuffled), GraphEditor(shuffled))
        assert found == expected
