"""Our callback inside the real Keras 3, on its torch backend.

One process: Keras spreads fit() over devices of one process (its distribution API, for JAX); it has no way to run fit() over
several processes with the torch backend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras

import fanfold
from fanfold.frameworks.keras import FanfoldCallback

# Keras' own: its variables have the older signature of __array__.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")

X = np.linspace(0, 1, 32, dtype="float32").reshape(16, 2)
Y = X.sum(axis=1)


@pytest.fixture(autouse=True)
def fresh(in_a_framework):
    """Every test stands alone."""


def compiled(**more):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="last")])
    model.compile(optimizer=keras.optimizers.SGD(0.125), loss="mse", metrics=["mae"], **more)
    return model


def fit(model, *callbacks, **more):
    return model.fit(X, Y, **{"batch_size": 4, "epochs": 2, "verbose": 0, "shuffle": False, "callbacks": list(callbacks), **more})


def points(run, key):
    series = fanfold.open(run.path).series(key)
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


class Raise(keras.callbacks.Callback):
    def __init__(self, error, after=6):
        super().__init__()
        self.error, self.left = error, after

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left < 0:
            raise self.error


def test_fit_evaluate_and_predict_are_one_run_with_keras_own_numbers(runs_dir):
    model, callback, seen = compiled(), FanfoldCallback("keras", name="first"), []
    watcher = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    history = fit(model, callback, watcher, validation_data=(X, Y)).history
    scores = model.evaluate(X, Y, verbose=0, callbacks=[callback], return_dict=True)
    model.predict(X, batch_size=4, verbose=0, callbacks=[callback])
    run = callback.run
    assert points(run, "batch/loss") == list(enumerate(seen, start=1))
    for name in ("loss", "mae"):
        assert points(run, f"train/{name}") == list(zip((4, 8), history[name], strict=True))
        assert points(run, f"val/{name}") == list(zip((4, 8), history[f"val_{name}"], strict=True))
        assert points(run, f"test/{name}") == [(8, scores[name])]
    assert points(run, "train/epoch") == [(4, 0), (8, 1)]
    assert points(run, "train/learning_rate") == [(4, 0.125), (8, 0.125)]
    assert points(run, "predict/batches") == [(8, 4)]
    assert [(item.name, item.status) for item in fanfold.runs(dir=runs_dir)] == [("first", "running")]
    fanfold.finish()
    assert fanfold.open(run.path).status == "finished"


def test_the_run_knows_the_model():
    callback = FanfoldCallback()
    fit(compiled(), callback)
    stored = fanfold.open(callback.run.path)
    assert (stored.config["model"]["parameters"], stored.config["epochs"], stored.config["steps"]) == (3, 2, 4)
    assert (stored.config["compile"]["loss"], stored.config["compile"]["optimizer"]["class_name"]) == ("mse", "SGD")
    (summary,), (graph,) = stored.texts("model/summary"), stored.texts("model/graph")
    assert "last (Dense)" in summary.text
    assert '"name": "last"' in graph.text


def test_a_model_that_is_code_is_described_by_its_layers_alone():
    class Code(keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.last = layer

        def call(self, inputs):
            return self.last(inputs)

        def get_config(self):
            raise NotImplementedError

    model = Code(keras.layers.Dense(1, name="last"))
    model.compile(optimizer="sgd", loss="mse")
    callback = FanfoldCallback()
    fit(model, callback, epochs=1)
    stored = fanfold.open(callback.run.path)
    assert "last (Dense)" in stored.texts("model/summary")[0].text
    assert stored.texts("model/graph") == []
    assert len(points(callback.run, "batch/loss")) == 4


def test_the_same_model_goes_on_in_its_run_and_another_has_a_run_of_its_own(runs_dir):
    model, callback = compiled(), FanfoldCallback()
    fit(model, callback, epochs=1)
    first = callback.run
    fit(model, callback, epochs=2, initial_epoch=1)
    assert callback.run is first
    assert points(first, "train/epoch") == [(4, 0), (8, 1)]
    fit(compiled(), callback, epochs=1)
    assert {run.id: run.status for run in fanfold.runs(dir=runs_dir)} == {first.id: "finished", callback.run.id: "running"}
    assert [step for step, _ in points(callback.run, "batch/loss")] == [1, 2, 3, 4]


def test_every_n_batches_and_never():
    for every, steps in ((3, [3, 7]), (0, None)):
        callback = FanfoldCallback(every=every)
        fit(compiled(), callback)
        keys = fanfold.open(callback.run.path).keys()
        assert ([step for step, _ in points(callback.run, "batch/loss")] if "batch/loss" in keys else None) == steps
        assert len(points(callback.run, "train/loss")) == 2


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("a bad batch"), "failed"), (KeyboardInterrupt(), "killed")])
def test_an_exception_that_somebody_catches_ends_the_run_at_once(error, status):
    callback, model, bad = FanfoldCallback(), compiled(), Raise(error)
    bad.async_safe = True  # so that batches are handed over by Keras' threads
    with pytest.raises(type(error)):
        fit(model, callback, bad)
    stored = fanfold.open(callback.run.path)
    assert stored.status == status
    assert type(error).__name__ in stored.error
    assert [step for step, _ in points(callback.run, "batch/loss")] == [1, 2, 3, 4, 5, 6]
    fit(model, callback, epochs=1)
    stored = fanfold.open(callback.run.path)
    assert [attempt.verdict()["status"] for attempt in stored.attempts] == [status, "running"]
    assert [step for step, _ in points(callback.run, "train/loss")] == [4, 10]


def test_a_run_of_the_users_is_used_and_left_open():
    run = fanfold.init("mine", config={"note": "kept"})
    with pytest.raises(RuntimeError):
        fit(compiled(), FanfoldCallback(), Raise(RuntimeError("a bad batch")))
    fit(compiled(), FanfoldCallback())
    assert run.status == "running"
    assert fanfold.open(run.path).config["note"] == "kept"
    assert [step for step, _ in points(run, "train/loss")] == [4, 4, 8]


def test_an_evaluation_without_training_opens_a_run():
    model, callback = compiled(), FanfoldCallback()
    loss, _ = model.evaluate(X, Y, verbose=0, callbacks=[callback])
    assert points(callback.run, "test/loss") == [(0, loss)]
    assert fanfold.open(callback.run.path).config["model"]["parameters"] == 3


ON_JAX = """
import threading
from test_framework_keras import *
assert keras.backend.backend() == "jax"

names = set()
class Named(FanfoldCallback):
    def on_train_batch_end(self, batch, logs=None):
        names.add(threading.current_thread().name)
        super().on_train_batch_end(batch, logs)

callback, model = Named("jax"), compiled(steps_per_execution=2)
history = fit(model, callback, validation_data=(X, Y)).history
assert points(callback.run, "train/loss") == list(zip((4, 8), history["loss"]))
assert points(callback.run, "val/loss") == list(zip((4, 8), history["val_loss"]))
assert [step for step, _ in points(callback.run, "batch/loss")] == [2, 4, 6, 8]
assert threading.main_thread().name not in names, names

bad = Raise(RuntimeError("a bad batch"))
bad.async_safe = True
model = compiled()
try:
    fit(model, callback, bad)
except RuntimeError:
    pass
assert fanfold.open(callback.run.path).status == "failed"
assert [step for step, _ in points(callback.run, "batch/loss")] == [1, 2, 3, 4, 5, 6]
fit(model, callback, epochs=1)
"""


def test_on_jax_metrics_become_numbers_in_keras_threads_and_none_is_lost_in_a_crash(tmp_path, runs_dir):
    """That is where Keras waits for the device; our callback does not move that wait to the training thread."""
    source = os.pathsep.join([str(Path(fanfold.__file__).parents[1]), str(Path(__file__).parent)])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ON_JAX], cwd=tmp_path, capture_output=True, text=True, timeout=110,
                          env={**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "PYTHONPATH": source})  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = fanfold.runs(dir=runs_dir)
    assert sorted([[attempt.verdict()["status"] for attempt in run.attempts] for run in runs]) == [
        ["failed", "finished"],
        ["finished"],
    ]
