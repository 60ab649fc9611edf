"""IMDB: 50,000 reviews of films, each favourable or not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples
from tfopt.data.sources.known_sets import Parts, checked, download, load_npz, members, reading
from tfopt.data.splits import split

CLASSES = ("negative", "positive")
FOLDERS = ("neg", "pos")
# The numbers of tokens, as in keras.datasets: words begin at 4, the most frequent first.
FILL, START, UNKNOWN, BEFORE_WORDS = 0, 1, 2, 3
ARCHIVE = "aclImdb_v1.tar.gz"


def imdb(
    *,
    path: str | Path | None = None,
    num_words: int = 20_000,
    length: int = 256,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> Examples:
    """Loads the reviews as sequences of word numbers: 25,000 to train on, and 25,000 to test on.

    The numbers are those of `keras.datasets.imdb`: 0 fills batches, 1 begins a review, 2 stands for a rare word, and
    the most frequent word of the training part is 4. From aclImdb_v1.tar.gz the words are counted anew.

    Args:
        path: The original archive aclImdb_v1.tar.gz, its unpacked folder, or Keras' imdb.npz. None downloads the data
            through `keras.datasets`.
        num_words: Size of the vocabulary, with the three special numbers.
        length: Largest number of words; the rest of a longer review is left out.
        validation_fraction: Share of the training part that becomes the validation part. With 0 there is none.
        seed: Seed of the split and of the order.
    Returns: Word numbers int32 [up to length], and classes. Examples differ in length: batches are padded with 0.
    Raises:
        ConfigError: The data cannot be downloaded, or the archive is missing, damaged or of another kind.
    Example:
        >>> imdb(path="/missing")
        Traceback (most recent call last):
        ...
        tfopt.errors.ConfigError: path must be aclImdb_v1.tar.gz, ... Received: '/missing' ... Fetch it again.

    Reference:
        Maas et al., "Learning Word Vectors for Sentiment Analysis", ACL 2011.
    """
    check_arguments(locals())
    from keras import datasets

    parts = download("imdb", datasets.imdb.load_data, ARCHIVE) if path is None else _read(Path(path).expanduser())
    (x_train, y_train), (x_test, y_test) = (checked("imdb", x, y, len(CLASSES)) for x, y in parts)
    chosen = split(len(y_train), y_train, 0, validation_fraction, seed)

    def part(reviews: Any, labels: np.ndarray, numbers: np.ndarray) -> Any:
        return _sequences([_limited(reviews[number], num_words, length) for number in numbers], labels[numbers])

    return Examples(
        name="imdb",
        train=part(x_train, y_train, chosen["train"]),
        validation=part(x_train, y_train, chosen["validation"]) if validation_fraction else None,
        test=part(x_test, y_test, np.random.default_rng(seed).permutation(len(y_test))),
        outputs=len(CLASSES),
        class_names=CLASSES,
        padding=(FILL, FILL),
    )


def _limited(review: Sequence[int], num_words: int, length: int) -> np.ndarray:
    numbers = np.asarray(review[:length], np.int32)
    return np.where(numbers < num_words, numbers, UNKNOWN)


def _sequences(reviews: list[np.ndarray], labels: np.ndarray) -> Any:
    """Returns a data set of sequences of different lengths, cut from one array."""
    import tensorflow as tf

    ends = np.cumsum([len(review) for review in reviews])
    starts = np.concatenate([[0], ends[:-1]])
    words = tf.constant(np.concatenate(reviews))

    def cut(start: Any, end: Any, label: Any) -> Any:
        return words[start:end], label

    return tf.data.Dataset.from_tensor_slices((starts, ends, labels)).map(cut, num_parallel_calls=tf.data.AUTOTUNE)


def _read(path: Path) -> Parts:
    with reading(path, f"{ARCHIVE}, its unpacked folder or Keras' imdb.npz"):
        if path.suffix == ".npz":
            return _with_start(load_npz(path))
        reviews: dict[str, list[bytes]] = {f"{part}/{each}": [] for part in ("train", "test") for each in FOLDERS}
        if path.is_dir():
            texts = [(place, file) for place in reviews for file in (path / place).glob("*.txt")]
            files = {f"{place}/{file.name}": file.read_bytes() for place, file in texts}
        else:
            files = members(path, lambda name: re.search(r"(^|/)(train|test)/(neg|pos)/[^/]+\.txt$", name) is not None)
        for name in sorted(files):
            reviews["/".join(name.split("/")[-3:-1])].append(files[name])
        missing = [name for name, found in reviews.items() if not found]
        if missing:
            raise ValueError(f"it holds no reviews in {', '.join(missing)}")
        words = {name: [_words(text) for text in found] for name, found in reviews.items()}
    train = [*words["train/neg"], *words["train/pos"]]
    counts = Counter(word for review in train for word in review)
    # Equally frequent words have the order of the alphabet, so that the order of the files does not matter.
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    ranks = {word: rank for rank, word in enumerate(ranked, 1)}

    def part(name: str) -> tuple[Any, Any]:
        texts = [words[f"{name}/{folder}"] for folder in FOLDERS]
        # A word that the training part does not hold is rarer than all of its words.
        numbers = [[ranks.get(word, len(ranks) + 1) for word in review] for group in texts for review in group]
        return numbers, np.repeat(np.arange(len(texts)), [len(group) for group in texts])

    return _with_start((part("train"), part("test")))


def _with_start(parts: Parts) -> Parts:
    def started(reviews: Iterable[Sequence[int]]) -> list[list[int]]:
        return [[START, *(rank + BEFORE_WORDS for rank in review)] for review in reviews]

    (x_train, y_train), (x_test, y_test) = parts
    return (started(x_train), y_train), (started(x_test), y_test)


def _words(text: bytes) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.decode("utf-8").lower().replace("<br />", " "))
