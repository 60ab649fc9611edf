"""Steps before and after a model: equal to NumPy's and Keras', and right in the checks of an artifact."""

import json

import keras
import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from keras import layers
from tensorflow_serving.apis import predict_pb2

from tfopt.cli import main
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting import (
    ExportConfig,
    PostprocessingConfig,
    PreprocessingConfig,
    SavedModelProcess,
    export,
    publish,
    verify,
)
from tfopt.exporting.manifest import read_manifest
from tfopt.quantization import quantize

GENERATOR = np.random.default_rng(0)
PIXELS = GENERATOR.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET = PreprocessingConfig(scale=1 / 255, mean=MEAN, std=STD)
NAMES = ("cat", "dog", "owl", "größe", "")
BEST = PostprocessingConfig(softmax=True, top_k=3, class_names=NAMES)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8, 8, 3), name="image")
    for filters in (8, 16):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(5)(layers.Flatten()(x)), name="small")


def normalised(pixels):
    return ((pixels.astype("float64") / 255 - MEAN) / STD).astype("float32")


@pytest.fixture(scope="module")
def artifacts(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("artifacts")
    both = {"preprocessing": IMAGENET, "postprocessing": BEST}
    export(model, root / "float32", ExportConfig(**both))
    config = ExportConfig(precision="int8", int8_nodes="all", float_fallback=True, **both)
    export(model, root / "int8", config, calibration_data=normalised(PIXELS), baseline=root / "float32")
    return root


def served(artifact, pixels):
    with SavedModelProcess(artifact) as process:
        return process.predict({"image": pixels})


def bilinear(images, height, width):
    """Resizes with the centres of pixels at halves, as NumPy in double precision."""

    def weights(old, new):
        places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        low = np.floor(places).astype(int)
        matrix = np.zeros((new, old))
        np.add.at(matrix, (np.arange(new), low), 1 - (places - low))
        np.add.at(matrix, (np.arange(new), np.minimum(low + 1, old - 1)), places - low)
        return matrix

    rows, columns = weights(images.shape[1], height), weights(images.shape[2], width)
    return np.einsum("ah,bw,nhwc->nabc", rows, columns, images.astype("float64"))


def test_pixels_of_any_size_give_the_best_classes(model, artifacts):
    for shape in ((8, 8), (13, 5), (5, 31)):
        pixels = GENERATOR.integers(0, 256, (2, *shape, 3), dtype=np.uint8)
        outputs = served(artifacts / "float32", pixels)
        resized = bilinear(pixels, 8, 8)
        logits = model.predict(((resized / 255 - MEAN) / STD).astype("float32"), verbose=0)
        expected = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(outputs["output_0"], expected, rtol=1e-4, atol=1e-6)
        order = np.argsort(-expected, axis=-1)[:, :3]
        np.testing.assert_allclose(outputs["scores"], np.take_along_axis(expected, order, -1), rtol=1e-4)
        assert [[name.decode() for name in row] for row in outputs["classes"]] == [
            [NAMES[place] for place in row] for row in order
        ]


@pytest.mark.parametrize("mode", ["caffe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tf", "torch"))])
def test_the_steps_are_those_of_keras_applications(mode, tmp_path):
    from keras.src.applications.imagenet_utils import preprocess_input

    config = {
        "tf": PreprocessingConfig(scale=1 / 127.5, mean=(1.0,)),
        "torch": IMAGENET,
        "caffe": PreprocessingConfig(mean=(103.939, 116.779, 123.68), reverse_channels=True),
    }[mode]
    inputs = keras.Input((None, None, 3), name="image")
    export(keras.Model(inputs, layers.Identity()(inputs)), tmp_path / "a", ExportConfig(preprocessing=config))
    found = served(tmp_path / "a", PIXELS[:2, :5])["output_0"]
    expected = preprocess_input(PIXELS[:2, :5].astype("float32"), mode=mode)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_open_sizes_are_resized_if_a_size_is_given(tmp_path):
    inputs = keras.Input((None, None, 1), name="image")
    config = ExportConfig(preprocessing=PreprocessingConfig(size=(3, 7)))
    export(keras.Model(inputs, layers.Identity()(inputs)), tmp_path / "a", config)
    pixels = PIXELS[:2, :, :, :1]
    np.testing.assert_allclose(served(tmp_path / "a", pixels)["output_0"], bilinear(pixels, 3, 7), atol=1e-3)


def test_int8_is_calibrated_on_the_input_of_the_model_and_compared_on_pixels(artifacts):
    manifest = read_manifest(artifacts / "int8")
    image = manifest.signature.inputs["image"]
    assert (image.dtype, image.shape) == ("uint8", (None, None, None, 3))
    assert manifest.signature.outputs["output_0"].op == "Softmax"
    assert manifest.signature.outputs["classes"].dtype == "string"
    low, high = manifest.check.ranges["image"]
    assert 0 <= low < 5
    assert 250 < high <= 255
    labels = np.argmax(served(artifacts / "float32", PIXELS)["output_0"], axis=-1)
    receipt = verify(artifacts / "int8", data=(PIXELS, labels), seconds=0)
    assert receipt.ok, receipt.problems
    assert receipt.accuracy > 0.9
    assert receipt.agreement == receipt.accuracy  # the labels are the baseline's decisions
    with pytest.raises(ConfigError, match=r"whole numbers that uint8 holds, for input 'image'.*unscaled pixels"):
        verify(artifacts / "int8", data=(PIXELS / 255, labels), seconds=0)
    assert receipt.parity_relative_error < 0.05
    assert receipt.kernels["_FusedQuantizedConv2D"] == 2
    other = verify(artifacts / "int8", signature="serving_float", seconds=0)
    assert other.ok
    assert other.parity_relative_error < receipt.parity_relative_error


@pytest.mark.slow
def test_the_check_finds_a_wrong_baseline_and_a_changed_model(model, artifacts, tmp_path):
    export(model, tmp_path / "plain")
    with pytest.raises(ConfigError, match="baseline must take the artifact's inputs"):
        verify(artifacts / "int8", baseline=tmp_path / "plain", seconds=0)
    weights = model.get_weights()
    changed = keras.models.clone_model(model)
    changed.set_weights([0.9 * each for each in weights])
    export(changed, tmp_path / "changed", ExportConfig(preprocessing=IMAGENET, postprocessing=BEST))
    own, other = (
        json.loads((each / "manifest.json").read_text()) for each in (artifacts / "float32", tmp_path / "changed")
    )
    own["check"]["outputs"] = other["check"]["outputs"]
    own.pop("sha256")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for path in (artifacts / "float32").rglob("*"):
        target = mixed / path.relative_to(artifacts / "float32")
        target.mkdir(exist_ok=True) if path.is_dir() else target.write_bytes(path.read_bytes())
    (mixed / "manifest.json").write_text(json.dumps(own))
    receipt = verify(mixed, seconds=0)
    assert not receipt.ok
    assert "differ from those recorded" in receipt.problems[0]


def test_a_request_of_pixels_gets_names(artifacts, tmp_path):
    published = publish(artifacts / "float32", tmp_path, name="animals")
    loaded = tf.saved_model.load(published.path)
    request = predict_pb2.PredictRequest()
    request.inputs["image"].CopyFrom(tf.make_tensor_proto(PIXELS[:1]))
    given = {name: tf.constant(tf.make_ndarray(tensor)) for name, tensor in request.inputs.items()}
    response = predict_pb2.PredictResponse()
    for name, value in loaded.signatures["serving_default"](**given).items():
        response.outputs[name].CopyFrom(tf.make_tensor_proto(value))
    classes = tf.make_ndarray(predict_pb2.PredictResponse.FromString(response.SerializeToString()).outputs["classes"])
    assert {name.decode() for name in classes[0]} <= set(NAMES)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.slow), "int8"])
def test_an_onnx_file_has_the_steps_too(precision, model, artifacts, tmp_path):
    after = PostprocessingConfig(softmax=True, top_k=2)
    config = ExportConfig(format="onnx", precision=precision, preprocessing=IMAGENET, postprocessing=after)
    export(model, tmp_path / "a", config, calibration_data=normalised(PIXELS) if precision == "int8" else None)
    session = onnxruntime.InferenceSession(str(tmp_path / "a" / "model.onnx"), providers=["CPUExecutionProvider"])
    for pixels in (PIXELS[:3], GENERATOR.integers(0, 256, (3, 13, 5, 3), dtype=np.uint8)):
        names = [each.name for each in session.get_outputs()]
        outputs = dict(zip(names, session.run(names, {"image": pixels}), strict=True))
        expected = served(artifacts / "float32", pixels)["output_0"]
        np.testing.assert_allclose(outputs["output_0"], expected, atol=1e-5 if precision == "float32" else 0.05)
        best = np.argsort(-outputs["output_0"], axis=-1)[:, :2]
        np.testing.assert_array_equal(outputs["classes"], best)
        np.testing.assert_array_equal(outputs["scores"], np.take_along_axis(outputs["output_0"], best, -1))
    assert verify(tmp_path / "a", seconds=0).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "float16"},
        {"precision": "int4_weight_only"},
        {"sparse_weights": True, "weights_in": "constants", "xla_signature": True},
        {"precision": "int8", "float_weights": "int8"},
        {"format": "onnx", "precision": "float16"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::tfopt.errors.TfoptWarning")
def test_the_steps_go_with_every_precision(settings, model, artifacts, tmp_path):
    after = PostprocessingConfig(softmax=True, top_k=2)
    config = ExportConfig(preprocessing=IMAGENET, postprocessing=after, **settings)
    artifact = export(model, tmp_path / "a", config, calibration_data=normalised(PIXELS))
    receipt = verify(artifact.path, seconds=0)
    assert receipt.ok, receipt.problems
    assert receipt.parity_relative_error < (0.2 if "int4" in str(settings) else 0.05)
    manifest = read_manifest(tmp_path / "a")
    for name in manifest.signatures:
        assert verify(artifact.path, signature=name, seconds=0).ok


@pytest.mark.slow
def test_a_quantized_model_gets_the_steps(model, tmp_path):
    quantized = quantize(model, calibration_data=normalised(PIXELS))
    export(quantized, tmp_path / "a", ExportConfig(preprocessing=IMAGENET, precision="int8", int8_nodes="all"))
    receipt = verify(tmp_path / "a", seconds=0)
    assert receipt.ok
    assert receipt.kernels["_FusedQuantizedConv2D"] == 2


def test_the_command_takes_the_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs = keras.Input((2, 2, 1), name="image")
    keras.Model(inputs, layers.Flatten()(inputs)).save("flat.keras")
    steps = ["--scale", "0.5", "--mean", "3", "--top-k", "1", "--class-names", *"abcd"]
    assert main(["export", "flat.keras", "out", *steps]) == 0
    serve = tf.saved_model.load("out").signatures["serving_default"]
    outputs = serve(image=tf.constant([[[[1], [2]], [[9], [4]]]], tf.uint8))
    assert outputs["classes"].numpy().tolist() == [[b"c"]]
    assert outputs["scores"].numpy().tolist() == [[1.5]]


def two_images():
    inputs = [keras.Input((4, 4, 3), name=name) for name in ("left", "right")]
    return keras.Model(inputs, {"a": layers.Flatten()(inputs[0]), "b": layers.Flatten()(inputs[1])})


def test_of_several_inputs_and_outputs_one_is_named(tmp_path):
    before, after = PreprocessingConfig(input="right", scale=0.5), PostprocessingConfig(output="b", top_k=1)
    export(two_images(), tmp_path / "a", ExportConfig(preprocessing=before, postprocessing=after))
    left, right = GENERATOR.random((2, 4, 4, 3), dtype="float32"), PIXELS[:2, :4, :4]
    with SavedModelProcess(tmp_path / "a") as process:
        outputs = process.predict({"left": left, "right": right})
    np.testing.assert_allclose(outputs["a"], left.reshape(2, -1))
    np.testing.assert_allclose(outputs["b"], right.reshape(2, -1) / 2)
    np.testing.assert_array_equal(outputs["classes"][:, 0], right.reshape(2, -1).argmax(axis=-1))


def flat(*shape):
    inputs = keras.Input(shape, name="image")
    return keras.Model(inputs, layers.Flatten()(inputs))


WRONG = {
    "needs one input of images.*left.*right": (two_images, PreprocessingConfig(), None),
    "Unknown input 'middle'": (two_images, PreprocessingConfig(input="middle"), None),
    "output must be given": (two_images, None, PostprocessingConfig(softmax=True)),
    "Unknown output 'c'": (two_images, None, PostprocessingConfig(softmax=True, output="c")),
    "mean must have one number.*3 channels": (None, PreprocessingConfig(mean=(1.0, 2.0)), None),
    r"size must be that of the model's input.*\(8, 8\)": (None, PreprocessingConfig(size=(9, 9)), None),
    "reverse_channels is for images of 3 channels.*has 4 channels": (
        lambda: flat(4, 4, 4),
        PreprocessingConfig(reverse_channels=True),
        None,
    ),
    r"height, width, channels.*\(None, 3, 8, 16\)": (lambda: flat(3, 8, 16), PreprocessingConfig(), None),
    r"classes, two or more.*\(None, 1\)": (lambda: flat(1, 1, 1), None, PostprocessingConfig(top_k=1)),
    "at most the number of classes, 5.*top_k=6": (None, None, PostprocessingConfig(top_k=6)),
    "a name for each of 5 classes.*2 names": (None, None, PostprocessingConfig(top_k=1, class_names=("a", "b"))),
}


@pytest.mark.parametrize("words", WRONG)
def test_steps_that_do_not_fit_the_model(words, model, tmp_path):
    make, before, after = WRONG[words]
    with pytest.raises(ConfigError, match=words):
        export(make() if make else model, tmp_path / "a", ExportConfig(preprocessing=before, postprocessing=after))
    assert not (tmp_path / "a").exists()


def test_softmax_of_probabilities_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="softmax")])
    config = ExportConfig(postprocessing=PostprocessingConfig(softmax=True))
    with pytest.raises(ConfigError, match=r"softmax must be False.*comes from a Softmax"):
        export(model, tmp_path / "a", config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: ExportConfig(postprocessing=PostprocessingConfig()), "must compute something"),
        (lambda: PostprocessingConfig(softmax=True, class_names=("a",)), "Set top_k too"),
        (lambda: PreprocessingConfig(scale=0.0), "scale must be a positive number"),
        (lambda: ExportConfig(format="onnx", postprocessing=BEST), "class_names belong to format='saved_model'"),
        (lambda: ExportConfig(xla_signature=True, postprocessing=BEST), "which XLA cannot compile"),
    ],
)
def test_settings_that_exclude_each_other(config, words):
    with pytest.raises(ConfigError, match=words):
        config()


@pytest.mark.parametrize("data", [PIXELS.astype("float32"), PIXELS.astype("float32") / 255 / 255])
def test_calibration_data_is_what_the_model_takes(data, model, tmp_path):
    config = ExportConfig(preprocessing=PreprocessingConfig(scale=1 / 255))
    with pytest.raises(ConfigError, match=r"calibration_data must be what the model takes.*which are pixels from"):
        export(model, tmp_path / "a", config, calibration_data=data)


def test_calibration_data_is_checked_before_the_quantization(model, tmp_path, monkeypatch):
    monkeypatch.setattr("tfopt.exporting.lowering.quantize_frozen", None)
    config = ExportConfig(precision="int8", preprocessing=IMAGENET)
    data = {"calibration_data": normalised(PIXELS), "evaluation_data": normalised(PIXELS)}
    for name in data:
        with pytest.raises(ConfigError, match="calibration_data must be what the model takes"):
            export(model, tmp_path / "a", config, **(data | {name: PIXELS.astype("float32")}))


def test_an_artifact_with_names_is_not_exported_again(artifacts, tmp_path):
    with pytest.raises(UnsupportedModelError, match="outputs of a frozen model must be numbers"):
        export(artifacts / "float32", tmp_path / "again")
