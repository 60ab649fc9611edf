"""Trains, prunes, quantizes and exports a small GPT on the source files of Python's standard library, byte by byte.

    python recipes/gpt.py
    python recipes/gpt.py --quick
    python recipes/gpt.py --sample "def "

The run takes about 7 minutes on two CPU cores (benchmarks/results/gpt.json). Bits per byte on held-out files: float32
1.77, pruned to 50% zeros 1.745, int8 1.746 in 0.31 of the bytes. gzip takes 1.90, and a 5-gram model 1.85
(benchmarks/results/text_baselines.json).

--sample trains in float32 alone, keeps the model in saved_models/gpt.keras, and continues the text. The next time it
reads the model from there.

The full form trains a decoder of the size of GPT-2 (124M) on the text files in data/wikitext-103, which you put there:
a folder train and a folder test. It has not been run: it needs a GPU and the data.

The script accepts the flags of `tfopt run gpt`; --help lists them.
"""

import sys
from dataclasses import replace
from pathlib import Path

from tfopt.cli import main

MODEL = Path("saved_models/gpt.keras")


def sample(text: str) -> str:
    """Continues a text with the trained model, up to the 256 bytes that it was trained on."""
    import keras

    import tfopt

    if MODEL.is_file():
        model = keras.saving.load_model(MODEL)
    else:
        recipe = replace(tfopt.recipes.RECIPES["gpt"], pruning=None, quantization=None, export_dir=None)
        model = tfopt.run(recipe).model
        model.save(MODEL)
    prompt = text.encode()
    length = model.input_shape[1]
    tokens = tfopt.models.generate(model, list(prompt), max_new_tokens=length - len(prompt), temperature=0.5)
    return bytes(tokens.tolist()).decode(errors="replace")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sample"]:
        print(sample(sys.argv[2]))
        sys.exit()
    sys.exit(main(["run", "gpt", *sys.argv[1:]]))
