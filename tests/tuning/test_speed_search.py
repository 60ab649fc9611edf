"""The search for speed settings on machines and trainings whose answer is known."""

import dataclasses
import math
import tomllib
from pathlib import Path

import keras
import numpy as np
import pytest

import tfopt
from tfopt import ArtifactError, ConfigError, TrainingConfig, TuneConfig, TuneReport
from tfopt.cli import main
from tfopt.errors import TfoptWarning
from tfopt.hardware import Gpu, Hardware
from tfopt.recipe.kept import with_kept
from tfopt.timing import Estimate
from tfopt.tuning import exploration
from tfopt.tuning.comparison import ratio, reaches_loss
from tfopt.tuning.exploration import Exploration
from tfopt.tuning.facts import Facts, facts_of
from tfopt.tuning.search import kept_for_later
from tfopt.tuning.space import Space, space_of, tables_of
from tfopt.tuning.tune_report import Contribution, TuneTrial

pytest.importorskip("optuna")
VALUES = {
    "precision": "float32",
    "jit_compile": False,
    "strategy": "none",
    "augment": "host",
    "cache": "memory",
    "steps_per_execution": 10,
    "accumulate": 1,
    "global_batch_size": 64,
    "remat": None,
    "communication": "auto",
    "prefetch": 2,
}
FACTS = Facts(values=VALUES, examples=6400, steps=100)
A100 = Gpu(name="NVIDIA A100", compute_capability=(8, 0))


def machine(*features, gpus=()):
    return Hardware(
        logical_cores=8, memory_bytes=2**36, tensorflow_version="2.21.0", cpu_features=features, gpus=tuple(gpus)
    )


def test_only_settings_with_a_choice_are_searched_and_the_others_have_a_reason():
    plain = space_of(FACTS, machine())
    assert {"precision", "strategy", "communication", "global_batch_size", "remat", "threads"} <= plain.left_out.keys()
    assert list(plain.choices) == ["jit_compile", "augment", "cache", "steps_per_execution", "accumulate", "prefetch"]
    assert all(values[0] == VALUES[name] and len(set(values)) == len(values) for name, values in plain.choices.items())
    assert plain.choices["accumulate"] == (1, 2, 4)
    two = space_of(FACTS, machine(gpus=[A100, A100]), other_batches=True)
    assert "mixed_bfloat16" in two.choices["precision"]
    assert two.choices["strategy"] == ("none", "mirrored")
    assert two.choices["global_batch_size"] == (64, 128, 256)
    few = space_of(
        Facts(values={**VALUES, "global_batch_size": 8}, examples=10, steps=2), machine(), other_batches=True
    )
    assert few.choices["steps_per_execution"] == (10, 1)  # an epoch has two steps
    assert {"accumulate", "global_batch_size"} <= few.left_out.keys()
    fixed = space_of(Facts(values=VALUES, fixed={"jit_compile": "a lookup"}), machine())
    assert fixed.left_out["jit_compile"] == "a lookup"


def test_what_needs_tfopts_step_brings_it_along():
    space = space_of(Facts(values={**VALUES, "step": "keras", "steps_per_execution": "auto"}), machine(), of_model=True)
    assert space.changes({"jit_compile": True, "step": "keras"}) == {"step": "tfopt", "jit_compile": True}
    assert space.changes({"prefetch": 8}) == {"prefetch": 8}
    assert space.changes(space.full({})) == {}
    singles = space.singles()
    assert singles[0] == {"step": "tfopt"}
    assert all(len(each.keys() - {"step"}) <= 1 for each in singles)
    assert {"cache", "augment", "precision"} <= space.left_out.keys()
    start = TrainingConfig(precision="float32", global_batch_size=48)
    settings = tables_of({"step": "tfopt", "jit_compile": True}, start, FACTS)["training"]
    assert TrainingConfig(**settings) == dataclasses.replace(start, jit_compile=True)


def test_a_larger_batch_brings_its_learning_rate_along():
    training = TrainingConfig(global_batch_size=64, learning_rate=0.1, optimizer="sgd")
    tables = tables_of({"global_batch_size": 256, "accumulate": 4}, training, FACTS)
    changed = tfopt.recipe.with_changes(tfopt.Recipe(name="a", training=training), tables).training
    assert (changed.global_batch_size, changed.accumulate, changed.base_batch_size) == (256, 4, 64)
    assert changed.learning_rate == 0.1


def test_the_facts_of_a_model_say_what_is_fixed():
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Hashing(8, name="hash")])
    examples = tfopt.data.arrays(np.zeros((100, 4), np.int32), np.zeros(100, np.int32))
    plan = tfopt.plan(TrainingConfig(precision="float32", global_batch_size=16, steps_per_execution=4))
    found = facts_of(plan, model, examples)
    assert found.fixed["jit_compile"].startswith("XLA cannot compile hash")
    assert (found.values["global_batch_size"], found.values["steps_per_execution"]) == (16, 4)
    assert (found.steps, found.at_once) == (math.ceil(found.examples / 16), 1)


# The share of the start's speed that each change gives; of several, the product.
GAINS = {("jit", True): 0.8, ("cache", "off"): 1.1, ("calls", 1): 0.9, ("calls", 50): 1.3}
SPACE = Space(choices={"jit": (False, True), "cache": ("memory", "off"), "calls": (10, 1, 50)}, left_out={})


def known(ran, fails=()):
    """Returns trials whose speed is known, and that note what was tried."""

    def measure(number, changes, bar):
        ran.append((number, changes))
        if any(changes.get(name) == value for name, value in fails):
            return TuneTrial(number=number, changes=changes, state="failed", seconds=1.0, reason="it crashed")
        gain = math.prod(GAINS[each] for each in changes.items())
        state = "slower" if gain * 1.01 < bar else "measured"
        speedup = Estimate(median=gain, least=gain * 0.99, most=gain * 1.01)
        return TuneTrial(number=number, changes=changes, state=state, speedup=speedup, seconds=1.0)

    return measure


def explored(folder, *, seed=0, most=10**6, fails=()):
    folder.mkdir(exist_ok=True)
    ran = []
    found = Exploration(SPACE, seed, folder, known(ran, fails), lambda: "most" if len(found.trials) >= most else "")
    return found, found.run(), ran


def test_each_change_is_tried_alone_then_the_faster_ones_together(tmp_path):
    found, ended, ran = explored(tmp_path, most=5)
    alone = [{"jit": True}, {"cache": "off"}, {"calls": 1}, {"calls": 50}]
    assert [changes for _, changes in ran] == [*alone, {"cache": "off", "calls": 50}]
    assert found.best.changes == {"cache": "off", "calls": 50}
    assert ended == "most"


def test_a_search_ends_when_all_is_tried_and_tries_nothing_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(exploration, "MOST_DOUBLES", 4)
    small = Space(choices={"jit": (False, True), "cache": ("memory", "off")}, left_out={})
    ran = []
    ended = Exploration(small, 0, tmp_path, known(ran)).run()
    assert ended == "all settings that were proposed have been tried"
    assert [changes for _, changes in ran[:2]] == [{"jit": True}, {"cache": "off"}]
    assert len({tuple(changes.items()) for _, changes in ran}) == len(ran)


def test_a_trial_that_fails_is_recorded_and_never_the_best(tmp_path):
    found, _, _ = explored(tmp_path, fails=[("calls", 50)], most=4)
    failed = [each for each in found.trials.values() if each.state == "failed"]
    assert failed
    assert {each.reason for each in failed} == {"it crashed"}
    assert found.best.changes == {"cache": "off"}


def test_a_seed_proposes_the_same_whatever_fails_and_a_stopped_search_goes_on(tmp_path):
    _, _, whole = explored(tmp_path / "whole", most=7)
    failing_search, _, failing = explored(tmp_path / "failing", most=6, fails=[("cache", "off"), ("calls", 50)])
    assert failing_search.best is None
    of_whole, of_failing = dict(whole), dict(failing)
    both = sorted(of_whole.keys() & of_failing.keys())
    assert [of_whole[each] for each in both] == [of_failing[each] for each in both]
    assert any(each > 4 for each in both)  # of optuna
    stops = [explored(tmp_path / "stopped", most=most) for most in (2, 7)]
    assert [each for _, _, ran in stops for each in ran] == whole
    assert len(stops[-1][0].trials) == 7


def test_a_damaged_trial_is_an_error_that_names_it(tmp_path):
    explored(tmp_path, most=2)
    file = tmp_path / "trials" / "001" / "trial.json"
    file.write_text(file.read_text().replace('"number": 1', '"number": 7'))
    with pytest.raises(ArtifactError, match=r"trials/001/trial.json \(its checksum does not match.*Remove "):
        explored(tmp_path, most=2)
    file.write_text("")
    with pytest.raises(ArtifactError, match="A trial must be as it was written"):
        explored(tmp_path, most=2)


def test_a_trial_that_time_cuts_is_tried_again_later(tmp_path):
    ran = []

    def cut(number, changes, bar):
        ran.append(number)
        return TuneTrial(number=number, changes=changes, state="cut", seconds=1.0)

    found = Exploration(SPACE, 0, tmp_path, cut, lambda: "minutes=1" if ran else "")
    assert found.run() == "minutes=1"
    assert not found.trials
    assert explored(tmp_path, most=1)[2] == [(0, {"jit": True})]


def test_ratios_are_those_within_turns_and_losses_are_compared_as_shares():
    drift = [1.0, 0.5, 0.25, 1.0, 0.5, 0.25]
    assert ratio([100 * each for each in drift], [150 * each for each in drift]) == Estimate(
        median=1.5, least=1.5, most=1.5
    )
    assert reaches_loss([4.0, 2.0], [4.0, 2.19], 0.05)
    assert not reaches_loss([4.0, 2.0], [4.0, 2.21], 0.05)
    assert reaches_loss([4.0, 2.0], [4.0, 1.0], 0.05)
    assert not reaches_loss([4.0, 2.0], [4.0, math.inf], None)


def report():
    speedup = Estimate(median=1.4, least=1.3, most=1.5)
    changes = {"jit_compile": True, "augment": "device"}
    slow = {"number": 1, "changes": {"prefetch": 8}, "seconds": 2.0}
    return TuneReport(
        name="digits_cnn",
        kind="recipe",
        examples_per_s=1000.0,
        changes=changes,
        settings=tables_of(changes, TrainingConfig(), FACTS),
        speedup=speedup,
        contributions=(
            Contribution(setting="jit_compile", value=True, start=False, speedup=speedup, kept=True),
            Contribution(setting="prefetch", value=8, start=2, speedup=None, kept=False, reason="no time was left"),
        ),
        trials=(
            TuneTrial(
                number=0, changes=changes, state="measured", speedup=speedup, losses=((2.0,), (2.1,)), seconds=3.0
            ),
            TuneTrial(state="loss", losses=((2.0, 1.0), (2.0, math.nan)), reason="the losses differ", **slow),
        ),
        left_out={"precision": "no GPU"},
        ended_by="minutes=5",
        seconds=300.0,
    )


def test_a_report_prints_goes_through_json_and_is_laid_over_a_recipe(tmp_path):
    found = report()
    again = TuneReport.from_json(found.to_json())
    assert str(again) == str(found)
    assert again.to_json() == found.to_json()
    assert again.trials[0] == found.trials[0]
    for words in ("1.40x (1.30 to 1.50)", "no time was left", "left out", "no GPU", "dropped", "minutes=5"):
        assert words in str(found)
    file = tmp_path / "fast.toml"
    file.write_text(found.to_toml())
    assert tomllib.loads(found.to_toml()) == {
        "training": {"jit_compile": True},
        "data": {"augment": {"where": "device"}},
    }
    changed = tfopt.recipes.compose("digits_cnn", file)
    assert (changed.training.jit_compile, changed.data.augment.where) == (True, "device")
    with pytest.raises(ConfigError, match="must be the JSON of a TuneReport"):
        TuneReport.from_json("{}")
    start = dataclasses.replace(found, changes={}, speedup=None)
    assert "no faster setting was found" in str(start)
    seen = "1.02x (0.97 to 1.06) of the start"
    assert f"not confirmed ({seen})" in str(dataclasses.replace(start, unconfirmed=seen))
    assert "raise minutes" in str(dataclasses.replace(start, trials=()))


@pytest.mark.parametrize(
    "settings",
    [{"minutes": 0.0}, {"minutes": math.nan}, {"max_trials": 0}, {"turns": 5}, {"seed": -1}, {"loss_tolerance": 0.0}],
)
def test_bad_budgets_are_errors_at_once(settings):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} must be"):
        TuneConfig(**settings)


def test_wrong_arguments_are_errors_before_any_trial(tmp_path, capsys):
    with pytest.raises(ConfigError, match="training must be left out"):
        tfopt.tune("digits_cnn", training=TrainingConfig())
    with pytest.raises(ConfigError, match="data must be left out"):
        tfopt.tune("digits_cnn", np.zeros(3))
    with pytest.raises(ConfigError, match="digits_cn"):
        tfopt.tune("digits_cn")
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="directory must be new"):
        tfopt.tune("digits_cnn", directory=tmp_path)
    assert main(["tune", "--no-throughput", "digits_cnn"]) == 2
    assert "--only batch-size" in capsys.readouterr().err
    assert main(["tune", "digits_cnn", "more"]) == 2


def test_a_result_is_kept_or_told_and_never_lost_for_it(tmp_path, monkeypatch):
    recipe = tfopt.Recipe(name="mine")
    faster = Estimate(median=1.2, least=1.1, most=1.3)
    report = TuneReport(name="mine", kind="recipe", examples_per_s=1.0, ended_by="minutes=1", seconds=60.0)
    monkeypatch.setenv("TFOPT_CACHE_DIR", str(tmp_path))
    assert kept_for_later(recipe, report) == ""  # nothing was faster
    found = dataclasses.replace(report, speedup=faster, settings={"training": {"prefetch": 8}})
    file = Path(kept_for_later(recipe, found))
    assert with_kept(recipe)[0].training.prefetch == 8
    assert str(dataclasses.replace(found, kept=str(file))).count(str(file)) == 1
    monkeypatch.setenv("TFOPT_CACHE_DIR", str(file))  # a file, in which no directory can be
    with pytest.warns(TfoptWarning, match="not kept for later runs"):
        assert kept_for_later(recipe, found) == ""
