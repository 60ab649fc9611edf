import json
import os
import sys
from pathlib import Path

import psutil
import pytest
import tensorflow as tf

from tfopt import plan
from tfopt.errors import ConfigError
from tfopt.hardware import CPU_FEATURES, GPU_CARDS, Gpu, Hardware, cpu_peak, detect, find_card, has_vnni, peak_tflops
from tfopt.timing import call_seconds


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch):
    monkeypatch.delenv("TFOPT_PRETEND_HARDWARE", raising=False)


def test_detect_agrees_with_the_system():
    hardware = detect()
    assert hardware.memory_bytes == psutil.virtual_memory().total
    assert hardware.tensorflow_version == tf.__version__
    assert len(hardware.gpus) == len(tf.config.list_physical_devices("GPU"))
    assert set(hardware.cpu_features) <= set(CPU_FEATURES)
    for attribute in ("cpu_model", "cpu_features", "gpus"):
        assert bool(getattr(hardware, attribute)) != (attribute in hardware.unavailable)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_cpu_features_are_whole_words_of_cpuinfo():
    words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    if "flags" not in words:
        pytest.skip("this kernel does not list x86 flags")
    assert detect().cpu_features == tuple(feature for feature in CPU_FEATURES if feature in words)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a process affinity")
def test_logical_cores_are_those_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert detect().logical_cores == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert detect().logical_cores == len(allowed)


def test_detect_leaves_the_devices_to_be_configured(fresh_python):
    # TensorFlow refuses this with a RuntimeError once a device was started.
    program = """
import tensorflow as tf
from tfopt.hardware import detect
detect()
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
print(len(tf.config.list_logical_devices("CPU")))
"""
    assert fresh_python("-c", program, check=True).stdout.strip() == "3"


@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA B200", 2250.0),
    ],
)
def test_peak_rates_tell_variants_apart(name, bfloat16):
    rates = peak_tflops(name)
    assert rates is not None
    assert rates["bfloat16"] == rates["float16"] == bfloat16
    assert rates["float32"] < rates["tensorfloat32"] < rates["bfloat16"] < rates["int8"]


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB", "Tesla T4"])
def test_gpus_before_ampere_have_no_bfloat16_rate(name):
    rates = peak_tflops(name)
    assert rates is not None
    assert "bfloat16" not in rates
    assert rates["float16"] > rates["float32"]


@pytest.mark.parametrize(
    "name", ["NVIDIA A10G", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_a_gpu_that_only_resembles_a_known_one_has_unknown_rates(name):
    assert peak_tflops(name) is None


def test_a_known_gpu_prints_its_figures_and_an_unknown_one_the_reasons():
    known = Gpu(
        name="Tesla T4", compute_capability=(7, 5), memory_bytes=15 * 2**30, peak_tflops=peak_tflops("Tesla T4")
    )
    assert str(known) == (
        "Tesla T4, compute capability 7.5, memory 15.0 GiB, peak float32 8.1, float16 65, int8 130 TFLOP/s"
    )
    hardware = Hardware(
        cpu_model=None,
        logical_cores=4,
        memory_bytes=2**33,
        gpus=(known, Gpu(name="NVIDIA X")),
        tensorflow_version="2.21.0",
        unavailable={"cpu_model": "not named", "cpu_features": "not listed"},
    )
    cpu, features, _, first, second, _ = str(hardware).splitlines()
    assert cpu.split(maxsplit=1) == ["cpu", "unavailable (not named), 4 logical cores"]
    assert features.endswith("unavailable (not listed)")
    assert first.split(maxsplit=2) == ["gpu", "0", str(known)]
    assert second.count("unavailable (") == 3


def test_it_serialises_to_json():
    hardware = detect()
    assert json.loads(hardware.to_json())["logical_cores"] == hardware.logical_cores


@pytest.mark.parametrize(
    ("name", "gib", "bandwidth", "watts"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, 2039, 400),
        ("NVIDIA A100-SXM4-40GB", 40, 1555, 400),
        ("NVIDIA A100 80GB PCIe", 80, 1935, 300),
        ("NVIDIA A100-PCIE-40GB", 40, 1555, 250),
        ("NVIDIA H100 80GB HBM3", 80, 3350, 700),
        ("NVIDIA H200", 141, 4800, 700),
        ("Tesla T4", 16, 320, 70),
    ],
)
def test_the_variants_of_a_gpu_have_their_own_memory_and_power(name, gib, bandwidth, watts):
    card = find_card(name)
    assert (card.memory_gib, card.memory_gb_per_s, card.board_watts) == (gib, bandwidth, watts)


def test_every_card_of_the_table_is_found_by_its_own_key_and_is_complete():
    for key, card in GPU_CARDS.items():
        assert find_card(f"NVIDIA {key}") is card  # no variant hides behind its family
        assert card.peak_tflops["float16"] > card.peak_tflops["float32"]
        # Operations per byte that both roofs allow: no slip of a power of ten.
        assert 50 < 1e3 * card.peak_tflops["float16"] / card.memory_gb_per_s < 500
        assert (card.nvlink_gb_per_s or 300) >= 300


def test_the_measured_peak_is_reached_by_no_other_product():
    """Nothing that TensorFlow computes here is much faster than the peak, and small products are slower."""
    assert cpu_peak() is cpu_peak()  # measured once
    matrix = tf.random.stateless_uniform((512, 512), (1, 2))
    tf.matmul(matrix, matrix)
    for _ in range(5):
        peak = cpu_peak()
        rate = 2 * 512**3 / min(call_seconds(lambda: tf.matmul(matrix, matrix), 0.1)) / 1e9
        if rate < 2 * peak.float32_gflops:
            break
        cpu_peak.cache_clear()  # other processes may have taken the machine while one of the two was measured
    assert rate < 2 * peak.float32_gflops
    # A product of large matrices needs hundreds of operations per byte, or the peak would be that of the memory: a
    # twelfth of an operation per byte, where three arrays are read and written.
    assert peak.float32_gflops > peak.memory_gb_per_s / 4


@pytest.mark.slow
def test_the_peak_is_measured_where_a_limit_leaves_no_bfloat16(fresh_python):
    """TensorFlow ends the process at a bfloat16 product that oneDNN may not compute, where the processor has AVX512."""
    code = "from tfopt.hardware.processor_peak import cpu_peak; peak = cpu_peak(); print(peak.bfloat16_gflops)"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = fresh_python("-c", code, env=environment)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "precision", "jit_compile"),
    [
        ("avx2", "float32", False),
        ("vnni", "float32", False),
        ("amx", "mixed_bfloat16", False),
        ("T4", "mixed_float16", True),
        ("V100", "mixed_float16", True),  # a part of a name, as `tfopt devices --card` takes
    ],
)
def test_another_machine_can_be_pretended(name, precision, jit_compile, monkeypatch):
    monkeypatch.setenv("TFOPT_PRETEND_HARDWARE", name)
    for limit in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(limit, raising=False)
    decided = plan()
    assert (decided.precision, decided.jit_compile) == (precision, jit_compile)
    assert f"pretended {name}" in str(decided.hardware)
    assert has_vnni() == ("avx512_vnni" in detect().cpu_features)


def test_a_machine_that_is_not_known_cannot_be_pretended(monkeypatch):
    monkeypatch.setenv("TFOPT_PRETEND_HARDWARE", "abacus")
    with pytest.raises(ConfigError, match="must be one of avx2, vnni, amx, or a GPU of the table"):
        detect()
