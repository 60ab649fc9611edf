"""A cached teacher teaches as the live one does, and is refused where its outputs are not those of the examples."""

import json
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from scipy.special import softmax

import tfopt
from tfopt.data import Augmentation, AugmentConfig, Examples, pipeline
from tfopt.distillation import DistillationConfig, FeaturePair, cache_teacher, distill
from tfopt.distillation.recorded import largest, spread
from tfopt.errors import ConfigError
from tfopt.graph.digest import digests
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.training import TrainingConfig, plan

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4, 4, 1)).astype("float32")
Y = RNG.integers(0, 5, 40)
LABELS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(seed, units=5, activation=None, outputs=5):
    keras.utils.set_random_seed(seed)
    body = [layers.Flatten(), layers.Dense(units, "tanh"), layers.Dense(outputs, activation)]
    return keras.Sequential([keras.Input((4, 4, 1)), *body], name="teacher" if units > 5 else "student")


def examples(x=X, y=Y, **others):
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return Examples(name="noise", train=dataset, test=dataset.take(8), outputs=5, **others)


@pytest.fixture(scope="module")
def teacher():
    return network(2, 30)


@pytest.fixture(scope="module", autouse=True)
def _small_files():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfopt.distillation.cached_teacher.BATCHES_PER_FILE", 2)
        yield


@pytest.fixture(scope="module")
def directory(teacher, tmp_path_factory):
    """Outputs in several files, and what the call that computed them returned."""
    place = tmp_path_factory.mktemp("cached") / "teacher"
    return place, cache_teacher(teacher, examples(), place, batch_size=7)


@pytest.fixture
def cached(directory):
    return directory[1]


def weights_after_fit(given, data, settings=None, config=None):
    settings = {"jit_compile": False, "steps_per_execution": 1, **(settings or {})}
    decided = plan(TrainingConfig(precision="float32", global_batch_size=8, **settings))
    with decided.scope():
        student = network(1)
    distill(student, given, config)
    optimizer = keras.optimizers.SGD(0.5)
    tfopt.compile(student, decided, optimizer=optimizer, loss=LABELS, metrics=["accuracy"])
    history = student.fit(
        decided.pipeline(data), validation_data=decided.pipeline(data, training=False), epochs=2, verbose=0
    )
    assert {"accuracy", "val_accuracy"} <= history.history.keys()
    return student.get_weights()


def test_the_outputs_are_those_of_the_teacher_in_float16_and_it_trains_as_the_live_one(teacher, cached):
    rows = [row["teacher_outputs"]["output_0"] for _, row in cached.examples.decoded("train").as_numpy_iterator()]
    np.testing.assert_array_equal(rows, np.asarray(teacher(X)).astype("float16"))
    np.testing.assert_array_equal([x for x, _ in cached.examples.decoded("train").as_numpy_iterator()], X)
    assert "time of the teacher in each epoch" in cached.report.changed[0].detail
    live = weights_after_fit(teacher, examples())
    for one, other in zip(weights_after_fit(cached, cached.examples), live, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"strategy": "mirrored", "accumulate": 2}, {"jit_compile": True}])
def test_a_cached_teacher_teaches_in_every_way_that_a_step_divides_a_batch(cached, settings):
    for one, other in zip(
        weights_after_fit(cached, cached.examples, settings), weights_after_fit(cached, cached.examples), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_the_largest_values_are_kept_and_the_others_share_the_rest(teacher, tmp_path):
    logits = RNG.normal(size=(3, 2, 6)).astype("float32") * 3
    probabilities = softmax(logits, -1)
    dense = {}
    for op, values in (("MatMul", logits), ("Softmax", probabilities)):
        found, places, rest = largest(values, 2, op)
        dense[op] = np.asarray(spread({"values": found, "places": places, "rest": rest}, 6))
    np.testing.assert_allclose(softmax(dense["MatMul"], -1), dense["Softmax"], atol=1e-5)
    np.testing.assert_allclose(dense["Softmax"].sum(-1), 1, atol=1e-5)
    kept = np.argsort(logits, -1)[..., -2:]
    np.testing.assert_allclose(np.take_along_axis(dense["MatMul"], kept, -1), np.take_along_axis(logits, kept, -1))
    np.testing.assert_allclose(
        np.take_along_axis(dense["Softmax"], kept, -1), np.take_along_axis(probabilities, kept, -1), atol=1e-6
    )
    few = cache_teacher(teacher, examples(), tmp_path / "few", top_k=4)  # the fifth is what is left
    whole = cache_teacher(teacher, examples(), tmp_path / "all", dtype="float32")
    for one, other in zip(weights_after_fit(few, few.examples), weights_after_fit(whole, whole.examples), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


def test_the_checksums_are_those_of_layers_and_weights_whatever_their_names():
    models = [network(2), network(2), network(3), network(2, activation="softmax"), network(2, units=6)]
    found = [digests(freeze_unfolded(model)) for model in models]
    assert found[0] == found[1]
    assert found[0][0] == found[2][0]
    assert found[0][1] != found[2][1]
    assert len({layers for layers, _ in found}) == 3


def test_the_checksums_do_not_depend_on_the_order_of_control_inputs():
    """TensorFlow writes those of a node in the order of a set of objects, which the addresses in memory decide."""
    graph = freeze_unfolded(network(2))
    expected, turned = digests(graph), 0
    for node in graph.graph_def.node:
        control = [each for each in node.input if each.startswith("^")]
        turned += len(control) > 1
        node.input[:] = [each for each in node.input if not each.startswith("^")] + control[::-1]
    assert turned
    assert digests(graph) == expected


def test_classes_that_are_all_impossible_share_no_probability():
    values = np.float32([[2.0, -np.inf, 1.0, -np.inf]])
    found, places, rest = largest(values, 2, "BiasAdd")
    assert sorted(zip(places[0].tolist(), found[0].tolist(), strict=True)) == [(0, 2.0), (2, 1.0)]
    assert rest.tolist() == [-np.inf]


def test_the_checksums_tell_which_input_is_which():
    def difference(swapped):
        one, other = keras.Input((4,), name="one"), keras.Input((4,), name="other")
        operands = [other, one] if swapped else [one, other]
        return digests(freeze_unfolded(keras.Model([one, other], layers.Subtract()(operands))))

    assert difference(False) == difference(False)
    assert difference(True)[0] != difference(False)[0]


def test_a_killed_computation_goes_on_and_a_complete_one_runs_no_teacher(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("tfopt.distillation.cached_teacher.BATCHES_PER_FILE", 1)
    calls = []

    def stop(done, total):
        calls.append((done, total))
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache_teacher(teacher, examples(), tmp_path / "a", batch_size=5, progress=stop)
    assert calls[-1] == (4, 8)
    ran = []
    run = "tfopt.distillation.recorded.Computation._run"
    from tfopt.distillation.recorded import Computation

    original = Computation._run
    monkeypatch.setattr(run, lambda self, *inputs: ran.append(len(inputs[0])) or original(self, *inputs))
    cached = cache_teacher(teacher, examples(), tmp_path / "a", batch_size=5)
    assert 5 <= sum(ran) <= 25
    rows = [row["teacher_outputs"]["output_0"] for _, row in cached.examples.decoded("train").as_numpy_iterator()]
    np.testing.assert_array_equal(rows, np.asarray(teacher(X)).astype("float16"))
    ran.clear()
    again = cache_teacher(teacher, examples(), tmp_path / "a", batch_size=5)
    assert not ran
    assert " s" in again.report.changed[0].detail


def test_examples_without_a_known_number_go_to_several_files_too(teacher, directory, tmp_path):
    unknown = replace(examples(), train=examples().train.filter(lambda x, y: True))
    cached = cache_teacher(teacher, unknown, tmp_path / "unknown", batch_size=7)
    names = [
        sorted(path.name for path in (each / "outputs").glob("train-*"))
        for each in (tmp_path / "unknown", directory[0])
    ]
    assert names[0] == names[1]
    assert len(names[0]) > 1
    rows = [row["teacher_outputs"]["output_0"] for _, row in cached.examples.decoded("train").as_numpy_iterator()]
    np.testing.assert_array_equal(rows, np.asarray(teacher(X)).astype("float16"))


def test_an_error_of_the_teacher_is_not_one_of_the_examples(tmp_path):
    class Strict(layers.Layer):
        def call(self, x):
            with tf.control_dependencies([tf.debugging.assert_less(x, 3.0, "pixels are below 3")]):
                return tf.identity(x)

    strict = keras.Sequential([keras.Input((4, 4, 1)), Strict(), layers.Flatten(), layers.Dense(5)], name="strict")
    with pytest.raises(ConfigError, match=r"teacher must compute outputs.*'strict', which raises.*below 3") as raised:
        cache_teacher(strict, examples(X + 9), tmp_path / "none")
    assert "damaged" not in str(raised.value)
    assert "Repair" not in str(raised.value)


def test_another_teacher_data_set_or_setting_is_named(teacher, directory, tmp_path):
    place, _ = directory
    changed = X.copy()
    changed[17] += 1
    for given, data, settings, message in (
        (network(3, 30), examples(), {}, "teacher must be the one .* whose weights are not those"),
        (network(2, 31), examples(), {}, "teacher must be the one .* whose layers are not those"),
        (teacher, examples(changed), {}, "examples must be those that the teacher saw.*'noise', whose training part"),
        (teacher, examples(X[:30], Y[:30]), {}, "examples must be those that the teacher saw"),
        (teacher, replace(examples(), name="other"), {}, "examples must be those .* with outputs for 'noise'"),
        (teacher, examples(), {"dtype": "float32"}, "dtype must be that of the stored outputs"),
        (teacher, examples(), {"top_k": 2}, "top_k must be that of the stored outputs"),
    ):
        with pytest.raises(ConfigError, match=message):
            cache_teacher(given, data, place, **{"batch_size": 7} | settings)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="directory must be new, empty or one that cache_teacher wrote"):
        cache_teacher(teacher, examples(), tmp_path)
    content = json.loads((place / "teacher.json").read_text())
    (tmp_path / "edited").mkdir()
    (tmp_path / "edited" / "teacher.json").write_text(json.dumps({**content, "dtype": "float32"}))
    with pytest.raises(ConfigError, match=r"teacher\.json must be a file that cache_teacher wrote"):
        cache_teacher(teacher, examples(), tmp_path / "edited")
    (tmp_path / "edited" / "teacher.json").write_text(json.dumps(content)[:40])
    with pytest.raises(ConfigError, match=r"Remove the directory, or choose another one\."):  # overwrite cannot help
        cache_teacher(teacher, examples(), tmp_path / "edited")


def test_what_a_cache_cannot_hold_is_refused_before_the_teacher_runs(teacher, tmp_path):
    noisy = examples(decode=lambda x, y: (x + tf.random.normal(x.shape), y))
    ragged = examples(decode=lambda x, y: (x[: tf.cast(y, tf.int32) + 1], y))
    for given, data, settings, message in (
        (teacher, noisy, {}, "must be the same in every epoch"),
        (teacher, ragged, {}, "must have inputs of one shape"),
        (teacher, examples(X[:, :3]), {}, r"Received: \(3, 4, 1\) for .* which takes \(4, 4, 1\)"),
        (teacher, examples(), {"top_k": 5}, "top_k must be below the number of classes"),
        (network(2, 30, "sigmoid"), examples(), {"top_k": 2}, "exclude each other"),
        (teacher, examples(X[:0], Y[:0]), {}, "must hold training examples"),
        (teacher, (X, Y), {}, "examples must be an Examples"),
    ):
        with pytest.raises(ConfigError, match=message):
            cache_teacher(given, data, tmp_path / "none", **settings)
    assert not (tmp_path / "none").exists()
    large = keras.Sequential([keras.Input((4, 4, 1)), layers.Rescaling(1e6), layers.Flatten()])
    with pytest.raises(ConfigError, match="float16 holds values up to 65504"):
        cache_teacher(large, examples(), tmp_path / "none")


def test_augmented_examples_other_batches_and_layers_are_refused(teacher, directory, cached):
    augmentation = Augmentation(AugmentConfig(flip="horizontal"))
    for given in (augmentation, lambda example, seed: example):
        with pytest.raises(ConfigError, match="stored outputs of a teacher must not be augmented"):
            pipeline(cached.examples, batch_size=8, augment=given)
    student = network(1)
    pair = FeaturePair(student="dense", teacher="dense")
    for given, config, message in (
        ([cached, teacher], None, "A cached teacher must teach alone.*Received: 2 teachers"),
        (cached, DistillationConfig(features=(pair,)), "Received: features, whose layers it does not hold"),
        (replace(cached, top_k=2), DistillationConfig(loss="mse"), "top_k=2 with loss='mse'"),
        (directory[0], None, "what tfopt.cache_teacher returned, not its directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            distill(student, given, config)
    with pytest.raises(ConfigError, match="shapes and dtypes of the student's"):
        distill(network(1, outputs=4), cached)
    distill(student, cached)
    decided = plan(TrainingConfig(precision="float32"))
    tfopt.compile(student, decided, loss=LABELS, augment=augmentation)
    with pytest.raises(ConfigError, match="stored outputs of a teacher must not be augmented"):
        student.fit(decided.pipeline(cached.examples), verbose=0)
    tfopt.compile(student, decided, loss=LABELS)
    with pytest.raises(ConfigError, match="class_weight is for a model with a single output and single labels"):
        student.fit(decided.pipeline(cached.examples), class_weight=dict.fromkeys(range(5), 1.0), verbose=0)
    student.compile("sgd", LABELS)
    with pytest.raises(ConfigError, match="must bring the outputs of a cached teacher along"):
        student.fit(X, Y, verbose=0)


def test_examples_in_another_order_are_found_while_they_are_read(cached):
    shuffled = replace(
        cached.examples, train=cached.examples.train.map(lambda record, row: ((record[0] + 1, record[1]), row))
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be the one that the teacher saw at its place"):
        list(shuffled.decoded("train"))
