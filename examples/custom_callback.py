"""Write a callback, and give it to a Trainer in each of the four ways: class or instance, in the constructor or later."""

import tempfile

import torch

import fanfold
from fanfold.callbacks import TrainerCallback


class Greeter(TrainerCallback):
    """Say a word when training begins and when it ends."""

    def __init__(self, name: str = "a callback") -> None:
        self.name = name

    def on_train_begin(self, args, state, control, **kwargs):
        print(f"{self.name}: training begins, {state.max_steps} steps")

    def on_train_end(self, args, state, control, **kwargs):
        print(f"{self.name}: training ends at step {state.global_step}")


class StopAtLoss(TrainerCallback):
    """Steer: stop as soon as the logged loss is low enough."""

    def __init__(self, enough: float) -> None:
        self.enough = enough

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs.get("loss", float("inf")) < self.enough:
            control.should_training_stop = True


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}


torch.manual_seed(0)
points = torch.randn(64, 2)
data = [{"x": x, "labels": x.sum().reshape(1)} for x in points]

with tempfile.TemporaryDirectory() as folder:
    args = fanfold.TrainingArguments(
        folder, project="examples", num_train_epochs=30, learning_rate=0.1, logging_steps=5, save_strategy="no", disable_tqdm=True
    )
    trainer = fanfold.Trainer(Line(), args, train_dataset=data, callbacks=[Greeter, StopAtLoss(1e-3)])
    trainer.add_callback(Greeter("an instance"))
    trainer.remove_callback(Greeter)  # the first of that class: the one given as a class
    trainer.add_callback(Greeter)
    trainer.train()
    trainer.run.finish()
print("stopped early:", trainer.state.global_step < trainer.state.max_steps)
