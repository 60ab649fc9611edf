"""Real runs of small recipes, from the plan to the report; the named recipes in full are marked slow."""

import dataclasses
import io
import json
import math
import random
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console

from tfopt.compat import optimizers as compat
from tfopt.data import Examples, arrays, image_folder
from tfopt.data.augment.config import AugmentConfig
from tfopt.data.config import DataConfig
from tfopt.distillation import TeacherConfig
from tfopt.errors import ConfigError, ExportError, TfoptWarning, TrainingError, UnsupportedModelError
from tfopt.models import mlp
from tfopt.pruning import PruningConfig
from tfopt.quantization import QuantizationConfig
from tfopt.recipe import ModelConfig, Recipe, with_changes
from tfopt.recipes import RECIPES, find_recipe
from tfopt.reporting.html_page import write_html
from tfopt.reporting.saved_report import load_report
from tfopt.runner import diagnosis, run
from tfopt.runner.model_check import with_float_inputs
from tfopt.runner.teacher import teacher_recipe
from tfopt.tasks.label_smoothing import SmoothedCrossEntropy
from tfopt.training import TrainingConfig
from tfopt.training.optimizers import make_optimizer
from tfopt.tuning.workload import workload_of

TINY = Recipe(
    name="tiny",
    description="A perceptron on synthetic examples",
    model=ModelConfig(builder="mlp", arguments={"units": [24]}),
    data=DataConfig(source="synthetic", arguments={"examples": 250, "input_shape": [12], "num_classes": 4}),
    training=TrainingConfig(precision="float32", epochs=3, global_batch_size=16, learning_rate=0.01),
    pruning=PruningConfig(target_sparsity=0.5, epochs=2, frequency=1),
    quantization=QuantizationConfig(),
    int8_nodes="all",  # the same in every run
)
TRAIN_ONLY = dataclasses.replace(TINY, pruning=None, quantization=None)


def silent():
    return Console(file=io.StringIO(), width=200, color_system=None)


def printed(console):
    return console.file.getvalue()


class Recorder:
    """A builder that notes each call."""

    def __init__(self, build=mlp):
        self.calls, self.build = [], build

    def __call__(self, input_shape, num_classes):
        self.calls.append((input_shape, num_classes))
        return self.build(input_shape, num_classes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """One whole run: (result, what it printed)."""
    console = silent()
    recipe = dataclasses.replace(TINY, export_dir=str(tmp_path_factory.mktemp("run") / "new" / "tiny x"))
    return run(recipe, console=console), printed(console)


def test_everything_is_written_and_nothing_else(tiny):
    result, _ = tiny
    names = {path.name for path in result.export_dir.iterdir()}
    assert names == {"float32", "pruned", "int8", "receipts.json", "report.html", "report.json"}
    for name in ("float32", "pruned", "int8"):
        assert (result.export_dir / name / "manifest.json").is_file()
        signatures = tf.saved_model.load(str(result.export_dir / name)).signatures
        assert list(signatures) == ["serving_default"]


def test_the_result_holds_what_was_done(tiny):
    result, _ = tiny
    assert result.ok
    assert result.model.count_params() == 12 * 24 + 24 + 24 * 4 + 4
    assert result.plan.config == TINY.training
    report = result.report
    assert (report.recipe, report.description) == (TINY.name, TINY.description)
    assert report.environment["TensorFlow"] == tf.__version__
    assert report.plan[: len(result.plan.decisions)] == result.plan.decisions
    assert [decision.setting for decision in report.plan[-2:]] == ["cache", "shuffle_buffer"]
    assert report.receipts == result.receipts
    assert [(phase.name, len(phase.history["loss"])) for phase in report.phases] == [("train", 3), ("prune", 2)]
    for phase in report.phases:
        assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= set(phase.history)
        assert all(isinstance(value, float) for values in phase.history.values() for value in values)
    assert report.phases[1].history["sparsity"][-1] == pytest.approx(0.5, abs=0.01)
    assert [each.name for each in report.passes] == ["prune", "quantize"]
    assert len(report.utilization.seconds) >= 1


def test_the_receipts_are_those_of_the_artifacts(tiny):
    result, _ = tiny
    assert list(result.receipts) == ["float32", "pruned", "int8"]
    stored = json.loads((result.export_dir / "receipts.json").read_text())
    assert stored == json.loads(json.dumps({name: each.to_dict() for name, each in result.receipts.items()}))
    assert [receipt.precision for receipt in result.receipts.values()] == ["float32", "float32", "int8"]
    assert result.receipts["float32"].baseline is None
    for name in ("pruned", "int8"):  # one reference for all
        assert result.receipts[name].baseline.endswith("float32")
    assert result.receipts["float32"].sparsity < 0.01
    assert result.receipts["pruned"].sparsity == pytest.approx(0.5, abs=0.01)
    assert result.receipts["int8"].sparsity >= 0.49
    assert result.receipts["int8"].kernels["_QuantizedMatMul"] == 2


def test_the_model_is_the_one_that_was_exported(tiny):
    result, _ = tiny
    examples = TINY.data.load()
    logits = result.model.predict(examples.x_test, verbose=0)
    accuracy = np.mean(logits.argmax(-1) == examples.y_test)
    assert accuracy == pytest.approx(result.receipts["pruned"].accuracy, abs=1e-6)
    assert accuracy == pytest.approx(result.report.phases[1].history["val_accuracy"][-1], abs=1e-6)
    assert accuracy > 0.8
    serve = tf.saved_model.load(str(result.export_dir / "pruned")).signatures["serving_default"]
    (input_name,) = serve.structured_input_signature[1]
    (output,) = serve(**{input_name: tf.constant(examples.x_test)}).values()
    np.testing.assert_allclose(output, logits, atol=1e-4)


def test_the_page_needs_nothing_beside_it(tiny):
    result, _ = tiny
    page = (result.export_dir / "report.html").read_text(encoding="utf-8")
    assert TINY.description in page
    assert 'src="http' not in page
    assert "<link" not in page


def test_the_saved_report_renders_the_same_page(tiny):
    result, _ = tiny
    loaded = load_report(result.export_dir)
    assert json.loads(loaded.to_json()) == json.loads(result.report.to_json())
    again = write_html(loaded, result.export_dir / "again.html")
    page = again.read_text(encoding="utf-8")
    again.unlink()
    assert page == (result.export_dir / "report.html").read_text(encoding="utf-8")


def test_what_is_printed_tells_each_stage_and_whole_paths(tiny):
    result, text = tiny
    lines = text.splitlines()
    stages = ["tiny", "steps_per_execution", "mlp: 412 parameters", "train  epoch 3/3", "prune  epoch 2/2", "prune: "]
    found = [next(number for number, line in enumerate(lines) if word in line) for word in stages]
    assert found == sorted(found)
    for name in ("float32", "pruned", "int8"):
        assert any(line.startswith(f"exported {result.export_dir / name}, ") for line in lines)
    assert lines[-1] == f"report: {result.export_dir / 'report.html'}"


@pytest.mark.slow
def test_a_second_run_replaces_the_first(tmp_path):
    recipe = dataclasses.replace(TRAIN_ONLY, export_dir=str(tmp_path))
    first, second = run(recipe, console=silent()), run(recipe, console=silent())
    assert {path.name for path in tmp_path.iterdir()} == {"float32", "receipts.json", "report.html", "report.json"}
    assert list(second.receipts) == ["float32"]
    assert second.receipts["float32"].accuracy == first.receipts["float32"].accuracy
    assert first.report.passes == []


@pytest.mark.slow
def test_quantization_while_training_is_a_phase_of_its_own(tmp_path):
    quantization = QuantizationConfig(training=True, learned_ranges=True, epochs=2, learning_rate=1e-3)
    console = silent()
    recipe = dataclasses.replace(TINY, quantization=quantization, export_dir=str(tmp_path / "new"))
    result = run(recipe, console=console)
    assert [(phase.name, len(phase.history["loss"])) for phase in result.report.phases] == [
        ("train", 3),
        ("prune", 2),
        ("quantize", 2),
    ]
    receipts = result.receipts
    assert receipts["int8"].ok
    assert receipts["int8"].zero_count >= receipts["pruned"].zero_count >= 192
    assert receipts["int8"].kernels["_QuantizedMatMul"] == 2
    assert recipe.quick().quantization.epochs == 2


@pytest.fixture(scope="module")
def unexported(tmp_path_factory):
    """A run that trains and prunes, and the empty directory in which it ran."""
    directory = tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        return run(dataclasses.replace(TINY, quantization=None), console=silent()), directory


def test_without_quantization_and_export_nothing_is_written(unexported):
    result, directory = unexported
    assert (result.receipts, result.export_dir, result.ok) == ({}, None, True)
    assert [each.name for each in result.report.passes] == ["prune"]
    assert list(directory.iterdir()) == []


def test_a_target_that_cannot_be_written_is_found_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "mine" / "int8").mkdir(parents=True)
    (tmp_path / "mine" / "int8" / "thesis.txt").write_text("")
    for export_dir in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "mine"):
        builder, console = Recorder(), silent()
        recipe = dataclasses.replace(TINY, model=ModelConfig(builder=builder), export_dir=str(export_dir))
        with pytest.raises(ExportError, match=str(export_dir)):
            run(recipe, console=console)
        assert builder.calls == []
        assert printed(console) == ""
    assert [path.name for path in (tmp_path / "mine" / "int8").iterdir()] == ["thesis.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


@pytest.mark.parametrize(
    "build",
    [
        lambda input_shape, num_classes: keras.Sequential([keras.layers.Dense(num_classes)]),
        lambda input_shape, num_classes: None,
        lambda input_shape, num_classes: keras.layers.Dense(num_classes),
    ],
)
def test_a_model_that_is_not_built_is_refused_and_nothing_written(build, tmp_path):
    recipe = dataclasses.replace(TINY, model=ModelConfig(builder=build), export_dir=str(tmp_path / "out"))
    with pytest.raises(UnsupportedModelError, match=r"must return a built Keras 3 model. Received: .* keras.Input"):
        run(recipe, console=silent())
    assert list(tmp_path.iterdir()) == []


def test_what_the_plan_refuses_is_refused_before_the_model(tmp_path):
    builder = Recorder()
    training = TrainingConfig(strategy="pipeline", pipeline_devices=("CPU:0", "CPU:1"), jit_compile=True)
    recipe = Recipe(name="x", model=ModelConfig(builder=builder), training=training, export_dir=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="jit_compile=True"):
        run(recipe, console=silent())
    assert builder.calls == []
    assert list(tmp_path.iterdir()) == []


def test_shifting_what_is_no_image_is_refused_and_nothing_written(tmp_path):
    recipe = dataclasses.replace(
        TINY, data=dataclasses.replace(TINY.data, random_shift=2), export_dir=str(tmp_path / "out")
    )
    with pytest.raises(ConfigError, match="must be images"):
        run(recipe, console=silent())
    assert list(tmp_path.iterdir()) == []


def fail(input_shape, num_classes):
    np.random.random(), random.random()
    raise RuntimeError("in the builder")


@pytest.mark.parametrize("fails", [False, True])
def test_global_state_is_left_as_it_was(fails):
    training = dataclasses.replace(TINY.training, precision="mixed_bfloat16", epochs=1)
    recipe = dataclasses.replace(TRAIN_ONLY, training=training)
    if fails:
        recipe = dataclasses.replace(recipe, model=ModelConfig(builder=fail))
    random.seed(7)
    np.random.seed(7)
    policy = keras.config.dtype_policy()
    expected = (random.random(), np.random.random())
    random.seed(7)
    np.random.seed(7)
    if fails:
        with pytest.raises(RuntimeError, match="in the builder"):
            run(recipe, console=silent())
    else:
        assert run(recipe, console=silent()).model.get_layer("dense1").compute_dtype == "bfloat16"
    assert (random.random(), np.random.random()) == expected
    assert keras.config.dtype_policy() is policy


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_another():
    def weights(seed):
        training = dataclasses.replace(TINY.training, seed=seed)
        result = run(dataclasses.replace(TINY, training=training, quantization=None), console=silent())
        return result.report.phases, result.model.get_weights()

    np.random.seed(1)
    (phases, first), (again, second) = weights(3), weights(3)
    assert phases == again
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    assert weights(4)[0] != phases


@pytest.mark.slow
def test_an_optimizer_object_serves_every_phase():
    given = keras.optimizers.SGD(0.05, momentum=0.9)
    training = dataclasses.replace(TINY.training, optimizer=given)
    recipe = dataclasses.replace(TINY, training=training, quantization=None)
    first = run(recipe, console=silent())
    assert isinstance(first.model.optimizer, keras.optimizers.SGD)
    assert float(first.model.optimizer.momentum) == 0.9
    assert float(first.model.optimizer.learning_rate) == pytest.approx(0.05)
    assert int(given.iterations) == 0  # each phase has its own copy, so that a recipe can be run again
    (again,) = run(dataclasses.replace(recipe, pruning=None), console=silent()).report.phases
    assert again == first.report.phases[0]


def test_the_learning_rate_goes_where_it_should():
    optimizer = run(TRAIN_ONLY, console=silent()).model.optimizer
    assert int(optimizer.iterations) == 3 * 13  # 200 examples in batches of 16
    assert float(optimizer.learning_rate) == pytest.approx(0.0, abs=1e-6)  # by a cosine


@pytest.mark.slow
def test_pruning_may_have_its_own_learning_rate():
    pruning = dataclasses.replace(TINY.pruning, learning_rate=0.002)  # below, it has that of the training
    training = dataclasses.replace(TINY.training, decay="constant", epochs=1)
    recipe = dataclasses.replace(TINY, training=training, pruning=pruning, quantization=None)
    assert float(run(recipe, console=silent()).model.optimizer.learning_rate) == pytest.approx(0.002)


@pytest.mark.slow
def test_a_recipe_prunes_by_gradients_with_regrowth_and_mixed_targets():
    """Mixup makes shares of the targets of the loss, also of those that the gradients are computed with."""
    data = DataConfig(
        source="synthetic",
        arguments={"examples": 96, "input_shape": [8, 8, 3], "num_classes": 4},
        augment=AugmentConfig(mixup=0.2),
    )
    pruning = PruningConfig(target_sparsity=0.5, criterion="taylor", regrowth=0.2, epochs=1, frequency=2)
    training = dataclasses.replace(TINY.training, epochs=1)
    recipe = dataclasses.replace(TINY, data=data, training=training, pruning=pruning, quantization=None)
    result = run(recipe, console=silent())
    assert result.report.passes[0].metrics["sparsity"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
def test_two_replicas_run_a_recipe(two_replicas):
    training = dataclasses.replace(TINY.training, strategy=two_replicas)
    result = run(dataclasses.replace(TINY, training=training, quantization=None), console=silent())
    assert result.report.phases[0].history["val_accuracy"][-1] > 0.8
    assert result.report.passes[0].metrics["sparsity"] == pytest.approx(0.5, abs=0.01)
    zeros = [np.mean(weights == 0) for weights in result.model.get_weights() if weights.ndim == 2]
    assert zeros == pytest.approx([0.5, 0.5], abs=0.01)


@pytest.mark.slow
def test_mirrored_runs_a_second_recipe_in_the_same_process():
    """Two MirroredStrategy objects would give their collective operations the same numbers."""
    training = dataclasses.replace(TINY.training, strategy="mirrored", epochs=1)
    for units in ([5], [6, 7]):
        model = ModelConfig(builder="mlp", arguments={"units": units})
        result = run(dataclasses.replace(TRAIN_ONLY, model=model, training=training), console=silent())
        assert np.isfinite(result.report.phases[0].history["loss"]).all()


def test_a_function_may_give_model_and_data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype("float32"), np.arange(40) % 2

    def source(*, scale):
        part = tf.data.Dataset.from_tensor_slices((x * scale, y))
        return Examples(name="own", train=part, test=part.take(4), outputs=2)

    builder = Recorder()
    data = DataConfig(source=source, arguments={"scale": 2})
    result = run(dataclasses.replace(TRAIN_ONLY, model=ModelConfig(builder=builder), data=data), console=silent())
    assert builder.calls == [((3,), 2)]
    assert len(result.report.phases[0].history["loss"]) == 3


def test_weights_that_are_not_finite_end_a_run(tmp_path):
    """A relu can turn NaN into zero: the loss is finite, and the gradient of the layer before is not."""

    def build(input_shape, num_classes):
        relu = keras.layers.Lambda(lambda value: tf.where(value > 0, value, 0.0))
        layers = [keras.Input(input_shape), keras.layers.Dense(8), relu, keras.layers.Dense(num_classes)]
        return keras.Sequential(layers)

    def source(check_finite):
        x = np.random.default_rng(0).random((64, 4)).astype("float32")
        x[57, 2] = np.nan  # behind the batch on which the export is tried first
        part = tf.data.Dataset.from_tensor_slices((x, np.arange(64) % 2))
        return Examples(name="own", train=part, test=part.take(4), outputs=2, check_finite=check_finite)

    for checked, words in (
        (
            False,
            "Weights must be finite at the end of a fit.*kernel.*'train'. Likely cause: batch . of the data holds 1",
        ),
        (True, "The inputs of .*own.* must be finite"),
    ):
        recipe = dataclasses.replace(
            TRAIN_ONLY,
            model=ModelConfig(builder=build),
            data=DataConfig(source=source, arguments={"check_finite": checked}),
            training=TrainingConfig(epochs=1, precision="float32"),
            export_dir=str(tmp_path / "out"),
        )
        with pytest.raises(TrainingError, match=words):
            run(recipe, console=silent())
    assert not (tmp_path / "out" / "float32").exists()


def test_brackets_in_a_name_are_words_and_not_markup():
    console = silent()
    recipe = dataclasses.replace(TRAIN_ONLY, name="[bold]x", description="[/red] of [conv1]")
    run(recipe, console=console)
    assert "[bold]x  [/red] of [conv1]" in printed(console)


@pytest.mark.parametrize("given", ["resnet_cifar", RECIPES["resnet_cifar"]])
def test_a_recipe_is_found_by_its_name_or_as_itself(given):
    assert find_recipe(given) is RECIPES["resnet_cifar"]


def test_a_recipe_is_found_by_its_file(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY.to_toml())
    assert find_recipe(str(tmp_path / "tiny.toml")) == find_recipe(tmp_path / "tiny.toml") == TINY


def test_an_unknown_recipe_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"Unknown recipe 'digits_cn'. .* Did you mean 'digits_cnn'\?"):
        find_recipe("digits_cn")


@pytest.mark.slow
def test_a_parent_teaches_the_later_stages():
    recipe = dataclasses.replace(TINY, quantization=None, distillation=TeacherConfig(teacher_weight=1.0))
    losses = {}
    for name, each in (("taught", recipe), ("alone", dataclasses.replace(recipe, distillation=None))):
        result = run(each, console=silent())
        losses[name] = {phase.name: phase.history["loss"] for phase in result.report.phases}
        assert "compute_loss" not in vars(result.model)
        assert ("distill" in [report.name for report in result.report.passes]) == (name == "taught")
    assert losses["taught"]["train"] == losses["alone"]["train"]
    assert losses["taught"]["prune"][0] < 0.1 * losses["alone"]["prune"][0]  # the parent is still near


def test_a_parent_needs_a_stage_after_the_first_one():
    with pytest.raises(ConfigError, match="teaches the stages that train after the first one"):
        dataclasses.replace(TRAIN_ONLY, distillation=TeacherConfig())
    with pytest.raises(ConfigError, match=r"Received: task='regression'\. Set distillation\.loss='mse'"):
        dataclasses.replace(TINY, task="regression", distillation=TeacherConfig())


def test_a_teacher_that_does_not_fit_is_known_before_the_training(tmp_path):
    keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)]).save(tmp_path / "other.keras")
    recipe = dataclasses.replace(TRAIN_ONLY, distillation=TeacherConfig(teacher=str(tmp_path / "other.keras")))
    console = silent()
    with pytest.raises(ConfigError, match="outputs of the shapes and dtypes"):
        run(recipe, console=console)
    assert "train  epoch" not in printed(console)


TAUGHT = """
name = "taught"
base = "teacher.toml"

[model]
arguments = {{ units = [3] }}

[distillation]
teacher = "{directory}/teacher.toml"
teacher_cache = "{directory}/outputs"
teacher_weight = 1.0

[clustering]
clusters = 4
minimum_size = 1
epochs = 1
"""


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A run whose teacher is a recipe, and the directory of both: (result, what it printed, directory)."""
    directory = tmp_path_factory.mktemp("taught")
    (directory / "teacher.toml").write_text(dataclasses.replace(TRAIN_ONLY, name="large").to_toml())
    (directory / "taught.toml").write_text(TAUGHT.format(directory=directory))
    console = silent()
    recipe = find_recipe(directory / "taught.toml")
    training = dataclasses.replace(recipe.training, checkpoint_dir=str(directory / "checkpoints"))
    recipe = dataclasses.replace(recipe, training=training, export_dir=str(directory / "out"))
    return run(recipe, console=console), printed(console), recipe, directory


@pytest.mark.slow
def test_a_teacher_that_is_a_recipe_is_trained_first_and_its_score_stands_beside_the_students(taught):
    result, words, _, directory = taught
    assert [phase.name for phase in result.report.phases] == ["teacher", "train", "cluster"]
    assert list(result.receipts) == ["teacher", "float32", "clustered"]
    assert result.ok
    names = {name: receipt.baseline and Path(receipt.baseline).name for name, receipt in result.receipts.items()}
    assert names == {"teacher": None, "float32": "teacher", "clustered": "float32"}
    weights = {name: receipt.weight_count for name, receipt in result.receipts.items()}
    assert weights["teacher"] == 12 * 24 + 24 * 4
    assert weights["float32"] == 12 * 3 + 3 * 4
    assert [each.name for each in result.report.passes] == ["cache teacher", "distill", "cluster"]
    # The teacher alone taught: the loss is the distance from its outputs.
    assert result.report.phases[1].history["loss"][-1] < 0.5 * result.report.phases[1].history["val_loss"][-1]
    assert result.report.phases[0].history["val_accuracy"][-1] == pytest.approx(result.receipts["teacher"].accuracy)
    assert (directory / "outputs" / "teacher.json").is_file()
    assert "teacher: large" in words


def test_clustered_weights_share_their_values_in_the_model_and_the_artifact(taught):
    result, *_ = taught
    for name in ("dense1", "logits"):
        assert len(np.unique(result.model.get_layer(name).kernel)) <= 4
    assert result.receipts["clustered"].precision == "codebook_weight_only"
    assert result.receipts["clustered"].parity_max_abs_error < 1e-5
    assert result.report.passes[-1].changed[0].detail.startswith("4 values in kernel")


def test_a_run_with_a_teacher_resumes_after_it(taught):
    result, _, recipe, _ = taught
    console = silent()
    with pytest.warns(TfoptWarning, match="There is nothing to train"):
        again = run(dataclasses.replace(recipe, export_dir=None), console=console)
    assert "teacher  epoch" not in printed(console)
    for one, other in zip(again.model.get_weights(), result.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_teacher_that_is_a_recipe_takes_the_form_and_the_seed_of_the_run(tmp_path):
    quick = {"distillation": {"teacher_form": "quick"}}
    student = dataclasses.replace(
        TRAIN_ONLY, distillation=TeacherConfig(teacher="resnet_cifar"), forms={"quick": quick}
    )
    recipe = with_changes(student.quick(), {"training": {"seed": 7, "checkpoint_dir": "kept"}})
    found = teacher_recipe(recipe)
    assert found.name == "resnet_cifar (quick run)"
    assert found.training.epochs == RECIPES["resnet_cifar"].quick().training.epochs
    assert (found.training.seed, found.training.checkpoint_dir) == (7, "kept")
    assert teacher_recipe(TRAIN_ONLY) is None
    assert dataclasses.replace(student, forms={}).quick().distillation.teacher_form == "quick"
    with pytest.raises(ConfigError, match="Unknown form 'none'"):
        teacher_recipe(with_changes(recipe, {"distillation": {"teacher_form": "none"}}))
    with pytest.raises(
        ConfigError, match=r"Unknown recipe, file or directory of a teacher 'resnet_cifr'.*'resnet_cifar'\?"
    ):
        teacher_recipe(with_changes(recipe, {"distillation": {"teacher": "resnet_cifr"}}))
    (tmp_path / "taught.toml").write_text(student.to_toml())
    chain = with_changes(student, {"distillation": {"teacher": str(tmp_path / "taught.toml")}})
    with pytest.raises(ConfigError, match=r"learns from its labels alone.*Name that one"):
        teacher_recipe(chain)


@pytest.mark.parametrize("teacher", ["parent", "resnet_cifar"])
def test_doctor_and_tune_leave_out_a_teacher_of_later_stages_also_that_of_a_form(teacher, tmp_path, monkeypatch):
    recipe = dataclasses.replace(
        TINY,
        distillation=TeacherConfig(teacher=teacher),
        forms={"quick": {"distillation": {"teacher_form": "quick"}}},
    )
    watched = []
    monkeypatch.setattr(diagnosis, "run", lambda recipe, **_: watched.append(recipe))
    monkeypatch.setattr(diagnosis, "report", lambda *_: None)
    diagnosis.diagnose_recipe(recipe)
    assert watched[0].distillation is None
    workload = workload_of(recipe, None, tmp_path)
    kept = Recipe.from_toml(Path(workload.folder, "recipe.toml"))
    assert kept.pruning is None
    assert kept.distillation == (None if teacher == "parent" else recipe.distillation)


def test_a_cached_teacher_is_refused_with_augmentation_before_anything_runs():
    with pytest.raises(ConfigError, match="teacher_cache needs examples that are the same in every epoch"):
        with_changes(RECIPES["resnet_cifar"], {"distillation": {"teacher_cache": "outputs"}})


@pytest.mark.slow
def test_every_stage_is_exported_in_every_format(tmp_path):
    recipe = dataclasses.replace(TINY, pruning=None, formats=("saved_model", "onnx"), export_dir=str(tmp_path))
    result = run(recipe, console=silent())
    assert result.ok
    assert list(result.receipts) == ["float32", "float32_onnx", "int8", "int8_onnx"]
    runtimes = [receipt.runtime.split()[0] for receipt in result.receipts.values()]
    assert runtimes == ["TensorFlow", "ONNX", "TensorFlow", "ONNX"]
    assert {Path(each.baseline).name for each in list(result.receipts.values())[1:]} == {"float32"}
    assert result.receipts["int8_onnx"].agreement > 0.95
    assert "int8_onnx" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_the_demo_reaches_what_it_promises(tmp_path):
    """Accuracy on the held-out digits, and zeros in the artifacts. benchmarks/recipes.py does it for every recipe."""
    result = run(dataclasses.replace(RECIPES["digits_cnn"], export_dir=str(tmp_path)), console=silent())
    assert result.ok
    float32, pruned, int8 = (result.receipts[each] for each in ("float32", "pruned", "int8"))
    assert float32.accuracy >= 0.985
    assert pruned.accuracy >= max(0.98, float32.accuracy - 0.01)
    assert int8.accuracy >= pruned.accuracy - 0.005
    assert float32.sparsity < 0.01
    assert pruned.sparsity == pytest.approx(0.75, abs=0.001)
    assert int8.sparsity >= 0.749
    for receipt in (float32, pruned):
        assert receipt.bytes_on_disk <= 1.1 * 4 * result.model.count_params() + 40_000  # each weight once


def test_two_runs_at_once_do_not_share_a_directory(tmp_path):
    from tfopt.atomic.directories import exclusive

    recipe = Recipe(name="mine", export_dir=str(tmp_path / "shared"))
    with exclusive(tmp_path / "shared"), pytest.raises(ExportError, match="another is at work"):
        run(recipe, console=Console(quiet=True))
    assert not (tmp_path / "shared").exists()  # it was empty


def test_a_pruning_pattern_that_matches_nothing_is_known_before_training(tmp_path, capsys):
    recipe = Recipe(
        name="mine",
        model=ModelConfig(builder="mlp", arguments={"units": [4]}),
        data=DataConfig(source="synthetic", arguments={"examples": 40, "input_shape": [4], "num_classes": 2}),
        pruning=PruningConfig(exclude=("zzz",)),
        export_dir=str(tmp_path / "out"),
    )
    with pytest.raises(ConfigError, match="zzz"):
        run(recipe)
    assert "train  epoch" not in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_resume_goes_through_the_phases_that_were_done_and_begins_the_others(tmp_path, unexported):
    """The process may have ended in the first phase: the later ones have no checkpoints then."""
    training = dataclasses.replace(TINY.training, checkpoint_dir=str(tmp_path / "checkpoints"))
    recipe = dataclasses.replace(TINY, quantization=None, training=training)
    whole, _ = unexported
    run(dataclasses.replace(recipe, pruning=None), console=silent())
    insisting = dataclasses.replace(recipe, training=dataclasses.replace(training, resume=True))
    with pytest.warns(TfoptWarning, match="nothing to train: the training in .*train reached epoch 3"):
        resumed = run(insisting, console=silent())
    assert [len(phase.history["loss"]) for phase in resumed.report.phases] == [3, 2]
    for one, other in zip(resumed.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)

    anew = dataclasses.replace(recipe, training=dataclasses.replace(training, resume=False))
    shutil.rmtree(tmp_path / "checkpoints" / "train")
    with pytest.raises(ConfigError, match=r"resume=False\. Received: checkpoint_dir=.*prune, with steps"):
        run(anew, console=silent())
    assert not (tmp_path / "checkpoints" / "train").exists()  # known before the first phase trains
    with pytest.raises(ConfigError, match=r"resume=True\. Received: checkpoint_dir=.*train\."):
        run(insisting, console=silent())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["auto", "device"])
def test_mixed_examples_train_with_shares_of_classes(where, tmp_path):
    """The targets become shares of the classes, in the pipeline or in the step; the artifact knows nothing of it."""
    data = DataConfig(
        source="digits",
        arguments={"image_size": 8},
        augment=AugmentConfig(crop=1, mixup=0.2, where=where),
        max_examples=400,
    )
    recipe = dataclasses.replace(TRAIN_ONLY, data=data, export_dir=str(tmp_path / "out") if where == "auto" else None)
    console = silent()
    result = run(dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, epochs=8)), console=console)
    (decision,) = [each for each in result.report.plan if each.setting == "augment.where"]
    assert decision.value == ("host" if where == "auto" else "device")
    history = result.report.phases[0].history
    assert history["val_accuracy"][-1] > 0.6  # guessing gives 0.1
    if where == "auto":
        assert history["val_accuracy"][-1] == pytest.approx(result.receipts["float32"].accuracy)
    assert history["loss"][-1] > history["val_loss"][-1]  # mixed images are harder


def test_mixing_values_is_refused_before_the_training():
    data = dataclasses.replace(
        TINY.data, augment=AugmentConfig(mixup=0.2), arguments={"examples": 100, "input_shape": [4, 4, 1]}
    )
    with pytest.raises(ConfigError, match="mixup and cutmix need a task whose targets can be mixed"):
        run(dataclasses.replace(TRAIN_ONLY, data=data, task="regression"), console=silent())


def test_a_source_must_return_examples():
    with pytest.raises(ConfigError, match=r"source must return tfopt.data.Examples. Received: tuple"):
        run(dataclasses.replace(TRAIN_ONLY, data=DataConfig(source=lambda: (1, 2))), console=silent())


@pytest.mark.parametrize(
    ("task", "y", "outputs", "words"),
    [
        (
            "segmentation",
            np.zeros((20, 4, 4), int),
            3,
            "must be 3 logits for each target. Received: outputs of shape (3,)",
        ),
        ("classification", np.arange(20) % 2, 5, "must be 5 logits for each target. Received: outputs of shape (2,)"),
        ("regression", np.zeros((20, 3)), 2, "must be one value for each target. Received: outputs of shape (2,)"),
        ("classification", np.zeros(20, int), 1, "needs at least two classes. Received: 1"),
        ("classification", np.arange(20.0) % 2, 2, "class numbers, or one-hot. Received: targets of dtype float64"),
    ],
)
def test_outputs_that_do_not_fit_the_task_are_refused_before_the_training(task, y, outputs, words):
    def source():
        return arrays(np.zeros((20, 4), "float32"), y, outputs=outputs)

    model = ModelConfig(builder=lambda shape, outputs: mlp(shape, 3 if task == "segmentation" else 2))
    with pytest.raises(ConfigError) as caught:
        run(dataclasses.replace(TRAIN_ONLY, task=task, model=model, data=DataConfig(source=source)), console=silent())
    assert words in str(caught.value)


@pytest.mark.slow
def test_pixels_and_counts_are_calibrated_as_they_were_trained_without_a_warning():
    pixels = np.random.default_rng(0).integers(0, 256, (100, 12), dtype=np.uint8)
    recipe = dataclasses.replace(
        TINY,
        model=ModelConfig(builder=mlp, arguments={"units": [8]}),
        data=DataConfig(source=lambda: arrays(pixels, np.arange(100) % 4)),
        training=TrainingConfig(epochs=1, precision="float32"),
        pruning=None,
    )
    run(recipe, console=silent())  # a warning is an error here
    inputs = [keras.Input((2,), name="b"), keras.Input((2,), name="a", dtype="int32")]
    two = keras.Model(inputs, inputs)
    for x in ({"a": pixels[:, :2], "b": pixels[:, :2]}, (pixels[:, :2], pixels[:, :2])):
        batches = tf.data.Dataset.from_tensor_slices((x, pixels[:, 0])).batch(10)
        spec = with_float_inputs(batches, two).element_spec
        floats, ids = (spec[0]["b"], spec[0]["a"]) if isinstance(x, dict) else spec[0]
        assert (floats.dtype, ids.dtype, spec[1].dtype) == (tf.float32, tf.uint8, tf.uint8)


@pytest.mark.parametrize("exports", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_hot_targets_are_classes(exports, tmp_path):
    x, y = np.random.default_rng(0).normal(size=(60, 3)).astype("float32"), np.arange(60) % 3
    x[np.arange(60), y] += 8
    data = DataConfig(source=lambda: arrays(x, np.eye(3, dtype="float32")[y]))
    recipe = dataclasses.replace(TRAIN_ONLY, data=data, export_dir=str(tmp_path / "out") if exports else None)
    result = run(recipe, console=silent())
    found = [result.report.phases[0].history["val_accuracy"][-1], *(each.accuracy for each in result.receipts.values())]
    assert min(found) > 0.5  # guessing gives a third
    assert len(found) == 1 + exports


@pytest.mark.slow
def test_a_file_that_is_gone_is_named_with_a_remedy(tmp_path):
    for number in range(12):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(folder / f"{number}.png", np.full((8, 8, 3), 20 * number, "uint8"))

    def source():
        examples = image_folder(directory=tmp_path / "photos", image_size=8)
        for path in (tmp_path / "photos").rglob("*.png"):
            path.unlink()
        return examples

    data = DataConfig(source=source, cache="off")
    with pytest.raises(TrainingError, match=r"could not be read: .*[ab]/\d+.png; No such file.* Repair the file"):
        run(dataclasses.replace(TRAIN_ONLY, data=data), console=silent())


OPTIMIZER = {
    "optimizer": "adamw",
    "weight_decay": 0.1,
    "warmup_epochs": 1.5,
    "ema_momentum": 0.9,
    "base_batch_size": 64,
    "label_smoothing": 0.1,
    "optimizer_arguments": {"beta_2": 0.9},
}


@pytest.mark.slow
def test_the_first_fit_has_a_warm_up_and_averages_and_a_later_one_continues(monkeypatch):
    made = []

    def make(*arguments, **settings):
        made.append(make_optimizer(*arguments, **settings))
        return made[-1]

    monkeypatch.setattr("tfopt.runner.work.make_optimizer", make)
    recipe = with_changes(TINY, {"training": {**OPTIMIZER, "epochs": 2}, "quantization": False})
    result = run(recipe, console=silent())
    first, later = made
    assert result.model.optimizer is later
    steps = math.ceil(200 / 16)
    assert [each.weight_decay for each in (first, later)] == [0.1, 0.1]
    assert [each.beta_2 for each in (first, later)] == [0.9, 0.9]
    assert [each.use_ema for each in (first, later)] == [True, False]
    rates = [compat.learning_rate_as_given(each) for each in (first, later)]
    assert [rate.warmup_steps for rate in rates] == [round(1.5 * steps), 0]
    assert rates[0].warmup_target == pytest.approx(0.01 * math.sqrt(16 / 64))
    assert rates[1].initial_learning_rate == pytest.approx(0.01 * math.sqrt(16 / 64))
    (said,) = [decision for decision in result.report.plan if decision.setting == "learning_rate"]
    assert said.value == "0.005"
    assert isinstance(result.model.loss, SmoothedCrossEntropy)


def test_label_smoothing_needs_classes():
    recipe = with_changes(TRAIN_ONLY, {"task": "regression", "training": {"label_smoothing": 0.1}})
    recipe = with_changes(recipe, {"data": {"source": lambda: arrays(np.zeros((20, 3)), np.zeros((20, 1)))}})
    with pytest.raises(ConfigError, match="label_smoothing must be 0 unless the loss of the task is a cross-entropy"):
        run(recipe, console=silent())


@pytest.mark.slow
def test_a_run_that_stops_leaves_no_report_of_other_artifacts(tmp_path, monkeypatch):
    recipe = dataclasses.replace(TRAIN_ONLY, export_dir=str(tmp_path / "out"))
    run(recipe, console=silent())
    assert (tmp_path / "out" / "receipts.json").is_file()

    def stop(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("tfopt.runner.recipe_run.verify_together", stop)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, console=silent())
    assert [path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")] == ["float32"]


@pytest.mark.slow
def test_the_report_holds_the_nodes_that_the_export_chose(tmp_path):
    settings = {
        "pruning": False,
        "int8_nodes": "faster",
        "export_dir": str(tmp_path),
        "model": {"arguments": {"units": [64, 64]}},
    }
    result = run(with_changes(TINY, settings), console=silent())
    assert list(result.receipts) == ["float32", "int8"]
    assert result.receipts["int8"].baseline.endswith("float32")  # there is no pruned one
    assert [phase.name for phase in result.report.phases] == ["train"]
    written = json.loads((tmp_path / "int8" / "manifest.json").read_text())["report"]
    told = result.report.passes[-1]
    assert [each.name for each in told.changed] == [each["name"] for each in written["changed"]]
    assert [each.name for each in told.skipped] == [each["name"] for each in written["skipped"]]
