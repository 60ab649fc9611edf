"""`tfopt data` lists, measures and converts examples, and refuses wrong words with one line and code 2."""

import json

import numpy as np
import pytest

from tfopt.cli import main
from tfopt.data import SOURCES


def test_the_sources_are_listed_with_what_they_load(capsys):
    assert main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == list(SOURCES)
    number = next(number for number, line in enumerate(lines) if line.startswith("digits "))
    assert "handwritten digits" in lines[number]
    assert lines[number + 1].split() == ["image_size=32,", "test_fraction=0.2,", "validation_fraction=0.0,", "seed=0"]
    assert any("directory (required), image_size=224" in line for line in lines[1::2])
    assert main(["data", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["digits"]["image_size"], listed["image_folder"]["directory"]) == (32, "required")


@pytest.mark.slow
def test_examples_are_converted_and_the_files_measured(tmp_path, capsys):
    directory = str(tmp_path / "files")
    arguments = ["--arguments", "examples=200", "input_shape=[4]"]
    assert main(["data", "convert", "synthetic", directory, "--shards", "2", *arguments]) == 0
    assert "train 160 in 2, test 40 in 2 files" in capsys.readouterr().out
    read, made = SOURCES["tfrecord"](directory=directory), SOURCES["synthetic"](examples=200, input_shape=(4,))
    np.testing.assert_array_equal(np.sort(read.x_train, axis=0), np.sort(made.x_train, axis=0))
    words = ["--arguments", f"directory={directory}", "--seconds", "0.1", "--step-time-ms", "5", "--batch-size", "20"]
    assert main(["data", "measure", "tfrecord", *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["batches_per_epoch"] == 8
    assert [stage["name"] for stage in report["stages"]][-2:] == ["batch 20", "map check"]
    assert 0 <= report["wait_ms"] < 500  # of a busy machine; here it is a fraction


@pytest.mark.slow
def test_the_pipeline_of_a_recipe_is_measured(capsys):
    assert main(["data", "measure", "digits_cnn", "--seconds", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "together" in printed
    assert "wait of a step: unavailable (step_time_ms was not given)" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"], "Unknown command 'data lst'"),
        (["measure", "digit"], "Unknown source or recipe 'digit'"),
        (["measure", "digits_cnn", "--arguments", "image_size=8"], "a recipe has its own"),
        (["convert", "digits", "x", "--shards", "0"], "shards must be"),
        (["convert", "digits", "x", "--arguments", "size=8"], "arguments must fit the source 'digits'"),
        (["serve", "--workers", "0"], "workers must be a whole number of at least 1"),
        (["serve"], "workers"),
    ],
)
def test_wrong_words_are_refused(words, message, capsys):
    assert main(["data", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_help_lists_the_commands(capsys):
    assert main(["data", "--help"]) == 0
    assert "convert SOURCE DIR" in capsys.readouterr().out
