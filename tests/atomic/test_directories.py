"""Replacing a directory: interrupted at any line, read all the while, by several at once, on a full disk.

The artifacts are hand-made, so that hundreds of replacements take a second.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tfopt.atomic import directories
from tfopt.atomic.directories import check_target, exclusive, staged_directory
from tfopt.errors import ExportError


def write_artifact(directory, number):
    content = bytes([number]) * 1000
    (directory / "saved_model.pb").write_bytes(content)
    (directory / "manifest.json").write_text(json.dumps({"tfopt": "1", "files": {"saved_model.pb": {}}, "n": number}))


def put(final, number):
    with staged_directory(final) as directory:
        write_artifact(directory, number)


def number_of(final):
    """Which artifact it is, once sure that it is whole."""
    number = json.loads((final / "manifest.json").read_text())["n"]
    assert (final / "saved_model.pb").read_bytes() == bytes([number]) * 1000
    assert len(list(final.iterdir())) == 2
    return number


@pytest.fixture
def memory():
    """A directory in memory where the system has such, in which hundreds of flushes take no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    """Either the file system exchanges names, or it does not."""
    if request.param == "two renames":
        monkeypatch.setattr(directories, "_exchange", lambda one, other: False)
    return request.param


def put_interrupted(final, number, line):
    """Puts an artifact, with Ctrl-C before the given line of ours is run. Returns whether there was such a line."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if frame.f_code.co_filename != directories.__file__:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        put(final, number)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_interrupted_at_any_line_the_old_or_the_new_artifact_is_there(way, memory):
    final = memory / "a"
    put(final, 1)
    line, found = 1, set()
    while put_interrupted(final, 2, line):
        number = number_of(final)
        found.add(number)
        put(final, 1)
        assert [path.name for path in memory.iterdir()] == ["a"]
        line += 1
    assert found == {1, 2}
    assert line > 100


def test_an_error_at_any_point_of_writing_leaves_the_old_artifact(way, tmp_path):
    final = tmp_path / "a"
    put(final, 1)
    with pytest.raises(TypeError), staged_directory(final) as directory:
        write_artifact(directory, "two")
    assert number_of(final) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


READS_UNTIL_TOLD = """
import os, sys
path, stop = sys.argv[1:]
reads = missed = 0
print("ready", flush=True)
while reads % 100 or not os.path.exists(stop):
    try:
        with open(path) as file:
            assert file.read()
    except FileNotFoundError:
        missed += 1
    reads += 1
print(missed, reads)
"""


def test_a_reader_never_finds_nothing(memory):
    final, stop = memory / "a", memory / "stop"
    put(final, 0)
    reader = subprocess.Popen(
        [sys.executable, "-I", "-c", READS_UNTIL_TOLD, str(final / "manifest.json"), str(stop)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout.readline() == "ready\n"
    for number in range(60):
        put(final, number)
    stop.touch()
    missed, reads = map(int, reader.communicate()[0].split())
    assert reads > 60
    assert missed == 0


@pytest.fixture
def frequent_switches():
    """Threads take turns 500 times as often as usual, so that they meet between two renames."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_that_export_to_one_target(way, memory):
    final = memory / "a"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: put(final, number), range(60)))  # raises what a thread raised
    assert number_of(final) in range(60)
    assert [path.name for path in memory.iterdir()] == ["a"]


START = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_directories import directories, put, staged_directory, write_artifact
"""

AS_PROCESS_ONE = (
    START
    + """
assert os.getpid() == 1
for number in range(20):
    put(Path(sys.argv[1]), number)
"""
)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root may make PID namespaces")
def test_two_containers_that_export_to_one_target(memory):
    """In each of them the process has the id 1."""
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", AS_PROCESS_ONE, str(memory / "a")]
    containers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [(container.communicate()[1], container.returncode) for container in containers]
    assert [code for _, code in ended] == [0, 0], ended
    assert number_of(memory / "a") == 19
    assert [path.name for path in memory.iterdir()] == ["a"]


DIES_AT_WORK = (
    START
    + """
final = Path(sys.argv[1])
if sys.argv[2] == "moved aside":
    put(final, 1)
    directories._exchange = lambda one, other: False
    rename = Path.rename
    Path.rename = lambda self, to: os._exit(9) if to == final else rename(self, to)
with staged_directory(final) as directory:
    write_artifact(directory, 2)
    if sys.argv[2] == "writing":
        os._exit(9)
"""
)


@pytest.mark.parametrize(("when", "number"), [("writing", None), ("moved aside", 1)])
def test_what_a_killed_process_left_is_cleared_and_what_it_moved_aside_comes_back(when, number, tmp_path, fresh_python):
    final = tmp_path / "a"
    assert fresh_python("-c", DIES_AT_WORK, final, when, imported="nothing").returncode == 9
    assert len(list(tmp_path.iterdir())) == 1
    assert not final.exists()
    check_target(final)
    assert [number_of(path) for path in tmp_path.iterdir()] == ([] if number is None else [number])


def test_what_another_is_writing_is_left_alone(tmp_path):
    with staged_directory(tmp_path / "a") as first:
        write_artifact(first, 1)
        put(tmp_path / "a", 2)  # by the process that writes the other: only the lock tells
        assert first.is_dir()
        assert number_of(tmp_path / "a") == 2
    assert number_of(tmp_path / "a") == 1


def test_files_put_there_while_it_is_written_are_not_lost(tmp_path):
    final = tmp_path / "a"

    def write_both():
        with staged_directory(final) as directory:
            write_artifact(directory, 1)
            final.mkdir()
            (final / "mine.txt").write_text("notes")

    with pytest.raises(ExportError, match="holds something else"):
        write_both()
    assert (final / "mine.txt").read_text() == "notes"


def test_an_artifact_inside_an_artifact_is_refused(tmp_path):
    put(tmp_path / "a", 1)
    for inner in (tmp_path / "a" / "b", tmp_path / "a" / "deep" / "b"):
        with pytest.raises(ExportError, match=r"must not lie inside an artifact.*inside the artifact .*/a\."):
            check_target(inner)
    assert number_of(tmp_path / "a") == 1


def test_a_name_that_is_no_utf_8_is_refused_before_the_work(tmp_path):
    with pytest.raises(ExportError, match="text in UTF-8"):
        check_target(tmp_path / "out\udcff")
    check_target(tmp_path / "out é")


def test_nothing_is_left_where_the_process_has_too_many_open_files(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def write_with_one_file_left():
        with staged_directory(tmp_path / "artifact") as new:
            (new / "variables" / "shards").mkdir(parents=True)
            (new / "variables" / "shards" / "0").write_text("weights")
            with Path(os.devnull).open() as free:
                resource.setrlimit(resource.RLIMIT_NOFILE, (free.fileno(), limits[1]))
            (new / "manifest.json").write_text("{}")

    try:
        with pytest.raises(ExportError, match="Too many open files"):
            write_with_one_file_left()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert list(tmp_path.iterdir()) == []


def test_who_is_refused_leaves_the_empty_directory_of_the_one_at_work(tmp_path):
    directory = tmp_path / "records"
    with exclusive(directory):
        with pytest.raises(ExportError, match="One run at a time"), exclusive(directory):
            pass
        (directory / "file").write_text("")
    assert (directory / "file").exists()


def test_of_several_at_once_one_works_in_a_directory_that_stays(tmp_path):
    directory = tmp_path / "records"

    def work(number):
        try:
            with exclusive(directory):
                (directory / "file").write_text("")
                (directory / "file").unlink()
        except ExportError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(200))) > 0
    assert not directory.exists()
