"""LiteRT files are right where the converter or a kernel of LiteRT is not, and keep the model's order."""

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from keras import layers, ops

from tests.exporting.networks import examples
from tfopt.errors import UnsupportedModelError
from tfopt.exporting import ExportConfig, export
from tfopt.exporting.litert import convert
from tfopt.exporting.manifest import read_manifest
from tfopt.exporting.processing.config import PostprocessingConfig
from tfopt.exporting.unseen import unseen
from tfopt.exporting.verification.litert_only import operators, read
from tfopt.exporting.verification.process import RuntimeProcess
from tfopt.quantization import QuantizationConfig, quantize


def by_place(directory, values):
    """Returns the outputs of a file in its own order. The values are those of its inputs, in its own order."""
    interpreter = Interpreter(str(directory / "model.tflite"))
    inputs = [each["index"] for each in interpreter.get_input_details()]
    for place, value in zip(inputs, values, strict=True):
        interpreter.resize_tensor_input(place, value.shape)
    interpreter.allocate_tensors()
    for place, value in zip(inputs, values, strict=True):
        interpreter.set_tensor(place, value)
    interpreter.invoke()
    return [interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details()]


def test_zeros_large_numbers_signs_and_sizes_are_right_and_in_the_models_order(tmp_path):
    one, other = keras.Input((4, 4, 3), name="z"), keras.Input((4, 4, 3), name="a")
    smaller = layers.UpSampling2D(2)(layers.MaxPooling2D()(one))
    outputs = [
        layers.UnitNormalization()(one),
        ops.softplus(other),
        ops.log_sigmoid(one),
        layers.Conv2D(3, 1)(layers.Concatenate()([smaller, other])),
        ops.argmax(other, axis=-1),
        ops.argmin(one, axis=-1),
    ]
    model = keras.Model([one, other], outputs)
    values = [100 * examples((4, 4, 3), 2), examples((4, 4, 3), 2) ** 2]
    values[0][0] = values[1][1, 2] = 0
    export(model, tmp_path / "a", ExportConfig(format="litert"))
    for found, expected in zip(by_place(tmp_path / "a", values), model(values), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-5)


def test_batch_normalization_before_the_last_layer_is_kept_apart_in_int8(tmp_path):
    """The converter would multiply the rounded weights by its scale."""
    keras.utils.set_random_seed(0)
    normed = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((12,)), layers.Dense(32, activation="relu"), normed, layers.Dense(10)])
    generator = np.random.default_rng(0)
    normed.set_weights([generator.uniform(0.5, 2, 32) for _ in range(4)])
    x = examples((12,))
    export(model, tmp_path / "a", ExportConfig(format="litert", precision="int8"), calibration_data=x)
    (found,) = by_place(tmp_path / "a", [x])
    assert np.linalg.norm(found - model(x)) <= 0.03 * np.linalg.norm(model(x))
    kinds = [name for _, _, name in operators(read(str(tmp_path / "a" / "model.tflite")))]
    assert kinds == ["FULLY_CONNECTED", "MUL", "ADD", "FULLY_CONNECTED"]


def test_probabilities_behind_a_convolution_have_no_steps(tmp_path):
    """The converter would compute a softmax in int8, in steps of 1/256."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 4, 3))
    x = layers.Conv2D(8, 1, activation="relu")(inputs)
    outputs = [
        layers.Softmax()(layers.Flatten()(layers.Conv2D(40, 1)(x))),
        layers.Conv2D(2, 1, activation="sigmoid")(x),
    ]
    model, x = keras.Model(inputs, outputs), examples((4, 4, 3))
    quantized = quantize(model, QuantizationConfig(), calibration_data=x)
    export(quantized, tmp_path / "a", ExportConfig(format="litert"))
    for found, expected in zip(by_place(tmp_path / "a", [x]), quantized.graph.predict(x).values(), strict=True):
        assert np.median(np.abs(found - expected)) < 1e-5  # a value before it may be rounded to the other side


def test_a_wrong_value_for_zeros_is_refused_and_the_output_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "keep_within_limits", lambda editor: None)
    inputs = keras.Input((4, 4, 3))
    model = keras.Model(inputs, {"doubled": inputs * 2, "normed": layers.UnitNormalization()(inputs)})
    with pytest.raises(UnsupportedModelError, match="by inf of their norm, most in 'normed'"):
        export(model, tmp_path / "a", ExportConfig(format="litert"))


def test_float64_is_told_as_the_reason_and_the_converter_is_silent(tmp_path, capfd):
    model = keras.Sequential([keras.Input((4,), dtype="float64"), layers.Dense(2, dtype="float64")])
    with pytest.raises(UnsupportedModelError, match=r"it has float64 tensors, .* export a float32 model"):
        export(model, tmp_path / "a", ExportConfig(format="litert"))
    assert "TF Select" not in capfd.readouterr().err


@pytest.mark.slow
def test_the_process_of_a_file_takes_no_more_memory_than_is_available(fresh_python):
    """A loop that never ends would take all, and the kernel could end another process."""
    code = (
        "import psutil, resource\n"
        "from tfopt.exporting.verification.litert_only import leave_memory_to_others\n"
        "leave_memory_to_others()\n"
        "limit = resource.getrlimit(resource.RLIMIT_DATA)[0]\n"
        "print(0 < limit <= psutil.virtual_memory().total + psutil.swap_memory().total)"
    )
    assert fresh_python("-c", code, check=True).stdout.split() == ["True"]  # without a limit it is -1


def test_a_bias_that_32_bits_hold_in_larger_steps_only(tmp_path):
    """The converter then rounds the weights to few values; the file says little of their integers."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).random((16, 4, 4, 16), np.float32) * np.float32(1e-7)
    bias = keras.initializers.Constant(3.0)
    model = keras.Sequential(
        [
            keras.Input((4, 4, 16)),
            layers.Conv2D(64, 1, activation="relu", bias_initializer=bias),
            layers.Conv2D(8, 1, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    config = ExportConfig(format="litert", precision="int8", int8_nodes="all")
    artifact = export(model, tmp_path / "a", config, calibration_data=x)
    assert len(artifact.report.changed) == 3


def test_a_model_may_give_a_concatenation_of_two_ranges(tmp_path):
    """As heads of detectors do."""
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).random((32, 8, 8, 3), np.float32)
    inputs = keras.Input((8, 8, 3))
    large = layers.Conv2D(4, 3, kernel_initializer=keras.initializers.RandomNormal(stddev=5.0))(inputs)
    model = keras.Model(inputs, layers.Concatenate()([large, layers.Conv2D(4, 3)(inputs)]))
    export(model, tmp_path / "a", ExportConfig(format="litert", precision="int8", int8_nodes="all"), calibration_data=x)
    (found,) = by_place(tmp_path / "a", [x])
    for half in (slice(None, 4), slice(4, None)):
        expected = np.asarray(model(x))[..., half]
        assert np.linalg.norm(found[..., half] - expected) < 0.05 * np.linalg.norm(expected)


def test_the_range_of_a_result_does_not_reach_values_beyond_it(tmp_path):
    """The converter would give it to what a pooling, maximum, resize or slice reads, and to all else that does."""
    keras.utils.set_random_seed(0)
    pooled, resized, inputs = (keras.Input((8, 8, 3), name=name) for name in ("pooled", "resized", "inputs"))
    x = layers.Conv2D(8, 3, padding="same", activation="swish")(inputs)
    joined = layers.Concatenate()([ops.mean(x, -1, keepdims=True), ops.max(x, -1, keepdims=True)])
    read = [
        layers.AveragePooling2D(4)(pooled),
        layers.UpSampling2D(2, interpolation="bilinear")(resized),
        *(x, x[:, 2:5, 1:3], layers.MaxPooling2D()(x), ops.min(x, (1, 2), keepdims=True), joined),
        *(layers.Reshape((4, 16, 8))(layers.CenterCrop(4, 16)(layers.UpSampling2D(2)(x))), ops.take(x, [1, 3], axis=1)),
    ]
    model = keras.Model([pooled, resized, inputs], [layers.Conv2D(4, 1)(each) for each in read])
    x = {name: examples((8, 8, 3)) for name in ("pooled", "resized", "inputs")}
    quantized = quantize(model, QuantizationConfig(), calibration_data=x)
    export(quantized, tmp_path / "a", ExportConfig(format="litert"))
    outputs = by_place(tmp_path / "a", x.values())
    for found, expected in zip(outputs, quantized.graph.predict(x).values(), strict=True):
        assert np.linalg.norm(found - expected) <= 0.005 * np.linalg.norm(expected)


def test_one_hot_before_a_quantized_concatenation_is_exported(tmp_path):
    inputs = keras.Input((5,))
    places = layers.Flatten()(ops.one_hot(layers.Discretization([-1.0, 0.0, 1.0])(inputs), 4))
    model, x = keras.Model(inputs, layers.Dense(3)(layers.Concatenate()([inputs, places]))), examples((5,))
    export(model, tmp_path / "a", ExportConfig(format="litert", precision="int8", int8_nodes="all"), calibration_data=x)
    (found,) = by_place(tmp_path / "a", [x])
    assert np.linalg.norm(found - model(x)) <= 0.03 * np.linalg.norm(model(x))


def test_the_largest_probabilities_are_those_of_the_output_and_the_error_is_that_of_the_file(tmp_path):
    """The converter would compute the softmax in steps of 1/256, in which nearly even probabilities are equal."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8, 8, 1))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="swish")(inputs))
    model, x = keras.Model(inputs, layers.Dense(20)(x)), examples((8, 8, 1))
    config = ExportConfig(
        format="litert", precision="int8", int8_nodes="all", postprocessing=PostprocessingConfig(softmax=True, top_k=5)
    )
    export(model, tmp_path / "a", config, calibration_data=x)
    with RuntimeProcess(tmp_path / "a") as process:
        outputs = process.predict({inputs.name: x}, len(x))
    largest = np.argsort(-outputs["output_0"], axis=-1, kind="stable")[:, :5]
    np.testing.assert_array_equal(outputs["classes"], largest)
    drawn = unseen({inputs.name: x}, None).inputs[inputs.name]
    with RuntimeProcess(tmp_path / "a") as process:
        found, exact = process.predict({inputs.name: drawn}, 16)["output_0"], ops.softmax(model(drawn))
    recorded = read_manifest(tmp_path / "a").check.errors["artifact"].max_abs
    assert recorded == pytest.approx(float(np.abs(found - exact).max()), rel=5e-3)


def test_channels_are_known_behind_a_repetition_of_open_length(tmp_path):
    """The converter infers no size from sizes that are computed together, and then finds no operator."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None, 3), name="x")
    y = layers.UpSampling1D(2)(layers.Conv1D(4, 3, activation="relu")(inputs))
    model = keras.Model(inputs, layers.Conv1D(2, 3)(y))
    x = np.random.default_rng(0).normal(size=(4, 9, 3)).astype("float32")
    export(model, tmp_path / "a", ExportConfig(format="litert"))
    with RuntimeProcess(tmp_path / "a") as process:
        found = process.predict({"x": x}, 4)["output_0"]
    np.testing.assert_allclose(found, model(x), rtol=1e-4, atol=1e-5)
