"""Two processes, one run: torchrun --nproc-per-node 2 examples/train_ddp.py

Every rank calls init() and logs; each writes a journal of its own, so no rank waits for another. Reading folds them:
`fanfold show -` draws the mean over ranks, and rank 0 prints below which rank was slowest.
"""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fanfold

torch.set_num_threads(1)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no need to resolve its name
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
run = fanfold.init("ddp", config={"lr": 1e-2, "batch": 64})

torch.manual_seed(100 + rank)  # each rank draws data of its own
for step in range(100):
    began = time.perf_counter()
    inputs = torch.randn(64, 8)
    loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    # A tensor is logged as it is; on a GPU this copies it without waiting for the device.
    run.log({"loss": loss, "seconds": time.perf_counter() - began}, step=step)

run.finish()
dist.barrier()  # only so that rank 0 below sees the last steps of all
if rank == 0:
    fold = fanfold.open(run.path).series("seconds", fold="mean")
    print(f"{fold.count[-1]} ranks; slowest at the last step: rank {fold.max_rank[-1]}, {fold.max[-1] * 1e3:.1f} ms")
dist.destroy_process_group()
