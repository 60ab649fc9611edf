"""The examples that sources return: real, stratified, without overlap, and the same each time."""

import dataclasses
import inspect

import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from tfopt.data import SOURCES, Examples, arrays, digit_masks, digits, synthetic
from tfopt.errors import ConfigError


def equal(one, other):
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("x_train", "y_train", "x_test", "y_test")
    )


def test_digits_are_the_real_ones():
    """At the original size nothing is resized, so the pixels must be scikit-learn's own, each once."""
    examples = digits(image_size=8)
    images, labels = load_digits(return_X_y=True)
    ours = np.concatenate([examples.x_train, examples.x_test]).reshape(-1, 64) * 16
    both = np.column_stack([ours, np.concatenate([examples.y_train, examples.y_test])])
    theirs = np.column_stack([images, labels])
    np.testing.assert_array_equal(both[np.lexsort(both.T)], theirs[np.lexsort(theirs.T)])


def test_enlarged_digits_are_images_of_the_same_digits():
    small, large = digits(image_size=8), digits()
    assert large.x_train.shape == (1437, 32, 32, 1)
    assert large.x_test.shape == (360, 32, 32, 1)
    assert (large.input_shape, large.outputs) == ((32, 32, 1), 10)
    assert large.x_train.dtype == np.float32
    assert 0 <= large.x_train.min() < large.x_train.max() <= 1
    np.testing.assert_array_equal(small.y_train, large.y_train)
    # Bilinear enlarging by four keeps the brightness of the inside.
    blocks = large.x_train.reshape(-1, 8, 4, 8, 4).mean((2, 4))
    assert np.corrcoef(blocks.ravel(), small.x_train.ravel())[0, 1] > 0.95


def test_the_masks_of_digits_name_the_digit_at_its_ink_and_leave_out_the_edge():
    examples, plain = digit_masks(), digits()
    assert (examples.outputs, examples.ignored_target, examples.class_names[:3]) == (11, 255, ("paper", "0", "1"))
    np.testing.assert_array_equal(examples.x_test, plain.x_test)
    grey, masks = examples.x_test[..., 0], examples.y_test
    np.testing.assert_array_equal(masks == 0, grey < 0.25)
    np.testing.assert_array_equal(masks == 255, (grey >= 0.25) & (grey < 0.5))
    for mask, digit in zip(masks, plain.y_test, strict=True):
        assert set(mask[mask < 255]) == {0, digit + 1}


@pytest.mark.parametrize("test_fraction", [0.1, 0.2, 0.5])
def test_every_class_has_its_share_in_both_parts(test_fraction):
    examples = digits(image_size=8, test_fraction=test_fraction)
    total = np.bincount(np.concatenate([examples.y_train, examples.y_test]))
    held_out = np.bincount(examples.y_test, minlength=10)
    assert np.abs(held_out - total * test_fraction).max() <= 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("source", ["diabetes", "digits", "digit_masks", "synthetic"])
def test_a_source_gives_the_same_each_time_and_another_split_by_another_seed(source):
    assert equal(SOURCES[source](), SOURCES[source]())
    assert not equal(SOURCES[source](seed=0), SOURCES[source](seed=1))


def test_no_example_is_in_both_parts():
    x = np.arange(100, dtype="float32").reshape(100, 1)
    examples = arrays(x, np.arange(100) % 4)
    assert sorted([*examples.x_train[:, 0], *examples.x_test[:, 0]]) == list(range(100))
    np.testing.assert_array_equal(examples.x_train[:, 0] % 4, examples.y_train)  # each still has its label
    np.testing.assert_array_equal(examples.x_test[:, 0] % 4, examples.y_test)


def test_limit_takes_the_first_of_both_parts():
    examples = synthetic(examples=100, input_shape=(3,))
    few = examples.limit(7)
    np.testing.assert_array_equal(few.x_train, examples.x_train[:7])
    np.testing.assert_array_equal(few.y_test, examples.y_test[:7])
    assert few.outputs == examples.outputs


@pytest.mark.parametrize("input_shape", [(8,), (8, 8, 3), [4, 2]])
def test_synthetic_has_the_shape_that_was_asked_for(input_shape):
    examples = synthetic(examples=60, input_shape=input_shape, num_classes=3)
    assert examples.input_shape == tuple(input_shape)
    assert (len(examples.x_train), len(examples.x_test), examples.outputs) == (48, 12, 3)
    assert np.bincount(examples.y_train).tolist() == [16, 16, 16]
    assert examples.x_train.dtype == np.float32


def test_synthetic_can_be_learned():
    """The mean of a class in the training part is enough to tell the test part."""
    examples = synthetic(examples=400, input_shape=(8, 8, 1), num_classes=10)
    means = np.stack([examples.x_train[examples.y_train == label].mean(0) for label in range(10)])
    distances = ((examples.x_test[:, None] - means[None]) ** 2).sum((2, 3, 4))
    assert np.mean(distances.argmin(1) == examples.y_test) > 0.95
    noisy = synthetic(examples=400, input_shape=(8, 8, 1), noise=5.0)
    assert noisy.x_train.std() > 4


def test_lists_will_do():
    examples = arrays([[0.0], [1.0]] * 10, [0, 1] * 10)
    np.testing.assert_array_equal(examples.x_test[:, 0], examples.y_test)


@pytest.mark.parametrize(
    ("x", "y", "options", "words"),
    [
        (np.zeros((4, 2)), np.zeros(3, int), {}, "4 inputs and 3 labels"),
        (np.zeros((4, 2)), np.array([0, 1, -1, 0]), {}, "class numbers from 0"),
        (np.zeros((4, 2)), np.array(["a", "b", "a", "b"]), {}, "class numbers from 0"),
        (np.zeros((4, 2)), np.array([0, 0, 1, 1]), {"test_fraction": 0}, "test_fraction=0"),
        (np.zeros((4, 2)), np.array([0, 0, 1, 1]), {"test_fraction": 1.0}, "test_fraction=1.0"),
        (np.zeros((4, 2)), np.array([0, 0, 1, 1]), {"test_fraction": 20}, "test_fraction=20"),
        (np.zeros((4, 2)), np.array([0, 0, 0, 1]), {}, "at least two examples"),
        (np.zeros((8, 2)), np.arange(8) % 4, {"test_fraction": 0.2}, "each part at least one of every class"),
        (np.zeros((0, 2)), np.zeros(0, int), {}, "0 examples"),
        (np.zeros((4, 2)), np.array([0, 0, 1, 1]), {"validation_fraction": 0.9}, "validation_fraction=0.9"),
    ],
)
def test_arrays_that_cannot_be_split_are_refused(x, y, options, words):
    with pytest.raises(ConfigError) as caught:
        arrays(x, y, **options)
    assert words in str(caught.value)


SIZES = ("5", 0, 2.5, True)
SHARES = ("0.2", -0.1, 1, float("nan"), True)
WRONG = {
    "channels": (2, "3", True),
    "classes": ("yes",),
    "class_names": ("rose", 5),
    "directory": (5,),
    "download": ("no",),
    "exact": ("no",),
    "examples": SIZES,
    "files_at_a_time": SIZES,
    "horizon": SIZES,
    "ignored_target": ("255",),
    "image_size": (*SIZES, (1, 2, 3), (0, 8), ("8", "8")),
    "input_shape": (8, (8, 0)),
    "inputs": (5,),
    "length": SIZES,
    "min_files": SIZES,
    "name": (5,),
    "noise": ("0.3", -1),
    "num_classes": SIZES,
    "num_words": SIZES,
    "outputs": SIZES,
    "pack": ("no",),
    "path": (5,),
    "pattern": (5,),
    "seed": ("a", -1, 2**40, 0.5, None, True),
    "skip_damaged": ("5", -1, 2.5),
    "stride": SIZES,
    "target": (5,),
    "test_fraction": SHARES,
    "tokens": (5,),
    "validation_fraction": SHARES,
    "window": SIZES,
    "x": (5,),
}


@pytest.mark.parametrize("source", SOURCES)
def test_values_of_a_wrong_type_are_refused(source, tmp_path):
    file = tmp_path / "table"
    file.write_text("a,b\n1,2\n")
    needed = {"path": file, "directory": tmp_path, "name": "missing", "x": file, "y": file, "target": "a"}
    parameters = inspect.signature(SOURCES[source]).parameters
    needed = {name: needed[name] for name, each in parameters.items() if each.default is each.empty}
    for name in parameters.keys() & WRONG.keys():
        for value in WRONG[name]:
            with pytest.raises(ConfigError) as caught:
                SOURCES[source](**needed | {name: value})
            assert str(caught.value).startswith(f"{name} must be "), value
            assert f"Received: {name}={value!r}." in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    examples = digits(image_size=np.int64(8), test_fraction=np.float32(0.5), seed=np.int64(1))
    assert examples.input_shape == (8, 8, 1)


def test_a_validation_part_is_taken_from_the_training_part():
    examples = arrays(np.arange(100.0).reshape(100, 1), np.arange(100) % 4, validation_fraction=0.2)
    (x_validation, y_validation) = examples.arrays("validation")
    assert [len(examples.x_train), len(x_validation), len(examples.x_test)] == [60, 20, 20]
    assert len({*examples.x_train[:, 0], *x_validation[:, 0], *examples.x_test[:, 0]}) == 100
    assert np.bincount(y_validation).tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("y", "outputs"), [(np.zeros(10), 1), (np.zeros((10, 3)), 3), (np.full((10, 4, 4), 2), 3), (np.arange(10) % 2, 2)]
)
def test_the_number_of_outputs_comes_from_the_targets(y, outputs):
    assert arrays(np.zeros((10, 2)), y).outputs == outputs


def test_inputs_by_name_are_split_together():
    examples = arrays({"a": np.arange(10), "b": np.arange(10) * 2}, np.arange(10) % 2)
    assert examples.input_shape == {"a": (), "b": ()}
    np.testing.assert_array_equal(examples.x_train["a"] * 2, examples.x_train["b"])


def lengths(*counts):
    """Examples that differ in length: each is as many ones."""
    rows = [np.ones(count, "float32") for count in counts]
    spec = (tf.TensorSpec((None,)), tf.TensorSpec((), tf.int32))
    part = tf.data.Dataset.from_generator(lambda: ((row, len(row)) for row in rows), output_signature=spec)
    return Examples(name="lengths", train=part, test=part, outputs=1, padding=(0, -1))


def test_examples_that_differ_in_length_are_filled_up():
    examples = lengths(3, 1, 2)
    ((x, y),) = examples.batches("train")
    np.testing.assert_array_equal(x, [[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    assert y.numpy().tolist() == [3, 1, 2]


def test_what_cannot_be_an_array():
    with pytest.raises(ConfigError, match="must have one shape to become arrays"):
        lengths(*range(1, 400)).arrays("train")
    with pytest.raises(ConfigError, match="must hold examples to become arrays"):
        lengths().arrays("train")
    endless = dataclasses.replace(synthetic(examples=100), train=synthetic(examples=100).train.repeat())
    with pytest.raises(ConfigError, match="must have an end to become arrays"):
        endless.arrays("train")
    assert (endless.size("train"), endless.size("test")) == (None, 20)
    with pytest.raises(ConfigError, match="split must be one of"):
        endless.records("tests")
    with pytest.raises(ConfigError, match=r"The test part must have an end.*test data without end from 'synthetic'"):
        dataclasses.replace(endless, test=endless.train)
