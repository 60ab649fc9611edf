"""Text files as examples: for a language model, whose targets are the next tokens, and for a classifier of folders."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.data.arguments import check_arguments
from tfopt.data.examples import Examples, Split
from tfopt.data.files.documents import BYTES, Document, read_corpus
from tfopt.errors import ConfigError

IGNORED = -1


def text(
    *,
    directory: str | Path | None = None,
    pattern: str = "**/*",
    tokens: str | Path = BYTES,
    length: int = 128,
    pack: bool = True,
    encoding: str | None = None,
    separator: str | None = None,
    test_fraction: float = 0.1,
    validation_fraction: float = 0.0,
    max_unreadable: float = 0,
    seed: int = 0,
) -> Examples:
    """Reads text files as examples for a language model. Each file is a document and lies in one part as a whole.

    Without a directory it reads the source files of Python's own standard library, about 12 MB of real text that is
    always there. The library differs between versions of Python.

    If the directory holds a folder `train`, the folders of the parts are those of tfopt.data.image_folder, and files
    beside them are not read. Otherwise a hash of a file's relative name decides its part.

    Args:
        directory: Folder of text files, also in sub-folders. None means Python's standard library.
        pattern: Pattern of the names of the files.
        tokens: "bytes", or the path of a tokenizer.json of the package `tokenizers`. Bytes have 256 outputs.
        length: Number of tokens of an example.
        pack: Whether to join the documents of a part, with a separator after each, and cut them into examples of equal
            length. Otherwise an example is a document, or a piece of a document longer than `length`; examples then
            differ in length, for buckets or padded batches.
        encoding: Encoding of the files. None means that bytes are taken as they are, and that a tokenizer reads UTF-8.
        separator: Token of the tokenizer that ends a document. None looks for usual names. The bytes' separator is 0.
        test_fraction: Share of the files in the test part.
        validation_fraction: Share of the files in the validation part. With 0 there is none.
        max_unreadable: Number of files that may be unreadable or in another encoding; below 1 a share. They are left
            out and noted.
        seed: Seed of the split and of the order.
    Returns: Tokens int32 [length], and the next tokens int32 [length]. The last tokens of a part that fill no example
        are left out. With pack=False, targets that fill a batch are -1, the ignored target.
    Raises:
        ConfigError: A folder is missing or holds no text, a file is no text or in another encoding, or a part is too
            short for one example.
    Example:
        >>> examples = text(pattern="json/*.py", length=32, test_fraction=0.2)
        >>> examples.outputs, examples.input_shape
        (256, (32,))
        >>> inputs, targets = next(examples.decoded("train").as_numpy_iterator())
        >>> bool((inputs[1:] == targets[:-1]).all())
        True
    """
    check_arguments(locals())
    import tensorflow as tf

    corpus = read_corpus(
        directory,
        pattern=pattern,
        tokens=tokens,
        encoding=encoding,
        separator=separator,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        max_unreadable=max_unreadable,
        by_label=False,
        seed=seed,
    )

    def part(name: Split) -> Any:
        documents = [document for document in corpus.documents if document.part == name]
        end = np.array([corpus.tokens.separator], corpus.tokens.dtype)
        joined = np.concatenate([part for document in documents for part in (document.tokens, end)] or [end[:0]])
        return (_packed if pack else _pieces)(name, documents, joined, length, seed)

    def pair(tokens: Any) -> Any:
        tokens = tf.cast(tokens, tf.int32)
        return tokens[:-1], tokens[1:]

    return Examples(
        name=f"text {corpus.name}",
        train=part("train"),
        test=part("test"),
        validation=part("validation") if any(each.part == "validation" for each in corpus.documents) else None,
        outputs=corpus.tokens.size,
        decode=pair,
        padding=None if pack else (corpus.tokens.separator, IGNORED),
        ignored_target=None if pack else IGNORED,
        bytes_per_target=corpus.bytes_per_token,
        notes=corpus.notes,
    )


def _packed(name: Split, documents: list[Document], joined: np.ndarray, length: int, seed: int) -> Any:
    """Returns a data set of rows of length + 1 tokens. The last token of a row is the first one of the next row."""
    import tensorflow as tf

    count = (len(joined) - 1) // length
    if count < 1:
        raise ConfigError(
            f"The {name} part must be longer than one example. Received: {len(joined)} tokens in {len(documents)} "
            f"files, and length={length}. A file lies in one part as a whole: add files, set a smaller length, or "
            "put files into folders train and test."
        )
    rows = np.lib.stride_tricks.sliding_window_view(joined, length + 1)[::length]
    return tf.data.Dataset.from_tensor_slices(rows[np.random.default_rng(seed).permutation(count)])


def _pieces(name: Split, documents: list[Document], joined: np.ndarray, length: int, seed: int) -> Any:
    """Returns a data set of pieces of documents: each holds at most length + 1 tokens."""
    import tensorflow as tf

    pieces, start = [], 0
    for document in documents:
        stop = start + len(document.tokens) + 1
        pieces += [(first, min(first + length + 1, stop)) for first in range(start, stop - 1, length)]
        start = stop
    if not pieces:
        raise ConfigError(f"The {name} part must hold text. Received: {len(documents)} files without any. Add text.")
    chosen = np.array(pieces)[np.random.default_rng(seed).permutation(len(pieces))]
    everything = tf.constant(joined)

    # The tokens are the record, and not their place: one function decodes the records of all parts.
    def cut(piece: Any) -> Any:
        return everything[piece[0] : piece[1]]

    return tf.data.Dataset.from_tensor_slices(chosen).map(cut, num_parallel_calls=tf.data.AUTOTUNE)


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
    check_arguments(locals())
    import tensorflow as tf

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
        documents = [each for each in corpus.documents if each.part == name and each.label in names]
        shared, separator = overlap if name == "train" else 0, corpus.tokens.separator
        pieces = [_padded_pieces(document.tokens, length, shared, separator) for document in documents]
        if not sum(map(len, pieces)):
            raise ConfigError(f"The {name} part must hold text. Received: {len(pieces)} files without any. Add files.")
        labels = np.array([names.index(document.label) for document in documents], np.int32)
        order = np.random.default_rng(seed).permutation(sum(map(len, pieces)))
        classes = np.repeat(labels, [len(each) for each in pieces])
        return tf.data.Dataset.from_tensor_slices((np.concatenate(pieces)[order], classes[order]))

    def labelled(tokens: Any, label: Any) -> Any:
        return tf.cast(tokens, tf.int32), label

    return Examples(
        name=f"text_classes {corpus.name}",
        train=part("train"),
        test=part("test"),
        validation=part("validation") if any(each.part == "validation" for each in corpus.documents) else None,
        outputs=len(names),
        class_names=names,
        decode=labelled,
        notes=notes,
    )


def _padded_pieces(tokens: np.ndarray, length: int, overlap: int, separator: int) -> np.ndarray:
    """Returns the pieces [pieces, length] of a file. The separator fills the last one."""
    step = length - overlap
    count = max(-(-(len(tokens) - overlap) // step), 1) if len(tokens) else 0
    padded = np.full(count * step + overlap, separator, tokens.dtype)
    padded[: len(tokens)] = tokens
    return padded[np.arange(count)[:, None] * step + np.arange(length)]
