"""The pipeline gives every example once per epoch, in an order that is new each epoch and the same each run."""

import types

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from tfopt.data import pipeline
from tfopt.data.epoch_order import EpochCounter
from tfopt.data.sizes import available_memory_bytes
from tfopt.errors import ConfigError, TfoptWarning

NUMBERS = (np.arange(53, dtype="float32"), np.arange(53))


def epoch(dataset):
    return [int(label) for _, labels in dataset for label in labels]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_size", [1, 8, 53, 100])
def test_every_example_comes_once_per_epoch(training, batch_size):
    dataset = pipeline(NUMBERS, batch_size=batch_size, training=training)
    for _ in range(2):
        assert sorted(epoch(dataset)) == list(range(53))
    sizes = [len(x) for x, _ in dataset]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert sum(sizes) == 53
    assert len(dataset) == len(sizes)  # Keras shows progress by it


def test_inputs_keep_their_labels():
    for x, y in pipeline(NUMBERS, batch_size=8):
        np.testing.assert_array_equal(x, y)


def test_the_order_is_new_in_every_epoch_and_the_same_in_every_run():
    keras.utils.set_random_seed(3)
    dataset = pipeline(NUMBERS, batch_size=8, seed=1)
    first, second = epoch(dataset), epoch(dataset)
    assert first != second
    assert first != list(range(53))
    again = pipeline(NUMBERS, batch_size=8, seed=1)
    assert [epoch(again), epoch(again)] == [first, second]
    assert epoch(pipeline(NUMBERS, batch_size=8, seed=2)) != first


def test_without_training_the_order_stays():
    dataset = pipeline(NUMBERS, batch_size=8, training=False, random_shift=0)
    assert epoch(dataset) == epoch(dataset) == list(range(53))


def counting_source(size=10):
    reads = []

    def read():
        for number in range(size):
            reads.append(number)
            yield np.float32(number), number

    signature = (tf.TensorSpec((), tf.float32), tf.TensorSpec((), tf.int64))
    return tf.data.Dataset.from_generator(read, output_signature=signature), reads


@pytest.mark.parametrize(("cache", "times"), [(True, 1), (False, 3)])
def test_a_cached_source_is_read_once(cache, times):
    source, reads = counting_source()
    dataset = pipeline(source, batch_size=4, cache=cache)
    for _ in range(3):
        assert sorted(epoch(dataset)) == list(range(10))
    assert len(reads) == times * 10


def test_a_cached_source_is_still_shuffled_anew():
    dataset = pipeline(counting_source(40)[0], batch_size=8)
    assert epoch(dataset) != epoch(dataset)


def test_sample_weights_pass_through():
    x = np.ones((6, 4, 4, 1), "float32")
    weights = np.arange(6, dtype="float32")
    dataset = pipeline((x, np.arange(6), weights), batch_size=4, random_shift=1)
    for _, labels, weight in dataset:
        np.testing.assert_array_equal(labels, weight)


def numbered_images(count=12, height=7, width=6, channels=2):
    """Images in which every pixel is another positive number, so that any shift can be told."""
    pixels = np.arange(1, count * height * width * channels + 1, dtype="float32")
    return pixels.reshape(count, height, width, channels)


def offset(original, shifted, pixels):
    """The reference: the (down, right) by which the zero-padded original was moved; None if by none in bounds."""
    padded = np.pad(original, [(pixels, pixels), (pixels, pixels), (0, 0)])
    height, width, _ = original.shape
    found = [
        (pixels - top, pixels - left)
        for top in range(2 * pixels + 1)
        for left in range(2 * pixels + 1)
        if np.array_equal(padded[top : top + height, left : left + width], shifted)
    ]
    return found[0] if found else None


def offsets(dataset, images, pixels):
    moved = [(int(label), x) for batch, labels in dataset for x, label in zip(batch.numpy(), labels, strict=True)]
    return {label: offset(images[label], x, pixels) for label, x in moved}


def test_each_image_is_shifted_by_some_offset_within_bounds():
    images = numbered_images(count=480, height=5, width=4, channels=1)
    dataset = pipeline((images, np.arange(480)), batch_size=50, random_shift=3)
    found = offsets(dataset, images, 3)
    assert len(found) == 480
    # Each of 49 offsets is missed with a probability under 0.01%.
    assert set(found.values()) == {(down, right) for down in range(-3, 4) for right in range(-3, 4)}


def test_shifts_are_new_in_every_epoch_and_the_same_in_every_run():
    images = numbered_images()

    def first_epochs(seed, count=2):
        keras.utils.set_random_seed(0)
        dataset = pipeline((images, np.arange(12)), batch_size=5, random_shift=2, seed=seed)
        return [offsets(dataset, images, 2) for _ in range(count)]

    first = first_epochs(seed=1)
    assert first[0] != first[1]
    assert first_epochs(seed=1) == first
    assert first_epochs(seed=2, count=1) != first[:1]


def test_each_batch_of_each_epoch_is_augmented_with_a_seed_of_its_own():
    def note(example, seed):
        return tf.cast(seed, tf.int64)

    dataset = pipeline((np.zeros((12, 1)), np.arange(12)), batch_size=4, augment=note, seed=1)
    seeds = [tuple(np.asarray(each).ravel()) for _ in range(2) for each in dataset]
    assert len(set(seeds)) == 6


@pytest.mark.slow
def test_shifts_inside_fit_are_new_in_every_epoch_and_the_same_in_every_run():
    images = numbered_images(count=8, channels=1)

    def fit():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input(images.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(1)])
        seen = []

        def record(x, y):
            seen.append([offset(images[int(label)], image, 2) for image, label in zip(x, y, strict=True)])
            return x

        def spy(x, y):
            recorded = tf.numpy_function(record, [x, y], tf.float32)
            return tf.ensure_shape(recorded, x.shape), tf.cast(y, tf.float32)

        model.compile("sgd", "mse")
        dataset = pipeline((images, np.arange(8)), batch_size=8, random_shift=2)
        model.fit(dataset.map(spy), epochs=2, shuffle=False, verbose=0)
        return seen, model.get_weights()

    (seen, weights), (again, same) = fit(), fit()
    assert len(seen) >= 2
    assert all(None not in batch for batch in seen)
    assert seen[0] != seen[1]
    assert seen == again
    for one, other in zip(weights, same, strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_is_shifted_without_training():
    images = numbered_images()
    dataset = pipeline((images, np.arange(12)), batch_size=5, training=False, random_shift=3)
    assert set(offsets(dataset, images, 3).values()) == {(0, 0)}


@pytest.mark.parametrize("dtype", ["uint8", "float16"])
def test_a_shift_keeps_shape_and_dtype(dtype):
    dataset = pipeline((np.ones((3, 5, 6, 1), dtype), [0, 1, 2]), batch_size=3, random_shift=2)
    assert dataset.element_spec[0].shape == (None, 5, 6, 1)
    assert {images.dtype.name for images, _ in dataset} == {dtype}


def test_images_of_unknown_size_are_shifted_too():
    def read():
        for size in (4, 6, 9):
            yield np.ones((size, size + 1, 1), "float32"), size

    signature = (tf.TensorSpec((None, None, 1), tf.float32), tf.TensorSpec((), tf.int64))
    images = tf.data.Dataset.from_generator(read, output_signature=signature)
    dataset = pipeline(images, batch_size=1, random_shift=2, cache=False)
    assert sorted(tuple(image.shape) for image, _ in dataset) == [(1, 4, 5, 1), (1, 6, 7, 1), (1, 9, 10, 1)]


def test_what_is_no_image_cannot_be_shifted():
    with pytest.raises(ConfigError, match=r"must be images .* inputs of shape \(None, 4\)"):
        pipeline((np.zeros((8, 4)), np.zeros(8)), batch_size=4, random_shift=2)


@pytest.mark.parametrize("training", [True, False])
def test_a_smaller_last_batch_can_be_left_out(training):
    dataset = pipeline(NUMBERS, batch_size=8, training=training, drop_remainder=True)
    assert [x.shape for x, _ in dataset] == [(8,)] * 6
    assert dataset.element_spec[0].shape == (8,)
    assert len(dataset) == 6


@pytest.mark.parametrize("policy", ["auto", "data", "file", "off"])
def test_the_sharding_policy_is_set(policy):
    options = pipeline(NUMBERS, batch_size=8, auto_shard=policy).options()
    assert options.experimental_distribute.auto_shard_policy.name == policy.upper()


def test_an_unknown_sharding_policy_is_refused():
    with pytest.raises(ConfigError, match=r"Unknown auto_shard 'files'. .* Did you mean 'file'\?"):
        pipeline(NUMBERS, batch_size=8, auto_shard="files")


def test_files_are_not_sharded_behind_an_epoch():
    with pytest.raises(ConfigError, match=r"auto_shard must not be 'file' .* Use 'data'"):
        pipeline(NUMBERS, batch_size=8, auto_shard="file", epoch=EpochCounter())
    pipeline(NUMBERS, batch_size=8, auto_shard="file", epoch=EpochCounter(), training=False)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return NUMBERS


def numbers():
    return tf.data.Dataset.from_tensor_slices((np.zeros((53, 3), "float32"), NUMBERS[1]))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (list(NUMBERS), r"a list\. Write the arrays as a tuple"),
        (([*NUMBERS], NUMBERS[1]), r"a list\. Write the arrays as a tuple"),
        (Batches(), r"a Batches, which makes batches itself\. Pass it to fit without a pipeline"),
        (iter(range(3)), r"a range_iterator\. Make a data set .*from_generator"),
        (lambda: NUMBERS, r"a function\. Make a data set .*from_generator"),
        ((NUMBERS[0], None), r"None\. Leave None out"),
        ((numbers(), numbers()), r"a data set in a tuple or dict\. Join them: .*zip"),
        ("digits", r"a str of dtype <U6 and shape \(\)\. Convert it"),
        (np.array([object()]), r"a ndarray of dtype object and shape \(1,\)\. Make it an array .*np\.stack"),
        (
            numbers().batch(8),
            r"a batched data set, with elements of shape \(None, 3\), \(None,\)\. .* remove batching",
        ),
        (numbers().batch(8).map(lambda x, y: (x + 1, y)).shuffle(9).prefetch(1), "a batched data set"),
    ],
    ids=[
        "list",
        "list_of_inputs",
        "py_dataset",
        "iterator",
        "function",
        "none",
        "tuple_of_data_sets",
        "text",
        "objects",
        "batched",
        "mapped",
    ],
)
def test_what_is_no_single_example_is_refused_with_what_to_give(data, words):
    with pytest.raises(ConfigError, match=rf"The pipeline takes single examples: .* Received: {words}"):
        pipeline(data, batch_size=4)


def test_batches_of_one_size_may_be_examples():
    with pytest.warns(TfoptWarning, match=r"elements, of shape \(8, 3\), \(8,\), look like batches"):
        pipeline(numbers().batch(8, drop_remainder=True), batch_size=4)


@pytest.mark.parametrize(
    "data",
    [
        (NUMBERS[0], NUMBERS[1].tolist()),
        ({"a": NUMBERS[0], "b": tf.constant(NUMBERS[1])}, NUMBERS[1]),
        ((NUMBERS[0], NUMBERS[0]), NUMBERS[1]),
        numbers().batch(8).unbatch(),
        numbers().batch(8, drop_remainder=True).map(lambda x, y: (x[:-1], x[1:])),  # parts of a series
        tf.data.Dataset.from_generator(
            lambda: iter([([1.0, 2.0], [1, 2])] * 5),
            output_signature=tuple(tf.TensorSpec((None,), t) for t in ("float32", "int32")),
        ),
    ],
    ids=["list_of_labels", "dict", "inputs", "unbatched", "series", "open_length"],
)
def test_other_forms_of_single_examples_are_taken(data):
    first = next(iter(pipeline(data, batch_size=4)))
    assert {part.shape[0] for part in tf.nest.flatten(first)} == {4}


@pytest.mark.parametrize("length", ["known", "unknown"])
@pytest.mark.parametrize("cache", [True, False])
def test_rows_of_different_length_are_batched_with_and_without_the_cache(cache, length):
    rows = tf.ragged.constant([[1, 2], [3], [4, 5, 6]])
    dataset = tf.data.Dataset.from_tensor_slices((rows, [0, 1, 2]))
    if length == "unknown":
        dataset = dataset.filter(lambda row, label: True)
    batches = pipeline(dataset, batch_size=2, training=False, cache=cache)
    for _ in range(2):
        assert [row for x, _ in batches for row in x.to_list()] == rows.to_list()
    assert int(batches.cardinality()) == (2 if length == "known" else tf.data.UNKNOWN_CARDINALITY)
    shuffled = pipeline(dataset, batch_size=2, cache=cache)
    assert sorted(row for x, _ in shuffled for row in x.to_list()) == sorted(rows.to_list())


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=3000))


def test_a_shift_and_an_augmentation_exclude_each_other():
    with pytest.raises(ConfigError, match=r"random_shift must be 0 with an augmentation.* AugmentConfig\(crop=2\)"):
        pipeline(NUMBERS, batch_size=4, random_shift=2, augment=lambda example, seed: example)


@pytest.mark.usefixtures("little_memory")
def test_examples_that_do_not_fit_in_memory_are_not_kept():
    source, reads = counting_source()
    with pytest.warns(TfoptWarning, match=r"not kept in memory: they take 4.0 KiB, and 2.3 KiB may be used"):
        dataset = pipeline(source.apply(tf.data.experimental.assert_cardinality(10)), batch_size=4)
    assert [sorted(epoch(dataset)) for _ in range(3)] == [list(range(10))] * 3
    assert len(reads) == 30
    with pytest.warns(TfoptWarning, match="not kept in memory: the data set is infinite"):
        pipeline(counting_source()[0].repeat(), batch_size=4)


@pytest.mark.usefixtures("little_memory")
def test_examples_of_unknown_number_end_with_an_error_when_they_do_not_fit():
    assert len(epoch(pipeline(counting_source(5)[0], batch_size=5))) == 5
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Received: more than 2.3 KiB.* Set cache=False"):
        epoch(pipeline(counting_source(6)[0], batch_size=5))
    for settings in ({"cache": False}, {"auto_shard": "file"}):  # behind the counting no files would be found
        assert len(epoch(pipeline(counting_source(6)[0], batch_size=5, **settings))) == 6


@pytest.mark.parametrize(
    ("line", "group", "names"),
    [
        ("0::/jobs/a", "jobs", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/docker/a",  # as the host names it: inside the container it is the top
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_free_memory_is_within_the_limits_of_control_groups(tmp_path, line, group, names):
    limit, used, reclaimable = names
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"7:cpu:/\n{line}\n")
    folder = tmp_path / "sys/fs/cgroup" / group
    folder.mkdir(parents=True)
    (folder / "memory.stat").write_text(f"anon 5\n{reclaimable} 30\n")
    (folder / used).write_text("90\n")
    (folder / limit).write_text("100\n")
    assert available_memory_bytes(tmp_path) == 40
    (folder / limit).write_text("max\n")
    assert available_memory_bytes(tmp_path) > 2**20


def test_a_batch_must_hold_an_example():
    with pytest.raises(ConfigError, match=r"batch_size must be .*at least 1.*Received: batch_size=0"):
        pipeline(NUMBERS, batch_size=0)
