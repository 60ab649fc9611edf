"""What a server should set: what is measured, how it gets into the manifest, and where it is used."""

import json
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace

import keras
import numpy as np
import pytest

from tfopt import tune_serving
from tfopt.atomic.checked_json import with_checksum
from tfopt.cli import main
from tfopt.errors import ArtifactError, ConfigError, ExportError
from tfopt.exporting import ExportConfig, export, inspect, publish, verify
from tfopt.exporting.manifest import read_intact_manifest, read_manifest
from tfopt.exporting.serving_settings import write_tuned
from tfopt.hardware import detect
from tfopt.report import ServingReport, ThreadTimes
from tfopt.report.tuned_serving import tuned

ALONE = ThreadTimes(batch_size=1, threads=(1, 4), latency_ms_median=(5.0, 4.0), best_threads=4)
BRIEFLY = {"seconds": 0, "limit_s": 0.001}
# Examples in a second of each turn, by batch size and threads, on 4 cores.
RATES = {
    (1, 1): [300.0, 320.0, 310.0], (1, 4): [200.0, 210.0, 190.0],
    (8, 1): [970.0, 960.0, 980.0], (8, 4): [600.0, 610.0, 620.0],
    (16, 1): [900.0, 890.0, 910.0], (16, 4): [1000.0, 990.0, 1010.0],
}  # fmt: skip


def settings(**changes):
    """The settings that follow from RATES, as if measured on this machine."""
    machine = detect()
    found = tuned(RATES, [ALONE], device=machine.device(), cores=4, format="saved_model", runtime="TensorFlow")
    return replace(found, **{"cores": machine.logical_cores, **changes})


@pytest.fixture(scope="module", autouse=True)
def _no_pauses():
    """Threads that spin after their turn do not matter to what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfopt.exporting.verification.tune_serving.PAUSE_S", 0.0)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """An artifact in two formats, a SavedModel of Keras, and an ONNX file of far more work."""
    root = tmp_path_factory.mktemp("served")
    keras.utils.set_random_seed(0)
    small = keras.Sequential([keras.Input((32,), name="row"), keras.layers.Dense(16), keras.layers.Dense(4)])
    large = keras.Sequential([keras.Input((32,), name="row"), *(keras.layers.Dense(1024) for _ in range(4))])
    export(small, root / "saved_model")
    export(small, root / "small", ExportConfig(format="onnx"))
    export(large, root / "large", ExportConfig(format="onnx"))
    small.export(str(root / "foreign"), verbose=False)
    return root


@pytest.fixture
def artifact(models, tmp_path):
    return shutil.copytree(models / "saved_model", tmp_path / "artifact")


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_settings_are_the_knee_of_the_fastest_threads():
    found = settings(cores=4)
    assert [(each.batch_size, each.calls, each.threads) for each in found.curve] == [(1, 4, 1), (8, 4, 1), (16, 1, 4)]
    assert (found.batch_size, found.calls, found.threads) == (8, 4, 1)  # within 5% of batches of 16
    assert found.chosen.examples_per_s == 970
    np.testing.assert_allclose(found.chosen.call_ms, 1e3 * 4 * 8 / 970)
    assert found.many_requests.batches_pay
    slower = {key: rates if key[0] < 16 else [2 * rate for rate in rates] for key, rates in RATES.items()}
    far = tuned(slower, [ALONE], device="a processor", cores=4, format="onnx", runtime="")
    assert (far.batch_size, far.calls, far.threads) == (16, 1, 4)


def test_an_artifact_is_measured_and_its_manifest_has_the_settings(artifact, fresh_python):
    before = contents(artifact)
    report = tune_serving(artifact, batch_sizes=(4, 1), threads=(1, 64), **BRIEFLY)
    (row,) = report.models
    cores = detect().logical_cores
    assert report.ok
    assert row.written
    assert [each.batch_size for each in row.tuned.curve] == [1, 4]
    assert {each.threads for each in row.tuned.alone} == {(1, cores) if cores > 1 else (1,)}
    assert all(each.calls == max(cores // each.threads, 1) for each in row.tuned.curve)
    assert row.tuned.turns >= 3
    assert (row.tuned.device, row.tuned.cores) == (detect().device(), cores)
    after = contents(artifact)
    assert after.keys() == before.keys()
    assert [name.name for name, content in after.items() if content != before[name]] == ["manifest.json"]
    assert read_intact_manifest(artifact).tuned == row.tuned
    assert [path.name for path in artifact.parent.iterdir()] == ["artifact"]
    program = (
        "from pathlib import Path; from tfopt.exporting.manifest import read_intact_manifest\n"
        f"print(read_intact_manifest(Path({str(artifact)!r})).tuned.batch_size)"
    )
    assert fresh_python("-c", program).stdout.split() == [str(row.tuned.batch_size)]
    receipt = verify(artifact, seconds=0)
    assert receipt.ok
    assert any(note.startswith("serving: batches of") and "measured on this machine" in note for note in receipt.notes)
    assert ServingReport.from_json(report.to_json()) == report
    assert "has these settings" in str(report)
    assert max(map(len, str(report).splitlines())) <= 100


@pytest.mark.timed
def test_larger_batches_pay_where_calls_cost_more_than_the_work(models):
    report = tune_serving(models / "small", batch_sizes=(1, 64), threads=(1,), seconds=0.02, write=False)
    assert report.models[0].tuned.batch_size == 64
    assert report.models[0].tuned.chosen.examples_per_s > 2 * report.models[0].tuned.curve[0].examples_per_s


@pytest.mark.slow
def test_of_several_models_the_one_with_the_least_work_is_named(models):
    before = {name: contents(models / name) for name in ("small", "large", "foreign")}
    paths = [models / name for name in ("large", "small", "foreign")]
    report = tune_serving(paths, batch_sizes=(64,), threads=(1,), seconds=0.01, limit_s=0.001, write=False)
    assert [(each.requests, each.model) for each in report.fastest] == [
        ("many requests", "small"),
        ("one request", "small"),
    ]
    assert report.fastest[0].shares["large"].median < 0.5
    assert [each.not_written for each in report.models] == [
        *["as asked"] * 2,
        "it has no manifest, which only artifacts of tfopt.export have",
    ]
    assert {name: contents(models / name) for name in before} == before
    assert len(report.models[2].tuned.curve) == 1


def test_a_model_that_fails_is_a_row_and_its_manifest_stays(models, artifact):
    (artifact / "saved_model.pb").write_bytes(b"damaged")
    before = contents(artifact)
    report = tune_serving([artifact, models / "small"], batch_sizes=(1,), threads=(1,), write=False, **BRIEFLY)
    assert not report.ok
    assert "must be as it was written" in report.models[0].failure
    assert report.models[1].tuned is not None
    assert contents(artifact) == before
    with pytest.raises(ArtifactError, match=r"At least one model must run.*must be as it was written"):
        tune_serving(artifact)
    assert main(["tune", str(artifact)]) == 1
    assert contents(artifact) == before


def test_an_artifact_that_was_replaced_meanwhile_is_left(artifact):
    measured = read_manifest(artifact)
    export(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), artifact)
    before = contents(artifact)
    with pytest.raises(ArtifactError, match="was replaced meanwhile"):
        write_tuned(artifact, measured, settings())
    assert contents(artifact) == before


@contextmanager
def file_size_limit(most):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_leaves_the_earlier_manifest(artifact):
    write_tuned(artifact, read_manifest(artifact), settings())
    before, measured = contents(artifact), read_manifest(artifact)
    with file_size_limit(500), pytest.raises(ExportError, match="could not be written"):
        write_tuned(artifact, measured, settings(batch_size=1))
    assert contents(artifact) == before
    assert [path.name for path in artifact.parent.iterdir()] == ["artifact"]
    read_intact_manifest(artifact)


def test_a_link_to_an_artifact_stays_a_link(artifact):
    link = artifact.parent / "current"
    link.symlink_to("artifact")
    write_tuned(link, read_manifest(link), settings())
    assert link.is_symlink()
    assert read_intact_manifest(artifact).tuned == settings()


def test_a_manifest_of_an_earlier_version_has_no_settings(artifact):
    content = read_manifest(artifact).to_dict()
    del content["tuned"]
    (artifact / "manifest.json").write_text(json.dumps(with_checksum(content)))
    assert read_intact_manifest(artifact).tuned is None


@pytest.mark.parametrize("change", [{"threads": 0}, {"batch_size": 3}, {"curve": []}, {"calls": "2; evil"}])
def test_settings_that_cannot_be_are_refused(artifact, change):
    write_tuned(artifact, read_manifest(artifact), settings())
    content = json.loads((artifact / "manifest.json").read_text())
    content["tuned"] |= change
    (artifact / "manifest.json").write_text(json.dumps(with_checksum(content)))
    with pytest.raises(ArtifactError, match=r"must be as tfopt.export wrote it.*tuned"):
        read_manifest(artifact)


def test_servers_are_told_what_was_measured_on_this_machine(models, artifact, tmp_path):
    write_tuned(artifact, read_manifest(artifact), settings())
    published = publish(artifact, tmp_path / "repository", batch_sizes=(1, 2), warm_up=False)
    text = (tmp_path / "repository" / "artifact" / "1" / "batching_params.pbtxt").read_text()
    assert text == "max_batch_size { value: 8 }\nnum_batch_threads { value: 4 }\nbatch_timeout_micros { value: 0 }\n"
    (flags,) = published.report.notes
    assert flags.detail == "--tensorflow_intra_op_parallelism=1 --tensorflow_inter_op_parallelism=4"
    onnx = shutil.copytree(models / "small", tmp_path / "onnx")
    write_tuned(onnx, read_manifest(onnx), settings(format="onnx", batch_size=16, calls=1, threads=4))
    publish(onnx, tmp_path / "repository")
    config = (tmp_path / "repository" / "onnx" / "config.pbtxt").read_text().splitlines()
    warm = next(line for line in config if line.startswith("model_warmup") and "batch_size: 16" in line)
    assert "dims: [ 16" not in warm  # Triton adds the batch itself
    assert {
        "max_batch_size: 16",
        "dynamic_batching { preferred_batch_size: [ 16 ] }",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
        'parameters { key: "intra_op_thread_count" value: { string_value: "4" } }',
    } <= set(config)


def test_settings_of_another_machine_are_named_and_not_used(artifact, tmp_path):
    write_tuned(artifact, read_manifest(artifact), settings(device="another processor", cores=999))
    words = "measured on another processor, 999 cores, and this is"
    published = publish(artifact, tmp_path / "repository", warm_up=False)
    assert not (tmp_path / "repository" / "artifact" / "1" / "batching_params.pbtxt").exists()
    assert any(words in each.reason for each in published.report.skipped)
    assert words in " ".join(verify(artifact, seconds=0).notes)
    assert words in " ".join(str(inspect(artifact)).split())
    assert inspect(artifact).tuned.cores == 999
    publish(artifact, tmp_path / "repository", warm_up=False, any_machine=True)
    assert (tmp_path / "repository" / "artifact" / "2" / "batching_params.pbtxt").exists()


@pytest.mark.slow
def test_the_command(models, artifact, capsys):
    before = contents(artifact)
    assert main(["tune", "--json", "--no-write", "--max-batch-size", "1", str(artifact)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["models"][0]["tuned"]["batch_size"] == 1
    assert contents(artifact) == before
    for words, message in (
        (["--no-write", "digits_cnn"], "write is for models to serve"),
        (["--minutes", "1", str(artifact)], "minutes is for trainings"),
        ([str(artifact), "--no-write"], "The options must stand before the models"),
        ([str(artifact), "nowhere"], "A model must exist"),
    ):
        assert main(["tune", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"batch_sizes": ()}, {"threads": (0,)}, {"seconds": -1}, {"limit_s": 0}])
def test_settings_out_of_range(models, wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        tune_serving(models / "small", **wrong)
