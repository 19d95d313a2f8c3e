"""Read runs back: python examples/read_back.py

Everything the command line shows is here as objects, numpy arrays and data frames; live runs too.
"""

import math

import fanfold

for lr in (0.1, 0.01, 0.001):
    with fanfold.init("sweep", name=f"lr-{lr}", config={"lr": lr}, tags=["sweep"], quiet=True) as run:
        for step in range(200):
            run.log({"loss": math.exp(-lr * step), "val/accuracy": 1 - math.exp(-lr * step) / 2}, step=step)

# All runs of a project, newest first. Their facts come from a catalogue, so thousands list at once.
runs = fanfold.runs("sweep")[:3]
best = min(runs, key=lambda run: run.summary["loss"])
print(f"best of {len(runs)}: {best.name}, config {best.config}")

# One key as arrays; `fold="mean"` would fold it over ranks, with the lowest and highest rank beside it.
series = best.series("loss")
print(f"{len(series)} points, from {series.values[0]:.3f} to {series.values[-1]:.2e} at step {series.steps[-1]}")

# One row per step and a column per key; to_polars() and to_arrow() give the same.
try:
    print(best.to_pandas().tail(3).to_string(index=False))
except fanfold.MissingExtra as missing:
    print(missing)
