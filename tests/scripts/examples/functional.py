"""A functional model with dropout, on arrays: validation, class weights, callbacks that write files."""

import json
import sys

import keras
import numpy as np

epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 4
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(330, 12)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("int32") + (x[:, 2] > 1)

inputs = keras.Input((12,))
hidden = keras.layers.Dense(32, activation="relu")(inputs)
hidden = keras.layers.BatchNormalization()(hidden)
hidden = keras.layers.Dropout(0.2)(hidden)
model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
model.compile(
    optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-2, 60)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(
    x,
    y,
    batch_size=16,
    epochs=epochs,
    validation_split=0.2,
    class_weight={0: 1.0, 1: 2.0, 2: 0.5},
    callbacks=[keras.callbacks.EarlyStopping(patience=epochs)],
    verbose=2,
)
print(json.dumps({name: [round(value, 4) for value in values] for name, values in history.history.items()}))
print([round(value, 4) for value in model.evaluate(x, y, verbose=0)], model.predict(x, verbose=0).shape)
np.savez(sys.argv[1], *model.get_weights())
