"""NVML as the driver answers: a stand-in for its library, under the real nvidia-ml-py."""

import json
import shutil

import pytest

from tfopt.hardware import detect
from tfopt.profiling import Nvml, NvmlUnavailableError

READ_ALL = """
import json, os
from tfopt.hardware import detect
from tfopt.profiling import Nvml, NvmlUnavailableError
from tfopt.profiling.monitoring.readers import open_reader

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
reader = open_reader(0.5)
reader.close()
found["why"] = reader.unavailable
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
    first, second = found["samples"]
    assert first == {
        "gpu_utilization_percent": 37.0,
        "memory_utilization_percent": 5.0,
        "memory_used_bytes": 10 * 2**30,
        "power_watts": 250.5,
        "energy_joules": 0.0,
        "temperature_celsius": 61.0,
        "sm_clock_mhz": 1410.0,
        "throttled": 0.0,
        "pcie_sent_bytes_per_second": None,  # the turn of the other GPU
        "pcie_received_bytes_per_second": None,
        "nvlink_sent_bytes_per_second": None,
        "nvlink_received_bytes_per_second": None,
    }
    assert second["gpu_utilization_percent"] == 83.0
    assert second["power_watts"] is None
    assert second["pcie_sent_bytes_per_second"] == 3_000_000
    assert second["pcie_received_bytes_per_second"] == 3_500_000


def test_without_dcgmi_its_figures_are_unavailable_with_the_reason(found):
    if shutil.which("dcgmi"):
        pytest.skip("this machine has DCGM")
    assert found["why"]["sm_active_percent"] == found["why"]["tensor_active_percent"] == "dcgmi is not installed"


PLAY = """
import json, os, pathlib, time
from tfopt.profiling.monitoring import nvml as module
module.FIRST_PAUSE_S = 0.0
state = pathlib.Path(os.environ["FAKE_NVML_STATE"])
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
if os.environ.get("SLICE"):
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["SLICE"]
played, times = [], []
steps = json.loads(os.environ["TIMELINE"])
state.write_text(steps[0])
with module.Nvml() as nvml:
    for step in steps:
        state.write_text(step)
        time.sleep(0.02)
        before = time.monotonic()
        played.append([gpu.to_dict() for gpu in nvml.sample()])
        times.append((before, time.monotonic()))
    found = {"names": nvml.names, "numbers": nvml.numbers, "samples": played, "times": times}
    print(json.dumps({**found, "failures": nvml.failures, "throttles": nvml.throttles, "why": nvml.unavailable}))
"""


@pytest.fixture(scope="module")
def play(run_with_fake_nvml, tmp_path_factory):
    def run(*steps, driver="new", **environment):
        state = tmp_path_factory.mktemp("state") / "state"
        timeline = json.dumps(["\n".join(step) + "\n" for step in steps])
        process = run_with_fake_nvml(PLAY, driver, FAKE_NVML_STATE=str(state), TIMELINE=timeline, **environment)
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout.splitlines()[-1])

    return run


# What the stand-in is told, and what the sample must say of it.
SCRIPTED = {
    "util": ("gpu_utilization_percent", 1),
    "memutil": ("memory_utilization_percent", 1),
    "used": ("memory_used_bytes", 1),
    "power": ("power_watts", 1e-3),
    "temperature": ("temperature_celsius", 1),
    "clock": ("sm_clock_mhz", 1),
}


def test_a_timeline_of_eight_gpus(play):
    def value(gpu, key, number):
        return 1 + 10 * gpu + number + 100 * list(SCRIPTED).index(key)

    def step(number):
        rows = [f"{gpu} {key} {value(gpu, key, number)}" for gpu in range(8) for key in SCRIPTED]
        rows += [f"{gpu} energy {1000 * (gpu + 1) * (number + 1)}" for gpu in range(8)]
        rows += [f"{gpu} pcie {1000 * gpu + number}" for gpu in range(8)]
        links = [f"3 nvlink {1000 * number}"]
        reasons = ["2 reasons 36", "4 reasons 1"]  # 36: power limit and temperature; 1: idle, which is no throttling
        return ["count 8", *rows, *links, *(reasons if number == 1 else [])]

    found = play(*(step(number) for number in range(9)))
    samples = found["samples"]
    assert len(found["names"]) == 8
    for number, gpus in enumerate(samples):
        for index, gpu in enumerate(gpus):
            for key, (name, unit) in SCRIPTED.items():
                assert gpu[name] == pytest.approx(unit * value(index, key, number)), (number, index, name)
            assert gpu["energy_joules"] == pytest.approx(number * (index + 1))
            if index == (number + 1) % 8:  # its turn
                assert gpu["pcie_received_bytes_per_second"] == 1000 * (1000 * index + number + 500)
                assert gpu["pcie_sent_bytes_per_second"] == 1000 * (1000 * index + number)
            else:
                assert gpu["pcie_sent_bytes_per_second"] is None
    assert [gpu["throttled"] for gpu in samples[1]] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert found["throttles"] == {"gpu2: power limit": 1, "gpu2: temperature": 1}
    (before, _), (_, after) = found["times"][1:3]
    links = samples[2][3]
    assert links["nvlink_received_bytes_per_second"] == pytest.approx(2 * links["nvlink_sent_bytes_per_second"])
    assert 1024 * 1000 / (after - before) <= links["nvlink_sent_bytes_per_second"] <= 1024 * 1000 / 0.02
    assert samples[2][0]["nvlink_sent_bytes_per_second"] is None
    assert found["why"]["gpu0_nvlink_sent_bytes_per_second"] == "Not Supported"
    assert not [name for name in found["why"] if name.startswith("gpu3")]
    assert found["failures"] == {}


def test_a_card_and_a_driver_that_are_lost_come_back(play):
    # The energy of the driver that comes back counts from zero again.
    energies = [9000, 9000, 9000, 9000, 11000, 11000, 11000, 500, 1500]
    well, lost, gone = [], ["1 error 15"], ["init 9", "0 error 1", "1 error 1"]
    steps = [well, lost, lost, well, well, gone, gone, well, well]
    found = play(*(["count 2", f"0 energy {mj}", *step] for mj, step in zip(energies, steps, strict=True)))
    seen = [[gpu["gpu_utilization_percent"] for gpu in each] for each in found["samples"]]
    assert seen[0] == [37, 83]
    assert seen[2] == [37, None]  # the other card is still read
    assert [37, 83] in seen[3:5]
    assert seen[6] == [None, None]
    assert seen[8] == [37, 83]
    assert found["samples"][8][0]["energy_joules"] == pytest.approx(2 + 0.5 + 1)
    assert set(found["failures"]) >= {"GPU is lost"}


def test_a_card_that_is_lost_before_the_start_leaves_the_others(play):
    found = play(["count 3", "1 handle 15"])
    assert found["names"] == ["NVIDIA A100-SXM4-40GB"] * 2
    assert found["numbers"] == [0, 2]  # of the bus, as DCGM counts
    assert found["failures"] == {"GPU 1 of the bus: GPU is lost": 1}


def test_an_error_of_one_reading_leaves_the_others(play):
    found = play(["0 error_power 999"], ["0 util 50"])
    first, second = (each[0] for each in found["samples"])
    assert (first["power_watts"], first["gpu_utilization_percent"]) == (None, 37)
    assert (second["power_watts"], second["gpu_utilization_percent"]) == (250.5, 50)
    assert sum(found["failures"].values()) == 1


def test_a_driver_without_the_newer_calls(play):
    found = play(["count 1", "0 reasons 8"], driver="old")
    (gpu,) = found["samples"][0]
    assert gpu["gpu_utilization_percent"] == 37
    assert {gpu[name] for name in ("energy_joules", "pcie_received_bytes_per_second")} == {None}
    assert found["why"]["gpu0_energy_joules"] == "Function Not Found"
    assert found["throttles"] == {"gpu0: hardware slowdown": 1}  # the call has another name there
    assert found["failures"] == {}


def test_a_mig_slice_has_its_memory_and_no_utilization(play):
    found = play(["0 mig 2"], ["0 mig 0", "0 error 16"], ["0 mig 2"], ["0 mig 2"], SLICE="MIG-01")
    (part,) = found["samples"][0]
    assert found["names"] == ["NVIDIA A100-SXM4-40GB MIG 3g.20gb"]
    assert part["memory_used_bytes"] == 2_000_000
    assert part["gpu_utilization_percent"] is None
    assert found["why"]["gpu0_gpu_utilization_percent"] == "NVML does not measure it for a MIG slice"
    assert part["power_watts"] == 250.5
    assert found["samples"][1][0]["memory_used_bytes"] is None
    assert found["samples"][3][0]["memory_used_bytes"] == 2_000_000  # the same slice after a reset


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
