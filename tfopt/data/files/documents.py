"""Text files as tokens: the list of the files, their split into parts, and their bytes or tokens."""

from __future__ import annotations

import codecs
import hashlib
import re
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfopt.data.arguments import optional_package
from tfopt.data.examples import Split
from tfopt.data.files.folders import check_limit, existing_directory, is_clutter, not_used, part_folders, tolerate
from tfopt.errors import ConfigError

BYTES = "bytes"
WORDS = "words"
# The folders beside the standard library's own modules. Some systems leave its tests out.
NOT_STANDARD = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3")
SEPARATORS = ("<|endoftext|>", "</s>", "<eos>", "[SEP]", "<|end_of_text|>")
LARGEST_BYTES = 2**32


class Document(NamedTuple):
    """A text file: its name in the directory, its tokens, its part, and its label: its first folder."""

    name: str
    tokens: np.ndarray
    part: Split
    label: str


class Corpus(NamedTuple):
    """The documents of a directory."""

    name: str
    documents: list[Document]
    tokens: Bytes | Words | Tokenizer
    bytes_per_token: float
    notes: tuple[str, ...]


class Bytes:
    """The bytes of a text as tokens. A zero byte separates documents: text holds none."""

    size = 256
    separator = 0
    dtype = np.uint8

    def __init__(self, encoding: str | None) -> None:
        self._encoding = encoding

    def encode(self, content: bytes) -> np.ndarray:
        """Returns the tokens of a file. Raises ValueError with the reason if it is no text."""
        text = content if self._encoding is None else content.decode(self._encoding).encode()
        zero = text.find(b"\0")
        if zero >= 0:
            raise ValueError(f"byte {zero} is zero, so it is no text, or its encoding is not UTF-8")
        return np.frombuffer(text, np.uint8)


class Words:
    """The parts of words as tokens, for classifiers: their numbers are hashes, from which no text can be read back.

    A part of a word is a run of letters up to a capital letter, a number, or a punctuation mark: setTimeout_ms is
    "set", "timeout", "_", "ms". Capital letters do not count. White space is left out. The separator is 0.
    """

    size = 16_384
    separator = 0
    dtype = np.uint16
    part = re.compile(r"[^\W\d_A-Z]+|[A-Z][^\W\d_A-Z]+|[A-Z]+(?![^\W\d_A-Z])|\d+|[^\w\s]|_")

    def __init__(self, encoding: str | None) -> None:
        self._encoding = encoding or "utf-8"

    def encode(self, content: bytes) -> np.ndarray:
        parts = self.part.findall(content.decode(self._encoding))
        numbers = {part: 1 + zlib.crc32(part.lower().encode()) % (self.size - 1) for part in set(parts)}
        return np.array([numbers[part] for part in parts], self.dtype)


class Tokenizer:
    """The tokens of a tokenizer.json, the file of the package `tokenizers`."""

    def __init__(self, path: str | Path, encoding: str | None, separator: str | None) -> None:
        package = optional_package("tokenizers", "huggingface", f"tokens={str(path)!r}")
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(
                f"tokens must be 'bytes', 'words' or the path of a tokenizer.json. Received: tokens={str(path)!r}, "
                "which is no file. Correct the path."
            )
        try:
            self._reader = package.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises no other class
            raise ConfigError(f"tokens must be a whole tokenizer.json. Received: {str(file)!r} ({error}).") from error
        self._encoding = encoding or "utf-8"
        self.size: int = self._reader.get_vocab_size()
        self.dtype = np.uint16 if self.size <= 2**16 else np.int32
        names = SEPARATORS if separator is None else (separator,)
        found = [number for name in names if (number := self._reader.token_to_id(name)) is not None]
        if not found:
            raise ConfigError(
                f"separator must be a token of {str(file)!r}, which ends a document. "
                f"Received: separator={separator!r}. Name one of its special tokens."
            )
        self.separator: int = found[0]

    def encode(self, content: bytes) -> np.ndarray:
        text = content.decode(self._encoding)
        return np.asarray(self._reader.encode(text, add_special_tokens=False).ids, self.dtype)


def read_corpus(
    directory: str | Path | None,
    *,
    pattern: str,
    tokens: str | Path,
    encoding: str | None,
    separator: str | None,
    test_fraction: float,
    validation_fraction: float,
    max_unreadable: float,
    by_label: bool,
    seed: int,
) -> Corpus:
    """Reads the text files of a directory; see tfopt.data.text for the arguments.

    Args:
        by_label: Whether every label has the same share in each part. The label of a file is its first folder.
    """
    check_limit(max_unreadable)
    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError as error:
        raise ConfigError(
            f"encoding must be one that Python knows. Received: encoding={encoding!r}. 'utf-8' is usual."
        ) from error
    if tokens == WORDS and not by_label:
        raise ConfigError(
            "tokens must be 'bytes' or the path of a tokenizer.json for a language model. Received: tokens='words', "
            "whose numbers are hashes: no text can be read back from them."
        )
    vocabulary: Bytes | Words | Tokenizer
    if tokens in (BYTES, WORDS):
        vocabulary = Bytes(encoding) if tokens == BYTES else Words(encoding)
    else:
        vocabulary = Tokenizer(tokens, encoding, separator)
    root = _standard_library() if directory is None else existing_directory("directory", directory)
    files, links = _files(root, "**/*.py" if directory is None and pattern == "**/*" else pattern, directory is None)
    own = part_folders(root)
    beside = [path for path in files if own and not any(folder in path.parents for folder in own.values())]
    files = sorted({*files} - {*beside})
    total = sum(path.stat().st_size for path in files if path.is_file())
    if total > LARGEST_BYTES:
        raise ConfigError(
            "Text files must have less than 4 GiB in all, because their tokens are kept in memory. "
            f"Received: {total / 2**30:.1f} GiB in {str(root)!r}. Read fewer files with pattern=, or save tokens in "
            ".npy files for the source 'numpy'."
        )
    problems, read = [], {}
    for path in files:
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is no regular file")  # a pipe would wait for a writer
            read[path] = vocabulary.encode(path.read_bytes())
        except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
            problems.append((path.relative_to(root).as_posix(), str(error)))
    notes = tolerate(problems, len(files), max_unreadable, "text files")
    parts = {path: part for part, folder in own.items() for path in read if folder in path.parents}
    notes += not_used(links, root, "Links to folders")
    notes += not_used(beside, root, "Files beside the folders of the parts")
    labels = {}
    for path in read:
        inside = path.relative_to(own.get(parts.get(path, "train"), root)).parts
        labels[path] = inside[0] if len(inside) > 1 else ""
    rest = [path for path in read if not own or parts.get(path) == "train"]
    shares: dict[Split, float] = {
        "test": 0 if "test" in own else test_fraction,
        "validation": 0 if "validation" in own else validation_fraction,
    }
    for group in {labels[path] if by_label else "" for path in rest}:
        chosen = {path.relative_to(root).as_posix(): path for path in rest if not by_label or labels[path] == group}
        parts |= {chosen[name]: part for name, part in _by_hash(list(chosen), shares, seed).items()}
    documents = [
        Document(path.relative_to(root).as_posix(), tokens, parts[path], labels[path])
        for path, tokens in read.items()
        if path in parts
    ]
    test = [path for path in read if parts.get(path) == "test"]
    bytes_read = sum(path.stat().st_size + 1 for path in test)
    tokens_read = sum(len(read[path]) + 1 for path in test)
    each = 1.0 if isinstance(vocabulary, Bytes) or not test else bytes_read / tokens_read
    return Corpus(root.absolute().name, documents, vocabulary, each, notes)


def _standard_library() -> Path:
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "os.py").is_file():
        raise ConfigError(
            f"directory must be given where Python's standard library is not in files. Received: {str(root)!r} without "
            "os.py. Set directory=DIR."
        )
    return root


def _files(root: Path, pattern: str, standard: bool) -> tuple[list[Path], list[Path]]:
    """Returns the files that match a pattern, also broken links, and the links to folders, which are not followed."""
    left_out = NOT_STANDARD if standard else ()

    def wanted(path: Path) -> bool:
        return not any(is_clutter(part) or part in left_out for part in path.relative_to(root).parts)

    found = sorted(path for path in root.glob(pattern) if wanted(path))
    files = [path for path in found if not path.is_dir()]
    if not files:
        raise ConfigError(
            f"directory must hold text files. Received: directory={str(root)!r}, where no file matches "
            f"pattern={pattern!r}. Correct the path or the pattern."
        )
    return files, [path for path in found if path.is_dir() and path.is_symlink() and not standard]


def _by_hash(names: Sequence[str], shares: dict[Split, float], seed: int) -> dict[str, Split]:
    """Divides files by a hash of their names: the parts depend on neither the place nor the order of the files."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
    parts: dict[str, Split] = {}
    for part, share in shares.items():
        count = max(1, round(share * len(names))) if share else 0
        parts |= dict.fromkeys(ordered[len(parts) : len(parts) + count], part)
    return {name: parts.get(name, "train") for name in ordered}
