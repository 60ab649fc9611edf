"""The advice for a recipe: the roofline of kernels, the memory that decides what fits, and this machine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tfopt.advisor import advise, recipe_step
from tfopt.advisor.advise import RESERVED_BYTES
from tfopt.advisor.device import Device, of_card, step_seconds
from tfopt.advisor.shapes import zeros_like
from tfopt.cli import main
from tfopt.data.config import DataConfig
from tfopt.hardware import GPU_CARDS, detect, find_card
from tfopt.profiling.cost import Kernel, training_memory
from tfopt.recipe import ModelConfig, Recipe, TeacherConfig
from tfopt.training import TrainingConfig

DEVICE = Device(
    name="a device",
    flops_per_s={"float32": 1e12, "float16": 4e12},
    depthwise_flops_per_s=1e11,
    bytes_per_s=1e11,
    kernel_s=1e-5,
    memory_bytes=2**30,
)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "advisor.json"


def kernel(multiply_adds, moved, dtype="float32", kind="MatMul", executions=1):
    return Kernel(
        name="k", kinds=(kind,), multiply_adds=multiply_adds, moved_bytes=moved, dtype=dtype, executions=executions
    )


@pytest.fixture(scope="module")
def recipe():
    return Recipe(
        name="small",
        model=ModelConfig(builder="simple_cnn", arguments={"filters": [8]}),
        data=DataConfig(source="synthetic", arguments={"examples": 64, "input_shape": [16, 16, 3]}),
        training=TrainingConfig(global_batch_size=32, optimizer="sgd"),
    )


@pytest.fixture(scope="module", autouse=True)
def _short_measurements():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfopt.advisor.recipe_step.MEASURED_SECONDS", 0.1)
        yield


@pytest.fixture(scope="module")
def advice(recipe):
    return advise(recipe)


def test_a_kernel_takes_the_longer_of_its_two_roofs_and_its_start():
    assert step_seconds([kernel(5 * 10**9, 10**6)], DEVICE) == pytest.approx(10e-3 + 1e-5)  # compute
    assert step_seconds([kernel(5 * 10**6, 10**9)], DEVICE) == pytest.approx(10e-3 + 1e-5)  # memory
    assert step_seconds([kernel(5 * 10**9, 0, "float16")], DEVICE) == pytest.approx(2.5e-3 + 1e-5)
    assert step_seconds([kernel(5 * 10**9, 0, kind="DepthwiseConv2dNative")], DEVICE) == pytest.approx(0.1 + 1e-5)
    assert step_seconds([kernel(0, 0, executions=100)], DEVICE) == pytest.approx(1e-3)
    assert step_seconds([kernel(1, 0, "bfloat16")], DEVICE) is None


def test_a_card_computes_float32_in_tensorfloat32_if_it_can():
    assert of_card("T4", find_card("T4")).flops_per_s["float32"] < 8.1e12
    a100 = of_card("A100", find_card("A100")).flops_per_s
    assert 19.5e12 < a100["float32"] == a100["float16"] / 2


@pytest.mark.slow
def test_every_card_is_listed_with_the_precision_of_its_plan(advice, recipe):
    cards = {card.name: card for card in advice.cards}
    assert set(cards) == set(GPU_CARDS)
    assert cards["T4"].precision == "mixed_float16"
    assert cards["A100"].precision == "mixed_bfloat16"
    model = recipe.model.build((16, 16, 3), 10)
    expected = training_memory(model, 32, "mixed_bfloat16", "sgd").total_bytes + RESERVED_BYTES
    assert cards["A100"].memory_bytes == pytest.approx(expected, rel=0.01)
    for card in advice.cards:
        assert card.examples_per_s == pytest.approx(32 / card.step_ms * 1e3)
        assert card.examples_per_joule == pytest.approx(card.examples_per_s / GPU_CARDS[card.name].board_watts)


def test_the_best_has_the_most_examples_per_joule_of_those_that_fit(advice):
    rates = [card.examples_per_joule for card in advice.cards if card.fits]
    assert advice.best.examples_per_joule == max(rates)
    assert sum(card.is_best for card in advice.cards) == 1
    assert advice.best.name in str(advice)


def test_this_machine_states_its_error(advice):
    here = advice.here
    assert here.measured_ms > 0
    assert here.error == pytest.approx(here.estimated_ms / here.measured_ms - 1)
    assert f"error {here.error:+.0%}" in str(advice)


def test_a_batch_that_is_too_large_does_not_fit_and_micro_batches_help(recipe):
    def fits(**training):
        large = replace(recipe, training=replace(recipe.training, precision="float32", **training))
        return advise(large, cards=["L4"], measure=False).cards[0]

    whole, parts = fits(global_batch_size=2**23), fits(global_batch_size=2**23, accumulate=64)
    assert (whole.fits, parts.fits) == (False, True)
    assert parts.step_ms == pytest.approx(whole.step_ms, rel=0.1)


@pytest.mark.slow
def test_the_command_prints_advice_and_scaling(capsys, tmp_path, recipe):
    file = tmp_path / "small.toml"
    file.write_text(recipe.to_toml())
    words = ["devices", "--advise", str(file), "--no-measure", "--gpus", "1", "64", "--card", "A100"]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [step["gpus"] for step in printed["scaling"]["steps"]] == [1, 64]
    card = next(card for card in printed["cards"] if card["name"] == "A100")
    assert printed["scaling"]["steps"][0]["step_ms"] == pytest.approx(card["step_ms"])
    assert main([*words, "--network", "ethernet_10", "--input-shape", "28", "28", "1", "--outputs", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("best per watt" in line for line in lines)
    assert any("10 Gbit/s Ethernet" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "gpus"),
        (["--card", "L4O"], "Did you mean"),
        (["--network", "ethernet_9"], "Unknown network"),
        (["--input-shape", "8", "8", "3"], "must be given together"),
    ],
)
def test_wrong_flags_are_refused(capsys, words, message):
    assert main(["devices", "--advise", "digits_cnn", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_recorded_errors_are_those_of_the_recorded_figures():
    results = json.loads(RESULTS.read_text())
    for run in results["published"]:  # the rates are rounded to a tenth
        assert run["error"] == pytest.approx(
            run["estimated_examples_per_s"] / run["published_examples_per_s"] - 1, abs=5e-3
        )
    for cell in results["here"].values():
        assert cell["error"] == pytest.approx(cell["estimated_ms"] / cell["measured_ms"] - 1, abs=2e-2)
    for name, fitted in (("published_error", True), ("independent_error", False)):
        errors = [abs(run["error"]) for run in results["published"] if run["fitted"] is fitted]
        assert results[name]["largest"] == max(errors)


def test_the_step_of_a_student_holds_its_teacher_unless_that_is_cached(tmp_path):
    data = DataConfig(source="synthetic", arguments={"examples": 64, "input_shape": [16]})
    teacher = Recipe(name="teacher", model=ModelConfig(builder="mlp", arguments={"units": [4096]}), data=data)
    (tmp_path / "teacher.toml").write_text(teacher.to_toml())
    taught = TeacherConfig(teacher=str(tmp_path / "teacher.toml"))
    cached = replace(taught, teacher_cache=str(tmp_path / "cache"))
    student = Recipe(
        name="student",
        model=ModelConfig(builder="mlp", arguments={"units": [8]}),
        data=data,
        training=TrainingConfig(precision="float32", global_batch_size=256, accumulate=2),
    )
    steps = []
    for distillation in (None, taught, cached):
        recipe = replace(student, distillation=distillation)
        examples = zeros_like(recipe)
        batch = recipe_step.first_batch(recipe, examples)
        steps.append(recipe_step.recipe_step(recipe, examples, batch, recipe_step.plan_on(recipe, detect())))
    alone, with_teacher, with_cache = steps
    assert with_teacher.memory_bytes - alone.memory_bytes == pytest.approx(128 * 4096 * 4, rel=0.2)  # its hidden layer
    work = [sum(kernel.multiply_adds for kernel in step.kernels) for step in steps]
    assert work[1] - work[0] == 128 * 4096 * (16 + 10)
    assert (with_cache.memory_bytes, work[2]) == (alone.memory_bytes, work[0])
