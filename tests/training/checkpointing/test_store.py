"""The store survives damage, kills, full disks and several processes, with real files and real processes."""

import fcntl
import json
import os
import random
import subprocess
import sys
import textwrap
import time
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest

from tfopt.errors import ArtifactError, ConfigError, ExportError, TfoptWarning
from tfopt.training.checkpointing import store
from tfopt.training.checkpointing.store import CheckpointStore, read_checkpoint

ARRAYS = {
    "model/0000": np.arange(12, dtype=np.float32).reshape(3, 4),
    "transposed": np.arange(12, dtype=np.float64).reshape(3, 4).T,
    "strided": np.arange(12, dtype=np.int16)[::3],
    "scalar": np.array(7, dtype=np.int64),
    "numpy scalar": np.float16(0.5),
    "flag": np.array(True),
    "empty": np.zeros(0, dtype=np.uint8),
    "no elements": np.zeros((3, 0, 2), dtype=np.float32),
    "complex": np.array([1 + 2j]),
    "bfloat16": np.array([1.5, -2.25, np.inf]).astype(ml_dtypes.bfloat16),
    "bfloat16 scalar": np.array(3).astype(ml_dtypes.bfloat16),
    "float8": np.array([[0.5, 448.0]]).astype(ml_dtypes.float8_e4m3fn),
    "int4": np.array([-8, 7]).astype(ml_dtypes.int4),
    "nan payload": np.array([0x7FC12345], dtype=np.uint32).view(np.float32),
    "text": np.array(["a", "bc"]),
    "file": np.zeros(1),
    "name.npy": np.ones(1),
    "größe/层": np.full(2, 2.0),
    "long" * 10_000: np.full(1, 3.0),
}
META = {"epoch": 3, "nested": {"list": [1, None, 2.5, "größe"]}}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        value = np.asarray(value)
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


def test_everything_comes_back_bit_by_bit(tmp_path):
    store = CheckpointStore(tmp_path / "new" / "deep")
    assert store.load_newest() is None
    path = store.save(1234, ARRAYS, META)
    assert path.name == "step-00001234.npz"
    newest = store.load_newest()
    assert (newest.path, newest.step, newest.meta) == (path, 1234, META)
    same(newest.arrays, ARRAYS)


def test_no_arrays_and_no_meta(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(np.int64(0), {}, {})
    assert (store.load_newest().step, store.load_newest().arrays) == (0, {})


def test_numpy_reads_the_file_anywhere(tmp_path):
    path = CheckpointStore(tmp_path).save(5, {"w": np.arange(3)}, {})
    with np.load(path) as file:
        assert file["w"].tolist() == [0, 1, 2]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}


def test_equal_states_are_equal_files(tmp_path):
    first = CheckpointStore(tmp_path / "a").save(5, ARRAYS, META)
    assert CheckpointStore(tmp_path / "b").save(5, ARRAYS, META).read_bytes() == first.read_bytes()


def test_rotation_counts_steps_and_not_names(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 99_999_999, 100_000_000, 100_000_001):
        store.save(step, {}, {})
    assert store.steps() == [100_000_000, 100_000_001]
    assert store.load_newest().step == 100_000_001


def test_the_same_step_is_replaced_and_later_ones_stay(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(9, {}, {})
    for value in (1, 2):
        store.save(4, {"w": np.array(value)}, {})
    assert store.steps() == [4, 9]
    assert read_checkpoint(store.path(4)).arrays["w"] == 2


def test_other_files_are_left_alone(tmp_path):
    for name in ("step-1.npz", "notes.txt", "step-00000001.npz.bak", ".step-00000001.npz"):
        (tmp_path / name).write_text("mine")
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {}, {})
    store.save(2, {}, {})
    assert len(list(tmp_path.iterdir())) == 5
    assert store.steps() == [2]


def test_flipped_bytes_never_give_wrong_data(tmp_path):
    path = CheckpointStore(tmp_path).save(1, {k: v for k, v in ARRAYS.items() if len(k) < 100}, META)
    good, rng, refused = path.read_bytes(), random.Random(0), 0
    expected = read_checkpoint(path).arrays
    # The directory at the end is where zipfile has most to misread, so every byte of it is damaged too.
    ends = range(len(good) - 400, len(good))
    for offset in [*(rng.randrange(len(good)) for _ in range(600)), *ends]:
        bad = bytearray(good)
        bad[offset] ^= rng.randrange(1, 256)
        path.write_bytes(bad)
        try:
            checkpoint = read_checkpoint(path)
        except ArtifactError:
            refused += 1
        else:  # a byte that means nothing, such as a date
            same(checkpoint.arrays, expected)
            assert checkpoint.meta == META
    assert refused > 500


def test_any_truncation_and_any_extension_is_refused_or_right(tmp_path):
    path = CheckpointStore(tmp_path).save(1, {"w": np.arange(50)}, META)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(ArtifactError, match=r"step-00000001\.npz"):
            read_checkpoint(path)
    for garbage in (b"\0", b"\0" * 70_000, good[:100]):
        path.write_bytes(good + garbage)
        try:
            same(read_checkpoint(path).arrays, {"w": np.arange(50)})
        except ArtifactError:
            continue


@pytest.mark.parametrize("damage", [b"", b"PK", b"\0" * 4096, "directory", "pipe"])
def test_falls_back_to_the_one_before_and_says_so(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"w": np.array(step)}, {})
    store.path(3).unlink()
    if damage == "directory":
        store.path(3).mkdir()
    elif damage == "pipe":
        os.mkfifo(store.path(3))
    else:
        store.path(3).write_bytes(damage)
    with pytest.warns(TfoptWarning, match=r"step-00000003\.npz.*Going back to step 2"):
        assert store.load_newest().arrays["w"] == 2
    assert store.path(3).exists()  # other workers may be reading

    store.save(4, {"w": np.array(4)}, {})
    assert store.steps() == [1, 2, 4]
    assert (tmp_path / "step-00000003.npz.corrupt").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load_newest().step == 4


def test_none_readable_is_an_error_that_names_all(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, {}, {}).write_bytes(b"broken")
    with pytest.raises(ArtifactError, match=r"where none is.*step-00000002.*step-00000001"):
        store.load_newest()


def test_renamed_foreign_and_newer_files_are_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {"w": np.ones(2)}, {}).rename(store.path(7))
    with pytest.raises(ArtifactError, match="it holds step 1"):
        read_checkpoint(store.path(7))
    np.savez(store.path(8), w=np.ones(2))
    with pytest.raises(ArtifactError, match=r"holds no checkpoint\.json"):
        read_checkpoint(store.path(8))
    with zipfile.ZipFile(store.path(9), "w") as archive:
        archive.writestr("checkpoint.json", json.dumps({"format": 2, "step": 9}))
    with pytest.raises(ArtifactError, match="its format is 2"):
        read_checkpoint(store.path(9))
    with pytest.raises(ArtifactError, match="No such file"):
        read_checkpoint(store.path(10))


def test_a_record_edited_by_hand_is_refused_and_one_of_an_earlier_version_is_read(tmp_path):
    path = CheckpointStore(tmp_path).save(5, {"a": np.ones(2)}, {"in_epoch": 3})

    def edit(change):
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        record = json.loads(members["checkpoint.json"])
        change(record)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in (members | {"checkpoint.json": json.dumps(record)}).items():
                archive.writestr(name, content)

    edit(lambda record: record["meta"].update(in_epoch=7))
    with pytest.raises(ArtifactError, match=r"step-00000005.npz \(its checksum does not match"):
        read_checkpoint(path)
    edit(lambda record: record.pop("sha256"))
    assert read_checkpoint(path).meta == {"in_epoch": 7}


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    store = CheckpointStore(tmp_path / "never")
    refused = [
        (-1, {}, {}),
        (1.5, {}, {}),
        (True, {}, {}),
        (1, {"w": np.array([object()])}, {}),
        (1, {"a\0b": np.zeros(1)}, {}),
        (1, {"\ud800": np.zeros(1)}, {}),
        (1, {"n" * 70_000: np.zeros(1)}, {}),
        (1, {3: np.zeros(1)}, {}),
        (1, {}, {"w": np.zeros(1)}),
    ]
    for arguments in refused:
        with pytest.raises(ConfigError, match="Received"):
            store.save(*arguments)
    assert not store.directory.exists()
    for keep in (0, -1, 1.0, True):
        with pytest.raises(ConfigError, match="keep"):
            CheckpointStore(tmp_path, keep=keep)


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file")
    with pytest.raises(ExportError, match="step 1 could not be written"):
        store.save(1, {}, {})
    with pytest.raises(ArtifactError, match="must be readable"):
        store.load_newest()


@pytest.mark.parametrize("place", ["/proc/checkpoints", "file", "file/checkpoints"])
def test_a_directory_that_cannot_be_written_is_known_before_anything_is_saved(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="checkpoint_dir must be a directory that can be written"):
        CheckpointStore(tmp_path / place).check_writable()
    CheckpointStore(tmp_path / "new" / "run").check_writable()
    assert not list((tmp_path / "new" / "run").iterdir())


def process(code, *arguments, **options):
    """Starts a Python process that imports the store, but not TensorFlow, which takes seconds."""
    prelude = f"""
        import importlib.util, resource, sys
        import numpy as np
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("store", {store.__file__!r})
        sys.modules["store"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        CheckpointStore, ExportError = module.CheckpointStore, module.ExportError
    """
    command = [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def test_a_full_disk_leaves_the_earlier_ones(tmp_path):
    code = """
        store = CheckpointStore(Path(sys.argv[1]), keep=1)
        store.save(1, {"w": np.arange(10)}, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            store.save(2, {"w": np.zeros(100_000)}, {})
        except ExportError as error:
            print(error)
    """
    with process(code, tmp_path) as child:
        assert "step 2 could not be written" in child.communicate()[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.npz"]
    assert CheckpointStore(tmp_path).load_newest().arrays["w"].tolist() == list(range(10))


@pytest.mark.slow
def test_killed_at_any_moment_the_directory_loads(tmp_path):
    code = """
        store = CheckpointStore(Path(sys.argv[1]), keep=2)
        step = store.load_newest().step + 1 if store.steps() else 1
        print("ready", flush=True)
        while True:
            store.save(step, {f"w{i}": np.full(200_000, step) for i in range(4)}, {"step": step})
            step += 1
    """
    store, rng, leftovers, last = CheckpointStore(tmp_path, keep=2), random.Random(1), 0, 0
    for _ in range(6):
        with process(code, tmp_path) as child:
            assert child.stdout.readline() == "ready\n"
            time.sleep(0.05 + rng.random() * 0.1)
            child.kill()
        newest = store.load_newest()
        leftovers += any(".tfopt-" in path.name for path in tmp_path.iterdir())
        if newest is None:
            continue
        assert newest.step >= last
        last = newest.step
        assert newest.meta == {"step": last}
        assert all((array == last).all() for array in newest.arrays.values())
        assert len(store.steps()) <= 3  # killed between the new one and the removal of the oldest
    assert last > 6
    assert leftovers > 0  # or the kills came at harmless moments
    store.save(last + 1, {}, {})
    assert [path.name for path in sorted(tmp_path.iterdir())] == [store.path(last).name, store.path(last + 1).name]


def test_the_file_a_living_process_writes_is_not_a_leftover(tmp_path):
    code = """
        import fcntl
        with (Path(sys.argv[1]) / sys.argv[2]).open("xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            print("writing", flush=True)
            sys.stdin.read()
    """
    store, name = CheckpointStore(tmp_path), f".step-00000009.npz.tfopt-{1:032x}"
    with process(code, tmp_path, name, stdin=subprocess.PIPE) as child:
        child.stdout.readline()
        store.save(1, {}, {})
        assert (tmp_path / name).exists()
        child.communicate("")
    store.save(2, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.npz", "step-00000002.npz"]


def test_a_file_of_another_process_with_the_same_id_is_no_obstacle_and_stays(tmp_path):
    """In containers every training is process 1, and some file systems can neither lock nor remove a leftover file."""
    others = [tmp_path / f".step-00000001.npz.tmp-{os.getpid()}", tmp_path / ".nfs000000000000002a00000001"]
    for other in others:
        other.write_text("another's")
    with others[0].open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        CheckpointStore(tmp_path).save(1, {}, {})
    CheckpointStore(tmp_path).save(2, {}, {})
    assert [other.read_text() for other in others] == ["another's"] * 2
    assert CheckpointStore(tmp_path).steps() == [1, 2]
