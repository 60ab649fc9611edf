"""What plan() decides for different hardware, what it refuses, and which settings its scope restores."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.data import AugmentConfig, DataConfig, arrays
from tfopt.errors import ConfigError, TfoptWarning
from tfopt.hardware import Gpu, Hardware
from tfopt.models import mlp
from tfopt.recipe import Recipe
from tfopt.training import TrainingConfig, plan
from tfopt.training.choices import STEPS_PER_CALL, choose_augmentation_place


def machine(*capabilities):
    gpus = tuple(Gpu(name=f"GPU {number}", compute_capability=value) for number, value in enumerate(capabilities))
    return Hardware(logical_cores=2, memory_bytes=2**30, tensorflow_version=tf.__version__, gpus=gpus)


CPU = machine()


def decisions(decided):
    return {decision.setting: decision for decision in decided.decisions}


@pytest.mark.parametrize(
    ("hardware", "precision", "jit_compile"),
    [
        (CPU, "float32", False),
        (machine((6, 1)), "float32", True),
        (machine((7, 0)), "mixed_float16", True),
        (machine((7, 5)), "mixed_float16", True),
        (machine((8, 0)), "mixed_bfloat16", True),
        (machine((9, 0)), "mixed_bfloat16", True),
        (machine((10, 0)), "mixed_bfloat16", True),
        (machine(None), "float32", True),
    ],
)
def test_auto_on_one_device(hardware, precision, jit_compile):
    decided = plan(TrainingConfig(), hardware)
    assert (decided.precision, decided.jit_compile) == (precision, jit_compile)
    assert decided.strategy is None
    assert decided.steps_per_execution == STEPS_PER_CALL
    assert decided.prefetch == 2
    found = decisions(decided)
    assert found["precision"].value == precision
    assert found["jit_compile"].value == str(jit_compile)
    assert found["strategy"].value == "none"
    assert found["prefetch"].value == "2"


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        (((9, 0), (9, 0)), "mixed_bfloat16"),
        (((9, 0), (7, 5)), "mixed_float16"),  # every replica runs the same policy
        (((9, 0), None), "float32"),
        (((10, 0), (9, 0)), "mixed_bfloat16"),
    ],
)
def test_auto_on_two_gpus(capabilities, precision):
    # Where there are none MirroredStrategy takes the CPUs, which does not change what is decided here.
    decided = plan(TrainingConfig(), machine(*capabilities))
    assert isinstance(decided.strategy, tf.distribute.MirroredStrategy)
    assert decided.precision == precision
    assert decided.jit_compile is True
    assert decided.steps_per_execution == STEPS_PER_CALL
    assert decisions(decided)["strategy"].reason == "2 GPUs"


def test_a_run_augments_on_a_gpu_that_has_the_images():
    places = {
        (asked, gpus, in_stages): choose_augmentation_place(asked, machine(*gpus), in_stages=in_stages)[0]
        for asked in ("auto", "host", "device")
        for gpus in ((), ((9, 0),))
        for in_stages in (False, True)
    }
    on_device = {key for key, place in places.items() if place == "device"}
    assert on_device == {key for key in places if key[0] == "device"} | {("auto", ((9, 0),), False)}
    cutting = choose_augmentation_place("auto", machine((9, 0)), in_stages=False, cuts_boxes=True)
    assert cutting == ("host", "the boxes of crop_scale are cut while images are decoded")


def test_none_keeps_two_gpus_to_one():
    decided = plan(TrainingConfig(strategy="none"), machine((9, 0), (9, 0)))
    assert decided.strategy is None
    assert decided.jit_compile is True


@pytest.mark.parametrize("hardware", [CPU, machine((7, 0)), machine((9, 0)), machine(None), machine((8, 0), (8, 0))])
def test_every_decision_has_a_reason_and_print_shows_it(hardware):
    decided = plan(TrainingConfig(), hardware)
    names = ["precision", "jit_compile", "strategy", "steps_per_execution", "prefetch", "global_batch_size"]
    names += ["tensor_float_32", *(["memory_growth", "fused_convolutions"] if hardware.gpus else [])]
    assert [decision.setting for decision in decided.decisions] == names
    lines = str(decided).splitlines()
    for decision, line in zip(decided.decisions, lines, strict=True):
        assert len(decision.reason) > 5
        assert line.split("  ")[0] == decision.setting
        assert decision.value in line
        assert line.endswith(decision.reason)


def test_reasons_name_what_was_found():
    assert "7.5" in decisions(plan(TrainingConfig(), machine((7, 5))))["precision"].reason
    assert "GPU 0" in decisions(plan(TrainingConfig(), machine((7, 5))))["jit_compile"].reason
    assert "no GPU" in decisions(plan(TrainingConfig(), CPU))["strategy"].reason


@pytest.mark.parametrize("hardware", [CPU, machine((9, 0))])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("precision", "float32"),
        ("precision", "mixed_bfloat16"),
        ("precision", "mixed_float16"),
        ("jit_compile", True),
        ("jit_compile", False),
        ("steps_per_execution", 1),
        ("steps_per_execution", 7),
        ("prefetch", 3),
        ("strategy", "none"),
    ],
)
def test_what_was_asked_for_is_kept(hardware, setting, value):
    decided = plan(TrainingConfig(**{setting: value}), hardware)
    assert getattr(decided, setting) == (None if value == "none" else value)
    assert decisions(decided)[setting].value == str(value)
    assert decisions(decided)[setting].reason.startswith("as asked")


def test_mirrored_is_kept_without_gpus():
    decided = plan(TrainingConfig(strategy="mirrored"), CPU)
    found = decisions(decided)["strategy"]
    assert isinstance(decided.strategy, tf.distribute.MirroredStrategy)
    assert found.value == f"mirrored, {decided.strategy.num_replicas_in_sync} replicas"
    assert found.reason == "as asked"


def test_a_strategy_object_is_used_as_it_is(two_replicas):
    decided = plan(TrainingConfig(strategy=two_replicas, global_batch_size=8), CPU)
    assert decided.strategy is two_replicas
    assert (decided.jit_compile, decided.steps_per_execution) == (False, STEPS_PER_CALL)
    assert (decided.replicas, decided.per_replica_batch_size) == (2, 4)
    assert decisions(decided)["strategy"].value == "MirroredStrategy"
    assert "4 on each of 2 replicas" in decisions(decided)["global_batch_size"].reason


def test_a_recipe_is_planned_by_its_training_and_nothing_by_the_defaults():
    assert plan(Recipe(name="mine", training=TrainingConfig(prefetch=5))).prefetch == 5
    assert plan(hardware=CPU).config == TrainingConfig()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accumulate": 33}, ["accumulate=33", "32 examples", "Set accumulate=32"]),
        ({"global_batch_size": 33}, ["global_batch_size=33", "2 replicas", "Use 32 or 34."]),
        ({"global_batch_size": 1}, ["global_batch_size=1", "2 replicas", "Use 2."]),
    ],
)
def test_what_fails_under_a_strategy_is_refused(two_replicas, settings, words):
    with pytest.raises(ConfigError) as caught:
        plan(TrainingConfig(strategy=two_replicas, **settings), CPU)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "multi_worker"}, ["needs a cluster", "tfopt launch", "srun", "TF_CONFIG"]),
        ({"strategy": "pipeline"}, ["at least two devices", "0 GPUs"]),
        ({"strategy": "pipeline", "pipeline_devices": ("CPU:0", "CPU:1"), "accumulate": 2}, ["Set micro_batches"]),
        ({"strategy": "pipeline", "pipeline_devices": ("CPU:0", "CPU:1"), "jit_compile": True}, ["jit_compile=False"]),
        (
            {"strategy": "pipeline", "pipeline_devices": ("CPU:0", "CPU:1"), "micro_batches": 65},
            ["micro_batches=65", "Set micro_batches=64"],
        ),
        ({"micro_batches": 4}, ["micro_batches=4", "Set strategy='pipeline'"]),
        ({"pipeline_cuts": ("dense",)}, ["pipeline_cuts needs strategy='pipeline'"]),
        ({"strategy": "mirrored", "communication": "ring"}, ["communication='ring'", "'nccl'"]),
        ({"strategy": "none", "communication": "nccl"}, ["communication must be 'auto'"]),
        ({"accumulate": 65}, ["accumulate=65", "Set accumulate=64"]),
    ],
)
def test_what_cannot_train_is_refused(settings, words, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ConfigError) as caught:
        plan(TrainingConfig(**settings), CPU)
    for word in words:
        assert word in str(caught.value)


def test_sums_in_half_precision_are_refused():
    keras.config.set_floatx("float16")
    try:
        with pytest.raises(ConfigError, match=r"floatx.* must be float32 or float64.* Received: 'float16'"):
            plan(TrainingConfig(precision="float32"))
    finally:
        keras.config.set_floatx("float32")


def test_strategies_that_keras_cannot_train_under_are_refused():
    server = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    with pytest.raises(ConfigError, match="Received: strategy=CentralStorageStrategy"):
        plan(TrainingConfig(strategy=server))


def test_a_plan_within_a_strategys_scope_is_refused(two_replicas):
    with two_replicas.scope(), pytest.raises(ConfigError, match="strategies do not nest"):
        plan(TrainingConfig())


def test_a_keras_distribution_is_refused():
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        with pytest.raises(ConfigError, match=r"keras\.distribution must not be set"):
            plan(TrainingConfig())
    finally:
        keras.distribution.set_distribution(None)


def test_xla_and_several_steps_are_kept_under_a_strategy(two_replicas):
    decided = plan(TrainingConfig(strategy=two_replicas, steps_per_execution=4, jit_compile=True, accumulate=2), CPU)
    assert (decided.jit_compile, decided.steps_per_execution) == (True, 4)
    assert decisions(decided)["accumulate"].reason == "as asked; 16 examples at a time, one update for all"


def test_a_pipeline_has_its_stages_and_micro_batches_in_the_plan():
    decided = plan(TrainingConfig(strategy="pipeline", pipeline_devices=("CPU:0", "CPU:1")), CPU)
    assert decided.strategy is None
    assert decided.stage_devices == ("CPU:0", "CPU:1")
    assert decided.micro_batches == 8
    assert decisions(decided)["strategy"].value == "pipeline, 2 stages"
    assert "11%" in decisions(decided)["micro_batches"].reason  # (S - 1) / (M + S - 1) = 1 / 9


def test_checkpoints_are_in_the_plan(tmp_path):
    decided = plan(TrainingConfig(checkpoint_dir=str(tmp_path), checkpoint_every=50), CPU)
    found = decisions(decided)["checkpoint_dir"]
    assert found.value == str(tmp_path)
    assert found.reason == "as asked; saved every 50 steps, 3 kept, resumed if there is one"


def test_scope_sets_the_policy_and_puts_it_back():
    outer = plan(TrainingConfig(precision="mixed_bfloat16"))
    inner = plan(TrainingConfig(precision="mixed_float16"))
    before = keras.config.dtype_policy()
    with outer.scope():
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
        with inner.scope():
            assert keras.config.dtype_policy().name == "mixed_float16"
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    assert keras.config.dtype_policy() is before


def test_scope_puts_the_policy_back_when_the_block_raises(two_replicas):
    decided = plan(TrainingConfig(precision="mixed_float16", strategy=two_replicas))
    before = keras.config.dtype_policy()
    with pytest.raises(RuntimeError, match="inside"), decided.scope():
        raise RuntimeError("inside")
    assert keras.config.dtype_policy() is before
    assert not tf.distribute.has_strategy()


def test_scope_enters_the_strategy_and_may_be_nested(two_replicas):
    decided = plan(TrainingConfig(strategy=two_replicas))
    with decided.scope(), decided.scope():
        assert tf.distribute.get_strategy() is two_replicas
    assert not tf.distribute.has_strategy()


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_a_half_precision_model_computes_in_half_and_ends_in_float32(precision):
    with plan(TrainingConfig(precision=precision)).scope():
        model = mlp((4,), 3, units=[8])
    hidden = model.get_layer("dense1")
    assert hidden.compute_dtype == precision.removeprefix("mixed_")
    assert hidden.variable_dtype == "float32"
    logits = model(np.ones((2, 4), "float32"))
    assert logits.dtype == tf.float32
    assert model.output.dtype == "float32"


@pytest.mark.slow
def test_the_pipeline_of_a_recipe_augments_as_the_recipe_does():
    images = np.random.default_rng(0).random((32, 8, 8, 1), dtype=np.float32)
    examples = arrays(images, np.arange(32) % 2)
    training = TrainingConfig(global_batch_size=32, precision="float32")

    def recipe(**settings):
        return Recipe(name="mine", data=DataConfig(cache="off", **settings), training=training)

    def same(batches):
        return {image.tobytes() for batch, *_ in batches for image in batch.numpy()} <= {x.tobytes() for x in images}

    assert same(plan(recipe()).pipeline(examples))
    decided = plan(recipe(random_shift=3))
    assert not same(decided.pipeline(examples))
    assert same(decided.pipeline(examples, augment=None))
    with pytest.warns(TfoptWarning, match="examples of a source, and these are none: this pipeline does not"):
        decided.pipeline((images, np.arange(32)))
    mixed = plan(recipe(augment=AugmentConfig(mixup=0.2)))
    assert mixed.pipeline(examples).element_spec[1].shape[1:] == (2,)
    assert mixed.pipeline(examples, training=False).element_spec[1].shape[1:] == (2,)  # as the loss takes them
    on_device = plan(recipe(augment=AugmentConfig(crop=3, where="device")))
    with pytest.warns(TfoptWarning, match=r"on the device.*tfopt.compile augment="):
        on_device.pipeline(examples)
    with pytest.raises(ConfigError, match="bucket"):
        plan(recipe(bucket_boundaries=(4,))).pipeline(examples)
