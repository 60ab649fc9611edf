"""Traces: those recorded here, and those of a GPU, written event by event so that each figure is known by hand."""

import gzip
import json
import time

import numpy as np
import pytest
import tensorflow as tf

from tfopt.compat.tensorflow import empty_xspace
from tfopt.errors import ArtifactError, ConfigError
from tfopt.profiling.trace import record_trace, summarize
from tfopt.profiling.trace.events import newest_trace, read_spaces, write_chrome_trace
from tfopt.profiling.trace.summary import uses_tensor_cores

PS_PER_US = 1_000_000
GEMM, RELU = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_nn", "void relu_kernel<float>(float*)"


class Writer:
    """Writes an XSpace as TensorFlow does: names once in a table, times as offsets from the line's start."""

    def __init__(self):
        self.space = empty_xspace()

    def plane(self, name):
        plane = self.space.planes.add()
        plane.name = name
        return plane

    def line(self, plane, name, events, timestamp_ns=1_000_000):
        """Adds a line with events (name, start in us, end in us, stats)."""
        line = plane.lines.add()
        line.name, line.timestamp_ns = name, timestamp_ns
        for event_name, start, end, stats in events:
            event = line.events.add(offset_ps=start * PS_PER_US, duration_ps=(end - start) * PS_PER_US)
            event.metadata_id = self._id(plane.event_metadata, event_name)
            kind = event_name.rpartition(":")[2] if "/" in event_name or event_name.istitle() else ""
            plane.event_metadata[event.metadata_id].display_name = kind
            for key, value in stats.items():
                stat = event.stats.add(metadata_id=self._id(plane.stat_metadata, key))
                if isinstance(value, str):
                    stat.ref_value = self._id(plane.stat_metadata, value)
                else:
                    stat.int64_value = value

    def _id(self, table, name):
        for key, value in table.items():
            if value.name == name:
                return key
        key = len(table) + 1
        table[key].id, table[key].name = key, name
        return key

    def save(self, directory, time="2026_01_31_12_00_00", host="host"):
        folder = directory / "plugins" / "profile" / time
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{host}.xplane.pb").write_bytes(self.space.SerializeToString())
        return directory


def gpu_trace(gpus=1):
    """Two steps of 100 us on each GPU.

    Stream 13 runs the product for 30 us and the ReLU for 10 us, stream 14 copies. Of the ReLU 5 us are at the same time
    as a kernel of stream 15.
    """
    writer = Writer()
    host = writer.plane("/host:CPU")
    writer.line(host, "python", [("step", 0, 100, {"step_num": 0}), ("step", 100, 200, {"step_num": 1})])
    for gpu in range(gpus):
        plane = writer.plane(f"/device:GPU:{gpu}")
        details = {"kernel_details": "regs:32"}
        kernels = []
        for start in (0, 100):
            kernels += [
                (GEMM, start + 20, start + 50, {**details, "tf_op": "model/dense/MatMul:MatMul"}),
                (RELU, start + 60, start + 70, {**details, "tf_op": "model/dense/Relu:Relu"}),
            ]
        writer.line(plane, "Stream #13(Compute)", kernels)
        copies = [("MemcpyH2D", start, start + 15, {"memcpy_details": "size:8"}) for start in (0, 100)]
        copies += [("MemcpyD2H", 190, 195, {"memcpy_details": "size:8"})]
        writer.line(plane, "Stream #14(MemcpyH2D,MemcpyD2H)", copies)
        writer.line(plane, "Stream #15(Memset)", [("Memset", 65, 75, {})])
        writer.line(plane, "XLA Ops", [("fusion", 0, 200, {})])  # shows the streams a second time
        writer.line(plane, "Steps", [("0", 0, 200, {})])
    return writer


def test_figures_of_a_gpu_are_those_counted_by_hand(tmp_path):
    summary = summarize(gpu_trace().save(tmp_path))
    assert summary.steps == 2  # from the marks
    assert summary.span_ms == pytest.approx(0.195)  # from the first copy to the last
    assert summary.idle_share == pytest.approx(1 - (2 * 30 + 10 + 15) / 195)
    assert summary.tensor_core_share == pytest.approx(60 / 80)  # the memset is no kernel
    assert summary.copy_ms_per_step == pytest.approx((15 + 15 + 5) / 2 / 1000)
    product, relu, memset = summary.operators
    assert (product.name, product.kind, product.tensor_cores, product.on_device) == (GEMM, "MatMul", True, True)
    assert (product.ms_per_step, product.calls_per_step) == (pytest.approx(0.03), 1)
    assert product.share == pytest.approx(60 / 90)
    assert (relu.kind, relu.ms_per_step, relu.tensor_cores) == ("Relu", pytest.approx(0.01), False)
    assert (memset.kind, memset.calls_per_step, memset.tensor_cores) == ("memory", 0.5, None)
    assert "30.8% idle" not in str(summary)
    assert "56.4% of 0.195 ms, 2 steps" in str(summary)


def test_several_gpus_are_the_mean_of_them(tmp_path):
    one, two = summarize(gpu_trace().save(tmp_path / "1")), summarize(gpu_trace(2).save(tmp_path / "2"))
    for name in ("span_ms", "idle_share", "tensor_core_share", "copy_ms_per_step"):
        assert getattr(two, name) == pytest.approx(getattr(one, name))
    assert [each.ms_per_step for each in two.operators] == pytest.approx([each.ms_per_step for each in one.operators])
    assert two.operators[0].calls_per_step == 1


def test_hosts_of_one_trace_are_read_together(tmp_path):
    gpu_trace().save(tmp_path, host="a")
    summary = summarize(gpu_trace().save(tmp_path, host="b"))
    assert summary.operators[0].ms_per_step == pytest.approx(0.03)


def host_trace():
    """One step of 100 us on two threads: a call of 40 us that runs a product of 30 us, and an overlapping sum."""
    writer = Writer()
    plane = writer.plane("/host:CPU")
    writer.line(
        plane,
        "tf_Compute/1",
        [
            ("ExecutorState::Process", 5, 60, {"id": 1}),
            ("model/call:PartitionedCall", 10, 50, {}),
            ("StatefulPartitionedCall/model/dense:MatMul", 15, 45, {}),
            ("ExecutorState::Process", 70, 100, {"id": 7}),
            ("map/work:PyFunc", 70, 100, {}),
        ],
    )
    writer.line(plane, "tf_Compute/2", [("model/sum:Sum", 40, 60, {})])
    writer.line(plane, "tf_data_map/3", [("InstantiatedCapturedFunction::RunAsync", 0, 5, {"id": 7})])
    writer.line(plane, "tf_data_private/4", [("map/other:Sort", 0, 90, {})])
    return writer


def test_operators_of_the_host_count_without_those_inside_them_and_without_the_input(tmp_path):
    summary = summarize(host_trace().save(tmp_path), steps=1)
    times = {each.name: each.ms_per_step for each in summary.operators}
    assert times == pytest.approx({"model/dense": 0.03, "model/sum": 0.02, "model/call": 0.01})
    assert summary.span_ms == pytest.approx(0.05)
    assert summary.idle_share == pytest.approx(0)  # the two threads cover 10 to 60 us
    assert summary.tensor_core_share is None
    assert summary.unavailable["tensor_core_share"] == "the trace has no events of a GPU"
    assert summary.operators[0].kind == "MatMul"


def test_operators_that_python_calls_alone_count_without_their_dispatch(tmp_path):
    writer = Writer()
    events = []
    for start, kind in ((0, "MatMul"), (40, "IteratorGetNext"), (80, "__inference_train_12")):
        events += [
            (f"EagerLocalExecute: {kind}", start, start + 20, {}),
            ("EagerKernelExecute", start + 5, start + 15, {}),
        ]
    writer.line(writer.plane("/host:CPU"), "python", events)
    (product,) = summarize(writer.save(tmp_path), steps=1).operators
    assert (product.name, product.kind, product.ms_per_step) == ("MatMul", "MatMul", pytest.approx(0.01))


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("volta_h884gemm_128x128_ldg8_nn", True),
        ("turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1", True),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel", True),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_kernel_cudnn", True),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", True),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", True),
        ("turing_int8_i8816cudnn_int8_128x128_ldg16_relu_small_nt_v1", True),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_ffma_execute_kernel", False),
        ("cutlass_80_simt_sgemm_128x32_8x5_nn_align1", False),
        ("ampere_sgemm_128x64_nn", False),
        ("loop_add_fusion_1688", False),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", False),
        ("gemm_fusion_dot_4_0", None),
    ],
)
def test_kernels_in_tensor_cores_are_told_by_their_names(kernel, expected):
    assert uses_tensor_cores(kernel) is expected


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A trace of four steps whose batch takes 20 ms to make."""
    directory = tmp_path_factory.mktemp("recorded")

    def slow(number):
        time.sleep(0.02)
        return np.float32(number)

    data = tf.data.Dataset.range(4).map(lambda number: tf.numpy_function(slow, [number], tf.float32))
    product = tf.function(lambda x, scale: tf.reduce_sum(tf.matmul(x, x * scale)))
    matrix = tf.ones((128, 128))
    product(matrix, tf.constant(1.0))
    with record_trace(directory) as step:
        for number in data:
            with step():
                product(matrix, tf.ensure_shape(number, ())).numpy()
    return directory


def test_a_recorded_trace_names_the_operators_and_the_wait_is_idle(recorded):
    summary = summarize(recorded)
    assert summary.steps == 4
    kinds = {each.kind: each for each in summary.operators}
    product = next(each for kind, each in kinds.items() if "MatMul" in kind)
    assert product.calls_per_step == 1
    assert "PyFunc" not in kinds
    assert summary.idle_share > 0.5
    assert sum(each.share for each in summary.operators) == pytest.approx(1)


def test_perfetto_reads_the_same_events(recorded):
    events = json.loads(gzip.decompress((recorded / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = [each for each in events if each["name"] == "step"]
    assert [each["args"]["step_num"] for each in steps] == ["0", "1", "2", "3"]
    assert all(each["dur"] > 0 and each["ts"] >= 0 for each in events if each["ph"] == "X")
    rows = {(each["pid"], each["tid"]) for each in events if each["ph"] == "X"}
    assert rows <= {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}


def test_times_in_the_chrome_trace_are_microseconds(tmp_path):
    gpu_trace().save(tmp_path)
    path = write_chrome_trace(read_spaces(newest_trace(tmp_path)), tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [(each["ts"], each["dur"]) for each in events if each["name"] == GEMM] == [(20, 30), (120, 30)]
    assert {each["args"]["name"] for each in events if each["name"] == "process_name"} == {
        "host /host:CPU",
        "host /device:GPU:0",
    }


def test_a_block_that_raises_leaves_no_profiler_and_no_trace(tmp_path):
    with pytest.raises(ZeroDivisionError), record_trace(tmp_path):
        raise ZeroDivisionError
    assert not list(tmp_path.rglob("*.xplane.pb"))
    tf.profiler.experimental.start(str(tmp_path))  # works, because none runs
    tf.profiler.experimental.stop(save=False)


def test_a_second_profiler_is_an_error_and_the_first_goes_on(tmp_path):
    with record_trace(tmp_path) as step:
        with pytest.raises(ConfigError, match="one profiler at a time"), record_trace(tmp_path / "second"):
            pass
        with step():
            tf.linalg.matmul(tf.ones((8, 8)), tf.ones((8, 8)))
    assert summarize(tmp_path).steps == 1


def test_a_block_that_stops_the_profiler_is_told(tmp_path):
    with pytest.raises(ConfigError, match="until the end of the traced block"), record_trace(tmp_path):
        tf.profiler.experimental.stop(save=False)


def test_traces_that_cannot_be_summarized_say_why(tmp_path):
    with pytest.raises(ConfigError, match="steps must be a whole number of at least 1 or None"):
        summarize(tmp_path, steps=0)
    host_trace().save(tmp_path)
    with pytest.raises(ConfigError, match="steps must be given for a trace without marks"):
        summarize(tmp_path)
    newer = Writer()
    newer.plane("/host:CPU")
    newer.save(tmp_path, time="2099_01_01_00_00_00")
    with pytest.raises(ArtifactError, match="at least one operator"):
        summarize(tmp_path, steps=1)
    (newest_trace(tmp_path) / "host.xplane.pb").write_bytes(b"\x0a\xff\xff broken")
    with pytest.raises(ArtifactError, match="whole XSpace protobuf"):
        summarize(tmp_path, steps=1)
