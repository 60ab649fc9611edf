"""Freezing: the frozen graph computes what the Keras model or SavedModel computes, and says so when it cannot."""

import gc
import zipfile
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.framework.func_graph import FuncGraph

from tfopt.errors import ArtifactError, ConfigError, TfoptWarning, UnsupportedModelError
from tfopt.graph import freeze
from tfopt.graph.inputs import table_rows

GENERATOR = np.random.default_rng(0)


def normal(*shape):
    return GENERATOR.normal(size=shape).astype("float32")


def stack(shape, *parts, dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.convolution = layers.Conv2D(4, 3)
        self.norm = layers.BatchNormalization()
        self.head = layers.Dense(3)

    def call(self, x):
        x = keras.ops.relu(self.norm(self.convolution(x)))
        return self.head(keras.ops.mean(x, axis=(1, 2)))


def subclassed():
    model = Subclassed()
    model(normal(1, 8, 8, 2))
    return model


def nested():
    inner = stack((8, 8, 2), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU())
    inputs = keras.Input((8, 8, 2))
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(layers.Conv2D(3, 3)(inner(inputs))))


def attention():
    inputs = keras.Input((6, 8))
    return keras.Model(inputs, layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(inputs, inputs)))


def masked_tokens():
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Bidirectional(layers.LSTM(4))(layers.Embedding(10, 4, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(2)(x))


def passes_its_input_on():
    inputs = keras.Input((3,))
    return keras.Model(inputs, [inputs, layers.Dense(2)(inputs)])


def pad_is_an_output():
    inputs = keras.Input((6, 6, 2))
    padded = layers.ZeroPadding2D(1)(inputs)
    return keras.Model(inputs, [padded, layers.Conv2D(3, 3)(padded)])


IMAGE = (8, 8, 4)
MODELS = {
    "functional": lambda: keras.Model(i := keras.Input((4,)), layers.Dense(2, activation="softmax")(i)),
    "sequential": lambda: stack((4,), layers.Dense(8, activation="gelu"), layers.Dropout(0.5), layers.Dense(2)),
    "subclassed": subclassed,
    "nested": nested,
    "passes its input on": passes_its_input_on,
    "pad is an output": pad_is_an_output,
    "norm before conv": lambda: stack(IMAGE, layers.BatchNormalization(), layers.Conv2D(4, 3, padding="same")),
    "norm after conv": lambda: stack(IMAGE, layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()),
    "norm twice": lambda: stack(IMAGE, layers.Conv2D(4, 3), *(layers.BatchNormalization() for _ in range(2))),
    "norm after dense": lambda: stack((5,), layers.Dense(4), layers.BatchNormalization(), layers.ReLU()),
    "norm after dense on sequences": lambda: stack((7, 5), layers.Dense(4), layers.BatchNormalization()),
    "norm after relu": lambda: stack(IMAGE, layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization()),
    "depthwise": lambda: stack(IMAGE, layers.DepthwiseConv2D(3, depth_multiplier=2), layers.BatchNormalization()),
    "separable": lambda: stack(IMAGE, layers.SeparableConv2D(6, 3), layers.BatchNormalization()),
    "zero padding": lambda: stack(IMAGE, layers.ZeroPadding2D(((1, 2), (0, 3))), layers.Conv2D(4, 3, 2)),
    "zero padding, dilation": lambda: stack(IMAGE, layers.ZeroPadding2D(2), layers.Conv2D(4, 3, dilation_rate=2)),
    "dilation, same": lambda: stack(IMAGE, layers.Conv2D(4, 3, padding="same", dilation_rate=3)),
    "groups": lambda: stack(IMAGE, layers.Conv2D(4, 3, groups=2), layers.BatchNormalization()),
    "lstm": lambda: stack((5, 3), layers.LSTM(4, return_sequences=True), layers.GRU(4), layers.Dense(2)),
    "conv1d": lambda: stack((16, 3), layers.Conv1D(4, 3, padding="causal"), layers.BatchNormalization()),
    "conv1d, dilation": lambda: stack((16, 3), layers.Conv1D(4, 3, padding="causal", dilation_rate=2)),
    "conv3d": lambda: stack((4, 4, 4, 2), layers.Conv3D(4, 3), layers.BatchNormalization()),
    "conv transposed": lambda: stack(IMAGE, layers.Conv2DTranspose(4, 3, 2), layers.BatchNormalization()),
    "one channel": lambda: stack((8, 8, 1), layers.Conv2D(1, 3), layers.BatchNormalization()),
    "no scale, no centre": lambda: stack(
        IMAGE, layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(center=False, scale=False)
    ),
    "swish": lambda: stack(IMAGE, layers.Conv2D(4, 3, activation="swish"), layers.Dense(3, activation="silu")),
    "rescaling": lambda: stack(IMAGE, layers.Rescaling(1 / 255, -0.5), layers.Conv2D(4, 3)),
    "attention": attention,
    "embedding": lambda: stack((5,), layers.Embedding(10, 4), layers.Flatten(), layers.Dense(2), dtype="int32"),
    "masked tokens": masked_tokens,
    "open size": lambda: stack((None, None, 3), layers.Conv2D(4, 3), layers.GlobalMaxPooling2D()),
}


def randomize(model):
    """Gives every weight, also the statistics of batch normalisation, a value that makes a difference."""
    for variable in model.weights:
        if "seed" not in variable.path:
            variable.assign(GENERATOR.uniform(0.3, 1.2, variable.shape) * GENERATOR.choice([1.0, 1.0, 0.5]))
    return model


def example(model):
    specs = getattr(model, "inputs", None) or [keras.KerasTensor((None, 8, 8, 2))]
    shape = [size or 9 for size in specs[0].shape[1:]]
    return GENERATOR.integers(0, 10, (3, *shape)) if "int" in specs[0].dtype else normal(3, *shape)


def assert_same(outputs, expected, rtol=1e-5):
    assert len(outputs) == len(expected)
    for value, wanted in zip(outputs, expected, strict=True):
        wanted = np.asarray(keras.ops.cast(wanted, "float32"))
        assert value.shape == wanted.shape
        np.testing.assert_allclose(value, wanted, rtol=0, atol=rtol * max(1.0, np.abs(wanted).max()))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_computes_what_keras_computes(name):
    model = randomize(MODELS[name]())
    inputs = example(model)
    expected = tf.nest.flatten(model(inputs, training=False))
    assert_same(freeze(model).predict(inputs).values(), expected)


def test_without_folding_it_computes_the_same():
    model = randomize(MODELS["norm after conv"]())
    inputs = example(model)
    assert_same(freeze(model, fold=False).predict(inputs).values(), [model(inputs)])


def two_inputs(outputs):
    image, vector = keras.Input((8, 8, 1), name="image"), keras.Input((3,), name="a_vector")
    x = layers.Concatenate()([layers.Flatten()(layers.Conv2D(2, 3)(image)), vector])
    return keras.Model([image, vector], outputs(layers.Dense(2)(x), layers.Dense(4)(x)))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_layer_that_needs_an_open_size_is_named(interpolation):
    """Keras' own export fails on it too."""
    image = keras.Input((None, None, 3), name="image")
    model = keras.Model(image, layers.UpSampling2D(2, interpolation=interpolation)(image))
    message = (
        r"open sizes of the model's inputs, {'image': \[None, None, None, 3\]}.*calling UpSampling2D.*Give keras.In"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        freeze(model)


def test_several_inputs_and_outputs_in_a_list():
    model = two_inputs(lambda a, b: [a, b])
    inputs = [normal(3, 8, 8, 1), normal(3, 3)]
    graph = freeze(model)
    assert list(graph.inputs) == ["image", "a_vector"]
    outputs = graph.predict(inputs)
    assert list(outputs) == ["output_0", "output_1"]
    assert_same(outputs.values(), model(inputs))
    named = graph.predict({"a_vector": inputs[1], "image": inputs[0]})
    np.testing.assert_array_equal(named["output_1"], outputs["output_1"])


def test_outputs_in_a_dict_keep_their_names():
    model = two_inputs(lambda a, b: {"z": a, "b": b})
    inputs = [normal(3, 8, 8, 1), normal(3, 3)]
    outputs, expected = freeze(model).predict(inputs), model(inputs)
    assert outputs.keys() == expected.keys()
    assert_same(outputs.values(), [expected[name] for name in outputs])


def test_inputs_in_a_dict():
    inputs = {"z": keras.Input((2,), name="z"), "b": keras.Input((3,), name="b")}
    model = keras.Model(inputs, layers.Dense(2)(layers.Concatenate()([inputs["z"], inputs["b"]])))
    batch = {"z": normal(3, 2), "b": normal(3, 3)}
    assert_same(freeze(model).predict(batch).values(), [model(batch)])


def test_nested_outputs_are_numbered():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, {"a": [layers.Dense(1)(inputs), layers.Dense(2)(inputs)], "b": layers.Dense(3)(inputs)})
    batch = normal(3, 2)
    outputs = freeze(model).predict(batch)
    assert list(outputs) == ["output_0", "output_1", "output_2"]
    assert_same(outputs.values(), tf.nest.flatten(model(batch)))


class TakesADict(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3)

    def call(self, batch):
        return {"b": self.head(batch["v"]), "a": batch["u"] * 2.0}


def test_subclassed_dict_inputs_are_named_by_their_keys():
    model, batch = TakesADict(), {"v": normal(2, 3), "u": normal(2, 4), "unused": normal(2, 5)}
    expected = model(batch)
    graph = freeze(model)
    assert set(graph.inputs) == {"u", "v", "unused"}
    outputs = graph.predict(batch)
    assert_same([outputs["a"], outputs["b"]], [expected["a"], expected["b"]])


class LooksUp(keras.Model):
    def __init__(self):
        super().__init__(name="looks_up")
        self.table, self.head = layers.Embedding(50, 4), layers.Dense(3)

    def call(self, tokens):
        return self.head(keras.ops.mean(self.table(tokens), axis=1))


def test_the_ids_of_a_subclassed_model_are_floats_unless_an_input_gives_their_type():
    """Keras records the shapes of what a subclassed model was called on, and no types."""
    model, ids = LooksUp(), np.arange(14, dtype="int32").reshape(2, 7) * 3
    expected = model(ids)
    inputs = keras.Input((7,), dtype="int32", name="ids")
    for each, kind in ((model, tf.float32), (keras.Model(inputs, model(inputs)), tf.int32)):
        graph = freeze(each)
        ((name, spec),) = graph.inputs.items()
        assert spec.dtype == kind
        assert table_rows(graph) == {name: 50}  # so drawn ids are all of those that the table holds
        assert_same(graph.predict({name: ids.astype(kind.as_numpy_dtype)}).values(), [expected])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("norm after conv", policy) for policy in ("mixed_float16", "mixed_bfloat16", "float16")),
        *(("separable", "mixed_bfloat16"), ("attention", "mixed_float16"), ("lstm", "mixed_float16")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("lstm", "float16"), ("masked tokens", "float16"), ("masked tokens", "mixed_bfloat16"))
        ),
    ],
)
def test_half_precision_is_widened(name, policy):
    reference = randomize(MODELS[name]())
    for variable in reference.weights:  # values that float16 and bfloat16 hold exactly
        variable.assign(np.round(variable.numpy() * 16) / 16)
    keras.config.set_dtype_policy(policy)
    try:
        model = MODELS[name]()
    finally:
        keras.config.set_dtype_policy("float32")
    model.set_weights(reference.get_weights())
    inputs = example(reference)
    if policy == "float16":
        inputs = inputs.astype("float16") if inputs.dtype == np.float32 else inputs
    graph = freeze(model)
    assert all(spec.dtype in (tf.float32, tf.int32) for spec in graph.inputs.values())
    assert_same(graph.predict(inputs).values(), [reference(inputs)])


@pytest.mark.slow
def test_a_model_trained_in_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = stack(IMAGE, layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten(), layers.Dense(2))
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile("adam", "mse")
    inputs = normal(16, *IMAGE)
    model.train_on_batch(inputs, normal(16, 2))
    assert_same(freeze(model).predict(inputs).values(), [model(inputs)], rtol=1e-2)


def test_freezing_leaves_the_model_and_the_state_alone():
    model = stack(IMAGE, layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(2))
    model.compile("adam", "mse")
    weights, config = [value.copy() for value in model.get_weights()], model.get_config()
    state = keras.config.dtype_policy().name, keras.config.image_data_format(), keras.config.floatx()
    seeds = np.random.get_state()[1].copy()
    freeze(model)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    assert model.get_config() == config
    assert model.trainable
    assert (keras.config.dtype_policy().name, keras.config.image_data_format(), keras.config.floatx()) == state
    np.testing.assert_array_equal(np.random.get_state()[1], seeds)
    model.fit(normal(8, *IMAGE), normal(8, 6, 6, 2), verbose=0)


@pytest.mark.parametrize(
    "name", ["norm after conv", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lstm", "masked tokens"))]
)
def test_from_a_keras_file_and_from_a_saved_model(name, tmp_path):
    model = randomize(MODELS[name]())
    inputs = example(model)
    model.save(tmp_path / "model.keras")
    model.export(tmp_path / "exported", verbose=False)
    for source in (tmp_path / "model.keras", str(tmp_path / "exported")):
        assert_same(freeze(source).predict(inputs).values(), [model(inputs)])


def test_saved_model_outputs_belong_to_their_names(tmp_path):
    """Names in no alphabetical order, and other shapes, so that a mix-up shows."""
    module = tf.Module()

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="zz"), tf.TensorSpec([None, 3], name="aa")])
    def serve(z, a):
        return {"q": z * 2.0, "b": a * 3.0, "k": a + 1.0, "c": z - 1.0}

    tf.saved_model.save(module, str(tmp_path), signatures=serve)
    z, a = normal(2, 2), normal(2, 3)
    for _ in range(3):
        outputs = freeze(tmp_path).predict({"zz": z, "aa": a})
        for name, expected in {"q": z * 2, "b": a * 3, "k": a + 1, "c": z - 1}.items():
            np.testing.assert_allclose(outputs[name], expected, rtol=1e-6)


def test_the_inputs_of_a_saved_model_that_keras_numbered_keep_their_order(tmp_path):
    """TensorFlow sorts names as text, by which input 10 comes before input 9: once in a long process."""
    one, other = keras.Input((3,), name="keras_tensor_9"), keras.Input((3,), name="keras_tensor_10")
    model = keras.Model([one, other], layers.Subtract()([one, other]))
    model.export(tmp_path, verbose=False)
    graph = freeze(tmp_path)
    assert list(graph.inputs) == [one.name, other.name]
    x, y = normal(2, 3), normal(2, 3)
    np.testing.assert_array_equal(graph.predict((x, y))["output_0"], x - y)


class Counter(layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x + self.count


class TwoArguments(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3)

    def call(self, a, b=None):
        return self.head(a) + self.head(b)


def two_arguments():
    model = TwoArguments()
    model(normal(2, 3), normal(2, 3))
    return model


def gated(length):
    """A model that runs on no input: a gated linear unit halves the channels, which Keras does not know."""
    return stack((length, 5), layers.Dense(6, activation="glu"), layers.Dense(4))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: keras.Sequential([layers.Dense(2)]), "must be built.*Call it once"),
        (Subclassed, "must be built.*Subclassed.*Call it once"),
        (lambda: stack((3,), Counter()), "must not depend on a variable"),
        (lambda: keras.Sequential([keras.Input(batch_shape=(2, 5, 3)), layers.LSTM(4, stateful=True)]), "Stateful"),
        (two_arguments, "first argument alone"),
        (partial(gated, 20), r"run on inputs of its shapes.*Exception encountered.* incompatible with the layer"),
        (partial(gated, None), r"run on inputs of its shapes.*Exception encountered.* incompatible with the layer"),
        (lambda: stack((None, None, 3), layers.UpSampling2D(interpolation="bilinear")), "open sizes.*whole sizes"),
    ],
)
def test_models_that_cannot_be_frozen(build, message):
    with pytest.raises(UnsupportedModelError, match=message):
        freeze(build())


def test_layers_that_a_model_calls_with_training_are_named(tmp_path):
    inputs = keras.Input((5, 8))
    inner = keras.Model(inputs, layers.Dropout(0.5, name="kept")(inputs, training=True))
    hidden = layers.LSTM(3, dropout=0.5, name="recurrent")(inner(inputs), training=True)
    model = keras.Model(inputs, layers.Dropout(0.5, name="usual")(layers.Dense(2)(hidden), training=False))
    model.save(tmp_path / "model.keras")
    x = normal(2, 5, 8)
    for source in (model, tmp_path / "model.keras"):
        with pytest.warns(TfoptWarning, match="training=True for 'recurrent', 'kept'.*model.predict computes"):
            frozen = freeze(source)
        assert_same(frozen.predict(x).values(), [model.predict(x, verbose=0)])


def test_files_that_hold_no_model(tmp_path):
    with pytest.raises(ArtifactError, match=r"holds no saved_model.pb"):
        freeze(tmp_path / "absent")
    with pytest.raises(ArtifactError, match=r"readable .keras file"):
        freeze(tmp_path / "absent.keras")
    (tmp_path / "bad.keras").write_bytes(b"junk")
    with pytest.raises(ArtifactError, match=r"readable .keras file. Received: .*it is not a whole zip archive"):
        freeze(tmp_path / "bad.keras")
    (tmp_path / "model.h5").write_bytes(b"junk")
    with pytest.raises(ArtifactError, match=r"a \.keras file or the directory.*model\.h5, another file\. Load it with"):
        freeze(tmp_path / "model.h5")
    with zipfile.ZipFile(tmp_path / "other.keras", "w") as file:
        file.writestr("a", "b")
    with pytest.raises(ArtifactError, match=r"readable .keras file"):
        freeze(str(tmp_path / "other.keras"))
    for content in (b"", b"garbage garbage"):
        (tmp_path / "saved_model.pb").write_bytes(content)
        with pytest.raises(ArtifactError, match="loadable SavedModel"):
            freeze(tmp_path)
    for source in (None, 3, np.zeros(3)):
        with pytest.raises(ConfigError, match=r"source must be a keras.Model"):
            freeze(source)


@pytest.mark.slow
def test_a_keras_file_with_an_unknown_layer(tmp_path, fresh_python):
    stack((3,), Counter()).save(tmp_path / "custom.keras")
    script = f"from tfopt.graph import freeze; freeze({str(tmp_path / 'custom.keras')!r})"
    assert "tfopt.errors.ArtifactError: source must be a readable .keras file." in fresh_python("-c", script).stderr


def test_a_signature_that_is_not_there(tmp_path):
    stack((3,), layers.Dense(2)).export(tmp_path, verbose=False)
    with pytest.raises(ConfigError, match=r"must have the signature 'predict'. Received: .*'serving_default'"):
        freeze(tmp_path, signature="predict")


def test_a_batch_that_does_not_fit():
    graph = freeze(two_inputs(lambda a, b: a))
    image, vector = normal(3, 8, 8, 1), normal(3, 3)
    for batch in (image, [image], {"image": image}, {"image": image, "vector": vector}):
        with pytest.raises(ConfigError, match="must give the model's inputs"):
            graph.predict(batch)
    with pytest.raises(ConfigError, match=r"must be given as float32\. Received: values of dtype string"):
        graph.predict([image, "text"])
    with pytest.raises(ConfigError, match=r"shape of input 'image', \(None, 8, 8, 1\)"):
        graph.predict([image[0], vector])


@pytest.mark.slow
def test_heavy_graphs_are_freed_at_once():
    """TensorFlow leaves them in reference cycles, with the weights in each."""
    model = stack((4096,), layers.Dense(9000))  # 147 MB

    def left():
        graphs = [thing for thing in gc.get_objects() if isinstance(thing, FuncGraph)]
        return [graph.name for graph in graphs for node in graph.as_graph_def().node if node.ByteSize() > 10**8]

    gc.disable()
    try:
        freeze(model, fold=False)
        assert left() == []
    finally:
        gc.enable()


def test_loops_are_optimized_with_the_graph():
    """Otherwise the products of an LSTM run in TensorFlow's plain kernels, one example at a fraction of the speed."""
    graph = freeze(stack((8, 3), layers.LSTM(4, return_sequences=True), layers.GRU(4))).graph_def
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    loops = [node for node in nodes if node.op in ("While", "StatelessWhile")]
    assert len(loops) == 2
    assert all(node.attr["_lower_using_switch_merge"].b for node in loops)
