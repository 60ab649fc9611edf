"""Tokens per second of tfopt.models.generate, and of the same model without a cache of keys and values.

    python benchmarks/generation.py

Both sides continue the same prompts with the model of the recipe gpt, greedily, and alternate. Without a cache each new
token needs a run of the whole text, here of a compiled function of one length. The weights are random: the time does
not depend on them. The logits of both sides are compared at every position first.

Results go to benchmarks/results/generation.json. The run takes about two minutes on two cores.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfopt
from tfopt.atomic.files import write_text
from tfopt.hardware import detect
from tfopt.models.text.attention import cached_model
from tfopt.timing import in_turns, seconds_of

RESULTS = Path(__file__).parent / "results" / "generation.json"
LENGTH, PROMPT, OUTPUTS = 256, 16, 256
BATCHES, ROUNDS = (1, 8), 5


def main() -> None:
    keras.utils.set_random_seed(0)
    model = tfopt.recipes.RECIPES["gpt"].model.build((LENGTH,), OUTPUTS)
    results = {
        "what": f"{LENGTH - PROMPT} new tokens after {PROMPT}, greedy; medians of {ROUNDS} alternating rounds",
        "device": f"{detect().processor}, {detect().logical_cores} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "parameters": model.count_params(),
        "batches": {str(batch): measure(model, batch) for batch in BATCHES},
    }
    write_text(RESULTS, json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def measure(model: keras.Model, batch: int) -> dict[str, Any]:
    prompts = np.random.default_rng(0).integers(1, OUTPUTS, (batch, PROMPT)).astype("int32")
    whole = tf.function(model, autograph=False)

    def with_cache() -> np.ndarray:
        return tfopt.models.generate(model, prompts, max_new_tokens=LENGTH - PROMPT, temperature=0)

    def without_cache() -> np.ndarray:
        texts = np.pad(prompts, [(0, 0), (0, LENGTH - PROMPT)])
        for position in range(PROMPT, LENGTH):
            texts[:, position] = whole(tf.constant(texts)).numpy()[:, position - 1].argmax(-1)
        return texts

    difference = largest_difference(model, with_cache())
    sides = (with_cache, without_cache)
    for side in sides:
        side()  # traces
    fast, slow = map(np.array, in_turns([partial(seconds_of, side) for side in sides], ROUNDS))
    tokens = batch * (LENGTH - PROMPT)
    return {
        "with_cache_tokens_per_second": round(tokens / float(np.median(fast)), 1),
        "without_cache_tokens_per_second": round(tokens / float(np.median(slow)), 1),
        "ratio": round(float(np.median(slow / fast)), 2),
        "largest_difference_of_logits": difference,
    }


def largest_difference(model: keras.Model, texts: np.ndarray) -> float:
    expected, cached = model(texts).numpy(), cached_model(model)
    logits, caches = cached.first(texts[:, :PROMPT], LENGTH)
    found = [np.abs(logits - expected[:, PROMPT - 1]).max()]
    for position in range(PROMPT, LENGTH):
        logits, caches = cached.next(texts[:, position], caches, position)
        found.append(np.abs(logits - expected[:, position]).max())
    return float(max(found))


if __name__ == "__main__":
    main()
