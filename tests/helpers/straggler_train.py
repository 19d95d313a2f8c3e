"""A multi-rank training for test_stragglers.py in which one rank may be slow: torchrun … OUT WHERE RANK."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

import fanfold
from fanfold.callbacks import StragglerCallback

torch.set_num_threads(1)
OUT, WHERE, SLOW = sys.argv[1], sys.argv[2], int(sys.argv[3])
RANK = int(os.environ["RANK"])


def maybe_late(where):
    if where == WHERE and RANK == SLOW:
        time.sleep(0.06)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))

    def forward(self, x):
        maybe_late("compute")
        return self.body(x).square().mean()


def batches():
    batch = torch.randn(64, 256)
    while True:
        maybe_late("data")
        yield batch


dist.init_process_group("gloo")
run = fanfold.init("stragglers", system=False)
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
callback = StragglerCallback(every=8, patience=3)
loop = fanfold.Loop(run, max_steps=56, model=model, optimizer=optimizer, callbacks=[callback])
with loop:
    for _ in loop.epochs():
        for batch in loop.steps(batches()):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            maybe_late("io")
            loop.log({"loss": loss})
if RANK == 0:
    with open(f"{OUT}/found.json", "w") as file:
        json.dump([[found.rank, found.key] for found in callback.found], file)
run.finish()
dist.destroy_process_group()
