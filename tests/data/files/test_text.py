"""Text files as tokens: what the examples hold, how files are split, and what is said of files that are no text."""

import os
import string
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tfopt.data import text, text_classes
from tfopt.errors import ConfigError

STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture
def corpus(tmp_path):
    """Ten files, in each of which every line holds the number of the file."""
    for number in range(10):
        path = tmp_path / "corpus" / "ab"[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"line of {number}\n" * (number + 3))
    return tmp_path / "corpus"


def as_text(tokens):
    return bytes(tokens.astype(np.uint8).tolist()).decode()


def test_targets_are_the_next_tokens_and_nothing_is_lost(corpus):
    examples = text(directory=corpus, length=16, test_fraction=0.3)
    assert (examples.outputs, examples.bytes_per_target, examples.size("train")) == (256, 1.0, len(examples.x_train))
    whole, expected = set(), set()
    for part in ("train", "test"):
        inputs, targets = examples.arrays(part)
        assert inputs.dtype == targets.dtype == np.int32
        np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
        pieces = {as_text(row) for row in inputs}
        files = {each for each in "0123456789" if any(f"of {each}" in piece for piece in pieces)}
        whole |= {(part, each) for each in files}
        joined = "".join(
            (corpus / "ab"[int(each) % 2] / f"{each}.txt").read_text() + "\0" for each in sorted_names(files)
        )
        expected |= {joined[start : start + 16] for start in range(0, len(joined) - 16, 16)}
        assert pieces == {joined[start : start + 16] for start in range(0, len(joined) - 16, 16)}
    assert len(whole) == 10  # each file in one part
    assert sum(part == "test" for part, _ in whole) == 3


def sorted_names(numbers):
    return sorted(numbers, key=lambda each: ("ab"[int(each) % 2], each))


def test_documents_alone_differ_in_length(corpus):
    examples = text(directory=corpus, length=50, pack=False, test_fraction=0.3)
    assert (examples.padding, examples.ignored_target, examples.input_shape) == ((0, -1), -1, (None,))
    counts = {}
    for part in ("train", "test"):
        for inputs, targets in examples.decoded(part).as_numpy_iterator():
            assert len(inputs) == len(targets) <= 50
            np.testing.assert_array_equal(inputs[1:], targets[:-1])
            content = as_text(inputs)
            (number,) = {line[8:] for line in content.splitlines() if line.startswith("line of ") and line[8:]}
            counts[number] = counts.get(number, 0) + len(content)
    # The inputs hold every byte of a file; its separator is a target alone.
    assert counts == {str(number): 10 * (number + 3) for number in range(10)}
    batches = examples.decoded("train").padded_batch(
        4, padding_values=tuple(np.int32(each) for each in examples.padding)
    )
    inputs, targets = next(iter(batches))
    assert inputs.shape == targets.shape


def test_parts_do_not_depend_on_the_place_or_on_other_parts(corpus, tmp_path):
    first = text(directory=corpus, length=16)
    corpus.rename(tmp_path / "moved")
    again = text(directory=tmp_path / "moved", length=16)
    np.testing.assert_array_equal(first.x_train, again.x_train)
    other = text(directory=tmp_path / "moved", length=16, seed=3)
    assert {*map(as_text, other.x_test)} != {*map(as_text, first.x_test)}


def test_folders_of_parts_are_the_parts(tmp_path):
    for name, part in (("Training", "train"), ("valid", "validation"), ("TEST", "test")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{part}. " * 20)
    (tmp_path / "notes.txt").write_text("words")
    (tmp_path / "train_too").symlink_to(tmp_path / "Training")
    examples = text(directory=tmp_path, length=8)
    assert examples.notes == (
        "Links to folders were not used: 1 (train_too).",
        "Files beside the folders of the parts were not used: 1 (notes.txt).",
    )
    for part in ("train", "validation", "test"):
        assert part in "".join(as_text(row) for row in examples.arrays(part)[0]).replace("\0", "")


def test_the_standard_library_is_a_corpus():
    examples = text(pattern="email/*.py", length=64, test_fraction=0.2)
    content = (STDLIB / "email" / "parser.py").read_text()
    tokens = " ".join(as_text(row) for part in ("train", "test") for row in examples.arrays(part)[0])
    assert content[1000:1010] in tokens


def test_files_that_are_no_text_are_an_error_or_counted(corpus):
    (corpus / "a" / "wide.txt").write_text("utf-16", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"1 of 11 that cannot be read: a/wide.txt \(byte 3 is zero"):
        text(directory=corpus, length=16)
    examples = text(directory=corpus, length=16, max_unreadable=1)
    assert "1 of 11 text files was left out: a/wide.txt" in examples.notes[0]
    (corpus / "a" / "gone.txt").symlink_to(corpus / "missing.txt")
    os.mkfifo(corpus / "a" / "pipe.txt")
    with pytest.raises(ConfigError, match=r"3 of 13 .*a/gone.txt \(.*No such file.*a/pipe.txt \(it is no regular file"):
        text(directory=corpus, length=16)
    (corpus / "a" / "gone.txt").unlink()
    (corpus / "a" / "pipe.txt").unlink()
    (corpus / "a" / "wide.txt").write_bytes("Größe ".encode("latin-1") * 20)
    assert text(directory=corpus, length=16).notes == ()  # bytes are bytes
    with pytest.raises(ConfigError, match=r"a/wide.txt \('utf-8' codec can't decode byte 0xf6 in position 2"):
        text(directory=corpus, length=16, encoding="utf-8")
    latin = text(directory=corpus, length=16, encoding="latin-1", test_fraction=0.1)
    assert "Größe" in "".join(as_text(row) for part in ("train", "test") for row in latin.arrays(part)[0])


@pytest.fixture
def tokenizer(tmp_path, corpus):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.decoder = decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    made.train([str(path) for path in corpus.rglob("*.txt")], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_tokens_of_a_tokenizer(corpus, tokenizer):
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer))
    examples = text(directory=corpus, tokens=tokenizer, length=4, test_fraction=0.3)
    assert examples.outputs == reader.get_vocab_size()
    decoded = reader.decode(examples.x_train.ravel().tolist(), skip_special_tokens=True)
    assert "line of" in decoded
    assert 2.4 < examples.bytes_per_target < 2.5  # ten bytes in "line", " of", " 7" and "\n"; a separator each
    (corpus / "a" / "latin.txt").write_bytes(b"Gr\xf6\xdfe")
    with pytest.raises(ConfigError, match=r"a/latin.txt \('utf-8' codec can't decode byte 0xf6 in position 2"):
        text(directory=corpus, tokens=tokenizer, length=4)


def test_tokenizers_that_cannot_be_read_are_refused(corpus, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="which is no file"):
        text(directory=corpus, tokens="byte")
    with pytest.raises(ConfigError, match="separator must be a token"):
        text(directory=corpus, tokens=tokenizer, separator="[END]")
    tokenizer.write_text(tokenizer.read_text()[:100])
    with pytest.raises(ConfigError, match=r"must be a whole tokenizer.json"):
        text(directory=corpus, tokens=tokenizer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 0}, "length must be a whole number of at least 1"),
        ({"length": 10**6}, "train part must be longer than one example"),
        ({"pattern": "*.md"}, "no file matches"),
        ({"directory": "/missing"}, "must be an existing folder"),
    ],
)
def test_text_that_gives_no_examples_is_refused(arguments, words, corpus):
    with pytest.raises(ConfigError, match=words):
        text(**{"directory": corpus, **arguments})


def test_classes_are_folders_and_files_stay_whole(corpus):
    (corpus / "outside.txt").write_text("in no folder")
    examples = text_classes(directory=corpus, length=16, test_fraction=0.2)
    assert (examples.class_names, examples.outputs) == (("a", "b"), 2)
    assert examples.notes == ("Files in no folder were left out: 1.",)
    files = {"train": set(), "test": set()}
    for part, seen in files.items():
        for tokens, label in examples.decoded(part).as_numpy_iterator():
            found = [each for each in "0123456789" if f" {each}\n" in as_text(tokens)]
            assert all("ab"[int(each) % 2] == examples.class_names[label] for each in found)
            seen.update(found)
    assert sorted(files["test"] | files["train"]) == sorted("0123456789")
    assert not files["test"] & files["train"]
    assert [sum(int(each) % 2 == label for each in files["test"]) for label in (0, 1)] == [1, 1]
    with pytest.raises(ConfigError, match="at least two folders with min_files=6"):
        text_classes(directory=corpus, min_files=6)


def test_training_pieces_overlap_and_test_pieces_do_not(tmp_path):
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number, text_length in enumerate((26, 26, 26, 26, 3)):
            (tmp_path / label / f"{number}.txt").write_text(string.ascii_lowercase[:text_length])
    plain = text_classes(directory=tmp_path, length=8)
    examples = text_classes(directory=tmp_path, length=8, overlap=4)

    def texts(of, part):
        return Counter(as_text(tokens[tokens > 0]) for tokens in of.arrays(part)[0])

    assert texts(examples, "test") == texts(plain, "test")
    found = texts(examples, "train")
    files = sum(texts(plain, "train")[piece] for piece in ("abcdefgh", "abc"))
    assert files == 8
    assert files == sum(found[piece] for piece in ("abcdefgh", "abc"))
    # Each file is covered, and no piece lies within the one before it.
    assert set(found) - {"abc"} == {"abcdefgh", "efghijkl", "ijklmnop", "mnopqrst", "qrstuvwx", "uvwxyz"}
    with pytest.raises(ConfigError, match=r"overlap must be smaller than length. Received: overlap=8, length=8"):
        text_classes(directory=tmp_path, length=8, overlap=8)


def test_an_encoding_that_python_does_not_know_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"encoding must be one that Python knows. Received: encoding='utf-99'"):
        text(directory=tmp_path, encoding="utf-99")


def test_words_are_hashed_parts_of_words(tmp_path):
    from tfopt.data import text_classes
    from tfopt.data.files.documents import Words

    assert Words.part.findall("setTimeout_ms HTTPServer x12 = 'aé'\n") == [
        "set", "Timeout", "_", "ms", "HTTP", "Server", "x", "12", "=", "'", "aé", "'",
    ]  # fmt: skip
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(5):
            (tmp_path / label / f"{number}.txt").write_text(f"one One two{number} ONE")
    examples = text_classes(directory=tmp_path, tokens="words", length=6)
    tokens, _ = examples.arrays("train")
    assert tokens.shape == (8, 6)
    assert (tokens[:, 0] == tokens[:, 1]).all()  # capital letters do not count
    assert (tokens[:, 0] == tokens[:, 4]).all()
    assert (tokens[:, 5] == 0).all()  # the separator fills the last piece
    assert len(set(tokens[:, 3])) == 4
    assert tokens.min() == 0
    assert tokens.max() < Words.size == 16_384


def test_hashed_words_are_refused_for_a_language_model():
    with pytest.raises(ConfigError, match="no text can be read back"):
        text(pattern="json/*.py", tokens="words")
