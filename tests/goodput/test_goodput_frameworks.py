"""Goodput inside the frameworks: what the real Trainers of Transformers and Lightning, and Keras, do besides steps is timed."""

import os

import lightning.pytorch
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras

from fanfold.frameworks.keras import FanfoldCallback as KerasCallback
from fanfold.frameworks.lightning import FanfoldLogger
from fanfold.frameworks.transformers import FanfoldCallback
from span_tools import Clock, spans_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]
DATA = [{"x": torch.tensor([i / 10, 1.0]), "labels": torch.tensor(i / 5)} for i in range(16)]


@pytest.fixture(autouse=True)
def fresh(in_a_framework):
    """Every test stands alone."""


class Tiny(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 1)
        self.post_init()

    def _init_weights(self, module):
        torch.nn.init.constant_(module.weight, 0.5)

    def forward(self, x, labels=None):
        logits = self.layer(x).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def test_in_transformers_evaluations_saves_and_waits_for_data_are_timed(tmp_path):
    """A Trainer has no event at which an evaluation or a save begins; what happens inside them belongs to them."""
    clock = Clock()

    class Slow(Trainer):
        def evaluate(self, *args, **kwargs):
            clock.spend("evaluation", 0.6)
            return super().evaluate(*args, **kwargs)

        def _save_checkpoint(self, *args, **kwargs):
            clock.spend("checkpoint", 0.7)
            return super()._save_checkpoint(*args, **kwargs)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return len(DATA)

        def __getitem__(self, index):
            clock.spend("data", 0.02)
            return DATA[index]

    given = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, per_device_train_batch_size=2, logging_steps=1, use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, report_to="none", eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    callback = FanfoldCallback(project="p")
    Slow(Tiny(PretrainedConfig()), given, train_dataset=Data(), eval_dataset=DATA, callbacks=[callback]).train()
    callback.run.finish()
    found = spans_of(callback.run)
    assert found["evaluation"] == pytest.approx(clock.seconds["evaluation"], rel=0.1, abs=0.4)  # its own work comes on top
    assert found["checkpoint"] == pytest.approx(clock.seconds["checkpoint"], rel=0.1, abs=0.4)
    assert found["data"] == pytest.approx(clock.seconds["data"], rel=0.1, abs=0.1)
    assert min(found["evaluation"] - clock.seconds["evaluation"], found["checkpoint"] - clock.seconds["checkpoint"]) >= -0.01


def test_in_lightning_validations_and_checkpoints_are_timed(tmp_path):
    clock = Clock()

    class Model(BoringModel):
        def on_validation_epoch_start(self):
            clock.spend("evaluation", 0.6)

    class Slow:
        def __getstate__(self):
            clock.spend("checkpoint", 0.7)
            return {}

    class Adds(lightning.pytorch.Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["slow"] = Slow()

    globals()["Slow"] = Slow  # pickle looks it up by its name
    Slow.__qualname__ = "Slow"
    logger = FanfoldLogger("p", save_dir=str(tmp_path))
    trainer = lightning.pytorch.Trainer(
        logger=logger, max_epochs=1, limit_train_batches=4, limit_val_batches=2, callbacks=[Adds()], accelerator="cpu", devices=1, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(tmp_path), num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Model())
    logger.experiment.finish()
    found = spans_of(logger.experiment)
    assert found["evaluation"] == pytest.approx(clock.seconds["evaluation"], rel=0.1, abs=0.4)
    assert found["checkpoint"] == pytest.approx(clock.seconds["checkpoint"], rel=0.1, abs=0.4)


def test_in_keras_evaluations_are_timed():
    clock = Clock()

    class Slow(keras.callbacks.Callback):
        def on_test_batch_begin(self, batch, logs=None):
            clock.spend("evaluation", 0.3)

    x = np.linspace(0, 1, 32, dtype="float32").reshape(16, 2)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    callback = KerasCallback("p")
    model.fit(
        x, x.sum(axis=1), validation_data=(x, x.sum(axis=1)), epochs=1, verbose=0, batch_size=4, callbacks=[callback, Slow()]
    )
    callback.run.finish()
    assert spans_of(callback.run)["evaluation"] == pytest.approx(clock.seconds["evaluation"], rel=0.1, abs=0.4)
