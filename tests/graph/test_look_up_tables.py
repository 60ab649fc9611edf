"""Models with look-up layers: the tables are kept as they are, and the numeric part is folded and quantized."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.cli.entry import main
from tfopt.errors import ArtifactError, ConfigError, UnsupportedModelError
from tfopt.exporting import ExportConfig, export
from tfopt.exporting.manifest import read_manifest
from tfopt.graph import freeze
from tfopt.quantization import QuantizationConfig, WeightOnlyConfig

WORDS = ["red", "green", "blue", "größer"]
RANDOM = np.random.default_rng(0)
INT8 = ExportConfig(precision="int8", int8_nodes="all")


def strings(count=48, length=1):
    return np.array([[" ".join(RANDOM.choice([*WORDS, "unknown"], length))] for _ in range(count)])


def head(x):
    return layers.Dense(3)(layers.Dense(16, activation="relu")(x))


def model_of(layer, embedded=True, dtype="string"):
    inputs = keras.Input((1,), dtype=dtype, name="word")
    x = layer(inputs)
    return keras.Model(inputs, head(layers.Flatten()(layers.Embedding(20, 8)(x)) if embedded else x))


def from_a_file(folder):
    (folder / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")
    return model_of(layers.StringLookup(vocabulary=str(folder / "words.txt")))


def adapted(_):
    layer = layers.TextVectorization(output_sequence_length=4)
    layer.adapt(np.array(["red green", "blue blue größer"]))
    return model_of(layer)


def counting(_):
    layer = layers.TextVectorization(vocabulary=WORDS, output_mode="tf_idf", idf_weights=[1.0, 2.0, 3.0, 4.0])
    return model_of(layer, embedded=False)


MODELS = {
    "string look-up": lambda _: model_of(layers.StringLookup(vocabulary=WORDS)),
    "from a file": from_a_file,
    "text vectorization": adapted,
    "tf-idf": counting,
    "hashing": lambda _: model_of(layers.Hashing(8)),
    "integer look-up": lambda _: model_of(layers.IntegerLookup(vocabulary=[4, 7, 10]), dtype="int64"),
}


ALIKE = ("string look-up", "tf-idf")  # as "from a file", and "text vectorization"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in MODELS]
)
def test_the_table_is_kept_and_the_numeric_part_becomes_int8(name, tmp_path):
    model = MODELS[name](tmp_path)
    text = name in ("text vectorization", "tf-idf")
    x = RANDOM.choice([4, 7, 9], (48, 1)) if name == "integer look-up" else strings(length=3 if text else 1)
    expected = np.asarray(model(tf.constant(x)))
    np.testing.assert_allclose(freeze(model).predict(x)["output_0"], expected, atol=1e-6)
    artifact = export(model, tmp_path / "int8", INT8, calibration_data=x)
    assert sum("MatMul" in change.kind for change in artifact.report.changed) == 2
    served = tf.saved_model.load(artifact.path).signatures["serving_default"](word=tf.constant(x))["output_0"]
    assert np.abs(served - expected).max() < 0.05 * np.abs(expected).max()


@pytest.fixture(scope="module")
def looking():
    word, number = keras.Input((1,), dtype="string", name="word"), keras.Input((4,), name="number")
    table = layers.StringLookup(vocabulary=WORDS)
    found = layers.Flatten()(layers.Embedding(6, 8)(table(word)))
    model = keras.Model([word, number], head(layers.Concatenate()([found, number])), name="looking")
    x = {"word": strings(), "number": RANDOM.normal(size=(48, 4)).astype("float32")}
    return model, x, np.asarray(model({name: tf.constant(value) for name, value in x.items()}))


def served(path, x, signature="serving_default"):
    function = tf.saved_model.load(str(path)).signatures[signature]
    return function(**{name: tf.constant(value) for name, value in x.items()})["output_0"].numpy()


@pytest.mark.slow
def test_every_way_through_an_export_keeps_the_table(looking, tmp_path):
    model, x, expected = looking
    model.export(tmp_path / "keras", verbose=False)
    export(tmp_path / "keras", tmp_path / "float")
    stored = ExportConfig(precision="int8_weight_only", weight_only=WeightOnlyConfig(minimum_size=16))
    export(tmp_path / "float", tmp_path / "stored", stored)
    model.save(tmp_path / "model.keras")
    config = ExportConfig(
        precision="int8", int8_nodes="all", float_fallback=True, quantization=QuantizationConfig(max_accuracy_drop=0.5)
    )
    export(tmp_path / "model.keras", tmp_path / "int8", config, calibration_data=(x, expected.argmax(axis=1)))
    np.testing.assert_allclose(served(tmp_path / "float", x), expected, atol=1e-6)
    assert np.abs(served(tmp_path / "stored", x) - expected).max() < 0.05
    for signature in ("serving_default", "serving_float"):
        assert np.abs(served(tmp_path / "int8", x, signature) - expected).max() < 0.05


def test_the_check_of_the_manifest_draws_words_of_the_data_or_of_the_tables(looking, tmp_path):
    model, x, _ = looking
    with_data = read_manifest(Path(export(model, tmp_path / "with", calibration_data=x).path)).check
    without = read_manifest(Path(export(model, tmp_path / "without").path)).check
    assert set(with_data.words["word"]) == {*WORDS, "unknown"}
    assert set(without.words["word"]) == set(WORDS)
    assert any(any(record.values) for record in without.outputs["artifact"].values())
    manifest = tmp_path / "without" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["check"]["words"]["word"] = ["red"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=r"check.words has 1 words"):
        read_manifest(manifest.parent)


@pytest.mark.slow  # 10 s for two fresh processes that import TensorFlow
def test_such_an_artifact_is_served_by_tensorflow_alone(looking, tmp_path):
    model, x, _ = looking
    export(model, tmp_path / "float", calibration_data=x)
    export(model, tmp_path / "int8", INT8, calibration_data=x, baseline=tmp_path / "float")
    assert main(["verify", str(tmp_path / "int8")]) == 0


def test_what_cannot_be_kept_is_refused_with_a_remedy(looking, tmp_path):
    model, x, _ = looking
    for precision in ("float32", "int8"):  # before anything is calibrated, so without the data too
        with pytest.raises(ConfigError, match="xla_signature must be False for a model with look-up tables"):
            export(model, tmp_path / "out", ExportConfig(precision=precision, xla_signature=True))
    with pytest.raises(ConfigError, match="'word' must be given as string"):
        export(model, tmp_path / "out", INT8, calibration_data={**x, "word": np.ones((48, 1))})
    numbers = keras.Input((1,), dtype="int64")
    backwards = keras.Model(numbers, layers.StringLookup(vocabulary=WORDS, invert=True)(numbers))
    with pytest.raises(UnsupportedModelError, match=r"outputs of a frozen model must be numbers.*export the part"):
        freeze(backwards)


class Vectors(tf.Module):
    """Looks up vectors, which TensorFlow's static tables cannot hold."""

    def __init__(self):
        super().__init__()
        self.table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, [0.0, 0.0], -1, -2)
        self.table.insert(tf.constant([3], tf.int64), [[1.0, 2.0]])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="x")])
    def serve(self, x):
        return {"y": self.table.lookup(x)}


def test_a_table_of_vectors_is_refused_by_name(tmp_path):
    module = Vectors()
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=module.serve)
    with pytest.raises(UnsupportedModelError, match=r"single keys to single values.*LookupTableFindV2 at"):
        freeze(tmp_path / "model")
