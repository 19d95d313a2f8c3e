"""Accelerate's own tracking calls, with one import changed: a custom tracker, TensorBoard, and every rank in the run.

python examples/accelerate_tracking.py, or: accelerate launch --num_processes 2 examples/accelerate_tracking.py
"""

import tempfile
from pathlib import Path

import torch
from accelerate.tracking import GeneralTracker, on_main_process

import fanfold
from fanfold.frameworks.accelerate import Accelerator  # was: from accelerate import Accelerator


class TextTracker(GeneralTracker):
    name = "text"
    requires_logging_directory = False

    def __init__(self, path):
        super().__init__()
        self.path = path

    def start(self):
        self.file = self.path.open("w")

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def log(self, values, step=None):
        self.file.write(f"{step} {values}\n")

    @on_main_process
    def finish(self):
        self.file.close()


folder = Path(tempfile.mkdtemp())
accelerator = Accelerator(cpu=True, log_with=[TextTracker(folder / "log.txt"), "tensorboard"], project_dir=folder)
accelerator.init_trackers("accelerate", config={"lr": 0.1, "sizes": [3, 1]})

model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(20):
    inputs = torch.randn(16, 3)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss, "grad": {"lr": 0.1}}, step=step)  # a tensor, a nested dict: both arrive everywhere

accelerator.end_training()
if accelerator.is_main_process:
    lines = (folder / "log.txt").read_text().splitlines()
    run = fanfold.open(accelerator.run.path)
    print(f"text: {len(lines)} lines; run: {len(run.series('loss').values)} points, {len(run.ranks)} rank(s)")
