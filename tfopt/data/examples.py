"""The examples that a source returns: tf.data sets for training, validation and testing, in memory or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from tfopt.errors import ConfigError

if TYPE_CHECKING:  # a list of the sources needs no TensorFlow, whose import takes seconds
    import tensorflow as tf

    from tfopt.data.stored import Stored


Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
LARGEST_IN_MEMORY = 2**32
BATCH = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Examples for training, validation and testing, one at a time.

    The parts `train`, `validation` and `test` hold records. A record is an example, (inputs, targets) or (inputs,
    targets, weight), or something small that `decode` makes an example of, for example a file name and a class. The
    pipeline shuffles the records, and decodes them afterwards in parallel. So a shuffle needs little memory.

    Any first records of a part are a fair sample of it: a source that reads files class by class shuffles their list.

    Attributes:
        name: Name of the source.
        train: Records to train on.
        test: Records to test on.
        validation: Records for the scores during training. None means that the test part gives these scores.
        outputs: Number of outputs of a model: classes, labels, tokens of the vocabulary, values to predict.
        class_names: Names of the classes, in the order of their numbers; empty if there are none.
        decode: Function in TensorFlow from a record (one argument for each of its components) to an example. None
            means that records are examples.
        decodes_boxes: Whether `decode` takes the keyword `box`, a function in TensorFlow from the (height, width) of an
            encoded image to the part of it that is decoded and resized: (top, left, height, width). A random resized
            crop is then cut out of the image as it is stored, see AugmentConfig.crop_scale. Who replaces `decode` by a
            function without it sets this to False.
        padding: For examples that differ in length: the values that fill the inputs and the targets of a batch.
        ignored_target: Class number of targets that count neither in the loss nor in the score, such as 255 in a mask.
        bytes_per_target: Mean number of bytes of text that a token stands for.
        notes: Remarks of the source for the user, for example which files it skipped.
        stored: What `tfopt.data.convert` stores of a record that names a file. None means the examples.
        check_finite: Whether the pipeline looks at each batch, and ends with an error if a value is NaN or infinite.
            Sources whose values are known to be finite turn it off.

    Example:
        >>> import tensorflow as tf
        >>> examples = Examples(
        ...     name="squares",
        ...     train=tf.data.Dataset.range(10),
        ...     test=tf.data.Dataset.range(10, 12),
        ...     outputs=1,
        ...     decode=lambda x: (tf.cast([x], tf.float32), tf.cast([x * x], tf.float32)),
        ... )
        >>> examples.input_shape, examples.size("train")
        ((1,), 10)
        >>> examples.y_test.tolist()
        [[100.0], [121.0]]
    """

    name: str
    train: tf.data.Dataset
    test: tf.data.Dataset
    validation: tf.data.Dataset | None = None
    outputs: int
    class_names: tuple[str, ...] = ()
    decode: Callable[..., Any] | None = None
    decodes_boxes: bool = False
    padding: tuple[Any, Any] | None = None
    ignored_target: int | None = None
    bytes_per_target: float = 1.0
    notes: tuple[str, ...] = ()
    stored: Stored | None = None
    check_finite: bool = True

    def __post_init__(self) -> None:
        import tensorflow as tf

        for split in ("test", "validation"):
            part = getattr(self, split)
            if part is not None and int(part.cardinality()) == tf.data.INFINITE_CARDINALITY:
                raise ConfigError(
                    f"The {split} part must have an end: scores count all of it. Received: {split} data without end "
                    f"from {self.name!r}. Take a number of its examples: dataset.take(1000)."
                )

    def records(self, split: Split) -> tf.data.Dataset:
        """Returns the records of a part. The validation part is the test part if there is no other."""
        if split not in SPLITS:
            raise ConfigError(f"split must be one of {', '.join(map(repr, SPLITS))}. Received: split={split!r}.")
        records = getattr(self, split)
        return self.test if records is None else records

    def decoded(self, split: Split) -> tf.data.Dataset:
        """Returns the examples of a part, in the order of the records: (inputs, targets[, weight])."""
        import tensorflow as tf

        records = self.records(split)
        if self.decode is None:
            return records
        return records.map(self.decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def batches(self, split: Split, batch_size: int = 32) -> tf.data.Dataset:
        """Returns the examples of a part in batches. Examples that differ in length are filled up with `padding`."""
        from tfopt.data.batching import batched  # here, because it imports TensorFlow

        return batched(self.decoded(split), batch_size, padding=self.padding)

    def size(self, split: Split) -> int | None:
        """Returns the number of examples of a part; None if the source does not know it, or if there is no end."""
        count = int(self.records(split).cardinality())
        return count if count >= 0 else None

    @cached_property
    def element_spec(self) -> tuple[Any, ...]:
        """The shapes and types of one example, (inputs, targets[, weight])."""
        return self.decoded("train").element_spec

    @property
    def input_shape(self) -> Any:
        """Shape of the inputs of one example: a tuple, or a dict of tuples for a model of several inputs."""
        import tensorflow as tf

        return tf.nest.map_structure(lambda spec: tuple(spec.shape), self.element_spec[0])

    def limit(self, examples: int) -> Examples:
        """Returns the first `examples` examples of each part."""
        return replace(
            self,
            train=self.train.take(examples),
            test=self.test.take(examples),
            validation=None if self.validation is None else self.validation.take(examples),
        )

    def arrays(self, split: Split) -> tuple[Any, ...]:
        """Returns a whole part as arrays: (inputs, targets[, weight]), each as NumPy arrays.

        Raises:
            ConfigError: The part has no end, holds no example, is larger than 4 GiB, or its examples differ in shape.
        """
        import numpy as np
        import tensorflow as tf

        dataset = self.decoded(split)
        if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise ConfigError(
                f"A part must have an end to become arrays. Received: the {split} part of {self.name!r}, which has "
                "none. Take a number of its examples: dataset.take(1000)."
            )
        batches: list[Any] = []
        total = 0
        for batch in self.batches(split, BATCH).as_numpy_iterator():
            batches.append(batch)
            total += sum(np.asarray(part).nbytes for part in tf.nest.flatten(batch))
            if total > LARGEST_IN_MEMORY:
                raise ConfigError(
                    f"A part must be smaller than 4 GiB to become arrays. Received: the {split} part of {self.name!r}. "
                    f"Read it in batches: examples.batches({split!r})."
                )
        if not batches:
            raise ConfigError(
                f"A part must hold examples to become arrays. Received: the {split} part of {self.name!r}, which is "
                "empty. Give it examples."
            )
        try:
            joined: tuple[Any, ...] = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
        except ValueError as error:
            raise ConfigError(
                f"Examples must have one shape to become arrays. Received: the {split} part of {self.name!r}, with "
                f"batches of several shapes. Read it in batches: examples.batches({split!r})."
            ) from error
        return joined

    @cached_property
    def _train_arrays(self) -> tuple[Any, ...]:
        return self.arrays("train")

    @cached_property
    def _test_arrays(self) -> tuple[Any, ...]:
        return self.arrays("test")

    @property
    def x_train(self) -> Any:
        """Inputs of the training part as arrays, [n, ...]."""
        return self._train_arrays[0]

    @property
    def y_train(self) -> Any:
        """Targets of the training part as arrays, [n, ...]."""
        return self._train_arrays[1]

    @property
    def x_test(self) -> Any:
        """Inputs of the test part as arrays, [n, ...]."""
        return self._test_arrays[0]

    @property
    def y_test(self) -> Any:
        """Targets of the test part as arrays, [n, ...]."""
        return self._test_arrays[1]


def epoch_steps(
    data: Any, batch_size: int, *, steps_per_epoch: int | None = None, drop_remainder: bool = False, buckets: int = 0
) -> int:
    """Returns the number of training steps of an epoch.

    Args:
        data: `tfopt.data.Examples`, or a data set of single examples.
        batch_size: Examples of a step.
        steps_per_epoch: The number that the user asks for; it needs a pipeline with repeat=True.
        drop_remainder: Whether a smaller last batch is left out.
        buckets: Number of buckets by length. The last batch of each may be smaller, so the number of steps is unknown.
    Raises:
        ConfigError: The number is unknown, or the data has fewer examples than a step.
    Example:
        >>> import tensorflow as tf
        >>> epoch_steps(tf.data.Dataset.range(10), 4)
        3
    """
    if steps_per_epoch is not None:
        return steps_per_epoch
    records = data.train if isinstance(data, Examples) else data
    count = int(records.cardinality())
    remedy = "Set steps_per_epoch, the number of steps after which an epoch ends."
    if count < 0 or buckets:
        # TensorFlow's names for the numbers: -1 is infinite, -2 is unknown.
        why = "in batches from buckets by length" if buckets else "without end" if count == -1 else "of unknown number"
        raise ConfigError(f"An epoch needs a known number of steps. Received: examples {why}. {remedy}")
    steps = count // batch_size if drop_remainder else -(-count // batch_size)
    if not steps:
        raise ConfigError(
            f"An epoch needs at least one step. Received: {count} examples, with {batch_size} in each step. "
            "Lower global_batch_size."
        )
    return steps
