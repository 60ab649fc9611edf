"""Every file that tfopt writes or reads, damaged: what its reader makes of it.

A file with a checksum is read as it was written, or refused. A file without one (a foreign model, a table, a typed
recipe) may say something else afterwards; then that counts, but it is never an accident.
"""

from __future__ import annotations

import gzip
import itertools
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from campaign.fault import A_WORD, EQUAL_OR_WORD, NO_ACCIDENT, Fault, Said, expected, make_template
from campaign.spoiling import JSON_WHOLE, WHOLE, Spoil, cuts, edits, flips

KIND = "files"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file, who makes it and who reads it.

    Attributes:
        part: Its name in the table.
        make: Writes it, and what lies around it, into a directory.
        file: Its path there.
        read: Reads it as a user's call does, and returns what came out.
        checked: Whether it has a checksum, so that every change must be found.
        must: What must hold, if it is neither of the two usual cases.
        flips, cuts, edits: The numbers of these faults in full.
        seconds: After which a read hangs.
    """

    part: str
    make: Callable[[Path], None]
    file: str
    read: Callable[[Path], Any]
    checked: bool = True
    flips: int = 12
    cuts: int = 4
    edits: int = 0
    seconds: float = 20.0


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="relu", name="hidden"), keras.layers.Dense(3, name="head")]
    return keras.Sequential([keras.Input((4,), name="x"), *layers], name="tiny")


def _export(**settings: Any) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        import tfopt

        model = _model()
        x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
        needs = x if settings.get("precision") == "int8" else None
        tfopt.export(model, place / "model", tfopt.ExportConfig(**settings), calibration_data=needs)

    return make


def _inspect(name: str = "model") -> Callable[[Path], Any]:
    def read(place: Path) -> Any:
        import tfopt

        found = tfopt.inspect(place / name)
        if found.problems:
            raise Said(" ".join(found.problems))
        return {key: value for key, value in found.to_dict().items() if key not in ("path", "bytes_on_disk")}

    return read


def _intact(place: Path) -> Any:
    """What verify, bench, publish and every baseline do first."""
    from tfopt.exporting.manifest import read_intact_manifest

    manifest = read_intact_manifest(place / "model")
    return [manifest.to_dict(), {name: (place / "model" / name).read_bytes() for name in manifest.files}]


def _foreign(file_format: str, file: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        _export(format=file_format)(place)
        for each in (place / "model").iterdir():
            if each.suffix in (".onnx", ".tflite", ".xml", ".bin"):
                each.rename(place / each.name)
        for each in (place / "model").iterdir():
            each.unlink()
        (place / "model").rmdir()

    return make


def _keras_export(place: Path) -> None:
    _model().export(place / "model", verbose=False)


def _keras_file(place: Path) -> None:
    _model().save(place / "model.keras")


def _frozen(name: str) -> Callable[[Path], Any]:
    def read(place: Path) -> Any:
        from tfopt.graph import freeze

        graph = freeze(place / name)
        return graph.predict({key: np.ones((2, 4), "float32") for key in graph.inputs})

    return read


def _checkpoints(steps: tuple[int, ...]) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        from tfopt.training.checkpointing.store import CheckpointStore

        store = CheckpointStore(place / "checkpoints")
        for step in steps:
            store.save(step, {"w": np.arange(50.0) + step, "b": np.ones(3, "float32")}, {"epoch": step})

    return make


def _load_newest(place: Path) -> Any:
    from tfopt.training.checkpointing.store import CheckpointStore

    found = CheckpointStore(place / "checkpoints").load_newest()
    if found is None:
        raise Said("no checkpoint")  # as for a new training
    return [found.step, found.arrays, found.meta]


def _time_table(place: Path) -> None:
    from tfopt.atomic.checked_json import with_checksum

    times = {"float_ms": [0.5, 1.5], "int8_ms": [0.25, 1.0]}
    content = {
        "device": "a processor",
        "batch_sizes": [1, 8],
        "fusions": {"head": times, "hidden": times},
        "sizes": [256, 1024],
        "conversions": {"QuantizeV2": [0.1, 0.2], "Dequantize": [0.1, 0.3]},
        "layer_norms": {"norm": times},
        "whole": {"chosen": [0.5, 0.6], "all": [0.7, 0.8]},
    }
    (place / "times.json").write_text(json.dumps(with_checksum(content)))


def _read_table(place: Path) -> Any:
    from tfopt.exporting.int8.time_table import read_table

    return read_table(place / "times.json", (), (1, 8)).to_dict()


def _digits(count: int = 40) -> Any:
    from tfopt.data.sources.scikit_learn import digits

    return digits(image_size=8).limit(count)


def _records(compression: str = "") -> Callable[[Path], None]:
    def make(place: Path) -> None:
        from tfopt.data import convert

        convert(_digits(), place / "records", shards=2, compression=compression)

    return make


def _read_records(place: Path) -> Any:
    from tfopt.data.files.tfrecord import tfrecord
    from tfopt.data.user_data import readable

    examples = tfrecord(directory=place / "records")
    with readable():
        return [list(examples.decoded(part).as_numpy_iterator()) for part in ("train", "test")]


def _recipe(place: Path) -> None:
    from tfopt.recipes import find_recipe

    (place / "mine.toml").write_text(find_recipe("digits_cnn").to_toml())


def _read_recipe(place: Path) -> Any:
    import tfopt

    return tfopt.Recipe.from_toml(place / "mine.toml").to_dict()


def _teacher(place: Path) -> None:
    _cache_teacher(place)


def _cache_teacher(place: Path) -> Any:
    import tfopt
    from tfopt.data import arrays

    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    cached = tfopt.cache_teacher(_model(), arrays(x, np.arange(64) % 3, seed=0), place / "teacher", batch_size=16)
    return list(cached.examples.decoded("train").as_numpy_iterator())


def _study(place: Path) -> None:
    _proposals(place)


def _proposals(place: Path) -> Any:
    import optuna

    from tfopt.trials.study import Study

    space = {"share": optuna.distributions.FloatDistribution(0.1, 1.0)}
    study = Study(place / "study.db", "mine", ["loss"], space, seed=0)
    return study.propose(3)


def _outcome(place: Path) -> None:
    from tfopt.trials.process import Outcome

    (place / "outcome.json").write_text(Outcome(result={"multiply_adds": 0.5, "receipts": []}, seconds=3.0).to_json())


def _read_outcome(place: Path) -> Any:
    from tfopt.trials.process import read_outcome

    found = read_outcome(place)
    if found is None:
        raise Said("tried again")
    return found.to_dict()


def _tuning(place: Path) -> None:
    _search(place)


def _search(place: Path) -> Any:
    """Searches speed settings with times that are known, or goes on with such a search."""
    from tfopt.timing import Estimate
    from tfopt.tuning.exploration import Exploration
    from tfopt.tuning.space import Space
    from tfopt.tuning.tune_report import TuneTrial

    def measure(number: int, changes: dict[str, Any], bar: float) -> TuneTrial:
        gain = 1.0 + len(changes) / 10
        speedup = Estimate(median=gain, least=gain, most=gain)
        return TuneTrial(number=number, changes=changes, state="measured", speedup=speedup, seconds=1.0)

    space = Space(choices={"jit_compile": (False, True), "cache": ("memory", "off")}, left_out={})
    search = Exploration(space, 0, place, measure, lambda: "enough" if len(search.trials) >= 3 else "")
    search.run()
    return {str(number): trial.to_dict() for number, trial in search.trials.items()}


def _tuned(place: Path) -> None:
    from tfopt.tuning import BatchSizeReport, TuneReport
    from tfopt.tuning.limit import Limit
    from tfopt.tuning.memory import MemoryReport

    limit = Limit(bytes=2**30, margin=0.1, source="a limit")
    memory = MemoryReport(
        per_replica_batch_size=64, replicas=1, limit=limit, estimated=None, trials=(), ended_by="the data has no more"
    )
    tuned = TuneReport(name="tiny", kind="recipe", examples_per_s=100.0, ended_by="all is tried", seconds=3.0)
    (place / "batch_size.json").write_text(BatchSizeReport(name="tiny", memory=memory, seconds=3.0).to_json())
    (place / "tune.json").write_text(tuned.to_json())


def _read_reports(place: Path) -> Any:
    from tfopt.atomic.files import read_stored
    from tfopt.tuning import BatchSizeReport, TuneReport

    try:
        texts = [read_stored(place / name) for name in ("batch_size.json", "tune.json")]
    except OSError as error:  # users read the text themselves
        raise Said(str(error)) from error
    return [report.from_json(text).to_dict() for report, text in zip((BatchSizeReport, TuneReport), texts, strict=True)]


def _report(place: Path) -> None:
    from tfopt.report import Diagnosis, DiagnosisReport, StepBreakdown
    from tfopt.reporting.saved_report import save_report

    breakdown = StepBreakdown(step_ms=10, input_ms=6, host_ms=1, compute_ms=3, steps=100, batch_size=32)
    found = Diagnosis(cause="input", title="The input", gain=0.5, evidence="6 ms of 10", advice="Cache.")
    save_report(DiagnosisReport(name="mlp", breakdown=breakdown, diagnoses=[found]), place)


def _read_report(place: Path) -> Any:
    from tfopt.reporting.saved_report import load_report

    return {name: value for name, value in load_report(place).to_dict().items() if name not in ("name", "created")}


def _timeline(place: Path) -> None:
    lines = [{"source": "nvml", "names": ["gpu", "memory"]}, [0.0, 10, 5], [1.0, 20, 6], [2.0, 30, None]]
    for worker in ("worker0", "worker1"):
        path = place / f"utilization-{worker}.jsonl"
        path.write_text("\n".join(map(json.dumps, [*lines, {"unavailable": {"power": "no sensor"}}])) + "\n")


def _merged(place: Path) -> Any:
    from tfopt.profiling.monitoring.workers import merge_workers

    return merge_workers(place).to_dict()


def _trace(place: Path) -> None:
    import tensorflow as tf

    from tfopt.profiling.trace.recording import record_trace

    work = tf.function(lambda x: tf.linalg.matmul(x, x))
    work(tf.ones((8, 8)))
    with record_trace(place) as mark:
        for _ in range(3):
            with mark():
                work(tf.ones((8, 8)))
    next(place.rglob("*.xplane.pb")).rename(place / "host.xplane.pb")
    for each in sorted(place.rglob("*"), reverse=True):
        if each.name != "host.xplane.pb":
            each.rmdir() if each.is_dir() else each.unlink()
    folder = place / "plugins" / "profile" / "2026_01_01_00_00_00"
    folder.mkdir(parents=True)
    (place / "host.xplane.pb").rename(folder / "host.xplane.pb")


def _summary(place: Path) -> Any:
    from tfopt.profiling.trace.summary import summarize

    return summarize(place).to_dict()


def _arrays(place: Path) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 5)).astype("float32"), np.arange(60) % 3
    np.save(place / "x.npy", x)
    np.save(place / "y.npy", y)
    np.savez(place / "both.npz", x=x, y=y)
    rows = "\n".join(f"{','.join(map(str, row))},{label}" for row, label in zip(x.tolist(), y, strict=True))
    (place / "table.csv").write_text(f"a,b,c,d,e,label\n{rows}\n")


def _values(examples: Any) -> Any:
    from tfopt.data.user_data import readable

    with readable():
        return [list(examples.decoded(part).as_numpy_iterator()) for part in ("train", "test")]


def _read_npy(place: Path) -> Any:
    from tfopt.data.files.numpy_files import numpy_files

    return _values(numpy_files(x=place / "x.npy", y=place / "y.npy"))


def _read_npz(place: Path) -> Any:
    from tfopt.cli.example_data import find_example_data

    return find_example_data(str(place / "both.npz")).arrays


def _read_csv(place: Path) -> Any:
    from tfopt.data.files.tables import csv

    return _values(csv(path=place / "table.csv", target="label"))


def _parquet(place: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    draw = np.random.default_rng(0)
    columns = {name: draw.normal(size=60) for name in "abc"} | {"label": [f"k{i % 3}" for i in range(60)]}
    parquet.write_table(pyarrow.table(columns), place / "table.parquet")


def _read_parquet(place: Path) -> Any:
    from tfopt.data.files.tables import parquet

    return _values(parquet(path=place / "table.parquet", target="label"))


def _images(place: Path) -> None:
    from PIL import Image

    draw = np.random.default_rng(0)
    for name, ending in itertools.product(("cat", "dog"), ("png", "jpg")):
        folder = place / "images" / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(4):
            pixels = draw.integers(0, 256, (16, 16, 3)).astype("uint8")
            Image.fromarray(pixels).save(folder / f"{number}.{ending}")


def _read_images(place: Path) -> Any:
    from tfopt.data.files.image_folder import image_folder

    return _values(image_folder(directory=place / "images", image_size=16))


def _texts(place: Path) -> None:
    (place / "texts").mkdir()
    for number in range(8):
        (place / "texts" / f"{number}.txt").write_text(f"The text number {number} has some words. " * 20)


def _read_texts(place: Path) -> Any:
    from tfopt.data.files.text import text

    return _values(text(directory=place / "texts", pattern="*.txt", length=32))


def _idx(place: Path) -> None:
    draw = np.random.default_rng(0)
    for part, count in (("train", 20), ("t10k", 10)):
        images = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28) + draw.bytes(count * 784)
        labels = struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes(i % 10 for i in range(count))
        for name, content in ((f"{part}-images-idx3-ubyte.gz", images), (f"{part}-labels-idx1-ubyte.gz", labels)):
            (place / name).write_bytes(gzip.compress(content, mtime=0))


def _read_idx(place: Path) -> Any:
    from tfopt.data.sources.small_images import mnist

    return _values(mnist(path=place))


def _disk_cache(place: Path) -> None:
    _cached(place)


def _cached(place: Path) -> Any:
    import tensorflow as tf

    from tfopt.data.disk_cache import cached_on_disk
    from tfopt.data.user_data import readable

    with readable():
        return [int(x) for x in cached_on_disk(tf.data.Dataset.range(40), tf.square, str(place / "cache"), "numbers")]


def _calibration_ranges(place: Path) -> None:
    _export(precision="int8", int8_nodes="all")(place)


STORED = (
    StoredFile(
        part="manifest.json", make=_export(), file="model/manifest.json", read=_intact, flips=100, cuts=20, edits=40
    ),
    StoredFile(
        part="manifest.json, inspected", make=_export(), file="model/manifest.json", read=_inspect(), flips=10, edits=10
    ),
    StoredFile(part="saved_model.pb of an artifact", make=_export(), file="model/saved_model.pb", read=_intact),
    StoredFile(
        part="variables of an artifact",
        make=_export(),
        file="model/variables/variables.data-00000-of-00001",
        read=_intact,
    ),
    StoredFile(part="model.onnx of an artifact", make=_export(format="onnx"), file="model/model.onnx", read=_inspect()),
    StoredFile(
        part="model.tflite of an artifact", make=_export(format="litert"), file="model/model.tflite", read=_inspect()
    ),
    StoredFile(
        part="model.xml of an artifact", make=_export(format="openvino"), file="model/model.xml", read=_inspect()
    ),
    StoredFile(
        part="model.bin of an artifact", make=_export(format="openvino"), file="model/model.bin", read=_inspect()
    ),
    StoredFile(
        part="an int8 artifact",
        make=_export(precision="int8", int8_nodes="all"),
        file="model/manifest.json",
        read=_intact,
        edits=20,
    ),
    StoredFile(
        part="a foreign SavedModel, inspected",
        make=_keras_export,
        file="model/saved_model.pb",
        read=_inspect(),
        checked=False,
        flips=40,
    ),
    StoredFile(
        part="a foreign SavedModel, read",
        make=_keras_export,
        file="model/saved_model.pb",
        read=_frozen("model"),
        checked=False,
        flips=20,
    ),
    StoredFile(
        part="variables of a foreign SavedModel",
        make=_keras_export,
        file="model/variables/variables.index",
        read=_frozen("model"),
        checked=False,
        flips=8,
    ),
    StoredFile(
        part="a .keras file", make=_keras_file, file="model.keras", read=_frozen("model.keras"), checked=False, flips=20
    ),
    StoredFile(
        part="a foreign .onnx file",
        make=_foreign("onnx", "model.onnx"),
        file="model.onnx",
        read=_inspect("model.onnx"),
        checked=False,
        flips=40,
    ),
    StoredFile(
        part="a foreign .tflite file",
        make=_foreign("litert", "model.tflite"),
        file="model.tflite",
        read=_inspect("model.tflite"),
        checked=False,
        flips=40,
    ),
    StoredFile(
        part="a foreign .xml file",
        make=_foreign("openvino", "model.xml"),
        file="model.xml",
        read=_inspect("model.xml"),
        checked=False,
        flips=40,
    ),
    StoredFile(
        part="the newest of three checkpoints",
        make=_checkpoints((1, 2, 3)),
        file="checkpoints/step-00000003.npz",
        read=_load_newest,
        flips=100,
        cuts=20,
    ),
    StoredFile(
        part="the only checkpoint", make=_checkpoints((1,)), file="checkpoints/step-00000001.npz", read=_load_newest
    ),
    StoredFile(part="a time table", make=_time_table, file="times.json", read=_read_table, flips=20, edits=20),
    StoredFile(
        part="schema.json of records",
        make=_records(),
        file="records/schema.json",
        read=_read_records,
        flips=20,
        edits=30,
    ),
    StoredFile(
        part="a file of records",
        make=_records(),
        file="records/train-00000-of-00002.tfrecord",
        read=_read_records,
        flips=20,
    ),
    StoredFile(
        part="a compressed file of records",
        make=_records("GZIP"),
        file="records/train-00001-of-00002.tfrecord",
        read=_read_records,
    ),
    StoredFile(part="a recipe", make=_recipe, file="mine.toml", read=_read_recipe, checked=False, flips=60, cuts=10),
    StoredFile(
        part="teacher.json", make=_teacher, file="teacher/teacher.json", read=_cache_teacher, flips=6, cuts=2, edits=6
    ),
    StoredFile(
        part="a study of a search", make=_study, file="study.db", read=_proposals, checked=False, flips=10, cuts=6
    ),
    StoredFile(
        part="the outcome of a trial", make=_outcome, file="outcome.json", read=_read_outcome, checked=False, edits=6
    ),
    StoredFile(
        part="a trial of speed settings",
        make=_tuning,
        file="trials/001/trial.json",
        read=_search,
        flips=30,
        edits=30,
    ),
    StoredFile(
        part="batch_size.json", make=_tuned, file="batch_size.json", read=_read_reports, checked=False, edits=20
    ),
    StoredFile(part="tune.json", make=_tuned, file="tune.json", read=_read_reports, checked=False, edits=10),
    StoredFile(part="a diagnosis", make=_report, file="diagnosis.json", read=_read_report, flips=20, edits=30),
    StoredFile(
        part="a worker's timeline",
        make=_timeline,
        file="utilization-worker1.jsonl",
        read=_merged,
        checked=False,
        flips=30,
    ),
    StoredFile(
        part="a trace",
        make=_trace,
        file="plugins/profile/2026_01_01_00_00_00/host.xplane.pb",
        read=_summary,
        checked=False,
        flips=20,
    ),
    StoredFile(part="a .npy file", make=_arrays, file="x.npy", read=_read_npy, checked=False),
    StoredFile(part="a .npz file", make=_arrays, file="both.npz", read=_read_npz, checked=False),
    StoredFile(part="a table in CSV", make=_arrays, file="table.csv", read=_read_csv, checked=False),
    StoredFile(part="a table in Parquet", make=_parquet, file="table.parquet", read=_read_parquet, checked=False),
    StoredFile(part="a PNG image", make=_images, file="images/cat/1.png", read=_read_images, checked=False),
    StoredFile(part="a JPEG image", make=_images, file="images/dog/2.jpg", read=_read_images, checked=False),
    StoredFile(part="a text", make=_texts, file="texts/3.txt", read=_read_texts, checked=False, flips=6),
    StoredFile(
        part="MNIST's images", make=_idx, file="train-images-idx3-ubyte.gz", read=_read_idx, checked=False, flips=8
    ),
    StoredFile(
        part="the manifest of a cache on disk",
        make=_disk_cache,
        file="cache/numbers-*/manifest.json",
        read=_cached,
        checked=False,
        flips=8,
    ),
    StoredFile(
        part="a cache on disk",
        make=_disk_cache,
        file="cache/numbers-*/examples/*/*/*.snapshot",
        read=_cached,
        checked=False,
        flips=8,
    ),
)
WRITERS = (_cache_teacher, _proposals, _search, _cached)  # these mend or go on, so files may change


def faults(work: Path, *, share: float = 1.0, only: str = "") -> Iterator[Fault]:
    """Yields the faults of all files; with a share below 1 as many fewer of the flips, the cuts and the edits."""
    made: dict[Callable[[Path], None], Path] = {}
    for number, stored in enumerate(STORED):
        if only and only not in f"{KIND}: {stored.part}":
            continue
        template = made.get(stored.make)
        if template is None:
            template = made[stored.make] = work / f"template-{number}"
            template.mkdir(parents=True)
            make_template(stored.part, partial(stored.make, template), work / f"template-{number}.log")
        file = next(template.glob(stored.file)).relative_to(template)
        right = expected(stored.part, stored.read, template, work / "place")
        for how, spoil, must in _spoils(stored, template / file, share, number):
            yield Fault(
                kind=KIND,
                part=stored.part,
                how=how,
                act=stored.read,
                template=template,
                expected=right,
                must=must,
                spoil=lambda place, file=file, spoil=spoil: spoil(place / file),  # type: ignore[misc]
                keeps=stored.read not in WRITERS,
                limit_s=stored.seconds,
            )


def _spoils(stored: StoredFile, file: Path, share: float, seed: int) -> Iterator[tuple[str, Spoil, str]]:
    def some(count: int) -> int:
        return max(int(count * share), 1) if count else 0

    must = EQUAL_OR_WORD if stored.checked else NO_ACCIDENT
    for how, spoil in itertools.chain(flips(some(stored.flips), seed), cuts(some(stored.cuts))):
        yield how, spoil, must
    whole = dict(WHOLE)
    if file.suffix == ".json":
        whole |= JSON_WHOLE
    for number, (how, spoil) in enumerate(whole.items()):
        if share == 1 or number % max(round(1 / share / 2), 1) == 0:
            yield how, spoil, NO_ACCIDENT if how == "missing" else must  # as if it had never been written
    if stored.edits:
        content = json.loads(file.read_bytes())
        for checksum in (False, True):
            allowed = NO_ACCIDENT if checksum else must
            for how, spoil in edits(content, checksum=checksum, most=some(stored.edits), seed=seed):
                yield how, spoil, allowed
        if "format" in content or "version" in content:
            name = "format" if "format" in content else "version"
            newer = content | {name: content[name] + 1}
            yield "a newer version", lambda file: _written(file, newer), A_WORD


def _written(file: Path, content: dict[str, Any]) -> None:
    from tfopt.atomic.checked_json import with_checksum

    file.write_text(json.dumps(with_checksum(content)))
