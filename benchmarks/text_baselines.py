"""What plain methods reach on the data of the recipes gpt and text_encoder.

    python benchmarks/text_baselines.py [--splits 3] [--only splits]

gpt: bits per byte of gzip -9, and of a 5-gram model of bytes with interpolated Kneser-Ney smoothing, which counts the
same training bytes. gzip compresses the held-out files joined to one, with nothing learnt from the training files.

text_encoder: accuracy of logistic regression on TF-IDF features of the same files with the same split, for several
settings: of the recipe's pieces of files, of whole files, and of files whose pieces vote with their log-probabilities.
The setting is chosen by cross-validation on the training files, as the settings of the recipe were chosen without the
test files. The scores of all settings on the test files are recorded too. The recipe then runs in a process of its own,
and the pieces of the files vote with its artifacts. There are few test files, so other splits of the files follow, with
the chosen settings: split 0 is the recipe's.

Results go to benchmarks/results/text_baselines.json. The run takes about forty minutes on two cores.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf
import tyro
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold

import tfopt
from tfopt.atomic.files import write_text
from tfopt.data.files.documents import Document, Words, read_corpus
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results" / "text_baselines.json"
RECIPE_RUN = Path(__file__).parent / "recipe_run.py"
ORDER, BYTES = 5, 256
# Features, and arguments of scikit-learn's TfidfVectorizer. "parts" are the tokens of the recipe.
FEATURES: dict[str, dict[str, Any]] = {
    "parts of words": {"analyzer": "word", "ngram_range": (1, 1)},
    "parts of words, 1 to 2": {"analyzer": "word", "ngram_range": (1, 2), "min_df": 2},
    "whole words": {"analyzer": "word", "token_pattern": r"\w+"},
    "characters in words, 2 to 4": {"analyzer": "char_wb", "ngram_range": (2, 4), "min_df": 2, "max_features": 100_000},
    "characters, 2 to 5": {"analyzer": "char", "ngram_range": (2, 5), "min_df": 2, "max_features": 200_000},
}
STRENGTHS = (10.0, 100.0)
FOLDS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    splits: int = 3
    """Number of splits of the files into training and test files on which the recipe is compared with TF-IDF."""
    only: Literal["gpt", "text_encoder", "splits"] | None = None
    """The part to measure: the other parts of the results stay as they are."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a file.

    Attributes:
        parts: Its parts of words, in lower case, with a space between.
        text: Its text.
        label: The package of the file.
        file: The name of the file.
    """

    parts: str
    text: str
    label: str
    file: str


def main(options: Options) -> None:
    earlier = json.loads(RESULTS.read_text()) if options.only else {}
    results: dict[str, Any] = {"device": f"{detect().processor}, {detect().logical_cores} cores"}
    measure: dict[str, Callable[[], Any]] = {
        "gpt": language_model,
        "text_encoder": classifier,
        "splits": lambda: [compared(split, results["text_encoder"]["chosen"]) for split in range(options.splits)],
    }
    for part, results_of in measure.items():
        results[part] = results_of() if options.only in (None, part) else earlier[part]
    write_text(RESULTS, json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def documents(recipe: str, by_label: bool, split: int = 0) -> list[Document]:
    """Returns the files of a recipe, as bytes, in parts that the number of the split decides."""
    arguments = tfopt.recipes.RECIPES[recipe].data.arguments
    return read_corpus(
        None,
        pattern="**/*",
        tokens="bytes",
        encoding=None,
        separator=None,
        test_fraction=arguments.get("test_fraction", 0.2 if by_label else 0.1),
        validation_fraction=0.0,
        max_unreadable=0,
        by_label=by_label,
        seed=split,
    ).documents


def language_model() -> dict[str, Any]:
    files = documents("gpt", by_label=False)
    train, test = (
        np.concatenate([np.append(each.tokens, 0) for each in files if each.part == part]).astype(np.int64)
        for part in ("train", "test")
    )
    compressed = len(gzip.compress(test.astype(np.uint8).tobytes(), 9))
    return {
        "train_bytes": len(train),
        "test_bytes": len(test),
        "gzip_9_bits_per_byte": round(8 * compressed / len(test), 4),
        f"kneser_ney_{ORDER}_gram_bits_per_byte": round(float(-np.log2(kneser_ney(train, test)).mean()), 4),
    }


def kneser_ney(train: np.ndarray, test: np.ndarray, order: int = ORDER) -> np.ndarray:
    """Returns the probability of each byte of a text after its `order - 1` earlier bytes.

    With counts c of n-grams and one discount D for each n:

        p(byte | context) = (max(c(context, byte) - D, 0) + D * types(context) * p(byte | shorter context)) / c(context)

    For n below `order`, c counts the different bytes before an n-gram. An unknown context leaves p as it is.

    Reference:
        Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", 1999.
    """
    probability = np.full(len(test), 1 / BYTES)
    for n in range(1, order + 1):
        if n == order:
            grams, counts = np.unique(codes(train, n), return_counts=True)
        else:  # how many different bytes come before each n-gram
            grams, counts = np.unique(np.unique(codes(train, n + 1)) % BYTES**n, return_counts=True)
        once, twice = (counts == 1).sum(), (counts == 2).sum()
        discount = once / max(once + 2 * twice, 1)
        contexts, starts = np.unique(grams // BYTES, return_index=True)
        totals, types = np.add.reduceat(counts, starts), np.diff(np.append(starts, len(grams)))
        wanted = codes(test, n)
        count, total, kinds = (
            found(keys, values, sought)
            for keys, values, sought in (
                (grams, counts, wanted),
                (contexts, totals, wanted // BYTES),
                (contexts, types, wanted // BYTES),
            )
        )
        known, later = total > 0, probability[n - 1 :]
        later[known] = (np.maximum(count[known] - discount, 0) + discount * kinds[known] * later[known]) / total[known]
    return probability


def codes(text: np.ndarray, n: int) -> np.ndarray:
    """Returns each n-gram of a text as one number, its last byte in the lowest digits."""
    length = len(text) - n + 1
    return sum(text[place : place + length] * BYTES ** (n - 1 - place) for place in range(n))


def found(keys: np.ndarray, values: np.ndarray, sought: np.ndarray) -> np.ndarray:
    """Returns the values of the sought keys, and 0 for unknown keys."""
    places = np.searchsorted(keys, sought).clip(max=len(keys) - 1)
    return np.where(keys[places] == sought, values[places], 0)


def classifier() -> dict[str, Any]:
    (train, test), (whole_train, whole_test) = pieces_and_files(split=0)
    scores: dict[str, dict[str, float]] = {"pieces": {}, "files, whole": {}, "files, votes of pieces": {}}
    validation: dict[str, dict[str, float]] = {what: {} for what in scores}
    cuts = (scores, [(train, test)], [(whole_train, whole_test)]), (validation, folds(train), folds(whole_train))
    for name, arguments in FEATURES.items():
        for strength in STRENGTHS:
            start, setting = time.perf_counter(), f"{name}, C={strength:g}"
            for found, of_pieces, of_files in cuts:
                parts, files = (
                    [
                        (held_out, *logistic_regression(learnt, held_out, name, arguments, strength))
                        for learnt, held_out in cut
                    ]
                    for cut in (of_pieces, of_files)
                )
                found["pieces"][setting] = accuracy([best(*each) for each in parts])
                found["files, whole"][setting] = accuracy([best(*each) for each in files])
                found["files, votes of pieces"][setting] = accuracy([votes(*each) for each in parts])
            told = {what: (validation[what][setting], values[setting]) for what, values in scores.items()}
            print(setting, told, f"{time.perf_counter() - start:.0f} s", flush=True)
    chosen = {what: max(values, key=values.__getitem__) for what, values in validation.items()}
    shares_of_classes = Counter(piece.label for piece in test)
    return {
        "classes": len(shares_of_classes),
        "train_files": len(whole_train),
        "test_files": len(whole_test),
        "train_pieces": len(train),
        "test_pieces": len(test),
        "largest_class_of_pieces": round(max(shares_of_classes.values()) / len(test), 4),
        "validation_accuracy": validation,
        "accuracy": scores,
        "chosen": chosen,
        "chosen_accuracy": {what: scores[what][setting] for what, setting in chosen.items()},
    }


def compared(split: int, chosen: dict[str, str]) -> dict[str, Any]:
    """Returns the accuracy of TF-IDF with the chosen settings, and of the recipe's artifacts, on one split."""
    (train, test), (whole_train, whole_test) = pieces_and_files(split)

    def judged(what: str, learnt: list[Piece], held_out: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
        name, strength = chosen[what].rsplit(", C=", 1)
        return logistic_regression(learnt, held_out, name, FEATURES[name], float(strength))

    tf_idf = {
        "pieces": accuracy([best(test, *judged("pieces", train, test))]),
        "files, whole": accuracy([best(whole_test, *judged("files, whole", whole_train, whole_test))]),
        "files, votes of pieces": accuracy([votes(test, *judged("files, votes of pieces", train, test))]),
    }
    with tempfile.TemporaryDirectory() as directory:
        changes = json.dumps({"data": {"arguments": {"seed": split}}})
        subprocess.run([sys.executable, RECIPE_RUN, "text_encoder", "0", directory, changes], check=True)
        recipe = recipe_scores(Path(directory) / "artifacts", split, test)
    accuracies = {"test_files": len(whole_test), "test_pieces": len(test), "tf_idf": tf_idf, **recipe}
    print(accuracies, flush=True)
    return accuracies


def pieces_and_files(split: int) -> list[tuple[list[Piece], list[Piece]]]:
    """Returns the training and test pieces, and the training and test files."""
    length = tfopt.recipes.RECIPES["text_encoder"].data.arguments["length"]
    return [(pieces("train", cut, split), pieces("test", cut, split)) for cut in (length, None)]


def pieces(part: str, length: int | None, split: int) -> list[Piece]:
    """Returns pieces of the files of a part; with None the files as a whole."""
    least = tfopt.recipes.RECIPES["text_encoder"].data.arguments["min_files"]
    files = documents("text_encoder", by_label=True, split=split)
    counts = Counter(file.label for file in files if file.label)
    made = []
    for file in files:
        if file.part != part or counts[file.label] < least:
            continue
        text = bytes(file.tokens).decode()
        found = list(Words.part.finditer(text))
        step = length or max(len(found), 1)
        for start in range(0, len(found), step):
            piece = found[start : start + step]
            words = " ".join(each.group().lower() for each in piece)
            made.append(
                Piece(parts=words, text=text[piece[0].start() : piece[-1].end()], label=file.label, file=file.name)
            )
    return made


def folds(train: list[Piece]) -> list[tuple[list[Piece], list[Piece]]]:
    """Returns the folds of a cross-validation. A file lies in one fold as a whole."""
    labels, files = [piece.label for piece in train], [piece.file for piece in train]
    cut = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=0).split(train, labels, files)
    return [([train[place] for place in learnt], [train[place] for place in held_out]) for learnt, held_out in cut]


def logistic_regression(
    train: list[Piece], test: list[Piece], name: str, arguments: dict[str, Any], strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the names of the classes, and the log-probabilities of the test pieces."""
    parts = name.startswith("parts")
    if parts:
        arguments = {**arguments, "token_pattern": r"\S+"}

    def texts(of: list[Piece]) -> list[str]:
        return [each.parts if parts else each.text for each in of]

    vectorizer = TfidfVectorizer(sublinear_tf=True, **arguments)
    x, x_test = vectorizer.fit_transform(texts(train)), vectorizer.transform(texts(test))
    model = LogisticRegression(C=strength, max_iter=300).fit(x, [each.label for each in train])
    return model.classes_, model.predict_log_proba(x_test)


def best(test: list[Piece], classes: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Returns the class of each piece, and the right one."""
    return classes[logs.argmax(-1)], [piece.label for piece in test]


def votes(test: list[Piece], classes: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Returns the class of each file by the sum of its pieces' log-probabilities, and the right one."""
    labels = {each.file: each.label for each in test}
    places = {file: number for number, file in enumerate(labels)}
    sums = np.zeros((len(places), len(classes)))
    np.add.at(sums, [places[each.file] for each in test], logs)
    return classes[sums.argmax(-1)], list(labels.values())


def accuracy(parts: Sequence[tuple[np.ndarray, list[str]]]) -> float:
    """Returns the share of right classes over parts, each with its classes and the right ones."""
    right = np.concatenate([found == np.array(labels) for found, labels in parts])
    return round(float(right.mean()), 4)


def recipe_scores(artifacts: Path, split: int, test: list[Piece]) -> dict[str, dict[str, float]]:
    """Returns the accuracy of the recipe's artifacts, of pieces and of files."""
    data = tfopt.recipes.RECIPES["text_encoder"].data
    examples = replace(data, arguments={**data.arguments, "seed": split}).load()
    length, words = examples.input_shape[0], Words(None)
    tokens = np.zeros((len(test), length), np.int32)
    for row, piece in zip(tokens, test, strict=True):
        encoded = words.encode(piece.text.encode())
        row[: len(encoded)] = encoded
    classes, found = np.array(examples.class_names), {}
    for path in (artifacts / each for each in ("float32", "pruned", "int8")):
        serve = tf.saved_model.load(str(path)).signatures["serving_default"]
        (name,) = serve.structured_input_signature[1]
        batches = [
            next(iter(serve(**{name: tf.constant(tokens[i : i + 128])}).values())) for i in range(0, len(tokens), 128)
        ]
        logs = tf.nn.log_softmax(tf.concat(batches, 0)).numpy()
        found[path.name] = {
            "pieces": accuracy([best(test, classes, logs)]),
            "files, votes of pieces": accuracy([votes(test, classes, logs)]),
        }
    return found


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
