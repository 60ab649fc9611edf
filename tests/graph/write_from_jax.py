"""Writes from_jax.keras, which test_from_jax.py reads. Run it where JAX and Keras are:

    KERAS_BACKEND=jax python write_from_jax.py

The file is as Keras writes it, only packed more tightly. The outputs that it prints are in the test.
"""

import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
from keras import layers

TARGET = Path(__file__).with_name("from_jax.keras")


def main():
    keras.utils.set_random_seed(3)
    generator = np.random.default_rng(0)
    model = keras.Sequential(
        [
            keras.Input((5, 2), name="steps"),
            layers.BatchNormalization(),
            layers.GRU(3, dropout=0.2),
            layers.Dropout(0.3, seed=5),
            layers.Dense(2, activation="softmax"),
        ],
        name="from_jax",
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    model.fit(generator.normal(size=(8, 5, 2)), generator.integers(0, 2, 8), batch_size=4, epochs=2, verbose=0)
    model.save(TARGET)
    with zipfile.ZipFile(TARGET) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(TARGET, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name, content in parts.items():
            file.writestr(name, content)
    outputs = model.predict(np.linspace(-1, 1, 20, dtype="float32").reshape(2, 5, 2), verbose=0)
    momentum = float(np.asarray(model.optimizer.variables[-1]).sum())
    print(keras.backend.backend(), outputs.tolist(), momentum, TARGET.stat().st_size, file=sys.stderr)


if __name__ == "__main__":
    main()
