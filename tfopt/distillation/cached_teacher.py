"""The outputs of a teacher, computed once and kept on disk: trainings read them beside the examples.

    DIRECTORY/teacher.json    checksums of the teacher's layers and weights, and what of its outputs is stored
    DIRECTORY/outputs/        files of tfopt.data.convert: a record for each batch, in the order of the examples

Each row of outputs has a key, the fingerprint of its example's inputs. The pipeline compares the two when it joins
them, so an example never meets the outputs for another one. The targets of a joined example are

    {"labels": its targets, "teacher_outputs": {name of an output: what is stored of it}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tensorflow as tf
from annotated_types import Ge

from tfopt.atomic.checked_json import EDITED, is_as_written, with_checksum
from tfopt.atomic.directories import exclusive
from tfopt.atomic.files import read_stored
from tfopt.atomic.own_files import json_with, write_own
from tfopt.compat.forks import check_not_forked
from tfopt.data.augment.augmentation import LABELS, OF_TEACHER
from tfopt.data.examples import Examples
from tfopt.data.files.tfrecord import tfrecord
from tfopt.data.records.convert import Progress, convert
from tfopt.data.records.earlier import OtherSourceError
from tfopt.data.repeatable import changes_every_epoch
from tfopt.distillation.recorded import Computation, check_top_k, spread
from tfopt.distillation.teacher import Teacher, check_inputs, inputs_by_name, matched
from tfopt.errors import ConfigError
from tfopt.graph import FrozenGraph
from tfopt.graph.digest import digests
from tfopt.graph.unfolded import freeze_unfolded
from tfopt.report import Change, PassReport
from tfopt.settings.validation import check_type, check_value

FILE, RECORDS, FORMAT = "teacher.json", "outputs", 1
KEY = "key"
# A killed computation goes on after its last whole file.
BATCHES_PER_FILE, MOST_FILES = 16, 64
REMEDY = "Choose another directory, or compute the outputs again: remove this one, or set overwrite=True."


class OtherTeacherError(ConfigError):
    """The directory holds the outputs of another teacher."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedTeacher:
    """The outputs of a teacher on disk. It teaches where a model would, in batches of its `examples`.

    Attributes:
        examples: The examples. Their training part brings the teacher's outputs along; the others are unchanged.
        report: What is stored, and the time that the teacher needs for an epoch.
        name: The teacher's name.
        outputs: Spec of each output, by its name in the teacher.
        ops: The op that computes each output, for example "Softmax".
        top_k: The number of values stored of the last axis; None if all are.
    """

    examples: Examples
    report: PassReport
    name: str
    outputs: Mapping[str, tf.TensorSpec]
    ops: Mapping[str, str]
    top_k: int | None


class RecordedTeacher:
    """A cached teacher of one student: its outputs by the student's names, from what a batch brings along."""

    def __init__(self, cached: CachedTeacher, student: FrozenGraph) -> None:
        self.name, self._outputs = f"{cached.name} (cached)", cached.outputs
        self._names = matched(student, cached.outputs, cached.name, "outputs")
        self.ops = {own: cached.ops[name] for own, name in self._names.items()}

    def recorded(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Returns its outputs by the student's names, [batch, ..., outputs]."""
        found = {}
        for own, name in self._names.items():
            stored = rows[name]
            found[own] = spread(stored, self._outputs[name].shape[-1]) if isinstance(stored, Mapping) else stored
        return found


def cache_teacher(
    teacher: Any,
    examples: Examples,
    directory: str | Path,
    *,
    top_k: int | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    batch_size: int = 64,
    trusted: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CachedTeacher:
    """Computes the outputs of a teacher for the training examples once, and keeps them on disk.

    Give the result to `tfopt.distill` as the teacher, and its `examples` to the pipeline: the step then reads the
    outputs and runs no teacher. A call that was killed goes on after its last whole file. A call with a complete
    directory reads the examples once, to compare them, and does not run the teacher.

    The outputs belong to the examples as they are, so a pipeline or step that augments them is refused: the student
    would see other images than the teacher saw. Store augmented examples as examples of their own, or use the teacher
    itself. Layers of the teacher (`features`) and several teachers also need the teachers themselves. `class_weight`
    of Keras' `fit` takes single labels only: give the examples weights in its place.

    Args:
        teacher: A model as for `tfopt.distill`.
        examples: Examples of a source, or tfopt.data.arrays(x, y). Their inputs have one shape.
        directory: New or empty directory, or one of an earlier call.
        top_k: Number of classes of which the outputs are stored; the others share the rest of the probability evenly.
            None stores all. It is for outputs of classes that exclude each other.
        dtype: "float16" rounds to 11 bits and holds values up to 65504. "float32" keeps the outputs as they are.
        batch_size: Examples of a call of the teacher.
        trusted: Whether the teacher's source is trusted, as in ExportConfig.
        overwrite: Whether to compute all outputs again, whatever an earlier call has stored.
        progress: Function that is called with the number of batches done and the number of all batches.
    Raises:
        ConfigError: The directory holds something else; or the outputs of another teacher, for other examples or with
            other settings; or the examples are random, differ in shape or do not fit the teacher; or float16 cannot
            hold an output; or the teacher raises an error.
        UnsupportedModelError: The teacher touches files, the network or Python when it runs.
    Example:
        >>> import keras, tempfile
        >>> from tfopt.data import arrays
        >>> teacher = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> examples = arrays(np.zeros((10, 4), "float32"), np.arange(10) % 2)
        >>> cached = cache_teacher(teacher, examples, tempfile.mkdtemp())
        >>> cached.examples.element_spec[1]["teacher_outputs"]["output_0"]
        TensorSpec(shape=(3,), dtype=tf.float16, name=None)
    """
    check_not_forked()
    check_type("examples", examples, Examples, "Pass for example tfopt.data.arrays(x, y).")
    check_value("top_k", top_k, Annotated[int, Ge(1)] | None)
    check_value("dtype", dtype, Literal["float16", "float32"])
    check_value("batch_size", batch_size, Annotated[int, Ge(1)])
    check_examples(examples)
    frozen = teacher if isinstance(teacher, FrozenGraph) else freeze_unfolded(teacher, trusted=trusted)
    model = Teacher(frozen, frozen, trusted=True)
    layers, weights = digests(frozen)
    specs = {name: spec for name, (_, spec) in frozen.outputs.items()}
    if top_k is not None:
        check_top_k(top_k, specs, model.ops)
    check_inputs(examples, frozen, "teacher")
    contents = Contents(
        teacher=frozen.name,
        layers=layers,
        weights=weights,
        examples=examples.name,
        top_k=top_k,
        dtype=dtype,
        batch_size=batch_size,
    )
    computation = Computation(model, list(frozen.inputs), specs, top_k, dtype)
    batches = _counted(examples.batches("train", batch_size)).map(
        lambda inputs, *_: {KEY: _keys(inputs), "inputs": inputs_by_name(inputs, frozen)}
    )
    count = int(batches.cardinality())
    to_store = Examples(
        name=f"{examples.name}, outputs of the teacher {layers[:16]} {weights[:16]}",  # files of another do not count
        train=batches,
        test=batches.take(0),
        outputs=1,
        decode=lambda batch: {KEY: batch[KEY], "outputs": computation.stored(batch["inputs"])},
    )
    place = Path(directory)
    with exclusive(place):
        earlier = _earlier(place, contents, overwrite=overwrite)
        if earlier is None:
            _write(place, contents)
        try:
            written = convert(
                to_store,
                place / RECORDS,
                shards=min(max(count // BATCHES_PER_FILE, 1), MOST_FILES),
                overwrite=overwrite,
                progress=progress,
            )
        except OtherSourceError as error:
            raise ConfigError(
                "examples must be those that the teacher saw. Received: "
                f"{examples.name!r}, whose training part has changed since {place} was written. {REMEDY}"
            ) from error
        except ConfigError as error:
            raise error if computation.error is None else computation.error from error
        seconds = None if earlier is None else earlier.seconds_per_example
        if computation.examples:
            seconds = computation.seconds / computation.examples
            _write(place, replace(contents, seconds_per_example=seconds))
    rows = tfrecord(directory=place / RECORDS, files_at_a_time=1).decoded("train").unbatch()
    size = examples.size("train")
    size = int(rows.reduce(np.int64(0), lambda total, _: total + 1)) if size is None else size
    kind = dtype if top_k is None else f"{dtype}, top {top_k}"
    saves = "unknown, from an earlier call" if seconds is None else f"{seconds * size:.3g} s"
    detail = f"{size:,} examples, {written.bytes:,} bytes; time of the teacher in each epoch: {saves}"
    return CachedTeacher(
        examples=_joined(examples, rows, size),
        report=PassReport(name="cache teacher", changed=[Change(name=frozen.name, kind=kind, detail=detail)]),
        name=frozen.name,
        outputs=specs,
        ops=model.ops,
        top_k=top_k,
    )


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What teacher.json says of the outputs in a directory.

    Attributes:
        layers: Checksum of the teacher's operations.
        weights: Checksum of its weights.
        seconds_per_example: Time of the teacher; None until it has been measured.
    """

    format: int = FORMAT
    teacher: str
    layers: str
    weights: str
    examples: str
    top_k: int | None
    dtype: str
    batch_size: int
    seconds_per_example: float | None = None


def _counted(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Returns batches that know their number: it decides the files. They are read once if the source does not know."""
    if int(batches.cardinality()) != tf.data.UNKNOWN_CARDINALITY:
        return batches
    count = int(batches.reduce(np.int64(0), lambda total, *_: total + 1))
    return batches.apply(tf.data.experimental.assert_cardinality(count))


def _keys(inputs: Any) -> tf.Tensor:
    """Returns a fingerprint of the inputs of each example of a batch, uint8 [batch, 8]."""
    prints = [tf.fingerprint(each) for each in tf.nest.flatten(inputs)]
    joined = prints[0] if len(prints) == 1 else tf.fingerprint(tf.concat(prints, axis=1))
    return tf.ensure_shape(joined, (None, 8))


def _joined(examples: Examples, rows: tf.data.Dataset, size: int) -> Examples:
    """Returns examples whose training part brings the outputs of the teacher along."""
    plain = examples.decode or (lambda *example: example)
    train = tf.data.Dataset.zip((examples.train, rows)).apply(tf.data.experimental.assert_cardinality(size))
    words = (
        "Each example must be the one that the teacher saw at its place. Received: another one: the data set has "
        "changed, or is read in another order, as by workers that share its files. Compute the outputs again, or set "
        "auto_shard='data'."
    )

    def decode(*record: Any) -> Any:
        row = record[-1]
        if not (isinstance(row, Mapping) and row.keys() == {KEY, "outputs"}):  # of a part without a teacher
            return plain(*record)
        inputs, targets, *weight = plain(*(record[0] if isinstance(record[0], tuple) else record[:1]))
        same = tf.reduce_all(_keys(tf.nest.map_structure(lambda each: each[None], inputs))[0] == row[KEY])
        with tf.control_dependencies([tf.debugging.Assert(same, [words])]):
            outputs = tf.nest.map_structure(tf.identity, row["outputs"])
        return inputs, {LABELS: targets, OF_TEACHER: outputs}, *weight

    return replace(examples, train=train, decode=decode, decodes_boxes=False, padding=None, stored=None)


def check_examples(examples: Examples) -> None:
    """Raises ConfigError unless the outputs of a teacher for these examples can be kept."""
    if examples.size("train") == 0:
        raise ConfigError(f"examples must hold training examples. Received: none in {examples.name!r}. Check the data.")
    if changes_every_epoch(examples.decoded("train")):
        raise ConfigError(
            "examples must be the same in every epoch, since the outputs of the teacher are. Received: "
            f"{examples.name!r}, which draws random numbers. Leave the random changes out, or use the teacher itself."
        )
    for spec in tf.nest.flatten(examples.element_spec[0]):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            raise ConfigError(
                "examples must have inputs of one shape: padding would make the outputs depend on which examples share "
                f"a batch. Received: {examples.name!r} with {spec}. Fill the inputs up to one length in the source."
            )


def _earlier(place: Path, contents: Contents, *, overwrite: bool) -> Contents | None:
    """Returns what a directory says of itself; None if it is empty or may be overwritten.

    Raises:
        ConfigError: It holds something else, or the outputs of another teacher or other settings.
    """
    names = sorted(path.name for path in place.iterdir())
    if FILE not in names and names:
        raise ConfigError(
            "directory must be new, empty or one that cache_teacher wrote. "
            f"Received: directory={place}, which holds {names[0]}. Choose another directory."
        )
    if not names or overwrite:
        return None
    try:
        content = json.loads(read_stored(place / FILE).decode())
        if not is_as_written(content):
            raise ValueError(EDITED)
        earlier = Contents(**{key: value for key, value in content.items() if key != "sha256"})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{FILE} must be a file that cache_teacher wrote. Received: {place / FILE} ({error}). Remove the "
            "directory, or choose another one."
        ) from error
    for part in ("layers", "weights"):
        if getattr(earlier, part) != getattr(contents, part):
            raise OtherTeacherError(
                f"teacher must be the one whose outputs the directory holds. Received: {contents.teacher!r}, whose "
                f"{part} are not those of the teacher of {place}. {REMEDY}"
            )
    if earlier.examples != contents.examples:
        raise ConfigError(
            f"examples must be those that the teacher saw. Received: {contents.examples!r}, and {place} with outputs "
            f"for {earlier.examples!r}. {REMEDY}"
        )
    for name in ("format", "dtype", "top_k", "batch_size"):
        if getattr(earlier, name) != getattr(contents, name):
            raise ConfigError(
                f"{name} must be that of the stored outputs. Received: {name}={getattr(contents, name)!r}, and {place} "
                f"with {getattr(earlier, name)!r}. {REMEDY}"
            )
    return earlier


def _write(place: Path, contents: Contents) -> None:
    text = json.dumps(with_checksum(asdict(contents)), indent=1) + "\n"
    write_own(place / FILE, text, json_with("sha256", "teacher", "layers", "weights"))
