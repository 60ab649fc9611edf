"""The search for smaller models: with trials whose outcomes the tests make up, and once with real ones."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers

import tfopt
from tfopt.cli import main
from tfopt.cli.compress import _of_recipe
from tfopt.cli.exit_codes import SUCCESS, WRONG_USE
from tfopt.compression import search
from tfopt.compression.candidates import Allocation, farthest
from tfopt.compression.config import BYTES, DROP, MEMORY, CompressionConfig, changes_in
from tfopt.compression.front import CompressedModel, CompressionReport, excess, figures_of, front
from tfopt.compression.search import compress
from tfopt.compression.trial import MODEL, export_config, score_of
from tfopt.errors import ConfigError, TrainingError, UnsupportedModelError
from tfopt.pruning import StructuredPruningConfig
from tfopt.pruning.sensitivity_curves import Sensitivity
from tfopt.recipe import Recipe
from tfopt.recipes import compose, find_recipe
from tfopt.report import Receipt
from tfopt.trials.process import OUTCOME, Outcome

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
    assert CONFIG.recipe("unshrunk", {}).shrink is None


def test_the_amounts_meet_the_share_where_it_hurts_least():
    cost = lambda ratios: 1 - (3 * ratios.get("a", 0.0) + ratios.get("b", 0.0)) / 4  # noqa: E731
    found = Sensitivity(
        score="loss",
        higher_is_better=False,
        baseline=1.0,
        shares=(0.3, 0.9),
        curves={"a": (1.0, 1.1), "b": (2.0, 5.0)},
        config=StructuredPruningConfig(ratio=0.5),
        cost=cost,
    )
    allocation = Allocation(found, {"a": 0.9, "b": 0.5})
    assert allocation.least == pytest.approx(1 - (2.7 + 0.5) / 4)
    assert allocation.ratios(0.5, "sensitive") == pytest.approx({"a": 2 / 3, "b": 0.0}, abs=1e-3)
    assert allocation.ratios(0.5, "even") == pytest.approx({"a": 0.5, "b": 0.5}, abs=1e-3)


def test_a_share_below_the_least_is_the_least():
    found = Sensitivity(
        score="loss",
        higher_is_better=False,
        baseline=1.0,
        shares=(0.3, 0.9),
        curves={"a": (1.0, 1.1)},
        config=StructuredPruningConfig(ratio=0.5),
        cost=lambda ratios: 1 - ratios.get("a", 0.0) / 16,
    )
    assert Allocation(found, {"a": 0.9}).ratios(0.9, "sensitive") == pytest.approx({"a": 0.9}, abs=1e-4)


def test_a_score_of_a_trial_knows_what_the_examples_ignore():
    data = replace(examples(), ignored_target=255, bytes_per_target=4.0)
    score = score_of("mean_iou", data)
    score.update(np.array([[0, 1, 255]]), np.eye(2)[[[0, 1, 1]]])
    assert score.result() == 1.0
    bits = score_of("bits_per_byte", data)
    bits.update(np.array([[3, 7]]), np.zeros((1, 2, 256)))
    assert bits.result() == 2.0
    assert score_of("accuracy", data) == "accuracy"
    assert export_config(CONFIG.recipe("small", {}), [8], score).quantization.metric is score


def test_a_search_halves_the_interval_before_it_fills_the_front():
    shares = {1: 0.9, 2: 0.5, 3: 0.31, 4: 0.1}
    assert farthest(shares, [1.0, 0.3], 0.3, 1.0) == 2
    assert farthest({4: 0.1, 1: 0.9}, [1.0, 0.3], 0.3, 0.31) == 4
    assert farthest({1: 0.5}, [0.5], 0.0, 1.0) is None


def network(units=32):
    keras.utils.set_random_seed(0)
    body = [layers.Dense(units, "relu", name="a"), layers.Dense(units, "relu", name="b"), layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *body])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def examples():
    x = np.random.default_rng(0).normal(size=(120, 6)).astype("float32")
    return tfopt.data.arrays(x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 0))


class MadeUp:
    """Outcomes as a function of the ratios: half of the channels cost nothing, and the rest too much.

    A trial takes `seconds` on a clock of its own, on which nothing else takes time.
    """

    def __init__(self, monkeypatch, failing=(), stops_after=None, seconds=1.0):
        self.calls, self.failing, self.stops_after = [], failing, stops_after
        self.now, self.seconds, self.limits = 0.0, seconds, {}
        monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(search, "call_apart", self)
        monkeypatch.setattr(search, "STARTUP", 6)  # each is a transaction of SQLite

    def __call__(self, function, arguments, directory, limit_s):
        name = Path(arguments["trial"]).name
        if self.stops_after is not None and len(self.calls) >= self.stops_after:
            raise KeyboardInterrupt
        self.calls.append(name)
        shrink = Recipe.from_toml(directory / "recipe.toml").shrink
        share = 1.0 if shrink is None else 1 - sum(shrink.ratios.values()) / 2
        score = 0.97 if share > 0.5 else 0.9
        receipt = replace(
            RECEIPT, scores={"accuracy": score}, latency_ms_median=4 * share, bytes_on_disk=int(4000 * share)
        )
        result = {"multiply_adds": share, "receipts": [receipt.to_dict()]}
        failure = "its process was killed" if len(self.calls) in self.failing else ""
        self.limits[name] = limit_s
        seconds = self.seconds if arguments["heals"] else 1.0
        if seconds > limit_s:
            failure, seconds = "it took too long", limit_s
        self.now += seconds
        outcome = Outcome(result=None if failure else result, failure=failure, seconds=seconds)
        (directory / OUTCOME).write_text(outcome.to_json())
        return outcome


def settings_of(report):
    return [each.settings for each in report.trials]


@pytest.mark.slow
def test_a_search_records_failures_and_goes_on_after_a_stop(tmp_path, monkeypatch):
    config = replace(CONFIG, max_score_drop=0.005, max_trials=4)
    model, data = network(), examples()
    before = [each.copy() for each in model.get_weights()]
    made_up = MadeUp(monkeypatch, failing=(4,), stops_after=5)
    with pytest.raises(KeyboardInterrupt):
        compress(model, data, config, directory=tmp_path / "run")
    assert made_up.calls[:2] == ["smallest", "unshrunk"]
    assert len(made_up.calls) == 5
    made_up.stops_after = None
    report = compress(model, data, config, directory=tmp_path / "run")
    assert len(made_up.calls) == 6  # the first two are not measured again
    assert len(set(made_up.calls)) == 6
    states = [each.state for each in report.trials]
    assert states.count("measured") == 3
    assert states.count("failed") == 1
    assert [each.reason for each in report.trials if each.state == "failed"] == ["its process was killed"]
    assert report.best.figures[DROP] == 0
    assert report.best.multiply_adds > 0.5
    assert (tmp_path / "run" / "front.svg").is_file()
    assert json.loads((tmp_path / "run" / "report.json").read_text())["score"] == "accuracy"
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)

    whole = compress(model, data, config, directory=tmp_path / "whole")
    assert settings_of(whole)[:6] == settings_of(report)[:6]
    with pytest.raises(ConfigError, match="of the same model and settings"):
        compress(model, data, replace(config, seed=1), directory=tmp_path / "run")


def test_a_budget_that_no_model_meets_is_said_before_any_training(tmp_path, monkeypatch):
    made_up = MadeUp(monkeypatch)
    tight = replace(CONFIG, max_latency_ms=(0.1,), max_bytes=10)
    model, data = network(), examples()
    with pytest.raises(ConfigError, match=r"ms at batch 8 0\.100, and the smallest model takes .* above it; bytes"):
        compress(model, data, tight, directory=tmp_path / "run")
    assert made_up.calls == ["smallest"]
    # The same directory takes a larger budget, and the model as it was saved. The smallest one is measured anew.
    wide = replace(tight, max_latency_ms=(100.0,), max_bytes=None, max_trials=0)
    saved = keras.saving.load_model(tmp_path / "run" / MODEL)
    report = compress(saved, data, wide, directory=tmp_path / "run")
    assert made_up.calls == ["smallest", "smallest", "unshrunk"]
    assert [each.name for each in report.front] == ["unshrunk"]
    model.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(ConfigError, match="of another model"):
        compress(model, data, wide, directory=tmp_path / "run")


def test_a_trial_that_the_default_limit_ends_may_be_tried_again(tmp_path, monkeypatch):
    made_up = MadeUp(monkeypatch, seconds=500.0)
    model, data, config = network(), examples(), replace(CONFIG, time_limit_s=602.0)
    report = compress(model, data, config, directory=tmp_path / "run")
    first, second = made_up.calls[2:]
    assert first != second
    assert (made_up.limits[first], made_up.limits[second]) == (300.0, 300.0)
    assert {each.state for each in report.trials} == {"open"}

    made_up.seconds = 250.0  # the machine is less busy
    report = compress(model, data, config, directory=tmp_path / "run")
    assert made_up.calls[4] == first
    assert made_up.limits[made_up.calls[5]] == 352.0  # all that is left after a trial that has succeeded
    assert [each.state for each in report.trials].count("measured") == 2

    def take_long(step):
        made_up.now += 1000.0

    # Without time for more, the report has what was measured before.
    late = compress(model, data, config, directory=tmp_path / "run", on_step=take_long)
    assert len(made_up.calls) == 6
    assert [each.name for each in late.front] == [each.name for each in report.front]
    assert [each.state for each in late.trials].count("measured") == 2


def test_a_bound_of_latency_leaves_out_what_is_predicted_to_be_slow(tmp_path, monkeypatch):
    MadeUp(monkeypatch)
    report = compress(network(), examples(), replace(CONFIG, max_latency_ms=(1.6,)), directory=tmp_path / "run")
    slow = [each for each in report.trials if each.multiply_adds > 0.55]
    assert slow
    assert {each.state for each in slow} == {"left out"}
    assert all("ms at batch 8 would be about" in each.reason for each in slow)
    assert excess(report.best.figures, report.budget) == {}


def test_what_cannot_be_searched_is_said_at_once(tmp_path, monkeypatch):
    MadeUp(monkeypatch, failing=(1,))
    for model, data, error, message in [
        (network(), np.zeros((4, 6)), ConfigError, "data must be an Examples"),
        (keras.Sequential([keras.Input((6,)), layers.Dense(3)]), examples(), UnsupportedModelError, "be compiled"),
        (network(units=4), examples(), UnsupportedModelError, "channels that can be removed"),
        (network(), examples(), TrainingError, "The smallest model must be measured.*was killed"),
    ]:
        with pytest.raises(error, match=message):
            compress(model, data, CONFIG, directory=tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="which holds something else"):
        compress(network(), examples(), CONFIG, directory=tmp_path / "mine")


def test_a_model_that_can_lose_next_to_nothing_is_refused(tmp_path, monkeypatch):
    MadeUp(monkeypatch)
    inputs = keras.Input((6,))
    wide = layers.Dense(3)(layers.Dense(2000, name="wide")(inputs))
    model = keras.Model(inputs, layers.Add()([wide, layers.Dense(3)(layers.Dense(16, name="narrow")(inputs))]))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    config = replace(CONFIG, shrink=replace(SHRINK, exclude=("wide",)))
    with pytest.raises(UnsupportedModelError, match="at the least, with round_to=8"):
        compress(model, examples(), config, directory=tmp_path / "run")


@pytest.mark.slow
def test_a_network_on_digits_gets_smaller_and_faster(tmp_path):
    data = tfopt.data.digits(image_size=16)
    model = tfopt.models.simple_cnn((16, 16, 1), 10, filters=[32, 64], kernel_size=3)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(data.x_train, data.y_train, epochs=8, verbose=0)
    config = CompressionConfig(max_score_drop=0.02, batch_sizes=(8,), shrink=replace(SHRINK, epochs=4), max_trials=1)
    report = compress(model, data, config, directory=tmp_path / "run")
    assert [each.state for each in report.trials].count("measured") == 1
    trained = next(each for each in report.front if each.multiply_adds < 1)
    assert trained.figures[BYTES] < report.baseline[BYTES] / 4
    assert trained.receipts[0].ok
    assert trained.receipts[0].precision in ("int8", "int8_weight_only")  # the clock decides over the nodes
    assert Recipe.from_toml(trained.recipe).shrink.ratios
    outputs = keras.layers.TFSMLayer(trained.artifact, "serving_default")(data.x_test)
    found = np.mean(np.argmax(next(iter(outputs.values())), -1) == data.y_test)
    assert found == pytest.approx(trained.receipts[0].scores["accuracy"], abs=0.01)


def test_the_command_names_what_is_missing(capsys):
    for words, message in [
        (["model.keras", "out"], "needs the examples"),
        (["resnet_cifar", "out", "--data", "digits"], "has examples of its own"),
    ]:
        assert main(["compress", *words]) == WRONG_USE
        assert message in capsys.readouterr().err


def test_a_recipe_with_mixup_and_rounds_is_compressed_without_them(tmp_path, monkeypatch, capsys):
    file, out = tmp_path / "mine.toml", tmp_path / "run"
    file.write_text('name = "mine"\n[data]\nsource = "digits"\n[data.augment]\nmixup = 0.2\n[shrink]\nrounds = 3\n')
    trained = network()
    trained.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True))
    monkeypatch.setattr("tfopt.runner.run", lambda recipe, console: SimpleNamespace(model=trained))
    model, _, config = _of_recipe(str(file), out, CompressionConfig(), as_json=False)
    assert config.augment == tfopt.data.AugmentConfig()
    assert config.shrink.rounds == 1
    assert model.get_compile_config()["loss"]["class_name"] == "SparseCategoricalCrossentropy"
    shown = capsys.readouterr().err
    assert "without mixup" in shown
    assert "not in rounds" in shown

    out.mkdir()
    model.save(out / MODEL)  # without the mark it may be anybody's, so the recipe is trained
    assert _of_recipe(str(file), out, CompressionConfig(), as_json=False)[0] is trained
    (out / "compression.json").write_text(json.dumps({"compression": "", "source": str(file)}))
    assert _of_recipe(str(file), out, CompressionConfig(), as_json=False)[0] is not trained
    with pytest.raises(ConfigError, match=r"of another model, of .*mine\.toml"):
        _of_recipe("digits_cnn", out, CompressionConfig(), as_json=False)


@pytest.mark.slow
def test_the_command_compresses_a_file(tmp_path, monkeypatch, capsys):
    MadeUp(monkeypatch)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((32, 32, 1)), layers.Flatten(), layers.Dense(32, "relu"), layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save(tmp_path / "model.keras")
    words = ["--data", "digits", "--round-to", "8", "--max-trials", "1", "--batch-sizes", "8", "--json"]
    limit = ["--max-score-drop", "0.005"]
    assert main(["compress", str(tmp_path / "model.keras"), str(tmp_path / "run"), *words, *limit]) == SUCCESS
    assert json.loads(capsys.readouterr().out)["budget"] == {"score drop": 0.005}
