"""The list of layers that XLA cannot compile is right: layers on the list, and others, are compiled here."""

import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.errors import TfoptWarning
from tfopt.training import xla
from tfopt.training.xla import compilation_cause, compilation_failed, xla_blockers

RNG = np.random.default_rng(0)
IMAGES = RNG.random((4, 8, 8, 3)).astype("float32")
VECTORS = RNG.random((4, 6)).astype("float32")
NUMBERS = RNG.integers(0, 4, (4, 2))


def compile_a_step(layer, x):
    """Returns a model with the layer, and the error of its first step under XLA, or None."""
    middle = [layers.Embedding(8, 2)] if x.dtype.kind == "i" else []
    model = keras.Sequential(
        [keras.Input(x.shape[1:], dtype=x.dtype.name), layer, *middle, layers.Flatten(), layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    model._jit_compile = True  # Keras' setter would turn it off again, with a warning
    try:
        model.fit(x, np.zeros((len(x), 1)), verbose=0)
    except tf.errors.OpError as error:
        return model, error
    return model, None


def to_text_and_back(x):
    return tf.strings.to_number(tf.strings.as_string(x))


def scale_by_unique_values(x):
    return x * tf.reduce_sum(tf.unique(tf.reshape(x, [-1]))[0])


FAILS = {
    "mixup": (lambda: layers.MixUp(name="it"), IMAGES, "StatelessRandomGammaV3"),
    "cutmix": (lambda: layers.CutMix(name="it"), IMAGES, "StatelessRandomGammaV3"),
    "elastic": (lambda: layers.RandomElasticTransform(name="it"), IMAGES, "Range"),
    "bicubic": (lambda: layers.Resizing(4, 4, interpolation="bicubic", name="it"), IMAGES, "ResizeBicubic"),
    "lanczos3": (lambda: layers.Resizing(4, 4, interpolation="lanczos3", name="it"), IMAGES, "ScaleAndTranslate"),
    "lanczos5": (lambda: layers.UpSampling2D(interpolation="lanczos5", name="it"), IMAGES, "ScaleAndTranslate"),
    "rotation": (lambda: layers.RandomRotation(0.1, name="it"), IMAGES, "ImageProjectiveTransformV3"),
    "hashing": (lambda: layers.Hashing(8, name="it"), NUMBERS, "AsString"),
    "lookup": (lambda: layers.IntegerLookup(vocabulary=[1, 2], name="it"), NUMBERS, "LookupTableFindV2"),
}


QUICK = ("mixup", "bicubic", "rotation", "lookup")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in FAILS])
def test_a_layer_named_as_a_blocker_does_fail_and_the_error_leads_back_to_it(case):
    make, x, operation = FAILS[case]
    model, error = compile_a_step(make(), x)
    assert [(skip.name, bool(skip.reason)) for skip in xla_blockers(model)] == [("it", True)]
    assert compilation_failed(error)
    cause = compilation_cause(error, model)
    assert operation in cause
    assert f"in layer 'it' ({type(model.layers[0]).__name__})" in cause
    assert "\n" not in cause


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: keras.Sequential([layers.RandomFlip(), layers.RandomErasing(), layers.Resizing(4, 4)]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: keras.Sequential(
                [
                    layers.UpSampling2D(interpolation="bilinear"),
                    layers.BatchNormalization(),
                    layers.Dropout(0.5),
                    layers.TimeDistributed(layers.Dense(3)),
                ]
            ),
            marks=pytest.mark.slow,
        ),
        # XLA gives tensors whose shape depends on values an upper bound.
        lambda: layers.Lambda(lambda x: x * tf.reduce_sum(tf.boolean_mask(x, x > 0.5)), output_shape=(8, 8, 3)),
        lambda: layers.Lambda(scale_by_unique_values, output_shape=(8, 8, 3)),
    ],
)
def test_a_layer_not_named_compiles(make):
    model, error = compile_a_step(make(), IMAGES)
    assert error is None
    assert xla_blockers(model) == []


class Own(keras.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.inner = layers.Lambda(to_text_and_back, name="inner", output_shape=(6,))

    def call(self, inputs):
        return self.inner(inputs)


def test_a_compilation_that_takes_long_is_told_while_it_lasts(monkeypatch):
    monkeypatch.setattr(xla, "LONG_S", 0.01)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "gelu"), layers.Dense(1)])
    tfopt.compile(model, tfopt.plan(tfopt.TrainingConfig(strategy="none", jit_compile=True)), loss="mse")
    with pytest.warns(TfoptWarning, match=r"under XLA has taken 0\.01 s so far.*jit_compile=False") as told:
        model.fit(VECTORS, np.zeros((4, 1)), verbose=0, epochs=3)
    assert len(told) == 1


def test_a_compilation_that_is_quick_is_not_told(recwarn):
    with xla.tells_of_a_long_compilation():
        begun = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    for each in begun:
        each.join(timeout=5)
        assert not each.is_alive()
    assert begun
    assert not [each for each in recwarn if each.category is TfoptWarning]


def test_the_cause_names_a_layer_within_a_layer():
    model, error = compile_a_step(Own(name="own"), VECTORS)
    assert xla_blockers(model) == []
    assert compilation_failed(error)
    expected = "XLA could not compile the step: no XLA kernel for AsString, in layer 'own/inner' (Lambda)"
    assert compilation_cause(error, model) == expected


def test_a_python_function_is_named():
    def double(x):
        return tf.reshape(tf.numpy_function(lambda a: a * 2, [x], tf.float32), [-1, 6])

    model, error = compile_a_step(layers.Lambda(double, name="double", output_shape=(6,)), VECTORS)
    assert compilation_failed(error)
    assert "PyFunc, in layer 'double'" in compilation_cause(error, model)


def test_text_as_input_is_named():
    words = np.array([["a", "b"], ["b", "c"]])
    lookup = layers.StringLookup(vocabulary=["a", "b"], name="words")
    model = keras.Sequential([keras.Input((2,), dtype="string"), lookup, layers.Embedding(4, 2), layers.Flatten()])
    model.compile("sgd", "mse", jit_compile=False)
    model._jit_compile = True
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.fit(tf.constant(words), np.zeros((2, 4)), verbose=0)
    assert [skip.name for skip in xla_blockers(model)] == ["words"]
    assert compilation_failed(caught.value)
    assert "such as string" in compilation_cause(caught.value, model)


@pytest.mark.slow
def test_text_that_aborts_the_process_is_named_beforehand(fresh_python):
    script = """
import keras, numpy as np, tensorflow as tf
from tfopt.training.xla import xla_blockers
compiled = tf.function(lambda x: x + 1, jit_compile=True)
for size in (1, 2, 3):
    compiled(tf.zeros(size))
text = keras.layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=2, name="text")
model = keras.Sequential([keras.Input((1,), dtype="string"), text, keras.layers.Embedding(4, 2)])
print(xla_blockers(model)[0].name, flush=True)
model.compile("sgd", "mse", jit_compile=False)
model._jit_compile = True
try:
    model.fit(tf.constant([["a b"], ["b"]]), np.zeros((2, 2, 2)), verbose=0)
except tf.errors.OpError:
    print("only an error")
"""
    done = fresh_python("-c", script)
    assert done.stdout == "text\n"
    assert done.returncode == -signal.SIGABRT


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_step_that_is_wrong_without_xla_is_no_failed_compilation(jit_compile):
    one_more = layers.Lambda(lambda x: tf.concat([x, x[:1]], 0), output_shape=(1,))
    model = keras.Sequential([keras.Input((10,)), layers.Dense(1), one_more])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes") as caught:
        model.fit(np.zeros((4, 10)), np.zeros((4, 1)), verbose=0)
    assert not compilation_failed(caught.value)


def test_a_numeric_check_or_a_python_error_is_no_failed_compilation():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.debugging.check_numerics(tf.constant([np.nan]), "bad")
    assert not compilation_failed(caught.value)
    assert not compilation_failed(ValueError("tf2xla conversion failed"))


def test_a_layer_of_your_own_that_says_so_is_a_blocker():
    layer = Own(name="own")
    layer.supports_jit = False
    model = keras.Sequential([keras.Input((6,)), layer])
    assert [(skip.name, skip.kind) for skip in xla_blockers(model)] == [("own", "Own")]
    assert "supports_jit" in xla_blockers(model)[0].reason


def test_a_recurrent_layer_that_takes_the_cudnn_kernel_is_named_with_the_remedy():
    model = keras.Sequential([keras.Input((3, 2)), layers.LSTM(4, name="lstm")])
    assert xla_blockers(model) == []
    model.get_layer("lstm").supports_jit = False  # Keras sets this where there is a GPU
    assert [skip.name for skip in xla_blockers(model)] == ["lstm"]
    assert "use_cudnn=False" in xla_blockers(model)[0].reason


@pytest.mark.slow
def test_op_determinism_is_a_blocker_and_does_fail(fresh_python):
    # It cannot be switched off again, so it is switched on in a process of its own.
    script = """
import keras, numpy as np, tensorflow as tf
import tfopt
from tfopt.errors import TfoptWarning
from tfopt.training import xla
from tfopt.training.xla import compilation_cause, compilation_failed, xla_blockers
model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(2, 3), keras.layers.MaxPooling2D(name="pool"),
                          keras.layers.Flatten(), keras.layers.Dense(1)])
print(len(xla_blockers(model)))
keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
print(xla_blockers(model)[0].reason)
model.compile("sgd", "mse", jit_compile=False)
model._jit_compile = True
try:
    model.fit(np.zeros((4, 8, 8, 3)), np.zeros((4, 1)), verbose=0)
except tf.errors.OpError as error:
    print(compilation_failed(error), compilation_cause(error, model))
"""
    done = fresh_python("-c", script, check=True)
    before, reason, failure = done.stdout.splitlines()
    assert before == "0"
    assert reason.startswith("op determinism is enabled")
    assert failure.startswith("True XLA could not compile the step:")
    assert failure.endswith("in layer 'pool' (MaxPooling2D)")
