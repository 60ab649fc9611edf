"""A small Sequential MLP: trained twice, then compiled anew and trained on a tf.data.Dataset."""

import sys

import keras
import numpy as np
import tensorflow as tf

epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 4
keras.utils.set_random_seed(2)
rng = np.random.default_rng(0)
x = rng.normal(size=(1920, 8)).astype("float32")
y = x.sum(1, keepdims=True)

model = keras.Sequential([keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
model.fit(x, y, epochs=2, verbose=0)
history = model.fit(x, y, epochs=epochs, initial_epoch=2, verbose=0)
print(history.epoch, f"{history.history['loss'][-1]:.4f}")

model.compile("adam", "mse")
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100, seed=5).repeat().batch(32)
history = model.fit(data, epochs=epochs, steps_per_epoch=43, validation_data=(x, y), verbose=0)
print(history.params["steps"], f"{history.history['val_loss'][-1]:.4f}")
np.savez(sys.argv[1], *model.get_weights())
