"""What reaches the terminal and the page: no control characters; and what happens where an output cannot be written."""

import io
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.reporting.test_html_page import sample_report
from tfopt.cli import main
from tfopt.errors import ConfigError
from tfopt.hardware.gpus import card_name
from tfopt.recipe import Recipe
from tfopt.report.run_report import run_of
from tfopt.report.sheet import Sheet, Table
from tfopt.reporting.html_page import write_html
from tfopt.terminal import PrintableConsole, printable, working

EVIL = "a\x1b[2J\x07\x9b31m\u202egpj.exe\u2028<b>"
SHOWN = "a\\x1b[2J\\x07\\x9b31m\\u202egpj.exe\\u2028<b>"
CONTROLS = ("\x1b", "\x07", "\x9b", "\u202e", "\u2028")


def test_control_characters_are_shown_and_not_obeyed(tmp_path):
    assert printable(EVIL) == SHOWN
    assert printable("größe\n\t✓ 日本 \ud800") == "größe\n\t✓ 日本 \\ud800"
    shown = io.StringIO()
    PrintableConsole(file=shown, force_terminal=True, width=80).print(EVIL, style="red", markup=False, highlight=False)
    bell = "\\x07"  # rich leaves it out
    assert shown.getvalue() == f"\x1b[31m{SHOWN.replace(bell, '')}\x1b[0m\n"  # its own colours stay
    page = write_html(run_of(None, name=EVIL), tmp_path / "report.html").read_text()
    for text in (page, Sheet(title=EVIL, note=EVIL, tables=[Table(rows=[[EVIL]])]).html()):
        assert SHOWN.replace("<b>", "&lt;b&gt;") in text
        assert not [each for each in CONTROLS if each in text]


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "a\u202eb", "a\x00"])
def test_the_name_of_a_recipe_is_one_line(name, tmp_path, capsys):
    with pytest.raises(ConfigError, match="name must be one line without control characters"):
        Recipe(name=name)
    (tmp_path / "evil.toml").write_text(f"name = {json.dumps(name)}")
    assert main(["recipes", str(tmp_path / "evil.toml")]) == 2
    assert not [each for each in CONTROLS if each in capsys.readouterr().err]


def test_no_command_prints_the_control_characters_of_a_word(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.toml").write_text(f'name = "good"\ndescription = {json.dumps(EVIL)}')
    for words in (["recipes", "evil.toml"], ["verify", EVIL], ["report", EVIL], ["run", EVIL], [EVIL], ["init", EVIL]):
        main(words)
        said = capsys.readouterr()
        assert not [each for each in CONTROLS if each in said.out + said.err], words


STREAMS = {
    "recipes --json >/dev/full": (3, "tfopt: the output could not be written"),
    "recipes >/dev/full 2>/dev/full": (3, ""),
    "recipes >&-": (0, ""),
    "recipes nosuch 2>&-": (2, ""),
}


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.slow] * ("2>/dev/full" in each)) for each in STREAMS]
)
def test_an_output_that_cannot_be_written_is_no_failed_check(command):
    code, words = STREAMS[command]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["/bin/sh", "-c", f"{shlex.quote(sys.executable)} -m tfopt {command}"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1 if words else 0), done.stderr
    assert words in done.stderr


@pytest.mark.parametrize("stream", ["stdout", pytest.param("stderr", marks=pytest.mark.slow)])
def test_a_script_may_close_its_output(stream, tmp_path, fresh_python):
    script = tmp_path / "closes.py"
    script.write_text(f"import sys; print('done'); sys.{stream}.close(); sys.exit(5)")
    done = fresh_python("-m", "tfopt", "accelerate", script)
    assert (done.returncode, done.stdout) == (5, "done\n"), done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("depth", [900, 100_000])
def test_values_that_are_nested_too_deeply_are_wrong_use(depth, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deep = "[" * depth + "]" * depth
    (tmp_path / "deep.toml").write_text(f'name = "deep"\n[model]\narguments = {{ units = {deep} }}')
    (tmp_path / "manifest.json").write_text(f'{{"files": {deep}}}')
    assert main(["recipes", "deep.toml"]) == 2
    assert "deep.toml" in capsys.readouterr().err
    assert main(["report", "."]) == 2
    assert main(["verify", "."]) == 2
    assert "manifest" in capsys.readouterr().err
    monkeypatch.setenv("TF_CONFIG", deep)
    from tfopt.training.distributed.cluster import find_cluster

    with pytest.raises(ConfigError, match="TF_CONFIG"):
        find_cluster(os.environ)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report LOOP", "a path cannot be used"),
        ("init LOOP", "LOOP"),
        (f"init {'x' * 5000}", "File name too long"),
        (f"report {'x' * 5000}", "File name too long"),
        (f"run {'x' * 5000}", "Unknown recipe"),
        ("run null.toml", "embedded null byte"),
        ("data serve --workers 2 --port 65534", "port must leave room for the workers"),
    ],
)
def test_a_path_that_cannot_be_is_no_bug_of_tfopt(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LOOP").symlink_to("LOOP")
    (tmp_path / "null.toml").write_text('name = "n"\nexport_dir = "a\\u0000"')
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert len(line) < 700


def test_a_card_has_short_names():
    assert [card_name(name) for name in ("H100", "h200 nvl", "NVIDIA A100-SXM4-80GB", "v100", "T4")] == [
        "H100 HBM3",
        "H200 NVL",
        "A100 SXM4 80GB",
        "V100 SXM2",
        "T4",
    ]
    for name in ("", "H1000", "RTX 9090"):
        with pytest.raises(ConfigError, match="Unknown card"):
            card_name(name)


def test_a_lower_error_is_called_better(tmp_path):
    report = sample_report()
    first, *_ = report.receipts.values()
    error = replace(first, accuracy=None, scores={"mean_absolute_error": 0.5}, higher_is_better=False)
    lower = replace(error, scores={"mean_absolute_error": 0.27})
    receipts = {"float32": error, "int8": lower}
    page = write_html(replace(run_of(None, name="a"), receipts=receipts), tmp_path / "report.html").read_text()
    assert "-46.00% (better)" in page
    assert 'class="value marked"' not in page


class Terminal(io.StringIO):
    def isatty(self):
        return True


def wait_for(stream, words):
    """Waits until a terminal shows words; a file never does."""
    for _ in range(6000 if stream.isatty() else 10):
        if words in stream.getvalue():
            break
        time.sleep(0.01)


def test_a_terminal_shows_a_sign_of_life_and_a_file_does_not(monkeypatch):
    monkeypatch.setattr("tfopt.terminal.SECONDS_BETWEEN_DRAWINGS", 0.01)
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with working("measuring") as now, working("within"):
            wait_for(stream, "measuring, 0 s")
            now("measuring the input")
            wait_for(stream, "measuring the input")
        shown = stream.getvalue()
        if stream.isatty():
            assert "tfopt: measuring, 0 s" in shown
            assert "measuring the input" in shown
            assert "within" not in shown
            assert shown.endswith("\r\x1b[2K")
        else:
            assert shown == ""
