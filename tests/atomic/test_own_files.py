"""Only files that tfopt wrote are replaced; a file of the same name that it did not write stays as it is."""

import dataclasses
import gzip
import io
import json

import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console

from tests.reporting.test_html_page import sample_report
from tests.runner.test_runner import TRAIN_ONLY
from tfopt.cli import main
from tfopt.data import Examples
from tfopt.data.records.convert import convert
from tfopt.errors import ConfigError
from tfopt.profiling.trace.events import write_chrome_trace
from tfopt.pruning import PruningConfig
from tfopt.pruning.sensitivity_curves import Sensitivity
from tfopt.report import DiagnosisReport, StepBreakdown, Utilization
from tfopt.report.run_report import run_of
from tfopt.reporting.comparison import write_comparison_html
from tfopt.reporting.html_page import write_diagnosis_html
from tfopt.reporting.saved_report import save_report
from tfopt.runner import run
from tfopt.runner.run_report import FORMS, check_reports, remove_reports, write_reports
from tfopt.training.checkpointing.store import CheckpointStore

REPORT = sample_report()
STEP = StepBreakdown(step_ms=10, input_ms=6, host_ms=1, compute_ms=3, steps=100, batch_size=32)
DIAGNOSIS = DiagnosisReport(name="mlp", breakdown=STEP)
CURVES = Sensitivity(
    score="accuracy", higher_is_better=True, baseline=0.9, shares=(0.5,), curves={"a": (0.8,)}, config=PruningConfig()
)
WRITERS = {
    "report.html": lambda path: write_diagnosis_html(DIAGNOSIS, path),
    "comparison.html": lambda path: write_comparison_html(dict.fromkeys("ab", run_of(DIAGNOSIS, name="mlp")), path),
    "report.json": lambda path: save_report(REPORT, path.parent),
    "diagnosis.json": lambda path: save_report(DIAGNOSIS, path.parent),
    "utilization.json": lambda path: save_report(Utilization(source="", seconds=(), series={}), path.parent),
    "trace.json.gz": lambda path: write_chrome_trace({}, path),
    **{f"curves.{kind}": CURVES.plot for kind in ("svg", "png", "pdf")},
}
OF_OTHERS = {
    ".html": b"<html><footer>Written by tfopt.</footer> is what I wrote under mine</html>",
    ".json": b'{"name": "mine", "recipe": "pancakes", "source": "grandmother"}',
    ".gz": gzip.compress(b'{"displayTimeUnit": "ms", "traceEvents": []}'),
    ".svg": b"<svg></svg>",
    ".png": b"\x89PNG mine",
    ".pdf": b"%PDF mine",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", WRITERS)
def test_each_writer_replaces_its_own_file_and_no_other(name, tmp_path):
    path, write = tmp_path / name, WRITERS[name]
    write(path)
    write(path)
    for content in (OF_OTHERS[path.suffix], b"\xff\xfe not what the name says", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"only if tfopt wrote it. Received: .*{name}, .* Move or rename it"):
            write(path)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(b"")  # nothing is lost
    write(path)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no regular file"):
        write(path)


@pytest.mark.parametrize(("name", "content"), [*((name, b"{}") for name in FORMS), ("receipts.json", b'{"tea": 3.5}')])
def test_a_run_refuses_before_it_trains(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"only if tfopt wrote it. Received: {tmp_path / name}"):
        run(dataclasses.replace(TRAIN_ONLY, export_dir=str(tmp_path)), console=Console(file=io.StringIO()))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == {tmp_path / name: content}


def test_a_run_replaces_the_reports_of_an_earlier_one(tmp_path):
    write_reports(REPORT, tmp_path, Console(file=io.StringIO()))
    assert {path.name for path in tmp_path.iterdir()} == set(FORMS)
    check_reports(tmp_path)
    remove_reports(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("doctor --out . digits_cnn", "report.html"),
        ("doctor --out . train.py", "diagnosis.json"),
        ("doctor --trace . train.py", "trace.json.gz"),
        ("accelerate --report package.json train.py", "package.json"),
        ("monitor --out train.py -- touch ran", "train.py"),
        ("report saved --out notes.html", "notes.html"),
        ("report saved", "saved/report.html"),
        ("report saved other", "comparison.html"),
        ("init .", "train.py"),
    ],
)
def test_a_command_refuses_before_its_program_runs(words, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for directory in ("saved", "other"):
        (tmp_path / directory).mkdir()
        save_report(DIAGNOSIS, directory)
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    if not (tmp_path / name).exists():
        (tmp_path / name).write_text('{"name": "mine"}')
    before = (tmp_path / name).read_text()
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert (tmp_path / name).read_text() == before
    assert not (tmp_path / "ran").exists()


def test_the_device_null_stays_a_device(capsys):
    assert main(["monitor", "--out", "/dev/null", "--", "true"]) == 2
    assert "no regular file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["schema.json", "unfinished.json", "train-00000-of-00001.tfrecord"])
def test_overwrite_removes_only_what_convert_wrote(name, tmp_path):
    dataset = tf.data.Dataset.from_tensor_slices((np.zeros((4, 2), "float32"), np.zeros(4, "int64")))
    examples = Examples(name="zeros", train=dataset, test=dataset, outputs=1)
    (tmp_path / name).write_bytes(b'{"version": 1, "mine": 1}')
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=name):
            convert(examples, tmp_path, overwrite=overwrite)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: b'{"version": 1, "mine": 1}'}


def test_checkpoints_remove_no_file_of_others(tmp_path):
    for step in (1, 2, 5):
        np.savez(tmp_path / f"step-{step:08d}.npz", mine=np.full(2, step))
    store = CheckpointStore(tmp_path, keep=1)
    for step in (3, 4, 5):
        store.save(step, {"w": np.zeros(2)}, {})
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "step-00000001.npz",
        "step-00000002.npz",
        "step-00000005.npz",
        "step-00000005.npz.corrupt",
    }
    assert np.load(tmp_path / "step-00000005.npz.corrupt")["mine"].tolist() == [5, 5]
    assert json.loads(np.load(tmp_path / "step-00000005.npz")["checkpoint.json"])["step"] == 5
