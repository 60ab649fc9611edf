"""The manifest is believed only as far as it is right: as a record, about the files, and about the graph."""

import json
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.atomic.checked_json import CHECKSUM, with_checksum
from tfopt.cli import main
from tfopt.errors import ArtifactError, ConfigError
from tfopt.exporting import ExportConfig, export, verify
from tfopt.exporting.manifest import MANIFEST_FORMAT, read_intact_manifest, read_manifest
from tfopt.exporting.verification.verify import find_baseline

X = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """float32/, int8/ of the same model, and the float model's own outputs. Read only."""
    root = tmp_path_factory.mktemp("manifests")
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(16, activation="relu")
    model = keras.Sequential([keras.Input((8,), name="x"), hidden, layers.Dense(100)])
    export(model, root / "float32")
    int8 = ExportConfig(precision="int8", int8_nodes="all")
    export(model, root / "int8", int8, calibration_data=X, baseline=root / "float32")
    return root


@pytest.fixture
def artifact(artifacts, tmp_path):
    """A copy of int8/ beside its baseline, to be damaged."""
    shutil.copytree(artifacts / "float32", tmp_path / "float32")
    return shutil.copytree(artifacts / "int8", tmp_path / "int8")


@pytest.fixture
def no_process(monkeypatch):
    """Starting a process would be a FileNotFoundError."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


def change(artifact, function):
    """Changes the manifest's JSON by a function of it, as if an export had written it so."""
    file = artifact / "manifest.json"
    manifest = json.loads(file.read_text())
    function(manifest)
    file.write_text(json.dumps(with_checksum(manifest)))


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_what_export_writes_is_read_back(artifacts):
    manifest = read_intact_manifest(artifacts / "int8")
    assert (manifest.format, manifest.precision, manifest.is_float) == (MANIFEST_FORMAT, "int8", False)
    assert manifest.signatures == ("serving_default",)
    assert manifest.signature.inputs["x"].shape == (None, 8)
    assert manifest.signature.outputs["output_0"].op == "MatMul"
    assert manifest.check.outputs.keys() == {"source", "artifact"}
    assert read_intact_manifest(artifacts / "float32").report is None


KEYS = ["tfopt", "tensorflow", "model", "precision", "requires", "signature", "files", "check"]
KEYS += ["signature.inputs", "signature.outputs", "check.ranges", "check.shapes", "check.outputs"]


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key(key, artifact):
    def remove(manifest):
        *path, last = key.split(".")
        for name in path:
            manifest = manifest[name]
        del manifest[last]

    change(artifact, remove)
    with pytest.raises(ArtifactError, match=r"manifest must be .*Export .* again"):
        read_manifest(artifact)


def assign(value, *path):
    def put(manifest):
        for name in path[:-1]:
            manifest = manifest[name]
        manifest[path[-1]] = value

    return put


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (assign("banana", "precision"), "precision is 'banana', which is none of float32"),
        (assign({}, "files"), "files do not list saved_model.pb"),
        (assign(["a"], "files"), "files: input should be an object"),
        (assign({"bytes": 1, "sha256": "0"}, "files", "../other"), "outside of the artifact"),
        (assign("many", "files", "saved_model.pb", "bytes"), "bytes: input should be a valid integer"),
        (assign([], "signatures"), "signatures do not hold 'serving_default'"),
        (assign("float33", "signature", "inputs", "x", "dtype"), "'float33', which TensorFlow does not have"),
        (assign([None, 9], "signature", "inputs", "x", "shape"), r"check.shapes of 'x' is \(2, 8\)"),
        (assign([1.0, 0.0], "check", "ranges", "x"), r"\(1.0, 0.0\), which is not a range"),
        (assign([float("nan"), 0.0], "check", "ranges", "x"), "which is not a range"),
        (assign({}, "check", "ranges"), "check has inputs other than the signature's"),
        (assign({}, "check", "outputs", "artifact"), "check.outputs are not the signature's"),
        (assign({}, "check", "outputs", "serving_nothing"), "check.outputs are those of"),
        (assign(3, "baseline"), "baseline: input should be a valid string"),
    ],
)
def test_wrong_values(function, message, artifact, no_process):
    change(artifact, function)
    with pytest.raises(ArtifactError, match=message):
        verify(artifact)


@pytest.mark.parametrize(
    "edit",
    [
        assign("float16", "precision"),
        assign("none at all", "requires"),
        assign([0.0], "check", "outputs", "source", "output_0", "values"),
        assign({"artifact": {"max_abs": 0.0, "relative": 0.0}}, "check", "errors"),
    ],
    ids=["precision", "requires", "outputs of the source", "errors"],
)
def test_a_manifest_edited_by_hand(edit, artifact, no_process):
    """Each of these is a manifest that an export could have written, and an earlier one wrote it without checksum."""
    file = artifact / "manifest.json"
    manifest = json.loads(file.read_text())
    edit(manifest)
    file.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"manifest must be as tfopt.export wrote it.*checksum does not match"):
        verify(artifact)
    del manifest[CHECKSUM]
    file.write_text(json.dumps(manifest))
    read_manifest(artifact)


def test_what_a_later_version_adds_is_no_fault(artifact):
    change(artifact, assign(["avx2"], "instructions"))
    assert read_intact_manifest(artifact).precision == "int8"


def test_a_file_that_was_added(artifact, no_process):
    (artifact / "assets" / "words.txt").write_text("a")
    with pytest.raises(ArtifactError, match=r"no file that its manifest does not list. Received: .*words.txt"):
        verify(artifact)


def test_a_flipped_bit_in_the_baseline(artifact, no_process):
    flip_a_bit(artifact.parent / "float32" / "saved_model.pb")
    for baseline in (None, artifact.parent / "float32"):
        with pytest.raises(ArtifactError, match=r"The baseline must be as it was written. Received: .*float32"):
            verify(artifact, baseline=baseline)


def test_a_baseline_must_be_a_float_artifact_of_the_same_inputs(artifact, artifacts, tmp_path, no_process):
    with pytest.raises(ConfigError, match=r"baseline must be a float artifact. Received: .*int8, whose precision is"):
        verify(artifact, baseline=artifacts / "int8")
    with pytest.raises(ConfigError, match=r"baseline must be a float artifact. Received: .*int8, whose precision is"):
        export(artifacts / "float32", tmp_path / "again", baseline=artifacts / "int8")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"baseline must be an artifact.*holds no manifest.json"):
            verify(artifact, baseline=path)
    export(keras.Sequential([keras.Input((9,), name="x"), layers.Dense(1)]), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"artifact's inputs, x float32 \[None, 8\].*takes x float32 \[None, 9\]"):
        verify(artifact, baseline=tmp_path / "other")


@pytest.mark.slow
def test_a_baseline_that_is_not_float_any_more_is_not_compared_with(artifact):
    shutil.rmtree(artifact.parent / "float32")
    shutil.copytree(artifact, artifact.parent / "float32")
    receipt = verify(artifact, seconds=0.01)
    assert receipt.show("baseline", "{}").endswith("float32 is not float but int8)")


def test_a_baseline_is_found_through_a_link_to_the_artifact(artifact, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "latest"
    link.symlink_to(artifact)
    monkeypatch.chdir(tmp_path)
    manifest = read_manifest(artifact)
    assert find_baseline(link, manifest, None) == (tmp_path / "float32", "")
    assert find_baseline(link.relative_to(tmp_path), manifest, None) == (Path("float32"), "")


def test_a_baseline_that_computes_something_else(artifact):
    def differ(manifest):
        values = manifest["check"]["outputs"]["artifact"]["output_0"]["values"]
        values[:] = [value + 1 for value in values]

    change(artifact.parent / "float32", differ)
    receipt = verify(artifact, seconds=0.01)
    assert len(receipt.problems) == 1
    assert receipt.problems[0].startswith("Of the baseline: The outputs differ")


@pytest.mark.parametrize("part", ["inputs", pytest.param("outputs", marks=pytest.mark.slow)])
def test_a_signature_that_the_graph_has_not(part, artifact):
    name, shape = {"inputs": ("x", [None, None]), "outputs": ("output_0", [None, 99])}[part]
    change(artifact, assign(shape, "signature", part, name, "shape"))
    with pytest.raises(ArtifactError, match=rf"graph's {part} must be those that its manifest lists: {name} float32"):
        verify(artifact, seconds=0.01)


def test_a_signature_that_is_not_there_is_wrong_use(artifacts, no_process):
    with pytest.raises(ConfigError, match=r"Unknown signature 'nope'. Expected one of: 'serving_default'"):
        verify(artifacts / "int8", signature="nope")


def test_the_command_line_says_wrong_use_before_any_work(artifacts, tmp_path, no_process, capsys):
    """Exit code 2 for what was asked, 1 for what was found."""
    for words in (["--signature", "nope"], ["--baseline", str(tmp_path)], ["--metric", "top5"]):
        assert main(["verify", str(artifacts / "int8"), *words]) == 2
        assert words[1] in capsys.readouterr().err
    damaged = shutil.copytree(artifacts / "float32", tmp_path / "damaged")
    change(damaged, assign({}, "files"))
    assert main(["verify", str(damaged)]) == 1
    assert "files do not list" in capsys.readouterr().err


def test_an_artifact_of_the_first_format(artifact):
    """As tfopt 0.1.0 wrote it: the first 64 values of each output, and neither sums nor ops."""
    artifact = artifact.parent / "float32"
    drawn = np.random.default_rng(0).uniform(-1.0, 2.0, (2, 8)).astype("float32")
    served = tf.saved_model.load(str(artifact)).signatures["serving_default"](x=drawn)["output_0"].numpy()
    values = {"output_0": [float(f"{value:.7g}") for value in served.reshape(-1)[:64].astype("float64")]}

    def age(manifest):
        del manifest["signatures"], manifest["signature"]["outputs"]["output_0"]["op"]
        check = {"ranges": {"x": [-1.0, 2.0]}, "shapes": {"x": [2, 8]}, "source": values, "artifact": values}
        manifest |= {"format": 1, "check": check}

    change(artifact, age)
    receipt = verify(artifact, seconds=0.01)
    assert receipt.ok
    assert receipt.parity_relative_error < 1e-6
    manifest = read_manifest(artifact)
    assert manifest.signatures == ("serving_default",)
    assert len(manifest.check.outputs["source"]["output_0"].values) == 64
