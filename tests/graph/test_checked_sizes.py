"""The sizes that a signature fixes: an artifact refuses others, and its checks are not part of the frozen graph."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.exporting import ExportConfig, export
from tfopt.graph import freeze


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    steps, more = keras.Input((4, 5), name="steps"), keras.Input((None, 3), name="open")
    outputs = layers.LSTM(3)(steps), layers.Dense(3)(steps), layers.Dense(2)(more)
    directory = tmp_path_factory.mktemp("sizes") / "artifact"
    export(keras.Model([steps, more], outputs), directory, ExportConfig(xla_signature=True))
    return directory


@pytest.mark.parametrize(
    ("signature", "shapes"),
    [("serving_default", [(2, 5, 4), (2, 2, 5), (2, 8, 5), (8, 5)]), ("serving_xla", [(2, 5, 4)])],
)
def test_other_sizes_than_those_of_the_signature_are_refused(signature, shapes, artifact):
    serve = tf.saved_model.load(artifact).signatures[signature]
    assert len(serve(steps=tf.ones((2, 4, 5)), open=tf.ones((2, 7, 3)))) == 3
    for shape in shapes:
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"steps.* compatible with expected shape \[\?,4,5\]"):
            serve(steps=tf.ones(shape), open=tf.ones((2, 7, 3)))


def test_a_graph_that_is_read_again_has_no_checks(artifact, tmp_path):
    first = freeze(artifact)
    assert "EnsureShape" not in {node.op for node in first.graph_def.node}
    export(artifact, tmp_path / "again")
    again = freeze(tmp_path / "again")
    assert sorted(node.op for node in again.graph_def.node) == sorted(node.op for node in first.graph_def.node)
    x = {"steps": np.ones((2, 4, 5), "float32"), "open": np.ones((2, 7, 3), "float32")}
    for name, value in first.predict(x).items():
        np.testing.assert_allclose(again.predict(x)[name], value, rtol=1e-6)


def test_a_check_of_the_model_that_says_more_stays(tmp_path):
    module = tf.Module()
    module.serve = tf.function(
        lambda x: {"y": tf.ensure_shape(x, (None, 4)), "z": tf.ensure_shape(x, (None, None))},
        input_signature=[tf.TensorSpec((None, None), tf.float32, "x")],
    )
    tf.saved_model.save(module, tmp_path / "source", signatures=module.serve)
    graph = freeze(tmp_path / "source")
    assert [node.op for node in graph.graph_def.node].count("EnsureShape") == 1
    assert graph.predict(np.ones((2, 4), "float32"))["z"].shape == (2, 4)
    with pytest.raises(tf.errors.InvalidArgumentError):
        graph.predict(np.ones((2, 3), "float32"))
