"""What log() takes as a number: python examples/tensors.py

Floats, ints, bools, numpy scalars, tensors on any device, nested dicts. A tensor on a GPU is copied without a
synchronisation and recorded when it lands; on the CPU it is read at once. A value that is no number is said once and
never stops the loop.
"""

import numpy as np
import torch

import fanfold

device = "cuda" if torch.cuda.is_available() else "cpu"
weights = torch.zeros(4, device=device, requires_grad=True)
target = torch.arange(4.0, device=device)
run = fanfold.init("tensors", config={"device": device})

for step in range(50):
    loss = (weights - target).square().sum()
    loss.backward()
    with torch.no_grad():
        weights -= 0.1 * weights.grad
        norm = weights.grad.norm()
        weights.grad = None
    run.log(
        {
            "loss": loss,  # no .item(): that would wait for the device
            "grad": {"norm": norm, "largest": weights.abs().max()},  # recorded as grad/norm and grad/largest
            "epoch": step // 10,
            "warm": step < 5,
            "time": np.float32(step * 0.5),
        },
        step=step,
    )

run.finish()
stored = fanfold.open(run.path)
print(f"keys: {', '.join(stored.keys())}")
print(f"loss fell from {stored.series('loss').values[0]:.2f} to {stored.series('loss').values[-1]:.2e}")
