import json

import pytest

from tfopt.hardware import detect
from tfopt.profiling.nvml import Nvml, NvmlUnavailableError

READ_ALL = """
import json, os
from tfopt.hardware import detect
from tfopt.profiling.nvml import Nvml, NvmlUnavailableError

def names(visible):
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        with Nvml() as nvml:
            return nvml.names
    except NvmlUnavailableError as reason:
        return str(reason)

with Nvml() as nvml:
    found = {"names": nvml.names, "samples": [sample.to_dict() for sample in nvml.sample()]}
nvml.close()
found["hardware"] = detect().to_dict()
entries = ["1", "1,0", "GPU-b", "0,7,1", "GPU-", "", "-1", "MIG-GPU-aaaaaaaa"]
found["visible"] = {entry: names(entry) for entry in entries}
found["hidden"] = detect().unavailable["gpus"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(run_with_fake_nvml):
    process = run_with_fake_nvml(READ_ALL)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_reads_every_gpu_in_units_and_none_where_unsupported(found):
    assert found["names"] == ["NVIDIA A100-SXM4-40GB", "NVIDIA T4-TEST"]
    assert found["samples"] == [
        {
            "gpu_utilization_percent": 37.0,
            "memory_used_bytes": 10 * 2**30,
            "power_watts": 250.5,
            "temperature_celsius": 61.0,
            "sm_clock_mhz": 1410.0,
        },
        {
            "gpu_utilization_percent": 83.0,
            "memory_used_bytes": 4 * 2**30,
            "power_watts": None,
            "temperature_celsius": 45.0,
            "sm_clock_mhz": 585.0,
        },
    ]


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("1", ["NVIDIA T4-TEST"]),
        ("1,0", ["NVIDIA T4-TEST", "NVIDIA A100-SXM4-40GB"]),
        ("GPU-b", ["NVIDIA T4-TEST"]),
        ("0,7,1", ["NVIDIA A100-SXM4-40GB"]),  # CUDA ignores what follows an entry that names no GPU
    ],
)
def test_cuda_visible_devices_chooses_and_orders_the_gpus(found, entry, names):
    assert found["visible"][entry] == names


@pytest.mark.parametrize("entry", ["", "-1", "GPU-", "MIG-GPU-aaaaaaaa"])  # "GPU-" is the beginning of two UUIDs
def test_gpus_hidden_by_cuda_visible_devices_are_the_reason(found, entry):
    assert found["visible"][entry] == f"CUDA_VISIBLE_DEVICES={entry!r} hides the 2 NVIDIA GPUs"


def test_hardware_tells_a_gpu_that_tensorflow_cannot_use_from_no_gpu(found):
    if found["hardware"]["gpus"]:
        pytest.skip("TensorFlow finds a real GPU here")
    why = found["hardware"]["unavailable"]["gpus"]
    assert "NVIDIA A100-SXM4-40GB, NVIDIA T4-TEST" in why
    assert why.endswith("tfopt[cuda]")
    assert found["hidden"].endswith("CUDA_VISIBLE_DEVICES='MIG-GPU-aaaaaaaa'")


def test_without_a_driver_the_error_is_the_reason():
    if detect().gpus:
        pytest.skip("this machine has an NVIDIA GPU")
    with pytest.raises(NvmlUnavailableError, match="no NVIDIA GPU can be read"):
        Nvml()
