"""What export records of a model's outputs, and what verify finds by it."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from tfopt.errors import ConfigError, TfoptWarning, UnsupportedModelError
from tfopt.exporting import ExportConfig, export
from tfopt.exporting.config import DEFAULT_SIGNATURE
from tfopt.exporting.int8.time_table import feeds_of
from tfopt.exporting.lowering import lower
from tfopt.exporting.manifest import CheckRecord, OutputRecord, TensorRecord, read_manifest
from tfopt.exporting.parity import (
    CHECKED_VALUES,
    compare,
    draw_inputs,
    make_check,
    record_output,
)
from tfopt.exporting.words import CHECKED_WORDS, first_words, text_of
from tfopt.graph import freeze
from tfopt.graph.inputs import table_rows
from tfopt.quantization import quantize
from tfopt.quantization.calibration.calibrate import read_calibration_data


def recorded(model, data=None):
    """Returns the record of a float export, and the inputs that it is made with."""
    source, graph = freeze(model, fold=False), freeze(model)
    content = json.loads(
        json.dumps(make_check(source, {DEFAULT_SIGNATURE: graph}, read_calibration_data(source, data).sample).to_dict())
    )
    outputs = {
        kind: {name: OutputRecord(**record) for name, record in each.items()}
        for kind, each in content["outputs"].items()
    }
    check = CheckRecord(
        ranges={name: tuple(limits) for name, limits in content["ranges"].items()},
        shapes={name: tuple(shape) for name, shape in content["shapes"].items()},
        outputs=outputs,
    )
    specs = {name: TensorRecord(shape=tuple(spec.shape), dtype=spec.dtype.name) for name, spec in graph.inputs.items()}
    return check, draw_inputs(specs, check), graph


def tokens(vocabulary=1000, embed=None, dtype="int32"):
    ids = keras.Input((16,), dtype=dtype, name="ids")
    hidden = (embed or layers.Embedding(vocabulary, 8))(ids)
    return keras.Model(ids, layers.Dense(32)(hidden))


def test_ids_are_drawn_over_the_whole_table(tmp_path):
    check, inputs, graph = recorded(tokens())
    assert check.ranges == {"ids": (0, 999)}
    assert inputs["ids"].dtype == np.int32
    assert len(np.unique(inputs["ids"])) > 25
    assert inputs["ids"].max() > 900
    outputs = graph.predict(inputs)
    assert compare(outputs, check.outputs["artifact"], first=False)[1] < 1e-6
    export(tokens(), tmp_path / "a")
    assert (tmp_path / "a" / "manifest.json").stat().st_size < 8000
    assert read_manifest(tmp_path / "a").check.ranges == check.ranges


def test_a_wrong_row_of_the_table_is_found():
    """One row out of a thousand, and it is looked up once: 32 of 1024 values."""
    model = tokens()
    check, inputs, _ = recorded(model)
    table = model.layers[1].embeddings.numpy()
    table[inputs["ids"][1, 15]] += 0.1
    model.layers[1].embeddings.assign(table)
    assert compare(freeze(model).predict(inputs), check.outputs["artifact"], first=False)[1] > 1e-2


def test_the_smallest_of_several_tables_bounds_the_ids():
    ids = keras.Input((16,), dtype="int64", name="ids")
    both = layers.Add()([layers.Embedding(1000, 8)(ids), layers.Embedding(20, 8)(ids)])
    model = keras.Model(ids, both)
    assert table_rows(freeze(model, fold=False)) == table_rows(freeze(model)) == {"ids": 20}
    assert recorded(model)[0].ranges == {"ids": (0, 19)}


class Shifted(layers.Layer):
    """Reads a table at other places than its input says."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(30, 4)

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        return self.table(ids * 3 + 20)


def test_evaluation_data_with_ids_beyond_the_table_are_an_error_of_the_data(tmp_path):
    with pytest.raises(
        ConfigError, match=r"calibration_data and evaluation_data must be.*= 1000 is not in \[0, 1000\)"
    ):
        export(tokens(), tmp_path / "a", evaluation_data=np.full((2, 16), 1000))


def test_sample_data_with_ids_beyond_the_table_are_an_error_of_the_data():
    ids = np.arange(64).reshape(4, 16)
    quantized = quantize(tokens(), calibration_data=ids)
    with pytest.raises(ConfigError, match=r"calibration_data and evaluation_data must be.*is not in \[0, 1000\)"):
        lower(quantized, ExportConfig(precision="int8", batch_sizes=(1,)), ids + 1000, None)


def test_a_model_that_takes_fewer_ids_than_it_seems_is_exported_all_the_same():
    ids = keras.Input((16,), dtype="int32", name="ids")
    check, inputs, _ = recorded(keras.Model(ids, Shifted()(ids)))
    assert check.ranges["ids"] == (0, 1)
    assert set(np.unique(inputs["ids"])) == {0, 1}


@pytest.mark.parametrize(("dtype", "limits"), [("uint8", (0, 255)), ("int32", (0, 9)), ("bool", (0, 1))])
def test_integers_that_read_no_table(dtype, limits):
    pixels = keras.Input((8, 8), dtype=dtype, name="pixels")
    cast = layers.Lambda(lambda values: keras.ops.cast(values, "float32"))(pixels)
    check, inputs, _ = recorded(keras.Model(pixels, layers.Dense(3)(cast)))
    assert check.ranges["pixels"] == limits
    assert inputs["pixels"].dtype == dtype
    drawn = int(inputs["pixels"].min()), int(inputs["pixels"].max())
    assert drawn == pytest.approx(limits, abs=10)
    assert len(np.unique(inputs["pixels"])) > 1


def test_with_data_its_largest_id_is_drawn_too():
    check, inputs, _ = recorded(tokens(), np.tile([[3, 4]], (5, 8)).astype("int32"))
    assert check.ranges["ids"] == (3, 4)
    assert set(np.unique(inputs["ids"])) == {3, 4}


@given(size=st.integers(1, 5000), place=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_no_value_can_change_unseen(size, place, seed):
    """A single value that changes by the size of the whole output."""
    output = np.random.default_rng(seed).normal(size=size)
    record = {"y": record_output(output)}
    assert len(record["y"].values) == min(size, CHECKED_VALUES)
    assert compare({"y": output}, record, first=False)[1] < 1e-5
    changed = output.copy()
    changed[int(place * size)] += np.linalg.norm(output)
    assert compare({"y": changed}, record, first=False)[1] > 0.99


def test_nan_is_refused_at_export(tmp_path):
    model = keras.Sequential([keras.Input((3,), name="x"), layers.Dense(2)])
    model.layers[0].bias.assign([np.nan, 0.0])
    with pytest.raises(
        UnsupportedModelError, match=r"'output_0' holds NaN for x from 0 to 1. Look for NaN among its w"
    ):
        export(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


class Positions(layers.Layer):
    """Adds a row of a table to each place of a sequence."""

    def build(self, shape):
        self.table = self.add_weight(shape=(20, shape[-1]))

    def call(self, x):
        return x + self.table[: keras.ops.shape(x)[1]]


def test_an_open_length_is_drawn_as_long_as_the_model_takes(tmp_path):
    ids = keras.Input((None,), dtype="int32", name="ids")
    model = keras.Model(ids, layers.Dense(3)(Positions()(layers.Embedding(50, 8)(ids))))
    export(model, tmp_path / "float")
    assert read_manifest(tmp_path / "float").check.shapes == {"ids": (2, 16)}
    assert feeds_of(freeze(model), None, [3])[3]["ids"].shape == (3, 16)  # what the clock times


def test_a_model_that_runs_on_no_length_that_is_tried_is_refused_with_the_reason(tmp_path):
    x = keras.Input((None, 4), name="x")
    rows = layers.Permute((2, 1))(x)
    model = keras.Model(x, layers.Lambda(lambda rows: keras.ops.matmul(rows, keras.ops.ones((7, 3))))(rows))
    with pytest.raises(UnsupportedModelError, match=r"shapes \{'x': \[2, 64, 4\]\}.*size.*64.*Pass calibration_data"):
        export(model, tmp_path / "a")
    export(model, tmp_path / "a", calibration_data=np.ones((4, 7, 4), np.float32))


def test_a_model_that_needs_real_inputs_is_exported_with_data(tmp_path):
    x = keras.Input((3,), name="x")
    model = keras.Model(x, layers.Lambda(lambda values: keras.ops.log(values - 5.0))(x))
    with pytest.raises(UnsupportedModelError, match=r"holds NaN for x from 0 to 1.*pass such inputs as calib"):
        export(model, tmp_path / "a")
    export(model, tmp_path / "a", calibration_data=np.linspace(6, 9, 30, dtype="float32").reshape(10, 3))
    assert read_manifest(tmp_path / "a").check.ranges["x"] == (6, 9)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_data_that_is_not_finite(value, tmp_path):
    model = keras.Sequential([keras.Input((3,), name="x"), layers.Dense(2)])
    with pytest.raises(ConfigError, match=r"calibration_data must be finite. Received: NaN or infinity.*input 'x'"):
        export(model, tmp_path / "a", calibration_data=np.full((4, 3), value, "float32"))
    assert not (tmp_path / "a").exists()


def test_an_infinite_weight_is_named_and_an_infinite_mask_is_not(tmp_path):
    model = keras.Sequential([keras.Input((3,), name="x"), layers.Dense(2, name="last")])
    model.layers[0].kernel.assign(np.full((3, 2), np.inf))
    with pytest.warns(
        TfoptWarning, match=r"should be finite. Received: infinity in those of '.*last.*', and among the outputs"
    ):
        export(model, tmp_path / "a")
    x = keras.Input((3,), name="x")
    masked = keras.Model(x, layers.Dense(2)(x) + np.array([0, -np.inf], "float32"))
    export(masked, tmp_path / "b")  # a warning is an error in tests
    assert read_manifest(tmp_path / "b").check.outputs["source"]["output_0"].infinite == 2


def test_strings_that_are_no_utf_8_are_drawn_as_they_are(tmp_path):
    class Decoder(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="image")])
        def serve(self, image):
            pixels = tf.map_fn(tf.io.decode_png, image, fn_output_signature=tf.TensorSpec([None, None, None], tf.uint8))
            return {"y": tf.reduce_mean(tf.cast(pixels, tf.float32), [1, 2, 3])}

    decoder = Decoder()
    tf.saved_model.save(decoder, str(tmp_path / "source"), signatures=decoder.serve)
    images = np.array([tf.io.encode_png(np.full((2, 2, 3), shade, np.uint8)).numpy() for shade in (5, 7)], object)
    export(tmp_path / "source", tmp_path / "a", calibration_data=images)
    check = read_manifest(tmp_path / "a").check
    drawn = draw_inputs({"image": TensorRecord(shape=(None,), dtype="string")}, check)["image"]
    assert set(drawn.tolist()) <= set(images.tolist())
    assert set(check.outputs["source"]["y"].values) <= {5.0, 7.0}


def test_few_long_strings_are_recorded():
    long = [bytes([letter]) * 200_000 for letter in b"abc"]
    assert [len(word) for word in first_words(map(text_of, long))] == [200_000]
    assert len(first_words(map(str, range(100)))) == CHECKED_WORDS
