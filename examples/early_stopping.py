"""Stop when the evaluation has not become better three times in a row, and go back to the best weights."""

import tempfile

import torch

import fanfold
from fanfold.callbacks import EarlyStoppingCallback


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def forward(self, x, labels):
        return {"loss": (self.layers(x) - labels).square().mean()}


torch.manual_seed(0)
few = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(32)]  # noise: it can only be learnt by heart
others = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(32)]

with tempfile.TemporaryDirectory() as folder:
    args = fanfold.TrainingArguments(
        folder,
        project="examples",
        num_train_epochs=50,
        learning_rate=0.01,
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
        disable_tqdm=True,
    )
    stopping = EarlyStoppingCallback(early_stopping_patience=3)
    trainer = fanfold.Trainer(Net(), args, train_dataset=few, eval_dataset=others, callbacks=[stopping])
    trainer.train()
    trainer.run.finish()
print(f"stopped after epoch {trainer.state.epoch:.0f} of 50; the best loss was {trainer.state.best_metric:.2f}")
