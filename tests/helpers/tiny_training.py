"""A small model, its data, and a fanfold Trainer for them."""

from __future__ import annotations

import torch

import fanfold


class Net(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
        )

    def forward(self, x, labels=None):
        guess = self.body(x).squeeze(-1)
        loss = (guess - labels).square().mean() if labels is not None else None
        return {"loss": loss, "guess": guess}


class Data(torch.utils.data.Dataset):
    """Rows whose inputs are jittered by the global random state, as augmentation does."""

    def __init__(self, count=22, jitter=0.0):
        self.inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(3))
        self.jitter = jitter

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        row = self.inputs[index]
        return {
            "x": row + self.jitter * torch.randn(4) if self.jitter else row,
            "label": row.sum().sin(),
            "text": "not for the model",
        }


def arguments(folder, **more):
    options = {"output_dir": str(folder), "per_device_train_batch_size": 2, "learning_rate": 0.05, "num_train_epochs": 2,
               "logging_steps": 2, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}  # fmt: skip
    return fanfold.TrainingArguments(**{**options, **more})


def trainer_in(folder, *, model=None, callbacks=(), train=None, run=False, **more):
    extra = {name: more.pop(name) for name in ("compute_metrics", "compute_loss_func", "eval_dataset", "optimizers", "data_collator",
                                               "model_init", "on_error") if name in more}  # fmt: skip
    if "model_init" not in extra:
        extra["model"] = model if model is not None else Net()
    return fanfold.Trainer(args=arguments(folder, **more), train_dataset=train if train is not None else Data(), run=run,
                           callbacks=callbacks, **extra)  # fmt: skip


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
