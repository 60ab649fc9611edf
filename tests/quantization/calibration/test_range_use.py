"""What calibration data cannot show: said at calibration, in the report, and by the error on other examples."""

import keras
import numpy as np
import pytest
from keras import layers

from tfopt.errors import TfoptWarning
from tfopt.exporting import ExportConfig, export
from tfopt.exporting.manifest import read_manifest
from tfopt.quantization import QuantizationConfig, quantization_report, quantize
from tfopt.report.record import RANGE

X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
INT8 = ExportConfig(precision="int8", int8_nodes="all")
OUTLIER = X.copy()
OUTLIER[3, 2] = 1e6
BAD = {
    "zeros": (np.zeros_like(X), "'x': every value is 0"),
    "constant": (np.full_like(X, 0.5), r"'x': every value is 0\.5"),
    "equal": (np.repeat(X[:1], 64, axis=0), "'x': all examples are equal"),
    "one": (X[:1], "'calibration_data': 1 example,"),
    "outlier": (OUTLIER, r"'x': values up to 1e\+06, while 99.9% of the others are at most 3\.[0-9]+"),
    "many outliers": (np.where(np.abs(X) > 2, -9999, X), r"'x': 9\d\.\d% of the values are rounded to 0"),
}


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    x = keras.Input((8,), name="x")
    hidden = layers.Dense(32, activation="relu")(layers.Dense(32, activation="relu")(x))
    return keras.Model(x, layers.Dense(2)(hidden))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ("constant", "one") else name for name in BAD]
)
def test_bad_data_are_named_and_their_error_is_seen_on_other_inputs(model, name, tmp_path):
    """Before, the outputs were compared on inputs like the calibration data: zeros gave an error of 4e-8."""
    data, message = BAD[name]
    with pytest.warns(TfoptWarning, match=message):
        artifact = export(model, tmp_path / "a", INT8, calibration_data=data)
    assert any(note.kind == "calibration" for note in artifact.report.notes)
    manifest = read_manifest(tmp_path / "a")
    assert manifest.check.examples == "random inputs with the values of calibration_data"
    assert not manifest.check.held_out
    if name != "many outliers":  # these are drawn too
        assert manifest.check.errors["artifact"].relative > 0.1


def test_good_data_are_not_warned_of(model, recwarn):
    report = quantize(model, calibration_data=X).report
    assert not [each for each in recwarn if issubclass(each.category, TfoptWarning)]
    assert {note.kind for note in report.notes} == {RANGE}
    assert report.notes[0].name == "x"
    assert report.notes[0].detail.startswith("0.00% of the values saturated, ")
    clipped = quantize(model, QuantizationConfig(observer="percentile", percentile=90), calibration_data=X).report
    assert 5 < float(clipped.notes[0].detail.split("%")[0]) < 15
    assert "% of the values saturated" in str(clipped)


def test_sparse_inputs_and_ids_are_no_outliers(recwarn):
    ids, one_hot = keras.Input((6,), dtype="int32"), keras.Input((500,))
    joined = layers.Concatenate()([layers.Flatten()(layers.Embedding(50, 4)(ids)), layers.Dense(8)(one_hot)])
    mixed = keras.Model([ids, one_hot], layers.Dense(3)(joined))
    quantize(mixed, calibration_data=(np.ones((40, 6), "int32"), np.eye(500, dtype="float32")[:40]))
    assert not [each for each in recwarn if issubclass(each.category, TfoptWarning)]


def test_training_with_int8_values_says_the_same(model):
    with pytest.warns(TfoptWarning, match="'x': every value is 0"):
        trained = quantize(model, QuantizationConfig(training=True), calibration_data=np.zeros_like(X))
    assert quantization_report(trained).notes[0].detail == "every value is 0"


def test_the_error_is_that_on_examples_behind_the_calibration(model, tmp_path):
    config = ExportConfig(precision="int8", int8_nodes="all", quantization=QuantizationConfig(calibration_examples=32))
    with pytest.warns(TfoptWarning, match="values up to"):
        export(model, tmp_path / "rest", config, calibration_data=OUTLIER)
    check = read_manifest(tmp_path / "rest").check
    assert check.examples == "32 examples of the rest of calibration_data"
    assert check.errors["artifact"].relative > 0.5
    quantized = quantize(model, config.quantization, calibration_data=X)  # it holds the examples behind the first 32
    for name, given in {"float": model, "quantized": quantized}.items():
        export(given, tmp_path / name, config, calibration_data=X, evaluation_data=X[40:50])
        check = read_manifest(tmp_path / name).check
        assert check.examples == "10 examples of evaluation_data"
        assert 0 < check.errors["artifact"].relative < 0.1


@pytest.mark.parametrize(
    "precision",
    ["float16", pytest.param("int8_weight_only", marks=pytest.mark.slow), "int4_weight_only", "int8"],
)
def test_weights_that_become_zero_are_named(precision, tmp_path):
    small = keras.Sequential([keras.Input((64,)), layers.Dense(64, name="lost"), layers.Dense(2, name="kept")])
    kernel = np.full((64, 64), 1e-8, "float32")
    kernel[0] = 1.0  # so the step of each channel, or group, is far larger than the other weights
    small.get_layer("lost").kernel.assign(kernel)
    data = np.random.default_rng(0).normal(size=(20, 64)).astype("float32")
    config = ExportConfig(precision=precision, int8_nodes="all")
    report = export(small, tmp_path / "a", config, calibration_data=data).report
    (note,) = [note for note in report.notes if note.kind == "lost weights"]
    assert "lost" in note.name
    assert note.detail.startswith("98.4%")


def test_the_error_of_an_output_near_zero_is_a_share_of_its_scale(tmp_path):
    """A mask of almost only background: its own norm would make the same error a hundred times as large."""
    x = keras.Input((8,), name="x")
    background = keras.initializers.Constant(-7.0)
    hidden = layers.Dense(16, activation="relu")(x)
    segments = keras.Model(x, layers.Dense(16, activation="sigmoid", bias_initializer=background)(hidden))
    export(segments, tmp_path / "a", INT8, calibration_data=X, evaluation_data=X[::-1])
    output = read_manifest(tmp_path / "a").check.outputs["source"]["output_0"]
    assert output.scale == 1.0
    assert max(output.values) < 0.2
    assert read_manifest(tmp_path / "a").check.errors["artifact"].relative < 1e-2


@pytest.mark.parametrize("shape", [pytest.param((), marks=pytest.mark.slow), (1,)])
def test_strings_that_are_all_equal_are_named(shape, tmp_path):
    word = keras.Input(shape, dtype="string", name="word")
    looked = layers.Embedding(4, 8)(layers.StringLookup(vocabulary=["a", "b"])(word))
    model = keras.Model(word, layers.Dense(3)(looked))
    with pytest.warns(TfoptWarning, match="'word': every value is equal"):
        export(model, tmp_path / "a", INT8, calibration_data=np.full((40, *shape), "a"))
    export(model, tmp_path / "a", INT8, calibration_data=np.array(["a", "b"] * 20).reshape(40, *shape))
