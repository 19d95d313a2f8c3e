"""A loop of your own with callbacks, early stopping, checkpoints and resume: python examples/hand_written_loop.py

Iterating is all the loop needs. Run it again with the folder still there and it goes on where it was.
"""

import torch

import fanfold
from fanfold.callbacks import EarlyStoppingCallback

torch.manual_seed(0)
inputs = torch.randn(256, 8)
batches = list(zip(inputs.split(16), inputs.sum(1, keepdim=True).sin().split(16), strict=True))
train, held_out = batches[:12], batches[12:]

model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def loss_of(batch):
    return (model(batch[0]) - batch[1]).square().mean()


@torch.no_grad()
def evaluate():
    return {"loss": torch.stack([loss_of(batch) for batch in held_out]).mean()}


def save(folder):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "weights.pt")


def load(folder):
    kept = torch.load(folder / "weights.pt", weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])


loop = fanfold.Loop(
    epochs=40, gradient_accumulation_steps=2, optimizer=optimizer, evaluate=evaluate, eval_strategy="epoch",
    save=save, load=load, save_strategy="epoch", save_total_limit=1, output_dir="checkpoints", load_best_model_at_end=True,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=5)], project="by-hand",
)  # fmt: skip
loop.resume()  # from the latest whole checkpoint, if there is one

with loop:  # an exception inside is told to the callbacks and marks the run failed
    for _epoch in loop.epochs():
        for batch in loop.steps(train):
            loss = loss_of(batch)
            (loss / loop.accumulation_steps).backward()
            if loop.sync_gradients:  # the last batch of a step
                optimizer.step()
                optimizer.zero_grad()
            loop.log({"loss": loss})

series = fanfold.open(loop.run.path).series("loss")
best = float(evaluate()["loss"])  # the best weights are back
print(f"{len(series.values)} steps of at most 240; the best was at step {loop.state.best_global_step}: {best:.3f}")
