"""Keras 3 with a run: metrics of batches and epochs, validation, evaluation, and the model itself. Here on its torch backend."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras  # reads its backend when it is imported
import numpy as np

import fanfold
from fanfold.frameworks.keras import FanfoldCallback

x = np.random.default_rng(0).random((64, 2), dtype="float32")
y = x.sum(axis=1)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])

tracking = FanfoldCallback("keras", name="sum-of-two", every=4)
model.fit(x, y, batch_size=8, epochs=3, validation_split=0.25, verbose=0, callbacks=[tracking])
model.evaluate(x, y, verbose=0, callbacks=[tracking])
fanfold.finish()

run = fanfold.open(tracking.run.path)
print(f"{run.name}: {len(run.series('batch/loss'))} points by batch, {len(run.series('val/loss'))} by epoch")
print(f"{run.config['model']['parameters']} parameters, {run.config['compile']['optimizer']['class_name']}")
