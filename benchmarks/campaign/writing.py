"""Everything that writes files for a user, and how each is tried: an earlier state, a failure, and a second attempt.

Whatever fails, the earlier state stays as it was, no temporary file is left, and a second attempt without the fault
gives what comes out without it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from campaign.fault import LOST, Bad, digest, expected
from campaign.limits import at_event
from tfopt.errors import TfoptError

TEMPORARY = re.compile(r"\.tfopt-[0-9a-f]{32}|\.tmp-[0-9a-f]{16}|\.tmp$")
WIDTH = 96


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Something that writes into a directory.

    Attributes:
        part: Its name in the table.
        write: Writes to a directory, which holds the state of an earlier call with another seed.
        read: Reads what the last call has written, as a user's call does.
        goes_on: Whether a failed call leaves whole files with which the next call goes on.
        begins_anew: Whether there is no earlier state: another seed may not go on with it.
        share: The share of the faults that it gets; slow writers get fewer.
    """

    part: str
    write: Callable[[Path, int], Any]
    read: Callable[[Path], Any]
    goes_on: bool = False
    begins_anew: bool = False
    share: float = 1.0
    seconds: float = 240.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a writer does without a fault.

    Attributes:
        digest: Of what is read in the end.
        bytes: What it adds to a disk.
        largest: Bytes of its largest file.
        events: How often Python opens, makes, renames or removes something in the directory.
    """

    digest: str
    bytes: int
    largest: int
    events: int


def place_of(place: Path) -> Path:
    return place / "disk"


def listing(directory: Path) -> dict[str, str]:
    """Returns the files below a directory with the digests of their contents."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def attempt(
    writer: Writer, disk: Path, fault: Any, undo: Callable[[], None] = lambda: None, right: str | None = None
) -> Any:
    """Writes with a fault, a context that is entered around it, and returns what can be read afterwards.

    Args:
        undo: Ends the fault before the second attempt, where leaving the context does not.
        right: The digest of what a second attempt gives; None if that fails as the first one does.
    Raises:
        Bad: The earlier state has changed, a temporary file is left, or a second attempt gives something else.
        Exception: What the failed attempt has raised, if all that holds.
    """
    before = listing(disk) if disk.is_dir() else {}
    others = temporary_files()
    failure = None
    try:
        with fault:
            writer.write(disk, 1)
    except Exception as error:  # noqa: BLE001 - it is raised again below
        failure = error
    undo()
    if left := temporary_files() - others:
        raise Bad(LOST, f"left in TMPDIR: {min(left)}")
    check_left(writer, disk, before, failure, right)
    if failure is None:
        return writer.read(disk)
    if right is not None:
        check_again(writer, disk, failure, right)
    if not isinstance(failure, TfoptError | MemoryError):
        raise RuntimeError(f"no word of tfopt: {failure!r}") from failure
    raise failure


def temporary_files() -> set[str]:
    """Returns the names in TMPDIR, but for those that TensorFlow removes as the process ends."""
    try:
        names = {path.name for path in Path(os.environ["TMPDIR"]).iterdir()}
    except OSError:
        return set()
    return {name for name in names if not name.startswith("__autograph_generated_file")}


def check_left(writer: Writer, disk: Path, before: dict[str, str], failure: object, right: str | None) -> None:
    """Raises Bad if there is a temporary file, or a failure has left neither the earlier state nor the new one."""
    if disk.is_dir() and (left := [path.name for path in disk.rglob("*") if TEMPORARY.search(path.name)]):
        raise Bad(LOST, f"left: {left[0]}, after {failure!r}")
    if failure is None or writer.goes_on:
        return
    after = listing(disk) if disk.is_dir() else {}
    if after != before:
        try:
            found = digest(writer.read(disk))
        except Exception as error:
            raise Bad(LOST, f"the earlier state is gone: {error!r}, after {failure!r}") from error
        if found != right:
            changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            raise Bad(LOST, f"changed, removed or left: {changed[0]}, after {failure!r}")


def check_again(writer: Writer, disk: Path, failure: object, right: str) -> None:
    """Raises Bad unless a second attempt gives the right result."""
    try:
        writer.write(disk, 1)
        again = digest(writer.read(disk))
    except Exception as error:
        raise Bad(LOST, f"a second attempt fails: {error!r}, after {failure!r}") from error
    if again != right:
        raise Bad(LOST, f"a second attempt gives another result, after {failure!r}")


def measured(writer: Writer, kind: str, template: Path, place: Path) -> Measured:
    """Calls a writer without a fault."""
    found = place.with_name("measured.json")

    def act(place: Path) -> Any:
        disk = place_of(place)
        before = listing(disk)
        with isolated(place), at_event(disk, 0, lambda: None) as events:
            writer.write(disk, 1)
        files = [path for path in disk.rglob("*") if path.is_file()]
        new = [path for path in files if str(path.relative_to(disk)) not in before or path.stat().st_size > 0]
        sizes = [path.stat().st_size for path in new]
        found.write_text(json.dumps([sum(-(-size // 4096) * 4096 for size in sizes), max(sizes), *events]))
        return writer.read(disk)

    right = expected(f"{kind}: {writer.part}", act, template, place)
    return Measured(
        digest=right, **dict(zip(("bytes", "largest", "events"), json.loads(found.read_text()), strict=True))
    )


@contextlib.contextmanager
def isolated(place: Path) -> Iterator[None]:
    """Gives temporary files a directory of their own, whose leftovers are then seen."""
    temporary = place / "tmp"
    temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None
    yield


def _model(seed: int, width: int = WIDTH) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, activation="relu", name="hidden"), keras.layers.Dense(3, name="head")]
    return keras.Sequential([keras.Input((32,), name="x"), *layers], name="tiny")


def _data(seed: int, rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(seed).normal(size=(rows, 32)).astype("float32"), np.arange(rows) % 3


def _export(disk: Path, seed: int, **settings: Any) -> None:
    import tfopt

    needs = _data(0)[0] if settings.get("precision") == "int8" else None
    tfopt.export(_model(seed), disk / "model", tfopt.ExportConfig(**settings), calibration_data=needs)


def _read_export(disk: Path) -> Any:
    from tfopt.exporting.manifest import read_intact_manifest

    found = read_intact_manifest(disk / "model")
    return [found.precision, found.model_format, found.check.to_dict()["outputs"]["source"]]


def exporter(**settings: Any) -> dict[str, Any]:
    return {"write": functools.partial(_export, **settings), "read": _read_export}


def _checkpoint(disk: Path, seed: int) -> None:
    from tfopt.training.checkpointing.store import CheckpointStore

    draw = np.random.default_rng(seed)
    arrays = {name: draw.normal(size=(200, 200)) for name in "abc"}
    CheckpointStore(disk).save(10 * (seed + 1), arrays, {"epoch": seed})


def _read_checkpoint(disk: Path) -> Any:
    from tfopt.training.checkpointing.store import CheckpointStore

    found = CheckpointStore(disk).load_newest()
    return None if found is None else [found.step, found.arrays, found.meta]


def _fit(disk: Path, seed: int) -> None:
    """Goes on with one more epoch, of the training that the earlier state has begun."""
    import keras

    import tfopt

    settings = {"precision": "float32", "global_batch_size": 16, "jit_compile": False, "seed": 0}
    config = tfopt.TrainingConfig(epochs=2, checkpoint_dir=str(disk), checkpoint_every=2, decay="constant", **settings)
    plan = tfopt.plan(config)
    model = _model(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tfopt.compile(model, plan, optimizer=plan.optimizer(steps_per_epoch=4), loss=loss)
    model.fit(plan.pipeline(_data(0)), epochs=1 + seed, verbose=0)


def _convert(disk: Path, seed: int, compression: str = "") -> None:
    from tfopt.data import arrays, convert

    draw = np.random.default_rng(seed)
    wide = draw.normal(size=(80, 2000)).astype("float32")  # 0.6 MB, and so the test part
    convert(arrays(wide, np.arange(80) % 3), disk, shards=3, compression=compression)


def _read_records(disk: Path) -> Any:
    from tfopt.data.files.tfrecord import tfrecord
    from tfopt.data.user_data import readable

    with readable():
        return list(tfrecord(directory=disk).decoded("train").as_numpy_iterator())


def _cache_teacher(disk: Path, seed: int) -> None:
    import tfopt
    from tfopt.data import arrays

    tfopt.cache_teacher(_model(0), arrays(*_data(seed, 200)), disk, batch_size=16)


def _read_teacher(disk: Path) -> Any:
    return [json.loads((disk / "teacher.json").read_text())["weights"], _read_records(disk / "outputs")]


def _disk_cache(disk: Path, seed: int) -> Any:
    import tensorflow as tf

    from tfopt.data.disk_cache import cached_on_disk
    from tfopt.data.user_data import readable

    with readable():
        rows = cached_on_disk(tf.data.Dataset.from_tensor_slices(_data(seed, 400)[0]), tf.square, str(disk), "rows")
        return [row.sum() for row in rows.as_numpy_iterator()]


def _read_disk_cache(disk: Path) -> Any:
    return _disk_cache(disk, 1)


def _report(disk: Path, seed: int) -> None:
    from tfopt.report import Diagnosis, DiagnosisReport, StepBreakdown
    from tfopt.reporting.saved_report import save_report

    breakdown = StepBreakdown(step_ms=10 + seed, input_ms=6, host_ms=1, compute_ms=3, steps=100, batch_size=32)
    causes = [
        Diagnosis(cause="input", title="The input", gain=0.5, evidence=f"{i} ms of 10", advice="Cache." * 20)
        for i in range(400)
    ]
    save_report(DiagnosisReport(name="mlp", breakdown=breakdown, diagnoses=causes), disk)


def _read_report(disk: Path) -> Any:
    from tfopt.reporting.saved_report import load_report

    return {name: value for name, value in load_report(disk).to_dict().items() if name not in ("name", "created")}


def _keep(disk: Path, seed: int) -> None:
    """Keeps the settings that a search has measured, as `tfopt tune` does at its end."""
    from tfopt.recipe import Recipe
    from tfopt.recipe.kept import VARIABLE, keep
    from tfopt.timing import Estimate

    os.environ[VARIABLE] = str(disk)
    keep(Recipe(name="mine"), {"training": {"prefetch": 3 + seed}}, Estimate(median=1.2, least=1.1, most=1.3))


def _read_kept(disk: Path) -> Any:
    from tfopt.recipe import Recipe
    from tfopt.recipe.kept import VARIABLE, with_kept

    os.environ[VARIABLE] = str(disk)
    return with_kept(Recipe(name="mine"))[0].training.prefetch


def _study(disk: Path, seed: int) -> None:
    import optuna

    from tfopt.trials.study import Study

    space = {"share": optuna.distributions.FloatDistribution(0.1, 1.0)}
    Study(disk / "study.db", "mine", ["loss"], space, seed=0).propose(3 + seed)


def _read_study(disk: Path) -> Any:
    import optuna

    from tfopt.trials.study import Study

    space = {"share": optuna.distributions.FloatDistribution(0.1, 1.0)}
    return Study(disk / "study.db", "mine", ["loss"], space, seed=0).propose(4)


def _trial(disk: Path, seed: int) -> None:
    from tfopt.trials.process import call_apart

    call_apart("math:gcd", {}, disk / "trial", 100.0)


def _read_trial(disk: Path) -> Any:
    from tfopt.trials.process import read_outcome

    found = read_outcome(disk / "trial")
    return None if found is None else [found.result, found.failure]


def _project(disk: Path, seed: int) -> None:
    from tfopt.cli.commands import write_project

    write_project(disk / f"project{seed}")


def _read_project(disk: Path) -> Any:
    return [(disk / "project1" / name).read_text() for name in ("train.py", "recipe.toml")]


def _publish(disk: Path, seed: int) -> None:
    import tfopt

    if seed == 0:
        return _export(disk, 0)
    tfopt.publish(disk / "model", disk / "repository", name="served", warm_up=False)
    return None


def _read_published(disk: Path) -> Any:
    from tfopt.exporting.manifest import read_intact_manifest

    return len(read_intact_manifest(disk / "repository" / "served" / "1").files)


def _run(disk: Path, seed: int) -> None:
    from rich.console import Console

    import tfopt
    from tfopt.data.config import DataConfig
    from tfopt.recipe import ModelConfig, Recipe

    recipe = Recipe(
        name="small",
        model=ModelConfig(builder="mlp", arguments={"units": [WIDTH]}),
        data=DataConfig(source="synthetic", arguments={"examples": 200, "input_shape": [32]}),
        training=tfopt.TrainingConfig(epochs=1, seed=0, precision="float32", checkpoint_dir=str(disk / "steps")),
        export_dir=str(disk / "run"),
    )
    tfopt.run(recipe, console=Console(quiet=True))


def _read_run(disk: Path) -> Any:
    from tfopt.exporting.manifest import read_intact_manifest

    receipts = json.loads((disk / "run" / "receipts.json").read_text())
    names = sorted(path.name for path in (disk / "run").iterdir())
    read_intact_manifest(disk / "run" / "float32")
    return [sorted(receipts), names]


WRITERS = (
    Writer(part="export", **exporter()),
    Writer(part="export in int8", **exporter(precision="int8", int8_nodes="all")),
    Writer(part="export to ONNX", **exporter(format="onnx")),
    Writer(part="export to LiteRT", **exporter(format="litert")),
    Writer(part="export to OpenVINO", **exporter(format="openvino")),
    Writer(part="a checkpoint", write=_checkpoint, read=_read_checkpoint),
    Writer(part="fit with checkpoints", write=_fit, read=_read_checkpoint, goes_on=True),
    Writer(part="data convert", write=_convert, read=_read_records, goes_on=True, begins_anew=True),
    Writer(
        part="data convert with GZIP",
        write=functools.partial(_convert, compression="GZIP"),
        read=_read_records,
        goes_on=True,
        begins_anew=True,
        share=0.5,
    ),
    Writer(part="a teacher's outputs", write=_cache_teacher, read=_read_teacher, goes_on=True, begins_anew=True),
    Writer(part="a cache of examples", write=_disk_cache, read=_read_disk_cache, goes_on=True),
    Writer(part="a saved report", write=_report, read=_read_report, share=0.5),
    Writer(part="settings that were measured", write=_keep, read=_read_kept, share=0.5),
    Writer(part="a study", write=_study, read=_read_study, goes_on=True, share=0.5),
    Writer(part="a trial", write=_trial, read=_read_trial, goes_on=True, begins_anew=True, share=0.5),
    Writer(part="a new project", write=_project, read=_read_project, goes_on=True, share=0.5),
    Writer(part="a run of a recipe", write=_run, read=_read_run, goes_on=True, share=0.2, seconds=400.0),
    Writer(part="publish", write=_publish, read=_read_published, share=0.5),
)


def made(writer: Writer, template: Path) -> None:
    """Writes the earlier state."""
    place_of(template).mkdir(parents=True)
    if not writer.begins_anew:
        writer.write(place_of(template), 0)
