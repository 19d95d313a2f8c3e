"""Example runs for a first look at the dashboard: the made-up curves of a small search, written as an import would write them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..journal.directory import run_path
from ..media import Histogram, Image, Table
from ..process import digest
from .account import RunAccount
from .events import Alert, Console, Definition, End, Event, Facts, Found, Rows, Start, Values
from .write import SECOND, RunWriter

PROJECT = "demo"
STEPS, RANKS = 1000, 8
PROMPTS = ("The cat sat on", "Once upon a time", "In the beginning", "The answer is")
ENDINGS = ("the the the", "the mat mat a", "a mat, and then", "the warm mat and slept.")


def write_examples(root: Path, project: str = PROJECT) -> int:
    """Write the example runs into a directory of runs; return how many were written. Those that are there stay as they are."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    written = 0
    grid = itertools.product((1e-4, 3e-4, 1e-3, 1e-2), (128, 256), (0, 1))
    for number, (lr, width, seed) in enumerate(grid):
        name = f"lr{lr:g}-width{width}-seed{seed}"
        id = digest("fanfold examples", project, name)
        if run_path(root, project, id).exists():
            continue
        found = Found(kind="examples", id=name, paths=(), project=project, name=name)
        account = RunAccount(kind="examples", source="", id=name, project=project, run=id)
        writer = RunWriter(run_path(root, project, id), id, project, found, account)
        for event in _events(name, number, lr, width, seed):
            writer.feed(event)
        writer.settle()
        writer.close()
        written += 1
    return written


def _events(name: str, number: int, lr: float, width: int, seed: int) -> Iterator[Event]:
    dice = np.random.default_rng(1000 * number + seed)
    began = time.time_ns() - (40 - number) * 600 * SECOND
    diverges = lr > 5e-3 and width > 200
    count = 620 if diverges else STEPS
    steps = np.arange(count, dtype=np.int64)
    times = began + steps * (SECOND // 2)
    loss = _curve(steps, lr, width, dice)
    if diverges:
        loss[500:] += np.exp((steps[500:] - 500) / 60)
        loss[600:] = math.nan
    yield Start(time_ns=began)
    config = {"lr": lr, "width": width, "seed": seed, "optimizer": "adamw", "schedule": "cosine" if number // 4 % 2 else "linear"}
    yield Facts(name=name, tags=["example", f"width {width}"], config=config)
    yield Definition(key="val/accuracy", options={"summary": "max"})
    rate = lr * np.minimum(1, (steps + 1) / 100) * (0.55 + 0.45 * np.cos(steps / STEPS * math.pi))
    norm = np.abs(dice.normal(1, 0.2, count)) + loss / 4
    yield Rows(steps=steps, times=times, columns={"train/loss": loss, "train/lr": rate, "train/grad_norm": norm})
    every = slice(24, count, 25)
    score = np.clip(1 - loss[every] / 4.5 + dice.normal(0, 0.004, len(steps[every])), 0, 1)
    yield Rows(steps=steps[every], times=times[every], columns={"val/loss": loss[every] * 1.06 + 0.03, "val/accuracy": score})
    if width > 200 and seed:  # trained by eight processes, one of them slow
        for rank in range(RANKS):
            took = np.abs(dice.normal(0.5 + 0.12 * (rank == 5), 0.03, count))
            yield Rows(steps=steps, times=times, columns={"train/step_seconds": took}, rank=rank)
    for place, step in enumerate(range(0, count, max(1, count // 4))):
        yield Values(step=step, time_ns=int(times[step]), values=_samples(float(loss[step]), place, dice))
    yield Console(text=f"training {name}\nstep {count - 1}: loss {loss[-1]:.3f}\n", time_ns=int(times[-1]))
    if diverges:
        yield Alert(title="loss is NaN", text="from step 600 on", level="error", step=600, time_ns=int(times[600]))
    yield End(status="failed" if diverges else "finished", time_ns=int(times[-1]), cause="loss is NaN" if diverges else "")


def _curve(steps: np.ndarray[Any, Any], lr: float, width: int, dice: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return a loss that falls sooner with a larger learning rate, and lower with a larger width."""
    floor = 1.1 - 0.18 * math.log2(width / 128) + 0.12 * abs(math.log10(lr / 6e-4))
    curve: np.ndarray[Any, Any] = floor + 3.1 * np.exp(-steps * (lr / 6e-4) ** 0.5 / 130) + dice.normal(0, 0.035, len(steps))
    return curve


def _samples(loss: float, place: int, dice: np.random.Generator) -> dict[str, Any]:
    noise = min(1.0, 0.0 if math.isnan(loss) else loss / 4)
    x, y = np.meshgrid(*[np.linspace(-1, 1, 64)] * 2)
    clean = np.stack([np.exp(-4 * (x**2 + y**2)), np.hypot(x, y) / 1.5, 0.5 + x / 2], axis=-1)
    picture = (255 * np.clip(clean * (1 - noise) + dice.random((64, 64, 3)) * noise, 0, 1)).astype(np.uint8)
    rewards = [round(float(reward), 3) for reward in dice.random(len(PROMPTS)) * (1 - noise)]
    rows = [[i, prompt, ENDINGS[min(place, 3)], reward] for i, (prompt, reward) in enumerate(zip(PROMPTS, rewards, strict=True))]
    return {
        "val/picture": Image(picture, caption=f"noise {noise:.2f}"),
        "val/samples": Table(["id", "prompt", "completion", "reward"], rows),
        "weights": Histogram(dice.normal(0, 0.2 + 0.1 * place, 2000)),
    }
