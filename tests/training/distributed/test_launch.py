import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from textwrap import dedent

import psutil
import pytest
import tensorflow as tf

from tfopt.cli import main
from tfopt.errors import ConfigError
from tfopt.training.distributed.launch import launch

INDEX = 'import json, os; index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]\n'


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(INDEX + dedent(text))
        return str(path)

    return write


def start(*words):
    """Starts a launcher in a separate process."""
    code = "import sys; from tfopt.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, "launch", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def gone(numbers, within_s=300.0):
    """Returns whether all processes end in time. A zombie has ended too."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not [number for number in numbers if _runs(number)]:
            return True
        time.sleep(0.05)
    return False


def _runs(number):
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_get_a_cluster_and_the_arguments(script, capsys):
    path = script("import sys; print(json.dumps([json.loads(os.environ['TF_CONFIG']), sys.argv]))")
    assert launch([path, "--workers", "7", "-m"], workers=3) == 0
    lines = dict(line.split("] ", 1) for line in capsys.readouterr().out.splitlines())
    configs = [json.loads(lines[f"[worker {index}"]) for index in range(3)]
    assert [config["task"]["index"] for config, _ in configs] == [0, 1, 2]
    assert len(set(configs[0][0]["cluster"]["worker"])) == 3
    assert all(config["cluster"] == configs[0][0]["cluster"] for config, _ in configs)
    assert all(arguments == [path, "--workers", "7", "-m"] for _, arguments in configs)


@pytest.mark.parametrize(("named", "expected"), [(None, ["0,1", "2,3"]), ("7,5,3,1", ["7,5", "3,1"])])
def test_each_worker_has_gpus_of_its_own(script, capsys, monkeypatch, named, expected):
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU"] * 4)
    path = script("print(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert launch([path], workers=2) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[worker {i}] {gpus}" for i, gpus in enumerate(expected)]
    with pytest.raises(ConfigError, match="workers=3, devices_per_worker=2, 4 GPUs"):
        launch([path], workers=3, devices_per_worker=2)


def test_a_character_that_the_output_cannot_hold_is_written_as_an_escape(script, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    path = script("import sys; sys.stdout.buffer.write('größe\\n'.encode())")
    assert launch([path], workers=1) == 0
    output.flush()
    assert output.buffer.getvalue() == b"[worker 0] gr\\xf6\\xdfe\n"


@pytest.mark.parametrize(
    "start",
    [
        'print("I0000 00:00:1795696811.126 7030 port.cc:153] oneDNN is on.", file=sys.stderr)',
        pytest.param("import tensorflow as tf; tf.config.list_physical_devices()", marks=pytest.mark.slow),
    ],
    ids=["written", "imported"],
)
def test_what_tensorflow_says_at_its_start_is_left_out(start, script, capsys, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    path = script(f"""
        import sys
        {start}
        print("I0000 is a name", file=sys.stderr)
    """)
    assert launch([path], workers=1) == 0
    assert capsys.readouterr().err.splitlines() == ["[worker 0] I0000 is a name"]


def test_lines_stay_whole_and_on_their_stream(script, capsys):
    path = script("""
        import sys, time
        for number in range(50):
            for stream in (sys.stdout, sys.stderr):
                for part in (f"{index}:", f"{number}:", "é" * 500, "\\n"):
                    stream.write(part)
                    stream.flush()
        sys.stdout.write("no newline at the end")
    """)
    assert launch([path], workers=2) == 0
    captured = capsys.readouterr()
    for index in (0, 1):
        whole = [f"[worker {index}] {index}:{number}:{'é' * 500}" for number in range(50)]
        of_this = f"[worker {index}] "
        out = [line for line in captured.out.splitlines() if line.startswith(of_this)]
        assert out == [*whole, f"[worker {index}] no newline at the end"]
        assert [line for line in captured.err.splitlines() if line.startswith(of_this)] == whole


def test_a_failure_stops_the_others_and_comes_last(script, capsys, monkeypatch):
    monkeypatch.setattr("tfopt.training.distributed.launch.SETTLE_S", 0.3)
    path = script("""
        import time
        if index == 1:
            raise ArithmeticError("the loss is nan")
        time.sleep(600)
    """)
    began = time.monotonic()
    assert launch([path], workers=3) == 1
    assert time.monotonic() - began < 300
    lines = capsys.readouterr().err.splitlines()
    place = lines.index("tfopt: worker 1 failed with exit code 1. It ended with:")
    assert lines[place + 1] == "[worker 1] Traceback (most recent call last):"
    assert lines[-1] == "[worker 1] ArithmeticError: the loss is nan"


@pytest.mark.slow
def test_a_worker_that_ignores_sigterm_is_killed(script, monkeypatch):
    monkeypatch.setattr("tfopt.training.distributed.launch.SETTLE_S", 0.5)
    monkeypatch.setattr("tfopt.training.distributed.launch.STOP_S", 2.0)
    path = script("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1)
        sys.exit(7) if index == 0 else time.sleep(600)
    """)
    began = time.monotonic()
    assert launch([path], workers=2) == 7
    assert time.monotonic() - began < 300


def test_the_first_traceback_is_to_blame_even_if_its_process_ends_last(script, capsys):
    path = script("""
        import atexit, time
        if index == 1:
            atexit.register(time.sleep, 1)
            raise ArithmeticError("the cause")
        time.sleep(0.4)
        raise ConnectionError("the consequence")
    """)
    assert launch([path], workers=2) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "[worker 1] ArithmeticError: the cause"


def test_exit_codes(script, capsys):
    assert launch([script("raise SystemExit(5 if index else 0)")], workers=2) == 5
    assert "tfopt: worker 1 failed with exit code 5.\n" in capsys.readouterr().err
    assert launch([script("import signal; index and os.kill(os.getpid(), signal.SIGKILL)")], workers=2) == 137
    assert (
        "tfopt: worker 1 was killed (SIGKILL), most often by the kernel when the memory is full; its exit code is 137"
        in capsys.readouterr().err
    )


def test_what_a_worker_started_ends_with_it(script, capsys):
    path = script("import subprocess; print(subprocess.Popen(['sleep', '600']).pid)")
    assert launch([path], workers=2) == 0
    children = [int(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(children) == 2
    assert gone(children)


WAITING = """
    import signal, subprocess, sys, time
    def save(*_):
        time.sleep(1)
        print("saved")
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    child = subprocess.Popen(["sleep", "600"])
    print(os.getpid(), child.pid)
    time.sleep(600)
"""


def processes(launcher, workers):
    lines = [launcher.stdout.readline() for _ in range(workers)]
    return [int(number) for line in lines for number in line.split("] ")[1].split()]


@pytest.mark.slow
def test_sigterm_lets_the_workers_save(script):
    launcher = start("--workers", 2, script(WAITING))
    started = processes(launcher, 2)
    launcher.terminate()
    output, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 143
    assert sorted(output.splitlines()) == ["[worker 0] saved", "[worker 1] saved"]
    assert "failed" not in errors
    assert errors.endswith("tfopt: the workers have ended after SIGTERM\n")
    assert gone(started)


@pytest.mark.parametrize("output", ["closed", "full"])
def test_workers_save_when_nobody_reads_their_output(output, script, tmp_path, monkeypatch):
    path = script("""
        import pathlib, signal, sys, time
        def save(*_):
            for number in range(50_000):  # more than a pipe holds
                print("saving", number)
            pathlib.Path(sys.argv[1], f"saved-{index}").touch()
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path(sys.argv[1], f"ready-{index}").touch()
        while True:
            if len(list(pathlib.Path(sys.argv[1]).glob("ready-*"))) == 2:
                print("epoch")
            time.sleep(0.05)
    """)
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer if output == "closed" else os.open("/dev/full", os.O_WRONLY), "w")
    monkeypatch.setattr(sys, "stdout", file)
    with pytest.raises(BrokenPipeError if output == "closed" else OSError, match=r"Broken pipe|No space left"):
        launch([path, str(tmp_path)], workers=2)
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    with contextlib.suppress(OSError):
        file.close()


@pytest.mark.slow
def test_ctrl_c_ends_the_workers(script):
    launcher = start("--workers", 2, script(WAITING))
    started = processes(launcher, 2)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 130
    assert errors.endswith("tfopt: the workers have ended after SIGINT\n")
    assert gone(started)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process(script):
    launcher = start("--workers", 2, script(WAITING))
    started = processes(launcher, 2)
    everything = [child.pid for child in psutil.Process(launcher.pid).children(recursive=True)]
    assert set(started) < set(everything)
    launcher.kill()
    launcher.communicate(timeout=300)
    assert gone(everything)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "0", "SCRIPT"], "workers must be a whole number of at least 1. Received: workers=0"),
        (["--workers", "1", "--devices-per-worker", "0", "SCRIPT"], "devices_per_worker=0"),
        (["--workers", "2", "missing.py"], "'missing.py'"),
        (["--workers", "2"], "script must be a Python file"),
        (["--workers", "2", "-m"], "and a module"),
        (["--workers", "two", "SCRIPT"], "two"),
        (["--worker", "2", "SCRIPT"], "--workers"),
        (["SCRIPT"], "--workers"),
    ],
)
def test_wrong_use(words, message, script, capsys):
    path = script("")
    assert main(["launch", *[word.replace("SCRIPT", path) for word in words]]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_a_module_can_be_launched(capsys):
    assert main(["launch", "--workers=1", "-m", "platform", "--workers"]) == 0
    assert capsys.readouterr().out.startswith("[worker 0] Linux")


@pytest.mark.gpu
def test_more_devices_than_gpus_are_refused(script):
    count = len(tf.config.list_physical_devices("GPU"))
    with pytest.raises(ConfigError, match=f"{count} GPUs"):
        launch([script("")], workers=count + 1, devices_per_worker=1)


@pytest.mark.slow
def test_without_gpus_a_worker_gets_logical_devices(script, capsys):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    path = script("""
        import sys, tensorflow as tf
        print(__name__, len(tf.config.list_logical_devices("CPU")), sys.argv, sys.path[0])
    """)
    assert launch([path, "-x"], workers=1, devices_per_worker=3) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed == f"[worker 0] __main__ 3 {[path, '-x']} {os.path.dirname(path)}"  # noqa: PTH120
