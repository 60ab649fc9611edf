"""A script with arguments, one of which has the name of a flag of tfopt, that trains a convolutional network."""

import argparse
import sys

import keras
import numpy as np


def build(filters):
    return keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            keras.layers.Conv2D(filters, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("epochs", type=int, nargs="?", default=2)
    parser.add_argument("--filters", type=int, default=4)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    keras.utils.set_random_seed(5)
    x = np.random.default_rng(0).normal(size=(200, 12, 12, 1)).astype("float32")
    y = (x.mean((1, 2, 3)) > 0).astype("int32")
    model = build(options.filters)
    temperature = 2.0
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(labels, logits):
        return cross_entropy(labels, logits / temperature)

    model.compile("rmsprop", loss, metrics=["accuracy"])
    history = model.fit(
        x, y, batch_size=16, epochs=options.epochs, shuffle=True, sample_weight=np.linspace(0, 1, 200), verbose=0
    )
    if options.report:
        print(f"{history.history['loss'][-1]:.4f}", sys.argv[2:])
    np.savez(options.out, *model.get_weights())


if __name__ == "__main__":
    main()
