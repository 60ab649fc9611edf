"""Layers inside of a student learn from layers of a teacher: numbers against NumPy, and what cannot be compared."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from scipy.special import softmax

import tfopt
from tfopt.distillation import DistillationConfig, FeaturePair, distill, end_distillation
from tfopt.distillation.features import FeatureDistance, RelationDistance
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting import export
from tfopt.pruning.weights import find_weights
from tfopt.training import TrainingConfig, plan

RNG = np.random.default_rng(0)
Y = RNG.integers(0, 3, 24)
WEIGHTS = RNG.uniform(0.2, 2.0, 24).astype("float32")
LABELS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def divergence(teacher, student, temperature):
    p, q = softmax(teacher / temperature, -1), softmax(student / temperature, -1)
    return temperature**2 * np.sum(p * (np.log(p) - np.log(q)), -1)


def convolutional(seed, filters):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8, 8, 2))
    x = layers.Conv2D(filters, 3, padding="same", activation="relu", name="first")(inputs)
    x = layers.Conv2D(4, 3, padding="same", activation="tanh", name="second")(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


IMAGES = RNG.normal(size=(12, 8, 8, 2)).astype("float32")
PAIRS = tuple(
    FeaturePair(student=layer, teacher=layer, loss=loss, weight=weight)
    for layer, loss, weight in (("first", "attention", 5.0), ("second", "mse", 2.0), ("second", "cosine", 0.5))
)


def test_layers_learn_from_layers_and_the_student_runs_once():
    student, teacher, alone = convolutional(1, 3), convolutional(2, 6), convolutional(1, 3)
    report = distill(student, teacher, DistillationConfig(weight=1.0, features=PAIRS))
    assert [each.kind for each in report.changed] == ["kl", "attention", "mse", "cosine"]

    def watched(model, training):
        inner = keras.Model(
            model.input, [*(model.get_layer(each).output for each in ("first", "second")), model.output]
        )
        return [np.asarray(each, np.float64) for each in inner(IMAGES, training=training)]

    def attention(x):
        places = np.mean(x**2, -1).reshape(len(x), -1)
        return places / np.linalg.norm(places, axis=-1, keepdims=True)

    (first, second, outputs), (other, another, expected) = watched(alone, True), watched(teacher, False)
    cosine = np.sum(second * another, -1) / np.linalg.norm(second, axis=-1) / np.linalg.norm(another, axis=-1)
    weights = WEIGHTS[:12]
    each = divergence(expected, outputs, 3.0)
    each += 5.0 * np.mean((attention(first) - attention(other)) ** 2, -1)
    each += 2.0 * np.mean((second - another) ** 2, (1, 2, 3)) + 0.5 * (1 - np.mean(cosine, (1, 2)))
    student.compile(keras.optimizers.SGD(0.0), LABELS)
    found = student.train_on_batch(IMAGES, Y[:12], sample_weight=weights)
    assert found == pytest.approx(np.mean(weights * each), rel=1e-4)
    once = convolutional(1, 3)
    once(IMAGES, training=True)
    for one, two in zip(student.layers[2].get_weights(), once.layers[2].get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.slow
def test_watched_layers_train_on_replicas_and_in_parts_and_are_refused_in_a_pipeline():
    found = []
    for settings in ({}, {"strategy": "mirrored", "accumulate": 2}):
        decided = plan(TrainingConfig(precision="float32", jit_compile=False, steps_per_execution=1, **settings))
        with decided.scope():
            student = convolutional(1, 3)
            student.layers[2].trainable = False  # its statistics depend on how a batch is divided
        distill(student, convolutional(2, 6), DistillationConfig(features=PAIRS))
        tfopt.compile(student, decided, optimizer=keras.optimizers.SGD(0.1), loss=LABELS)
        student.fit(IMAGES, Y[:12], batch_size=8, epochs=2, shuffle=False, verbose=0)
        found.append(student.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    end_distillation(student)
    assert not {"call", "compute_loss"} & vars(student).keys()
    decided = plan(TrainingConfig(strategy="pipeline", pipeline_devices=("CPU:0", "CPU:1"), global_batch_size=8))
    student = convolutional(1, 3)
    distill(student, convolutional(2, 6), DistillationConfig(features=PAIRS))
    with pytest.raises(ConfigError, match="layers are watched"):
        tfopt.compile(student, decided, loss=LABELS)


def test_layers_that_cannot_be_compared_are_refused(tmp_path):
    student, teacher = convolutional(1, 3), convolutional(2, 6)
    teacher.save(tmp_path / "teacher.keras")
    export(teacher, tmp_path / "artifact")
    for pair, given, message in (
        (FeaturePair(student="first", teacher="first", loss="mse"), teacher, "loss='attention' takes other widths too"),
        (FeaturePair(student="none", teacher="first"), teacher, "Unknown layer of the student 'none'"),
        (FeaturePair(student="first", teacher="none"), tmp_path / "teacher.keras", "Unknown layer of the teacher"),
        (FeaturePair(student="first", teacher="first"), [teacher, teacher], "features need one teacher"),
    ):
        with pytest.raises(ConfigError, match=message):
            distill(student, given, DistillationConfig(features=(pair,)))
    with pytest.raises(UnsupportedModelError, match="must be functional or Sequential"):
        distill(student, tmp_path / "artifact", DistillationConfig(features=PAIRS))
    assert not {"call", "compute_loss"} & vars(student).keys()


@pytest.mark.parametrize("kind", ["attention", "cosine"])
def test_features_that_are_all_zero_have_a_gradient_under_xla(kind):
    zeros = tf.Variable(tf.zeros((2, 3, 4)))

    @tf.function(jit_compile=True)
    def gradient():
        with tf.GradientTape() as tape:
            distance = FeatureDistance(kind, "layer")(tf.ones((2, 3, 4)), zeros)
        return tape.gradient(distance, zeros)

    assert np.isfinite(gradient()).all()


def test_a_mask_of_places_does_not_reach_the_distance_of_whole_examples():
    def tagger(seed):
        keras.utils.set_random_seed(seed)
        body = [layers.Embedding(9, 4, mask_zero=True, name="words"), layers.Dense(3)]
        return keras.Sequential([keras.Input((5,), dtype="int32"), *body])

    student, teacher = tagger(1), tagger(2)
    x = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 7]])
    pair = FeaturePair(student="words", teacher="words", loss="mse", weight=1e6)  # the outputs are small beside it
    distill(student, teacher, DistillationConfig(weight=1.0, features=(pair,)))
    student.compile(keras.optimizers.SGD(0.0), LABELS)
    expected = 1e6 * np.mean((student.layers[0](x).numpy() - teacher.layers[0](x).numpy()) ** 2)
    assert student.train_on_batch(x, np.zeros_like(x)) == pytest.approx(expected, rel=1e-3)


def test_relations_between_examples_are_those_of_numpy_whatever_the_shapes():
    one, other = RNG.normal(size=(6, 2, 3)).astype("float32"), RNG.normal(size=(6, 8)).astype("float32")

    def similarities(x):
        found = x.reshape(6, -1) @ x.reshape(6, -1).T
        return found / np.linalg.norm(found, axis=-1, keepdims=True)

    expected = np.sum((similarities(other) - similarities(one)) ** 2, -1) / 6
    np.testing.assert_allclose(
        RelationDistance(name="layer").call(tf.constant(other), tf.constant(one)), expected, 1e-5
    )


RELATIONS = DistillationConfig(features=(FeaturePair(student="first", teacher="second", loss="relations"),))


def test_relations_need_a_whole_batch():
    student, teacher = convolutional(1, 3), convolutional(2, 6)
    decided = plan(TrainingConfig(precision="float32", accumulate=2, jit_compile=False))
    tfopt.compile(student, decided, loss=LABELS)
    distill(student, teacher, RELATIONS)
    with pytest.raises(ConfigError, match="RelationDistance with 2 micro-batches, a function of the whole batch"):
        student.fit(IMAGES, Y[:12], verbose=0)
    end_distillation(student)
    student.fit(IMAGES, Y[:12], verbose=0)


PROJECTED = DistillationConfig(
    weight=1.0, features=(FeaturePair(student="first", teacher="first", loss="mse", projection=True, weight=3.0),)
)


def test_a_projection_between_widths_is_trained_along_and_belongs_to_no_file(tmp_path):
    student, teacher = convolutional(1, 3), convolutional(2, 6)
    before = len(student.weights)
    distill(student, teacher, PROJECTED)
    (projection,) = (each for each in student._layers if each.name == "first_to_teacher")
    kernel = np.asarray(projection.kernel)
    own = keras.Model(student.input, student.get_layer("first").output)(IMAGES)
    other = keras.Model(teacher.input, teacher.get_layer("first").output)(IMAGES)
    outputs = np.asarray(convolutional(1, 3)(IMAGES, training=True))
    expected = divergence(np.asarray(teacher(IMAGES)), outputs, 3.0).mean()
    expected += 3.0 * np.mean((np.asarray(own) @ kernel - np.asarray(other)) ** 2)
    student.compile(keras.optimizers.SGD(0.1), LABELS)
    assert student.train_on_batch(IMAGES, Y[:12]) == pytest.approx(expected, rel=1e-4)
    assert not np.allclose(projection.kernel, kernel)
    student.save(tmp_path / "student.keras", include_optimizer=False)
    student.save_weights(tmp_path / "student.weights.h5")
    loaded = keras.models.load_model(tmp_path / "student.keras")
    convolutional(1, 3).load_weights(tmp_path / "student.weights.h5")
    assert len(loaded.weights) == before
    np.testing.assert_allclose(loaded(IMAGES), student(IMAGES), rtol=1e-5)
    weights, _ = find_weights(student)
    assert [weight.path for weight in weights] == [
        layer.name for layer in student.layers if isinstance(layer, layers.Conv2D | layers.Dense)
    ]
    end_distillation(student)
    assert len(student.weights) == before


@pytest.mark.parametrize("scaled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_file_keeps_the_state_of_the_optimizer_without_that_of_a_projection(scaled, tmp_path):
    student, alone = convolutional(1, 3), convolutional(1, 3)
    for model in (student, alone):
        if model is student:
            distill(model, convolutional(2, 6), PROJECTED)
        optimizer = keras.optimizers.Adam(0.01)
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, LABELS)
        model.train_on_batch(IMAGES, Y[:12])
    student.save(tmp_path / "student.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = keras.models.load_model(tmp_path / "student.keras")
    own = [each.numpy() for each in student.optimizer.variables if "first_to_teacher" not in each.name]
    found = [each.numpy() for each in loaded.optimizer.variables]
    assert len(found) == len(alone.optimizer.variables) == len(own)
    for one, other in zip(own, found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any(np.any(each) for each in found[-len(loaded.trainable_variables) :])  # Adam's second moments


@pytest.mark.slow
def test_a_projection_trains_in_parts_and_on_replicas_and_resumes_from_a_checkpoint(tmp_path):
    found = []
    for settings in ({}, {"strategy": "mirrored", "accumulate": 2}, {"checkpoint_dir": str(tmp_path)}):
        decided = plan(TrainingConfig(precision="float32", jit_compile=False, steps_per_execution=1, **settings))
        for epochs in (1, 2) if "checkpoint_dir" in settings else (2,):  # the second run resumes
            with decided.scope():
                student = convolutional(1, 3)
                student.layers[2].trainable = False
            distill(student, convolutional(2, 6), PROJECTED)
            tfopt.compile(student, decided, optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=LABELS)
            student.fit(IMAGES, Y[:12], batch_size=8, epochs=epochs, shuffle=False, verbose=0)
        found.append(student.get_weights())
    for one, two, three in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)
        np.testing.assert_allclose(one, three, atol=1e-5)


def test_projections_that_cannot_be_are_refused():
    teacher = convolutional(2, 6)
    with pytest.raises(ConfigError, match="projection is for loss='mse' and loss='cosine'"):
        FeaturePair(student="first", teacher="first", projection=True)
    sequential = keras.Sequential(convolutional(1, 3).layers)
    with pytest.raises(ConfigError, match="projection needs a functional student"):
        distill(sequential, teacher, PROJECTED)
    student = convolutional(1, 3)
    student.compile("sgd", LABELS)
    student.train_on_batch(IMAGES, Y[:12])
    with pytest.raises(ConfigError, match="before the optimizer has its variables"):
        distill(student, teacher, PROJECTED)
