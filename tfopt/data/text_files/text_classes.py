"""Text files for a classifier: the class of a file is the folder that it lies in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples, Split
from tfopt.data.text_files.documents import BYTES, Corpus, read_corpus
from tfopt.errors import ConfigError


def text_classes(
    *,
    directory: str | Path | None = None,
    pattern: str = "**/*",
    tokens: str | Path = BYTES,
    length: int = 256,
    overlap: int = 0,
    encoding: str | None = None,
    separator: str | None = None,
    min_files: int = 5,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    max_unreadable: float = 0,
    seed: int = 0,
) -> Examples:
    """Reads text files as examples for a classifier that tells the folder of a piece of text.

    A file lies in one part as a whole, and each of its pieces is an example. Without a directory it reads Python's own
    standard library: the classes are its packages. If the directory holds a folder `train`, the parts are the folders
    as in tfopt.data.text, and the classes are the folders in them.

    Args:
        directory: Folder with one sub-folder per class. None means Python's standard library.
        pattern: Pattern of the names of the files.
        tokens: "bytes", "words" (parts of words, as hashes) or the path of a tokenizer.json of the package
            `tokenizers`.
        length: Number of tokens of an example. The separator fills the last piece of a file.
        overlap: Number of tokens that a training piece shares with the piece before it, below `length`. More pieces of
            the same files help when the files are few. Pieces of the other parts share none.
        encoding: Encoding of the files. None means that bytes are taken as they are, and that a tokenizer reads UTF-8.
        separator: Token of the tokenizer that ends a document. That of bytes and words is 0.
        min_files: Classes with fewer files are left out and noted.
        test_fraction: Share of the files in the test part, the same for every class.
        validation_fraction: Share of the files in the validation part. With 0 there is none.
        max_unreadable: Number of files that may be unreadable or in another encoding; below 1 a share.
        seed: Seed of the split and of the order.
    Returns: Tokens int32 [length], and class numbers. The vocabulary of a model's embedding has 256 tokens for bytes
        and 16,384 for words.
    Raises:
        ConfigError: A folder is missing or holds no text, a file is unreadable, fewer than two classes remain, or
            overlap is not below length.
    Example:
        >>> examples = text_classes(pattern="[ej]*/*.py", length=64)
        >>> examples.class_names
        ('email', 'encodings', 'json')
    """
    check_arguments(length=length, overlap=overlap, min_files=min_files)
    if overlap >= length:
        raise ConfigError(
            f"overlap must be smaller than length. Received: overlap={overlap}, length={length}. "
            f"Half the length is usual: overlap={length // 2}."
        )
    corpus = read_corpus(
        directory,
        pattern=pattern,
        tokens=tokens,
        encoding=encoding,
        separator=separator,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        max_unreadable=max_unreadable,
        by_label=True,
        seed=seed,
    )
    files = Counter(document.label for document in corpus.documents if document.label)
    names = tuple(sorted(name for name, count in files.items() if count >= min_files))
    if len(names) < 2:
        raise ConfigError(
            f"directory must hold at least two folders with min_files={min_files} text files each. Received: "
            f"{len(names)} such folders in {corpus.name!r}. Set a smaller min_files, or add files."
        )
    few = len(files) - len(names)
    notes = corpus.notes
    notes += (f"Classes with fewer than {min_files} files were left out: {few}.",) if few else ()
    outside = sum(1 for document in corpus.documents if not document.label)
    notes += (f"Files in no folder were left out: {outside}.",) if outside else ()

    def part(name: Split) -> Any:
        return _part(name, corpus, names, length, overlap if name == "train" else 0, seed)

    return Examples(
        name=f"text_classes {corpus.name}",
        train=part("train"),
        test=part("test"),
        validation=part("validation") if any(each.part == "validation" for each in corpus.documents) else None,
        outputs=len(names),
        class_names=names,
        decode=_example,
        notes=notes,
    )


def _part(name: Split, corpus: Corpus, names: tuple[str, ...], length: int, overlap: int, seed: int) -> Any:
    import tensorflow as tf

    numbers = {label: number for number, label in enumerate(names)}
    rows, labels = [], []
    for document in corpus.documents:
        if document.part != name or document.label not in numbers:
            continue
        pieces = _pieces(document.tokens, length, overlap, corpus.tokens.separator)
        rows.append(pieces)
        labels.append(np.full(len(pieces), numbers[document.label], np.int32))
    if not sum(map(len, rows)):
        raise ConfigError(f"The {name} part must hold text. Received: {len(rows)} files without any. Add files.")
    order = np.random.default_rng(seed).permutation(sum(map(len, rows)))
    return tf.data.Dataset.from_tensor_slices((np.concatenate(rows)[order], np.concatenate(labels)[order]))


def _pieces(tokens: np.ndarray, length: int, overlap: int, separator: int) -> np.ndarray:
    """Returns the pieces [pieces, length] of a file. The separator fills the last one."""
    step = length - overlap
    count = max(-(-(len(tokens) - overlap) // step), 1) if len(tokens) else 0
    padded = np.full(count * step + overlap, separator, tokens.dtype)
    padded[: len(tokens)] = tokens
    return padded[np.arange(count)[:, None] * step + np.arange(length)]


def _example(tokens: Any, label: Any) -> Any:
    import tensorflow as tf

    return tf.cast(tokens, tf.int32), label
