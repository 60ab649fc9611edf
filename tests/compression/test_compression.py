"""Compression: its budget, its front, its recipes, and what it refuses. test_search.py has whole searches."""

import json
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfopt
from tfopt.cli import main
from tfopt.cli.compress import _of_recipe
from tfopt.cli.exit_codes import WRONG_USE
from tfopt.compression.checks import check_examples, with_fitting_teacher
from tfopt.compression.config import BYTES, DROP, MEMORY, CompressionConfig, changes_in
from tfopt.compression.directory import prepare
from tfopt.compression.front import CompressedModel, CompressionReport, figures_of, front
from tfopt.compression.search import compress
from tfopt.compression.trial import LOSSES, MODEL, export_config, score_of
from tfopt.data import Examples
from tfopt.errors import ConfigError, UnsupportedModelError
from tfopt.pruning import StructuredPruningConfig
from tfopt.recipe import Recipe
from tfopt.recipes import compose, find_recipe
from tfopt.report import Receipt
from tfopt.trials.process import OUTCOME

MS = "ms at batch 8"
SHRINK = StructuredPruningConfig(round_to=8, epochs=1)
CONFIG = CompressionConfig(batch_sizes=(8,), shrink=SHRINK, max_trials=3)
RECEIPT = Receipt(
    artifact="out/int8",
    precision="int8",
    scores={"accuracy": 0.96},
    baseline_scores={"accuracy": 0.97},
    bytes_on_disk=1000,
    gzip_bytes=900,
    weight_count=10,
    zero_count=0,
    batch_size=8,
    latency_ms_median=2.0,
    latency_ms_p99=3.0,
    memory_peak_bytes=500,
    speedup=2.0,
    tensorflow_version="",
    device="",
)


def made(name, drop, ms, size):
    figures = {DROP: drop, MS: ms, BYTES: size}
    return CompressedModel(name=name, artifact=name, recipe="", multiply_adds=0.5, receipts=(), figures=figures)


def test_the_front_leaves_out_what_another_model_beats():
    models = [made("a", 0.0, 4.0, 100), made("b", 0.01, 2.0, 50), made("c", 0.01, 3.0, 50), made("d", 0.0, 4.0, 100)]
    assert [each.name for each in front(models, {})] == ["b", "a", "d"]
    assert front([], {}) == ()
    small = replace(models[2], figures={**models[2].figures, MEMORY: 50.0})
    large = replace(models[1], figures={**models[1].figures, MEMORY: 90.0})
    assert [each.name for each in front([large, small], {})] == ["b"]
    assert [each.name for each in front([large, small], {MEMORY: 60.0})] == ["b", "c"]


def test_a_report_names_the_best_within_the_budget_or_what_is_missed():
    report = CompressionReport(
        directory="out",
        score="accuracy",
        budget={DROP: 0.005, MS: 3.0},
        baseline={DROP: 0.0, MS: 8.0, BYTES: 400.0},
        front=(made("small", 0.02, 1.0, 50), made("fast", 0.004, 2.0, 60), made("exact", 0.0, 2.5, 90)),
    )
    assert report.best.name == "fast"
    assert [each.name for each in report.within] == ["fast", "exact"]
    assert report.missed == {}
    assert "best" in str(report)
    narrow = replace(report, budget={DROP: 0.001, MS: 2.2})
    assert narrow.best is None
    assert narrow.missed == pytest.approx({MS: 0.3})
    assert "ms at batch 8 is 0.300 above the budget" in str(narrow)
    unknown = replace(report, budget={MEMORY: 100.0})
    assert unknown.within == ()
    assert "memory bytes could not be measured" in str(unknown)


def test_the_figures_are_those_of_the_receipts():
    other = replace(RECEIPT, batch_size=1, latency_ms_median=0.5, memory_peak_bytes=700)
    assert figures_of([RECEIPT, other]) == {
        DROP: pytest.approx(0.01),
        MS: 2.0,
        "ms at batch 1": 0.5,
        BYTES: 1000.0,
        "memory bytes": 700.0,
    }
    error = replace(RECEIPT, scores={"error": 0.5}, baseline_scores={"error": 0.4}, higher_is_better=False)
    assert figures_of([error])[DROP] == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="needs a score"):
        figures_of([replace(RECEIPT, scores={})])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_score_drop": -0.1}, "max_score_drop must be"),
        ({"max_latency_ms": (1.0, 2.0)}, "one time for each of batch_sizes"),
        ({"batch_sizes": (8, 8)}, "batch_sizes must differ"),
        ({"time_limit_s": 0}, "time_limit_s must be"),
        ({"metric": "acuracy"}, "Unknown metric"),
        ({"quantization": tfopt.QuantizationConfig(training=True)}, "quantization of a compression works at once"),
        ({"augment": tfopt.data.AugmentConfig(mixup=0.2)}, "mixup and cutmix"),
        ({"shrink": StructuredPruningConfig(ratio=0.3)}, "chooses how many channels"),
        ({"shrink": StructuredPruningConfig(scope="global")}, "chooses how many channels"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        CompressionConfig(**settings)


def test_a_recipe_of_a_trial_goes_through_toml(tmp_path):
    recipe = CONFIG.recipe("trials/003", {"a": 0.5, "b": 0.0})
    file = tmp_path / "recipe.toml"
    file.write_text(changes_in(recipe))
    assert Recipe.from_toml(file) == recipe
    laid_over = compose("resnet_cifar", str(file))
    assert laid_over.model == find_recipe("resnet_cifar").model
    assert laid_over.pruning is None
    assert laid_over.shrink.ratios == {"a": 0.5, "b": 0.0}
    base = tmp_path / "base.toml"
    base.write_text('name = "base"\nbatch_sizes = [32]')
    for sizes in ((8,), (1, 8)):  # the same nodes are chosen, whatever the sizes of the recipe
        file.write_text(changes_in(replace(CONFIG, batch_sizes=sizes).recipe("small", {"a": 0.5})))
        assert compose(str(base), str(file)).batch_sizes == sizes
    assert CONFIG.recipe("unshrunk", {}).shrink is None


def test_a_score_of_a_trial_knows_what_the_examples_ignore():
    data = replace(examples(), ignored_target=255, bytes_per_target=4.0)
    score = score_of("mean_iou", data)
    score.update(np.array([[0, 1, 255]]), np.eye(2)[[[0, 1, 1]]])
    assert score.result() == 1.0
    bits = score_of("bits_per_byte", data)
    bits.update(np.array([[3, 7]]), np.zeros((1, 2, 256)))
    assert bits.result() == 2.0
    assert score_of("accuracy", data) == "accuracy"
    assert export_config(CONFIG.recipe("small", {}), score).quantization.metric is score


def network(units=32):
    keras.utils.set_random_seed(0)
    body = [layers.Dense(units, "relu", name="a"), layers.Dense(units, "relu", name="b"), layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *body])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def examples():
    x = np.random.default_rng(0).normal(size=(120, 6)).astype("float32")
    return tfopt.data.arrays(x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 0))


@pytest.mark.slow
def test_a_budget_that_no_model_meets_is_said_before_any_training(tmp_path):
    tight = replace(CONFIG, max_latency_ms=(0.001,), max_bytes=10)
    steps, folder = [], tmp_path / "run"
    with pytest.raises(ConfigError, match=r"ms at batch 8 0\.001, and the smallest model takes .* above it; bytes"):
        compress(network(), examples(), tight, directory=folder, on_step=steps.append)
    assert steps == ["writing the examples", "exporting the model in float32", "measuring the smallest model"]
    assert not (folder / "smallest" / LOSSES).exists()
    assert not (folder / "smallest" / OUTCOME).exists()  # a later call measures anew


class Unknown(layers.Layer):
    def call(self, inputs):
        return keras.ops.roll(inputs, 1, axis=-1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("outputs", "loss", "metric", "kind"),
    [
        (layers.Dense(1, "sigmoid"), "binary_crossentropy", "accuracy", "binary"),
        (layers.Dense(4), keras.losses.BinaryCrossentropy(from_logits=True), "accuracy", "binary"),
        (layers.Dense(1), "mse", "mean_absolute_error", "mse"),
        (layers.Dense(1), keras.losses.Huber(), "accuracy", "mse"),
        (layers.Dense(4), keras.losses.MeanSquaredError(name="mine"), "accuracy", "mse"),
        (layers.Dense(3, "softmax"), "sparse_categorical_crossentropy", "accuracy", "kl"),
        (layers.Dense(3, "softmax"), "binary_crossentropy", "accuracy", "kl"),
    ],
)
def test_the_teacher_teaches_as_the_models_own_loss_does(outputs, loss, metric, kind):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), outputs])
    model.compile("sgd", loss)
    found = with_fitting_teacher(CompressionConfig(metric=metric), model)
    assert found.distillation.loss == kind
    own = tfopt.distillation.TeacherConfig(loss="mse")
    assert with_fitting_teacher(replace(found, distillation=own), model).distillation is own


def test_a_few_examples_are_tried_and_more_where_these_do_not_tell_what_labels_are():
    model = keras.Sequential([keras.Input((6,), batch_size=16), layers.Dense(8), layers.Dense(4, "sigmoid")])
    model.compile("sgd", "binary_crossentropy")
    x, y = np.zeros((160, 6)), np.eye(4, dtype="float32")[np.zeros(160, int)]

    def data(*arrays):
        found = tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0])
        return Examples(name="mine", train=found, test=found, outputs=4)

    with pytest.raises(ConfigError, match="one class or several labels"):
        check_examples(model, data(x, y), CONFIG)
    y[150, 1] = 1
    check_examples(model, data(x, y), CONFIG)
    with pytest.raises(ConfigError, match="'mine', whose validation part is empty"):
        check_examples(model, replace(data(x, y), test=data(x, y).test.filter(lambda *_: False)), CONFIG)
    with pytest.raises(ConfigError, match="'mine', whose examples have no labels"):
        check_examples(model, data((x,)), CONFIG)


def test_what_cannot_be_searched_is_said_at_once(tmp_path):
    hidden = [layers.Lambda(lambda x: 2 * x, name="twice"), layers.Dense(64, "relu"), layers.Dense(64, "relu")]
    with_code = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)])
    with_code.compile("sgd", network().loss, metrics=["accuracy"])
    of_unknown = keras.Sequential([keras.Input((6,)), layers.Dense(64), Unknown(), layers.Dense(3)])
    of_unknown.compile("sgd", network().loss)
    for model, data, error, message in [
        (network(), np.zeros((4, 6)), ConfigError, "data must be an Examples"),
        (keras.Sequential([keras.Input((6,)), layers.Dense(3)]), examples(), UnsupportedModelError, "be compiled"),
        (network(units=4), examples(), UnsupportedModelError, "channels that can be removed"),
        (with_code, examples(), UnsupportedModelError, "the Lambda 'twice', whose function is a lambda"),
        (of_unknown, examples(), UnsupportedModelError, r"round_to=8: .*an operation that tfopt does not follow"),
    ]:
        with pytest.raises(error, match=message):
            compress(model, data, CONFIG, directory=tmp_path / "run")
    for data, message in [
        (np.linspace(0.1, 0.9, 120).reshape(40, 3), r"Labels must be 0 or 1.*set the metric 'mean_absolute_error'"),
        (np.eye(3)[np.arange(40) % 3], r"labels that the model's loss takes. Received: labels of shape \(8, 3\)"),
    ]:
        with pytest.raises(ConfigError, match=message):
            compress(network(), tfopt.data.arrays(np.zeros((40, 6)), data), CONFIG, directory=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"inputs of the model. Received: \(5,\) for .*which takes \(6,\)"):
        compress(network(), tfopt.data.arrays(np.zeros((40, 5)), np.arange(40) % 3), CONFIG, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"directory must be a directory.*a file"):
        compress(network(), examples(), CONFIG, directory=tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="which holds something else"):
        compress(network(), examples(), CONFIG, directory=tmp_path / "mine")


def test_a_directory_belongs_to_a_search_once_something_is_measured(tmp_path):
    mine = network()

    def ready(config, model=mine, *, is_begun):
        prepare(tmp_path, model, examples(), config, "", is_begun, lambda words: None)

    other = replace(CONFIG, batch_sizes=(1, 8), seed=3, metric="accuracy", shrink=replace(SHRINK, criterion="l1"))
    ready(CONFIG, is_begun=False)
    ready(other, is_begun=False)
    ready(replace(other, time_limit_s=9.0, max_bytes=9), is_begun=True)
    with pytest.raises(ConfigError) as refused:
        ready(CONFIG, is_begun=True)
    for words in ("batch_sizes=[1, 8] in place of [8]", "seed=3 in place of 0", "shrink.criterion='l1' in place of"):
        assert words in str(refused.value)
    off = replace(other, quantization=None, distillation=None)
    with pytest.raises(ConfigError, match="with distillation='on' in place of None, quantization='on'"):
        ready(off, is_begun=True)
    x = np.zeros((120, 6), "float32")
    with pytest.raises(ConfigError, match="data must be the examples of the earlier call"):
        prepare(tmp_path, mine, tfopt.data.arrays(x, x[:, 0].astype(int)), other, "", True, lambda words: None)
    with pytest.raises(ConfigError, match="a compression of another model"):
        ready(other, network(units=48), is_begun=True)
    (tmp_path / "unshrunk").mkdir()
    (tmp_path / "unshrunk" / OUTCOME).write_text(json.dumps({"seconds": 1.0, "failure": "", "result": {}}))
    with pytest.raises(ConfigError, match="seed=3 in place of 0"):  # also where the smallest is to be measured anew
        compress(mine, examples(), CONFIG, directory=tmp_path)
    (tmp_path / "compression.json").write_text(json.dumps({"compression": "", "source": ""}))
    with pytest.raises(ConfigError, match="a compression of an earlier version of tfopt"):
        compress(mine, examples(), CONFIG, directory=tmp_path)


def test_the_command_names_what_is_missing(capsys):
    for words, message in [
        (["model.keras", "out"], "needs the examples"),
        (["resnet_cifar", "out", "--data", "digits"], "has examples of its own"),
        (
            ["model.keras", "out", "--data", "digits", "--import", "no_such_module"],
            "--import must name a module that Python can import",
        ),
    ]:
        assert main(["compress", *words]) == WRONG_USE
        assert message in capsys.readouterr().err


MIXED = """
name = "mine"
[model]
builder = "mlp"
arguments = { units = [16] }
[data]
source = "digits"
max_examples = 64
[data.augment]
mixup = 0.2
[training]
epochs = 1
[shrink]
rounds = 3
"""


@pytest.mark.slow
def test_a_recipe_with_mixup_and_rounds_is_compressed_without_them(tmp_path, capsys):
    file, out = tmp_path / "mine.toml", tmp_path / "run"
    file.write_text(MIXED)
    out.mkdir()
    network().save(out / MODEL)  # without the mark it may be anybody's, so the recipe is trained
    model, _, config = _of_recipe(str(file), out, CompressionConfig(), as_json=False)
    assert model.input_shape == (None, 32, 32, 1)
    assert config.augment == tfopt.data.AugmentConfig()
    assert config.shrink.rounds == 1
    assert model.get_compile_config()["loss"]["class_name"] == "SparseCategoricalCrossentropy"
    shown = capsys.readouterr().err
    assert "without mixup" in shown
    assert "not in rounds" in shown

    (out / "compression.json").write_text(json.dumps({"compression": "", "source": str(file)}))
    assert _of_recipe(str(file), out, CompressionConfig(), as_json=False)[0].input_shape == (None, 6)
    with pytest.raises(ConfigError, match=r"of another model, of .*mine\.toml"):
        _of_recipe("digits_cnn", out, CompressionConfig(), as_json=False)
