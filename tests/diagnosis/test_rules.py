"""Rules for what a processor does not show: real measurements of a small training, judged as those of a GPU."""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.compat.plain import DETOURS
from tfopt.data.measurement.stages import stages_of
from tfopt.diagnosis import experiments
from tfopt.diagnosis import input_time as timing
from tfopt.diagnosis.diagnose import DoctorHook
from tfopt.diagnosis.experiments import CannotMeasureError, Pair
from tfopt.diagnosis.input_time import input_time, smaller_buffer, start_saved
from tfopt.diagnosis.measured import Measured
from tfopt.diagnosis.observation import Observation, Predictions, StepCall
from tfopt.diagnosis.rules import compute, detours, gpu, host, input, memory
from tfopt.hardware import Gpu, detect
from tfopt.profiling.cost.efficiency import Roofs, compare
from tfopt.report import Diagnosis, StepBreakdown, Utilization
from tfopt.reporting.figures import step_stack
from tfopt.scripts.hook import hooked

GIB = 2**30


@pytest.fixture(autouse=True)
def short_experiments(monkeypatch):
    """The tests look for large effects, so short experiments are enough."""
    monkeypatch.setattr(experiments, "SECONDS", 0.1)
    monkeypatch.setattr(experiments, "SETTLES", 0.02)
    monkeypatch.setattr(timing, "SECONDS", 0.05)


@pytest.fixture(scope="module")
def measured():
    body = [keras.layers.Dense(12, "relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((8,)), *body, keras.layers.Dense(4)])
    model.compile("adam", "mse", jit_compile=False)
    doctor = DoctorHook(steps=40)
    with hooked(doctor):
        model.fit(np.zeros((1280, 8)), np.zeros((1280, 4)), batch_size=32, verbose=0)
    a100 = Gpu(name="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0), memory_bytes=40 * GIB)
    return Measured(doctor.observation, dataclasses.replace(detect(), gpus=(a100,)))


def load(**series):
    seconds = [float(place) for place in range(len(next(iter(series.values()))))]
    return Utilization(
        source="NVML", seconds=seconds, series={f"gpu0_{name}": values for name, values in series.items()}
    )


def test_padding_a_width_saves_in_all_products_of_the_step():
    """Its gain is timed on what TensorFlow computes for a Dense layer, forward and backward."""
    products = compute.dense_products(5, 7, 3)
    captured = {tuple(each.shape): each for each in products.get_concrete_function().captured_inputs}
    x, kernel, gradient = (captured[shape] for shape in ((5, 7), (7, 3), (5, 3)))
    with tf.GradientTape() as tape:
        tape.watch([x, kernel])
        outputs = tf.matmul(x, kernel)
    expected = [outputs, *tape.gradient(outputs, [x, kernel], output_gradients=gradient)]
    found = products()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_processor_without_onednn_is_told_how_to_have_it(measured, monkeypatch):
    assert compute.onednn_off(measured) == "a GPU computes"
    here = Measured(measured.observation, dataclasses.replace(measured.hardware, gpus=()))
    monkeypatch.setattr(compute, "uses_onednn", lambda: True)
    assert compute.onednn_off(here) == "TensorFlow computes with oneDNN"
    monkeypatch.setattr(compute, "uses_onednn", lambda: False)
    with monkeypatch.context() as compiled:
        compiled.setattr(here.model, "jit_compile", True)
        assert compute.onednn_off(here) == "XLA compiles the step"
    monkeypatch.setattr(compute.platform, "machine", lambda: "aarch64")
    with pytest.raises(CannotMeasureError, match="what oneDNN saves on aarch64 is unknown"):
        compute.onednn_off(here)
    monkeypatch.setattr(compute.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compute, "COMPUTES", 2.0)
    assert compute.onednn_off(here).startswith("the computation takes ")
    monkeypatch.setattr(compute, "COMPUTES", 0.0)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    found = compute.onednn_off(here)
    assert "TF_ENABLE_ONEDNN_OPTS=1" in found.advice
    assert found.evidence.endswith("on by itself with VNNI, bfloat16 or AMX only")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert compute.onednn_off(here).evidence.endswith("; TF_ENABLE_ONEDNN_OPTS=0")


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["0", "1"])
def test_whether_tensorflow_computes_with_onednn_is_what_the_variable_says(setting):
    code = "from tfopt.compat.tensorflow import uses_onednn; print(uses_onednn())"
    run = [sys.executable, "-c", code]
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": setting}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(setting == "1")]


def test_lowered_clocks_cost_their_share(measured):
    measured.observation.load = load(throttled=[0, 1, 1, None, 0], sm_clock_mhz=[1400, 700, 700, None, 1300])
    found = compute.throttled(measured)
    parts = measured.breakdown
    assert found.gain == pytest.approx(0.5 * 0.5 * parts.compute_ms / parts.whole_ms)
    assert "50% of the samples, at 700 instead of 1,400 MHz" in found.evidence
    measured.observation.load = load(throttled=[0] * 19 + [1])
    assert compute.throttled(measured) == "clocks were lowered in 5% of the samples"
    measured.observation.load = load(throttled=[None, None])
    with pytest.raises(CannotMeasureError, match="does not say why clocks are low"):
        compute.throttled(measured)


@pytest.mark.timed
def test_memory_that_is_left_over_fits_a_larger_batch(measured):
    measured.observation.load = load(tensorflow_memory_peak_bytes=[None, 4 * GIB, 10 * GIB])
    vars(measured.experiments)["_done"].pop("examples 2", None)  # of a run before
    found = compute.unused_memory(measured)
    assert found.evidence.startswith("25% of the memory is used at most")
    assert compute.BATCH <= found.gain < 0.75  # 0.5 if twice the examples take no longer, as in so small a network
    assert found.settings == {"training.global_batch_size": 64}
    assert found.changes_training
    measured.observation.load = load(tensorflow_memory_peak_bytes=[30 * GIB])
    assert compute.unused_memory(measured) == "the training uses up to 75% of the memory"


def test_a_batch_above_the_noise_scale_is_named(measured):
    with pytest.raises(CannotMeasureError, match="NoiseScale is not among the callbacks"):
        compute.large_batch(measured)
    plan = tfopt.plan(tfopt.TrainingConfig(precision="float32", strategy="none", global_batch_size=64, accumulate=4))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    tfopt.compile(model, plan, optimizer=keras.optimizers.SGD(0.0), loss="mse")
    rng = np.random.default_rng(0)
    for spread, named in ((0.1, True), (5.0, False)):
        targets = 1 + spread * rng.normal(size=(1280, 1))
        with hooked(doctor := DoctorHook(steps=20)):
            model.fit(plan.pipeline((np.ones((1280, 4)), targets)), verbose=0, callbacks=[tfopt.NoiseScale(every=1)])
        found = compute.large_batch(Measured(doctor.observation, detect()))
        assert isinstance(found, Diagnosis) == named
        if isinstance(found, Diagnosis):
            assert (found.gain, found.changes_training) == (None, True)
            assert found.evidence.startswith("64 examples in a step; noise scale")


@pytest.mark.parametrize("rule", [compute.throttled, compute.unused_memory])
def test_without_a_gpu_its_rules_cannot_look(measured, rule):
    measured.observation.load = None
    here = Measured(measured.observation, dataclasses.replace(measured.hardware, gpus=()))
    with pytest.raises(CannotMeasureError, match="there is no GPU"):
        rule(here)


@pytest.mark.slow
def test_many_small_kernels_are_counted(measured):
    count = measured.cost.unfused_kernels
    found = compute.small_kernels(measured)
    assert isinstance(found, Diagnosis)  # seven small products, their gradients and updates, for tens of microseconds
    assert f"{count:,} kernels, 4 us to start each" in found.evidence
    assert count > 7 * 3


def test_a_computation_that_waits_for_memory(measured):
    parts = measured.breakdown
    of = {"flops_per_s": 1e15, "device": "a GPU", "dtype": "float32"}
    by_share = {}
    for share in (0.8, 0.3):
        bandwidth = 1e9 / (share * parts.compute_ms / 1e3)
        reached = compare(10**6, 10**9, parts.step_ms, Roofs(bytes_per_s=bandwidth, **of))
        judged = Measured(measured.observation, measured.hardware)
        vars(judged).update(efficiency=reached, breakdown=parts, experiments=measured.experiments)
        by_share[share] = compute.memory_bound(judged)
    assert "reaches 80% of the memory bandwidth" in by_share[0.8].evidence
    assert by_share[0.3].startswith("the computation reaches 30% of the memory bandwidth")


def test_a_graph_with_small_kernels_is_advised_xla_once(measured):
    answers = compute.small_kernels(measured), compute.xla(measured)
    advised = [each for each in answers if isinstance(each, Diagnosis) and each.gain is not None]
    assert len(advised) <= 1


@pytest.mark.timed
@pytest.mark.slow
def test_a_shuffle_is_timed_with_a_smaller_buffer():
    def slow(number):
        return tf.cast(number, tf.float32) + 0 * tf.reduce_sum(tf.random.normal((200, 200)))

    data = tf.data.Dataset.range(600).map(slow).shuffle(480).batch(20)
    found = input_time(data)
    smaller = smaller_buffer(found, 16)
    assert [each.size for each in stages_of(smaller).walk() if each.kind == "shuffle"] == [30]
    assert sorted(np.concatenate([batch[0] for batch in smaller.as_numpy_iterator()])) == list(range(600))
    assert start_saved(data, smaller) > 0.2  # 0.9 where nothing else runs


def watched(batches, steps):
    """Returns the measurements of a training with so many batches in an epoch."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse", jit_compile=False)
    doctor = DoctorHook(steps=steps)
    with hooked(doctor):
        model.fit(np.zeros((16 * batches, 8)), np.zeros((16 * batches, 4)), batch_size=16, epochs=30, verbose=0)
    return Measured(doctor.observation, detect())


@pytest.mark.timed
@pytest.mark.slow
def test_short_epochs_are_named_with_one_iterator_for_all():
    few = watched(batches=4, steps=10)
    assert 20 < few.observation.steps <= 30  # the starts of six epochs, or three times the steps
    found = input.short_epochs(few)
    assert (found.cause, found.gain > 0.1) == ("short_epochs", True)
    assert "fit(data.repeat(), steps_per_epoch=4)" in found.advice
    one = watched(batches=1, steps=10)
    assert input.short_epochs(one).gain > 0.1
    assert host.short_steps(one) == "an epoch has one batch; see short_epochs"


class Planted(dict):
    """Experiments with any input, which save nine tenths of the step."""

    def __contains__(self, name):
        return True

    def __missing__(self, name):
        return Pair(before_ms=10, after_ms=1)


def waiting(measured, data):
    """Returns the measurements of a training whose step waits for these data."""
    parts = StepBreakdown(step_ms=10, input_ms=9, host_ms=0, compute_ms=1, steps=40, batch_size=32)
    judged = Measured(dataclasses.replace(measured.observation, data=data, epochs=2), measured.hardware)
    vars(judged).update(breakdown=parts)
    vars(judged.experiments)["_done"] = Planted()
    return judged


def cached(measured, data):
    """Returns what the rule for a missing cache says of data that the step waits for."""
    return input.no_cache(waiting(measured, data))


EXAMPLES = np.zeros((128, 8), np.float32), np.zeros((128, 4), np.float32)


@pytest.mark.slow
def test_a_map_that_changes_state_is_neither_cached_nor_called_in_parallel(measured):
    count = tf.Variable(0, dtype=tf.int64)

    def numbered(x, y):
        return x + tf.cast(count.assign_add(1), tf.float32) + 0 * tf.reduce_sum(tf.random.normal((100, 100))), y

    judged = waiting(measured, tf.data.Dataset.from_tensor_slices(EXAMPLES).map(numbered).batch(32))
    serial = input.slow_map(judged)
    assert "changes state" in serial.title
    assert "num_parallel_calls" not in serial.advice
    assert isinstance(input.no_cache(judged), str)


@pytest.mark.slow
def test_a_map_that_only_computes_is_cached_and_called_in_parallel(measured):
    def plain(x, y):
        return x + 0 * tf.reduce_sum(tf.linalg.svd(tf.fill((48, 48), x[0]), compute_uv=False)), y

    examples = tf.data.Dataset.from_tensor_slices(EXAMPLES)
    judged = waiting(measured, examples.map(plain).batch(32))
    serial = input.slow_map(judged)
    assert "changes state" not in serial.title
    assert "num_parallel_calls" in serial.advice
    assert "repeat" not in input.no_cache(judged).advice
    assert "Move repeat() behind the cache" in cached(measured, examples.repeat().map(plain).batch(32)).advice


def order(data):
    return np.concatenate([x for x, _ in data.as_numpy_iterator()]).sum((1, 2, 3)).tolist()


@pytest.mark.slow
def test_a_cache_behind_a_shuffle_is_advised_with_a_shuffle_behind_it(measured, tmp_path):
    for number in range(24):
        folder = tmp_path / str(number % 2)
        folder.mkdir(exist_ok=True)
        keras.utils.save_img(folder / f"{number}.png", np.full((8, 8, 3), 8 * number), scale=False)
    options = {"labels": "inferred", "image_size": (96, 96), "verbose": False, "seed": 1}
    read = keras.utils.image_dataset_from_directory
    found = cached(measured, read(tmp_path, batch_size=8, **options))
    assert "before shuffle" not in found.advice
    assert "batch_size=None, then .cache().shuffle(64).batch(SIZE)" in found.advice
    frozen = read(tmp_path, batch_size=8, **options).cache()
    assert order(frozen) == order(frozen)
    advised = read(tmp_path, batch_size=None, **options).cache().shuffle(64).batch(8)
    first, second = order(advised), order(advised)
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.slow
def test_what_differs_between_epochs_is_not_cached_further_on(measured):
    def noisy(x, y):
        return x + tf.random.normal((8,)), y

    def slow(x, y):
        square = tf.fill((96, 96), x[0])
        return x + 0 * tf.reduce_sum(square @ square), y

    examples = tf.data.Dataset.from_tensor_slices((np.zeros((64, 8), np.float32), np.zeros((64, 4), np.float32)))
    assert "noisy may give other elements in each epoch" in cached(measured, examples.map(noisy).map(slow).batch(8))
    own = cached(measured, examples.shuffle(64).map(slow).batch(8)).advice
    assert "Put .cache().shuffle(64) behind the map, before batch" in own


def test_a_callback_is_not_told_to_do_what_it_does(tmp_path):
    best = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss", save_best_only=True)
    steps = keras.callbacks.ModelCheckpoint(tmp_path / "step.weights.h5", save_weights_only=True, save_freq=1)
    advice = {}
    for name, callback in {"best": best, "steps": steps}.items():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse", jit_compile=False)
        doctor = DoctorHook(steps=12)
        with hooked(doctor):
            model.fit(np.ones((64, 8)), np.ones((64, 4)), 16, epochs=4, callbacks=[callback], verbose=0)
        judged = Measured(doctor.observation, detect())
        used = 1e3 * doctor.observation.callbacks_s["ModelCheckpoint"] / doctor.observation.steps
        parts = {"step_ms": 2 * used, "input_ms": 0.0, "host_ms": used, "compute_ms": used, "callbacks_ms": used}
        vars(judged).update(breakdown=StepBreakdown(steps=12, batch_size=16, **parts))
        found = [each for each in (host.callbacks(judged), host.host_copies(judged)) if isinstance(each, Diagnosis)]
        (advice[name],) = (each.advice for each in found)
    assert "save_weights_only=True" in advice["best"]
    assert "at the end of an epoch" not in advice["best"]
    assert 'save_freq="epoch"' in advice["steps"]


@pytest.mark.timed
def test_what_xla_saves_is_less_by_its_compilation(measured):
    vars(measured.experiments)["_done"].pop("xla", None)  # of a run before
    assert measured.experiments.other_xla().build_s > 0.02  # it compiles sixteen steps of seven layers
    parts = StepBreakdown(step_ms=12, input_ms=1, host_ms=1, compute_ms=10, steps=40, batch_size=32)
    gains = {}
    for epochs, known in ((2, True), (100, True), (2, False)):
        seen = dataclasses.replace(measured.observation, epochs=epochs, length_is_known=known, batches_per_epoch=40)
        judged = Measured(seen, measured.hardware)
        vars(judged).update(breakdown=parts)
        vars(judged.experiments)["_done"]["xla"] = Pair(before_ms=10, after_ms=5, build_s=2.0)
        gains[epochs, known], figures = judged.gain_of_other_xla()
        assert "compiling takes 2 s once, which 400 steps win back" in figures
    assert gains[2, True] == 0.0
    assert gains[100, True] == pytest.approx((5 - 2000 / 4000) / 12)
    assert gains[2, False] == pytest.approx(5 / 12)


def test_parts_that_do_not_add_up_say_so():
    parts = {"step_ms": 10, "input_ms": 1, "host_ms": 1, "steps": 9, "batch_size": 4}
    shown = str(StepBreakdown(compute_ms=13.2, **parts))
    assert "The parts, each measured by itself, take 15.2 ms together" in shown
    assert "%" not in shown
    assert "%" not in step_stack({"now": StepBreakdown(compute_ms=13.2, **parts)})[0].summary
    assert StepBreakdown(compute_ms=13.2, **parts).whole_ms == pytest.approx(15.2)
    assert StepBreakdown(compute_ms=8.5, **parts).whole_ms == 10
    assert "The parts" not in str(StepBreakdown(compute_ms=8.5, **parts))
    assert "85%" in str(StepBreakdown(compute_ms=8.5, **parts))


def call(place, ms, shapes=((8, 4),), traces=0):
    return StepCall(
        fit=1, starts_epoch=not place, steps=1, period_s=ms / 1e3, call_s=ms / 1e3, wait_s=None, in_hand=False,
        after_taken=False, traces=traces, shapes=shapes,
    )  # fmt: skip


def test_a_call_that_compiles_for_a_new_shape_is_found_without_its_shape():
    one, other = ((8, 4),), ((8, 5),)
    calls = [call(0, 900), call(1, 2), call(2, 400, None), call(3, 2, other), call(4, 300, one), call(5, 3, traces=1)]
    seen = Observation(limit=9, calls=calls)
    assert seen.builds(0.002) == [calls[2], calls[5]]  # the fourth has the shapes of the first: only a busy machine
    constant = [dataclasses.replace(each, shapes=each.shapes and one) for each in calls]
    assert Observation(limit=9, calls=constant).builds(0.002) == [constant[5]]


@pytest.fixture(scope="module")
def grouped():
    """A training of Keras whose convolution has groups, judged as one of a processor."""
    convolution = keras.layers.Conv2D(4, 3, groups=2, name="grouped")
    model = keras.Sequential([keras.Input((8, 8, 4)), convolution, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    doctor = DoctorHook(steps=10)
    with hooked(doctor):
        model.fit(np.zeros((320, 8, 8, 4)), np.zeros((320, 1)), batch_size=32, verbose=0)
    found = Measured(doctor.observation, dataclasses.replace(detect(), gpus=()))
    vars(found.experiments)["_done"]["in_graph"] = Pair(before_ms=2.0, after_ms=2.0)
    return found


@pytest.mark.timed
def test_a_convolution_that_xla_compiles_alone_is_found_with_what_plain_operations_save(grouped):
    vars(grouped.experiments)["_done"].pop("xla_islands", None)  # of a run before
    found = detours.taken("xla_islands", grouped)
    assert found.title == "XLA compiles single convolutions: 1 layer"
    assert found.evidence.startswith("grouped: ")
    assert found.gain > 0.1
    assert found.advice.startswith("tfopt.compile, or tfopt accelerate")


def test_a_model_without_detours_has_none(measured):
    assert {detours.taken(cause, measured) for cause in DETOURS} == {"no layer takes this detour"}


@pytest.mark.parametrize(
    ("layer", "is_island"),
    [
        (keras.layers.Conv2D(4, 3, groups=2), True),
        (keras.layers.Conv2D(4, 3), False),
        (keras.layers.Conv3D(4, 3, data_format="channels_first"), True),
        (keras.layers.Conv3D(4, 3, data_format="channels_last"), False),
        (keras.layers.DepthwiseConv2D(3), False),
    ],
)
def test_which_convolutions_keras_gives_to_xla(layer, is_island):
    inputs = keras.Input((4,) * (layer.rank + 1))
    call = tf.function(keras.Model(inputs, layer(inputs))).get_concrete_function(tf.TensorSpec((1, *inputs.shape[1:])))
    functions = call.graph.as_graph_def().library.function
    assert any("_XlaMustCompile" in each.attr for each in functions) == is_island
    assert DETOURS["xla_islands"].is_taken_by(layer) == is_island


@pytest.mark.parametrize("settings", [{"jit_compile": True}, {"train_step": lambda self, data: {}}], ids="".join)
def test_the_step_decides_over_convolutions_that_xla_compiles(grouped, monkeypatch, settings):
    vars(grouped.experiments)["_done"]["xla_islands"] = Pair(before_ms=2.0, after_ms=1.0)
    kind = type("Own", (keras.Sequential,), {name: value for name, value in settings.items() if callable(value)})
    monkeypatch.setattr(grouped.model, "__class__", kind)
    for name in settings.keys() - vars(kind).keys():
        monkeypatch.setattr(grouped.model, name, settings[name])
    found = detours.taken("xla_islands", grouped)
    if "jit_compile" in settings:
        assert found == "XLA compiles the whole step"
    else:
        assert found.advice.startswith("override compute_loss in place of train_step, then tfopt.compile")


def test_what_xla_does_alone_is_not_judged_on_a_gpu(grouped, measured):
    with pytest.raises(CannotMeasureError, match="on processors alone"):
        detours.taken("xla_islands", Measured(grouped.observation, measured.hardware))


def test_operations_without_a_kernel_for_gpus_are_named_with_their_layers(measured):
    assert gpu.host_operations(measured).endswith("operations of the step have a kernel for GPUs")
    here = Measured(measured.observation, dataclasses.replace(measured.hardware, gpus=()))
    with pytest.raises(CannotMeasureError, match="no GPU"):
        gpu.host_operations(here)
    lookup = keras.layers.Lambda(lambda x: x + 0 * tf.cast(tf.strings.length(tf.strings.as_string(x)), x.dtype))
    model = keras.Sequential([keras.Input((8,)), lookup, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    doctor = DoctorHook(steps=4)
    with hooked(doctor):
        model.fit(np.zeros((160, 8)), np.zeros((160, 1)), batch_size=32, verbose=0)
    found = gpu.host_operations(Measured(doctor.observation, measured.hardware))
    assert found.cause == "host_operations"
    assert "StringLength" in found.evidence
    assert lookup.name in found.evidence


def test_a_tensorflow_without_machine_code_for_the_gpu_is_told(measured):
    def on(capability):
        card = Gpu(name="a card", compute_capability=capability)
        return gpu.no_machine_code(Measured(measured.observation, dataclasses.replace(measured.hardware, gpus=(card,))))

    assert "machine code for 8.0" in gpu.no_machine_code(measured)
    assert "CUDA_CACHE_MAXSIZE" in on((10, 0)).advice
    assert "none that runs on 5.2" in on((5, 2)).evidence
    assert "CUDA_CACHE" not in on((5, 2)).advice  # there is nothing to compile
    with pytest.raises(CannotMeasureError, match="compute capability"):
        on(None)


LEAK = """
import keras
import numpy as np

from tfopt.diagnosis.diagnose import DoctorHook
from tfopt.diagnosis.measured import Measured
from tfopt.diagnosis.rules import memory
from tfopt.hardware import detect
from tfopt.scripts.hook import hooked

kept = []


class Keeps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if KEEPS:
            kept.append(keras.ops.ones((500, 500)))


with hooked(doctor := DoctorHook(steps=120)):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(np.zeros((3200, 4)), np.zeros((3200, 1)), batch_size=16, verbose=0, callbacks=[Keeps()])
found = memory.growing_memory(Measured(doctor.observation, detect()))
print(len(kept), found if isinstance(found, str) else f"{found.gain} {found.evidence}")
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_that_grows_from_step_to_step_is_named_with_what_is_held(keeps, fresh_python):
    """In a process of its own: memory that other tests have freed would be taken first."""
    found = fresh_python("-c", LEAK.replace("KEEPS", str(keeps))).stdout
    assert found.startswith("200 None " if keeps else "0 ")
    assert "MB in the first quarter of the watched steps" in found
    assert ("tensors of float32 (500, 500) are held" in found) == keeps


PREDICTS = """
import keras
import numpy as np
from types import SimpleNamespace

from tfopt.diagnosis.diagnose import DoctorHook
from tfopt.diagnosis.rules import memory
from tfopt.scripts.hook import hooked

x, kept = np.zeros((8, 4), np.float32), []
with hooked(doctor := DoctorHook(steps=4)):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(x, np.zeros((8, 1)), verbose=0)
    for _ in range(24):
        if GROWS:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            kept.append((model, np.ones(10**6)))
        model.predict(x, verbose=0)
seen = doctor.observation.predictions
found = memory.growing_predictions(SimpleNamespace(observation=doctor.observation))
print(len(seen.resident_bytes), seen.functions, found if isinstance(found, str) else found.evidence)
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("grows", [True, False])
def test_memory_that_grows_from_predict_to_predict_is_named(grows, fresh_python):
    """In a process of its own, for the same reason."""
    found = fresh_python("-c", PREDICTS.replace("GROWS", str(grows))).stdout
    assert found.startswith("24 24 " if grows else "24 1 ")
    assert "in the first quarter of the 24 calls of predict" in found
    assert ("24 of the calls were of a model that was new or newly compiled" in found) == grows


def test_few_predictions_tell_nothing():
    def of(calls):
        observation = Observation(limit=4, predictions=Predictions(resident_bytes=[10**9] * calls))
        return memory.growing_predictions(SimpleNamespace(observation=observation))

    assert of(0) == "predict was not called"
    with pytest.raises(CannotMeasureError, match="predict was called 11 times"):
        of(11)
    assert "1,000 MB in the last" in of(12)
