"""Train a tiny model in the real Transformers Trainer: `python reporting_train.py ours|theirs NAMES FOLDER [crash]`."""

from __future__ import annotations

import os
import sys

import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments


class TinyConfig(PretrainedConfig):
    model_type = "tiny"

    def __init__(self, width=4, **kwargs):
        self.width = width
        super().__init__(**kwargs)


class Tiny(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config=None, fails_at=None):
        super().__init__(config or TinyConfig(api_key="sk-not-for-any-tracker"))
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(self.config.width, 1)
        self.post_init()
        self.calls, self.fails_at = 0, fails_at

    def _init_weights(self, module):
        """Keep them as they are."""

    def forward(self, x=None, labels=None):
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("a bad batch")
        y = self.layer(x).squeeze(-1)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}


def data(count=16):
    torch.manual_seed(1)
    return [{"x": torch.randn(4), "labels": torch.tensor(float(i % 3))} for i in range(count)]


def trainer(folder, callbacks, fails_at=None, **given):
    known = {
        "max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1,
        "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "run_name": "tiny-run", "disable_tqdm": True,
    }  # fmt: skip
    args = TrainingArguments(output_dir=f"{folder}/out", **{**known, **given})
    return Trainer(Tiny(fails_at=fails_at), args, train_dataset=data(), eval_dataset=data(4), callbacks=callbacks)


def made(which, name, folder):
    """Make a callback; where Transformers takes other arguments than ours for the same thing, they are its own."""
    if which == "ours":
        from fanfold.callbacks.reporting import INTEGRATION_TO_CALLBACK as known
    else:
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK as known
    if name == "neptune":
        return known[name](log_checkpoints="last")
    if name == "dvclive" and which == "ours":
        return known[name](log_model=True, dir=f"{folder}/dvclive", save_dvc_exp=False)
    if name == "dvclive":
        from dvclive import Live

        return known[name](live=Live(dir=f"{folder}/dvclive", save_dvc_exp=False))
    return known[name]()


if __name__ == "__main__":
    which, names, folder, *crash = sys.argv[1:]
    os.chdir(folder)
    trained = trainer(folder, [made(which, name, folder) for name in names.split(",")], fails_at=4 if crash else None)
    trained.train()
    trained.evaluate()
    trained.predict(data(4))
