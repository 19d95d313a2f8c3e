"""A training that takes requests, for test_tell.py. Every rank logs each step, and carried-out requests under `did/…`.

[torchrun …] tell_train.py DIR KIND [name=value …]
"""

import os
import sys
import time

import fanfold

DIR, KIND = sys.argv[1], sys.argv[2]
OPTIONS = {"steps": 1e9, "pace": 0.005, "eval_rows": 8} | {
    name: float(value) for name, value in (word.split("=") for word in sys.argv[3:])
}
RANK = int(os.environ.get("RANK", "0"))


def by_hand(run):
    """Train in a hand-written loop. With a process group, every step has a collective: a rank that stops alone would hang the others."""
    group = KIND == "group"
    if group:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        total = torch.zeros(1)
    lr = run.knob("lr", 0.1, min=0.0, max=1.0)
    run.knob("layers", 2)
    for step in range(1, int(OPTIONS["steps"])):
        time.sleep(OPTIONS["pace"] * (1 + RANK % 2))
        if group:
            dist.all_reduce(total)
        run.log({"lr": lr.value, "t": time.time()}, step=step)
        if KIND == "deaf":
            continue
        stop = run.control.should_stop
        for action in ("save", "evaluate"):
            if getattr(run.control, f"should_{action}"):
                run.log({f"did/{action}": 1.0}, step=step)
        if stop:
            run.log({"did/stop": 1.0}, step=step)
            break
    run.finish()
    if group:
        dist.destroy_process_group()


class Net:
    """A linear model, created on first use because importing torch takes a second."""

    def __new__(cls):
        import torch

        torch.set_num_threads(1)

        class Line(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.line = torch.nn.Linear(4, 1)

            def forward(self, x, labels):
                time.sleep(OPTIONS["pace"])
                return {"loss": (self.line(x).squeeze(-1) - labels).square().mean()}

        return Line()


def data(count=64):
    import torch

    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum()} for row in rows]


def marks(run, base):
    class Marks(base):
        def on_step_end(self, args, state, control, **kwargs):
            run.log({"t": time.time()}, step=state.global_step)

        def on_save(self, args, state, control, **kwargs):
            run.log({"did/save": 1.0}, step=state.global_step)

        def on_evaluate(self, args, state, control, **kwargs):
            run.log({"did/evaluate": 1.0}, step=state.global_step)

        def on_train_end(self, args, state, control, **kwargs):
            run.log({"did/stop": 1.0}, step=state.global_step)

    return Marks()


def trainer(run):
    from fanfold.callbacks import TrainerCallback

    arguments = fanfold.TrainingArguments(
        f"{DIR}/out", max_steps=int(min(OPTIONS["steps"], 10**7)), per_device_train_batch_size=2, logging_steps=10**6, disable_tqdm=True,
        save_strategy="no", use_cpu=True, learning_rate=0.1, lr_scheduler_type="constant",
    )  # fmt: skip
    fanfold.Trainer(
        Net(),
        arguments,
        train_dataset=data(),
        eval_dataset=data(int(OPTIONS["eval_rows"])) or None,
        callbacks=[marks(run, TrainerCallback)],
        run=run,
    ).train()
    run.finish()


def transformers_trainer(run):
    import transformers

    from fanfold.callbacks import ControlCallback
    from fanfold.frameworks.transformers import FanfoldCallback

    arguments = transformers.TrainingArguments(
        f"{DIR}/out", max_steps=int(min(OPTIONS["steps"], 10**7)), per_device_train_batch_size=2, logging_steps=10**6, disable_tqdm=True,
        save_strategy="no", use_cpu=True, learning_rate=0.1, lr_scheduler_type="constant", report_to=[],
    )  # fmt: skip
    # With `chosen`, the user's ControlCallback comes after the built-in one, or before it.
    steered = [FanfoldCallback(run=run, max_lr=0.8)]
    if order := int(OPTIONS.get("chosen", 0)):
        steered.insert(max(0, order), ControlCallback(run=run, max_lr=0.4))
    transformers.Trainer(
        Net(), arguments, train_dataset=data(), eval_dataset=data(int(OPTIONS["eval_rows"])) or None,
        callbacks=[*steered, marks(run, transformers.TrainerCallback)],
    ).train()  # fmt: skip
    run.finish()


def lightning(run):
    import lightning.pytorch as pl
    import torch

    from fanfold.frameworks.lightning import FanfoldLogger

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _index):
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            run.log({"t": time.time()}, step=self.trainer.global_step + 1)
            return loss

        def validation_step(self, batch, _index):
            run.log({"did/evaluate": 1.0}, step=self.trainer.global_step)

        def on_save_checkpoint(self, _checkpoint):
            run.log({"did/save": 1.0}, step=self.trainer.global_step)

        def on_train_end(self):
            run.log({"did/stop": 1.0}, step=self.trainer.global_step)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loaders = torch.utils.data.DataLoader(data(), batch_size=2), torch.utils.data.DataLoader(data(2), batch_size=2)
    fit = pl.Trainer(
        accelerator="cpu", max_epochs=10**6, max_steps=int(min(OPTIONS["steps"], 10**7)), logger=FanfoldLogger(run=run, max_lr=0.8),
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=f"{DIR}/out", check_val_every_n_epoch=10**6,
        num_sanity_val_steps=0, log_every_n_steps=10**6, enable_checkpointing=False,
        devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
    )  # fmt: skip
    fit.fit(Module(), *loaders)
    run.finish()


def keras(run):
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.chdir(DIR)
    import keras
    import numpy as np

    from fanfold.frameworks.keras import FanfoldCallback

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(OPTIONS["pace"])
            run.log({"t": time.time()}, step=batch)

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    rows = np.random.default_rng(0).normal(size=(64, 4))
    model.fit(rows, rows.sum(1), batch_size=2, epochs=10**6, verbose=0, callbacks=[Slow(), FanfoldCallback(run=run, max_lr=0.8)])
    run.log({"did/stop": 1.0}, step=int(model.optimizer.iterations))
    run.finish()


KINDS = {"trainer": trainer, "transformers": transformers_trainer, "lightning": lightning, "keras": keras}
KINDS.get(KIND, by_hand)(fanfold.init("tell", dir=DIR, system=False, quiet=True))
