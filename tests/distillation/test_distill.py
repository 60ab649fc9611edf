"""A student learns from a teacher: numbers against NumPy, in every way that a step divides a batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from scipy.special import expit, logit, softmax

import tfopt
from tfopt.distillation import DistillationConfig, distill, end_distillation
from tfopt.distillation.losses import TeacherLoss, targets_of
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.exporting import ExportConfig, export
from tfopt.training import TrainingConfig, plan

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype("float32")
Y = RNG.integers(0, 3, 24)
WEIGHTS = RNG.uniform(0.2, 2.0, 24).astype("float32")
SPREAD = keras.initializers.RandomNormal(stddev=20.0)
LABELS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(seed, units=5, activation=None, name=None):
    keras.utils.set_random_seed(seed)
    body = [layers.Dense(units, "relu", kernel_regularizer=keras.regularizers.L2(0.01)), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((6,)), *body, layers.Dense(3, activation)], name=name)


def divergence(teacher, student, temperature):
    p, q = softmax(teacher / temperature, -1), softmax(student / temperature, -1)
    return temperature**2 * np.sum(p * (np.log(p) - np.log(q)), -1)


def bernoulli(teacher, student, temperature):
    p, q = expit(teacher / temperature), expit(student / temperature)
    return temperature**2 * np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)), -1)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize(("kind", "expected"), [("kl", divergence), ("binary", bernoulli)])
def test_the_losses_are_those_of_numpy(kind, expected, temperature):
    teacher, student = RNG.normal(size=(2, 7, 4, 3)).astype("float32") * 2
    ends = {"kl": ("Softmax", lambda z: softmax(z, -1)), "binary": ("Sigmoid", expit)}
    op, probabilities = ends[kind]
    for given, how in ((teacher, "MatMul"), (probabilities(teacher), op)):
        targets = targets_of([given], [how], kind, temperature)
        for outputs, computed in ((student, "MatMul"), (probabilities(student), op)):
            found = TeacherLoss(kind, temperature, computed, "y").call(targets, tf.constant(outputs))
            np.testing.assert_allclose(found, expected(teacher, student, temperature), rtol=1e-3, atol=1e-4)


def test_several_teachers_are_averaged_at_the_temperature():
    one, other = RNG.normal(size=(2, 5, 3))
    found = targets_of([one, softmax(other, -1)], ["MatMul", "Softmax"], "kl", 2.0)
    np.testing.assert_allclose(found, (softmax(one / 2, -1) + softmax(other / 2, -1)) / 2, rtol=1e-5)
    np.testing.assert_allclose(targets_of([one, other], ["MatMul"] * 2, "mse", 2.0), (one + other) / 2, rtol=1e-5)
    np.testing.assert_allclose(
        targets_of([expit(one)], ["Sigmoid"], "binary", 2.0), expit(logit(expit(one)) / 2), rtol=1e-4
    )


def test_the_loss_of_a_step_is_that_of_the_labels_and_the_teacher_with_weights():
    student, teacher = network(1), network(2, 40)
    distill(student, teacher, DistillationConfig(temperature=2.0, weight=0.3))
    student.compile("sgd", LABELS)
    of_student, of_teacher = student(X, training=True), teacher(X, training=False)
    soft = np.mean(WEIGHTS * divergence(np.asarray(of_teacher), np.asarray(of_student), 2.0))
    hard = float(LABELS(Y, of_student, WEIGHTS))
    penalty = float(sum(student.losses))
    before = teacher.get_weights()
    loss = student.train_on_batch(X, Y, sample_weight=WEIGHTS)
    assert loss == pytest.approx(0.7 * hard + 0.3 * soft + penalty, rel=1e-4)
    for one, other in zip(before, teacher.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    # The labels alone count where nothing is trained.
    expected = float(LABELS(Y, student(X, training=False))) + float(sum(student.losses))
    assert student.evaluate(X, Y, verbose=0, batch_size=24) == pytest.approx(expected, rel=1e-4)


def test_the_statistics_of_the_student_are_those_of_one_pass():
    taught, alone = network(1), network(1)
    distill(taught, network(2, 40))
    for model in (taught, alone):
        model.compile(keras.optimizers.SGD(0.0), LABELS)
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        model.evaluate(X, Y, verbose=0)
    for one, other in zip(taught.layers[1].get_weights(), alone.layers[1].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


CELLS = {
    "accumulate": {"accumulate": 3},
    "mirrored": {"strategy": "mirrored"},
    "mirrored, accumulate": {"strategy": "mirrored", "accumulate": 2},
    "pipeline": {"strategy": "pipeline", "pipeline_devices": ("CPU:0", "CPU:1"), "global_batch_size": 8},
    "steps, xla": {"steps_per_execution": 2, "jit_compile": True},
}


@pytest.fixture(scope="module")
def one_device():
    return trained({})


def trained(settings):
    decided = plan(TrainingConfig(precision="float32", **{"jit_compile": False, "steps_per_execution": 1, **settings}))
    with decided.scope():
        student = without_statistics(1)
    distill(student, without_statistics(2))
    tfopt.compile(student, decided, optimizer=keras.optimizers.SGD(0.5), loss=LABELS)
    student.fit(X[:22], Y[:22], sample_weight=WEIGHTS[:22], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return student.get_weights()


def without_statistics(seed):  # which depend on how a batch is divided
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh", kernel_regularizer="l2"), layers.Dense(3)])


@pytest.mark.parametrize(
    "cell", [each if each == "mirrored, accumulate" else pytest.param(each, marks=pytest.mark.slow) for each in CELLS]
)
def test_however_a_batch_is_divided_the_weights_are_those_of_one_device(cell, one_device):
    for one, other in zip(trained(CELLS[cell]), one_device, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_half_precision_trains_too():
    decided = plan(TrainingConfig(precision="mixed_bfloat16"))
    with decided.scope():
        student = network(1)
    distill(student, network(2))
    tfopt.float32_outputs(student)
    tfopt.compile(student, decided, loss=LABELS)
    losses = student.fit(X, Y, epochs=4, batch_size=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_masks_of_tokens_count():
    def tagger(seed):
        keras.utils.set_random_seed(seed)
        body = [layers.Embedding(9, 4, "random_normal", mask_zero=True), layers.Dense(3, kernel_initializer=SPREAD)]
        return keras.Sequential([keras.Input((5,), dtype="int32"), *body])

    student, teacher = tagger(1), tagger(2)
    x = RNG.integers(1, 9, (4, 5))
    x[0, 2:] = x[2, 1:] = 0
    distill(student, teacher, DistillationConfig(weight=1.0))
    student.compile("sgd", LABELS)
    expected = divergence(np.asarray(teacher(x)), np.asarray(student(x)), 3.0)[x > 0].mean()
    assert student.train_on_batch(x, np.zeros_like(x)) == pytest.approx(expected, rel=1e-4)


def two_outputs(seed):
    keras.utils.set_random_seed(seed)
    inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((6,), name="b")}
    hidden = layers.Concatenate()([inputs["b"], inputs["a"]])
    outputs = {"kind": layers.Dense(3, "softmax", name="kind")(hidden), "size": layers.Dense(2, name="size")(hidden)}
    return keras.Model(inputs, outputs)


def test_outputs_have_losses_of_their_own_and_inputs_are_found_by_name():
    student, teacher = two_outputs(1), two_outputs(2)
    x = {"b": X, "a": 2 * X}
    report = distill(student, teacher, DistillationConfig(loss={"kind": None, "size": "mse"}, weight=1.0))
    assert [each.name for each in report.changed] == ["size"]
    assert [each.name for each in report.skipped] == ["kind"]
    student.compile("sgd", {"kind": "sparse_categorical_crossentropy", "size": "mse"})
    expected = np.mean(np.square(np.asarray(teacher(x)["size"]) - np.asarray(student(x)["size"])))
    found = student.train_on_batch(x, {"kind": Y, "size": np.zeros((24, 2))}, return_dict=True)
    assert found["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_model_without_labels_learns_from_any_teacher_on_disk(tmp_path):
    teacher, student = network(2, 40, "softmax"), without_statistics(1)
    teacher.save(tmp_path / "teacher.keras")
    export(teacher, tmp_path / "int8", ExportConfig(precision="int8", int8_nodes="all"), calibration_data=X)
    losses = []
    for given in (teacher, str(tmp_path / "teacher.keras"), tmp_path / "int8"):
        copy = keras.models.clone_model(student)
        copy.set_weights(student.get_weights())
        distill(copy, given)
        copy.compile(keras.optimizers.SGD(0.1), loss=None)
        losses.append(copy.fit(X, batch_size=8, epochs=1, shuffle=False, verbose=0).history["loss"][-1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=0.05)


def test_the_files_hold_the_student_alone(tmp_path):
    student, plain = network(1), network(1)
    distill(student, network(2, 400))
    student.save(tmp_path / "student.keras")
    plain.save(tmp_path / "plain.keras")
    assert abs((tmp_path / "student.keras").stat().st_size - (tmp_path / "plain.keras").stat().st_size) < 200
    loaded = keras.models.load_model(tmp_path / "student.keras")
    np.testing.assert_allclose(loaded(X), student(X), rtol=1e-6)
    assert "compute_loss" not in vars(loaded)
    assert len(student.weights) == len(plain.weights)


def test_the_end_leaves_the_labels_alone():
    student = without_statistics(1)
    distill(student, without_statistics(2))
    student.compile("sgd", LABELS)
    student.fit(X, Y, verbose=0)
    end_distillation(student)
    expected = float(LABELS(Y, student(X))) + float(sum(student.losses))
    assert student.train_on_batch(X, Y) == pytest.approx(expected, rel=1e-4)


def test_what_does_not_fit_is_refused_before_the_student_changes():
    student = network(1, activation="softmax")
    wrong = keras.Sequential([keras.Input((6,)), layers.Dense(4)], name="wrong")
    other = keras.Sequential([keras.Input((7,)), layers.Dense(3)], name="other")
    for teacher, config, message in (
        (student, None, "must be another model than the student"),
        ([], None, "Received: an empty sequence"),
        (wrong, None, r"outputs of the shapes and dtypes.*'output_0' of 'wrong', float32 \(None, 4\)"),
        (other, None, r"inputs of the shapes and dtypes"),
        (two_outputs(2), None, "as many inputs as the student"),
        (network(2), DistillationConfig(loss="binary"), "does not fit outputs that a Softmax computes"),
        (network(2), DistillationConfig(loss={"head": "kl"}), "Unknown output in loss 'head'"),
        (network(2), DistillationConfig(loss={"output_0": None}), "must name an output that learns"),
    ):
        with pytest.raises(ConfigError, match=message):
            distill(student, teacher, config)
    with pytest.raises(UnsupportedModelError):
        distill(student, keras.Sequential([layers.Dense(3)]))
    assert "compute_loss" not in vars(student)
    for settings in ({"temperature": 0.0}, {"weight": 1.5}, {"loss": "kullback"}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            DistillationConfig(**settings)


def test_a_teacher_that_comes_or_goes_after_a_fit_counts_from_then_on():
    """The step of tfopt.compile keeps the traces of its first fit."""
    decided = plan(TrainingConfig(precision="float32", jit_compile=False, steps_per_execution=1))
    student, teacher = without_statistics(1), without_statistics(2)
    tfopt.compile(student, decided, optimizer=keras.optimizers.SGD(0.0), loss=LABELS)
    fit = {"x": X, "y": Y, "batch_size": 24, "verbose": 0}
    alone = student.fit(**fit).history["loss"][0]
    distill(student, teacher, DistillationConfig(weight=1.0))
    penalty = float(sum(student.losses))
    expected = divergence(np.asarray(teacher(X)), np.asarray(student(X)), 3.0).mean() + penalty
    assert student.fit(**fit).history["loss"][0] == pytest.approx(expected, rel=1e-4)
    end_distillation(student)
    assert student.fit(**fit).history["loss"][0] == pytest.approx(alone, rel=1e-5)


class Own(keras.Model):
    """Computes its loss itself, in the form that has no `training`."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return keras.ops.mean(keras.ops.square(y_pred)) + 0.0 * keras.ops.sum(keras.ops.cast(y, "float32"))


def test_the_models_own_loss_counts_beside_the_teacher():
    inputs = keras.Input((6,))
    student, teacher = Own(inputs, layers.Dense(3)(inputs)), without_statistics(2)
    distill(student, teacher, DistillationConfig(weight=0.25))
    student.compile(keras.optimizers.SGD(0.0))
    outputs = np.asarray(student(X))
    soft = divergence(np.asarray(teacher(X)), outputs, 3.0).mean()
    found = student.train_on_batch(X, Y)
    assert found == pytest.approx(0.75 * np.mean(outputs**2) + 0.25 * soft, rel=1e-4)


def test_inputs_with_names_that_are_no_identifiers_are_not_mixed_up():
    def tower(seed):
        keras.utils.set_random_seed(seed)
        inputs = [keras.Input((6,), name=name) for name in ("query-tokens", "doc-tokens")]
        return keras.Model(inputs, layers.Dense(3)(inputs[0] - 2.0 * inputs[1]))

    student, teacher = tower(1), tower(2)
    x = {"query-tokens": X, "doc-tokens": X[::-1]}
    distill(student, teacher, DistillationConfig(weight=1.0))
    student.compile(keras.optimizers.SGD(0.0), LABELS)
    given = list(x.values())
    expected = divergence(np.asarray(teacher(given)), np.asarray(student(given)), 3.0).mean()
    assert student.train_on_batch(x, Y) == pytest.approx(expected, rel=1e-4)


def test_a_softmax_of_one_value_teaches_nothing_and_is_refused():
    one, other = (keras.Sequential([keras.Input((6,)), layers.Dense(1)]) for _ in range(2))
    with pytest.raises(ConfigError, match="loss='kl' needs two classes or more"):
        distill(one, other)


def test_class_weights_count_for_both_losses():
    student, teacher = without_statistics(1), without_statistics(2)
    distill(student, teacher, DistillationConfig(weight=0.4))
    student.compile(keras.optimizers.SGD(0.0), LABELS)
    weights = {0: 0.5, 1: 2.0, 2: 3.0}
    of_examples = np.array([weights[each] for each in Y], "float32")
    outputs = np.asarray(student(X))
    soft = np.mean(of_examples * divergence(np.asarray(teacher(X)), outputs, 3.0))
    expected = 0.6 * float(LABELS(Y, outputs, of_examples)) + 0.4 * soft + float(sum(student.losses))
    assert student.train_on_batch(X, Y, class_weight=weights) == pytest.approx(expected, rel=1e-4)


def test_the_outputs_of_student_and_teacher_may_differ_in_dtype():
    student, teacher = without_statistics(1), network(2, 40)
    half = keras.Sequential([keras.Input((6,)), *student.layers, layers.Activation("linear", dtype="bfloat16")])
    distill(half, teacher, DistillationConfig(weight=1.0))
    half.compile(keras.optimizers.SGD(0.0), LABELS)
    rounded = np.asarray(tf.cast(half(X), tf.float32))
    expected = divergence(np.asarray(teacher(X)), rounded, 3.0).mean() + float(sum(student.losses))
    assert half.train_on_batch(X, Y) == pytest.approx(expected, rel=1e-2)


def test_the_weight_of_the_teacher_may_follow_the_steps():
    losses = {}
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 2, end_learning_rate=0.0)
    for weight in (1.0, 0.5, 0.0, schedule):
        student = without_statistics(1)
        report = distill(student, without_statistics(2), DistillationConfig(weight=weight))
        student.compile(keras.optimizers.SGD(0.0), LABELS)
        losses[weight] = student.fit(X, Y, batch_size=24, epochs=3, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(losses[schedule], [losses[weight][0] for weight in (1.0, 0.5, 0.0)], rtol=1e-5)
    assert "weight PolynomialDecay of the step" in report.changed[0].detail


def test_outputs_are_named_as_keras_names_them_and_lists_in_another_order_are_refused():
    def two(*names):
        inputs = keras.Input((6,))
        return keras.Model(inputs, [layers.Dense(3, name=name)(inputs) for name in names])

    report = distill(two("a", "b"), two("a", "b"), DistillationConfig(loss={"a": "kl", "b": None}))
    assert [each.name for each in report.changed] == ["output_0"]
    with pytest.raises(ConfigError, match=r"same order, or in dicts.*\['a', 'b'\].*\['b', 'a'\]"):
        distill(two("a", "b"), two("b", "a"))
    with pytest.raises(ConfigError, match=r"Unknown output in loss 'c'.*'a', 'b', 'output_0'"):
        distill(two("a", "b"), two("a", "b"), DistillationConfig(loss={"c": "kl"}))


def test_a_student_without_a_loss_is_evaluated_by_its_teacher():
    student, teacher = network(1), network(2)
    distill(student, teacher, DistillationConfig(loss="mse"))
    student.compile("sgd", loss=None, metrics=["accuracy"])
    history = student.fit(X, Y, validation_data=(X, Y), verbose=0).history
    distance = np.mean(np.square(student.predict(X, verbose=0) - teacher.predict(X, verbose=0)))
    assert history["val_loss"][0] == pytest.approx(distance + float(sum(student.losses)), rel=1e-4)


@pytest.mark.parametrize(
    ("weight", "message"),
    [(lambda step: 5.0, "5 at step 0"), (lambda step: 0.9 if step < 5 else 0.1, "compare it with tf.where")],
)
def test_a_weight_that_follows_the_steps_is_tried_before_the_training(weight, message):
    with pytest.raises(ConfigError, match=message):
        distill(network(1), network(2), DistillationConfig(weight=weight))


def test_a_temperature_at_which_float32_has_no_digits_left_is_refused():
    for temperature in (float("inf"), 1e4):
        with pytest.raises(ConfigError, match="temperature"):
            DistillationConfig(temperature=temperature)
