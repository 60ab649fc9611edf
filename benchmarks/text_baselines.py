"""What plain methods reach on the data of the recipes gpt and text_encoder.

    python benchmarks/text_baselines.py

gpt: bits per byte of gzip -9, and of a 5-gram model of bytes with interpolated Kneser-Ney smoothing, which counts the
same training bytes. gzip compresses the held-out files joined to one, with nothing learnt from the training files.

text_encoder: accuracy of logistic regression on TF-IDF features of the same pieces of the same files, for several
settings. The best of them on the test files is the figure to compare with, which favours the baseline.

Results go to benchmarks/results/text_baselines.json. The run takes about four minutes on two cores.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

import tfopt
from tfopt.atomic.files import write_text
from tfopt.data.text_files.documents import Document, Words, read_corpus
from tfopt.hardware import detect

RESULTS = Path(__file__).parent / "results" / "text_baselines.json"
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


def main() -> None:
    results: dict[str, Any] = {
        "device": f"{detect().cpu_model}, {detect().logical_cores} cores",
        "gpt": language_model(),
        "text_encoder": classifier(),
    }
    write_text(RESULTS, json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def documents(recipe: str, by_label: bool) -> list[Document]:
    """Returns the files of a recipe, as bytes, in the recipe's parts."""
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
        seed=0,
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
    train, test = pieces("train"), pieces("test")
    shares = Counter(label for _, _, label in test)
    scores = {}
    for name, arguments in FEATURES.items():
        column = 0 if name.startswith("parts") else 1
        if column == 0:
            arguments = {**arguments, "token_pattern": r"\S+"}
        start = time.perf_counter()
        vectorizer = TfidfVectorizer(sublinear_tf=True, **arguments)
        x = vectorizer.fit_transform([piece[column] for piece in train])
        x_test = vectorizer.transform([piece[column] for piece in test])
        for strength in STRENGTHS:
            model = LogisticRegression(C=strength, max_iter=300).fit(x, [label for _, _, label in train])
            score = model.score(x_test, [label for _, _, label in test])
            scores[f"{name}, C={strength:g}"] = round(float(score), 4)
        print(name, scores, f"{time.perf_counter() - start:.0f} s", flush=True)
    best = max(scores, key=scores.__getitem__)
    return {
        "classes": len(shares),
        "train_pieces": len(train),
        "test_pieces": len(test),
        "largest_class": round(max(shares.values()) / len(test), 4),
        "accuracy": scores,
        "best": best,
        "best_accuracy": scores[best],
    }


def pieces(part: str) -> list[tuple[str, str, str]]:
    """Returns the recipe's pieces of files: their tokens, their text and their class."""
    arguments = tfopt.recipes.RECIPES["text_encoder"].data.arguments
    files = documents("text_encoder", by_label=True)
    counts = Counter(file.label for file in files if file.label)
    made = []
    for file in files:
        if file.part != part or counts[file.label] < arguments["min_files"]:
            continue
        text = bytes(file.tokens).decode()
        parts = list(Words.part.finditer(text))
        for start in range(0, len(parts), arguments["length"]):
            piece = parts[start : start + arguments["length"]]
            words = " ".join(each.group().lower() for each in piece)
            made.append((words, text[piece[0].start() : piece[-1].end()], file.label))
    return made


if __name__ == "__main__":
    main()
