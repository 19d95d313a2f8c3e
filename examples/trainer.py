"""The Trainer: train, evaluate, keep the best, resume: python examples/trainer.py (or torchrun --nproc-per-node 2 …)

The same script runs on one process and on many; each writes a journal of its own into the same run.
"""

import torch

import fanfold


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def forward(self, x, labels):
        guess = self.body(x).squeeze(-1)
        return {"loss": (guess - labels).square().mean(), "guess": guess}


def dataset(count, seed):
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": row.sum().sin()} for row in inputs]


def metrics(found):
    return {"mae": abs(found.predictions - found.label_ids).mean()}


def make(epochs):
    args = fanfold.TrainingArguments(
        output_dir="trainer_output", num_train_epochs=epochs, per_device_train_batch_size=16, learning_rate=1e-2,
        lr_scheduler_type="constant", logging_steps=10, eval_strategy="epoch", save_strategy="epoch", save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="mae", greater_is_better=False, project="trainer", disable_tqdm=True,
    )  # fmt: skip
    return fanfold.Trainer(Net(), args, train_dataset=dataset(256, 1), eval_dataset=dataset(64, 2), compute_metrics=metrics)


make(epochs=2).train()
trainer = make(epochs=4)  # as after a restart: a new process, the same folder
trainer.train(resume_from_checkpoint=True)
scores = trainer.evaluate(dataset(64, 3), metric_key_prefix="test")
trainer.run.finish()
if trainer.is_world_process_zero():
    run = fanfold.open(trainer.run.path)
    loss = run.series("train/loss")
    print(f"{len(run.attempts)} attempts, {loss.steps[-1]} steps, test mae {scores['test_mae']:.2f}")
