"""What the black box costs: CPU time of a training step with it, as a ratio to the same step without, in one process.

Blocks with and without alternate; the result is the median of the ratios of neighbours, with the middle half. The CPU time of the
watcher, a process of its own, is given as a share of one core. `python benchmarks/blackbox.py [--rounds N]`; see docs/blackbox.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fanfold
from fanfold.blackbox.activity import cpu_of
from fanfold.blackbox.watch import TrainingThread, Watch
from ops import transformer

STEPS = 120
LIMIT = 1.01


def block(step: Callable[[], None], run: fanfold.Run | None) -> float:
    began = time.process_time()
    for number in range(STEPS):
        step()
        if run is not None:
            run.log({"loss": 1.0}, step=number)
    return time.process_time() - began


def with_box(step: Callable[[], None], folder: str, *, on: bool) -> tuple[float, float]:
    """Return the CPU time of a block of steps in a run, and the watcher's share of a core."""
    run = fanfold.init("cost", dir=folder, quiet=True, system=False, blackbox=on)
    box = next(
        (stop.__self__ for stop in run._ending.stoppers if type(getattr(stop, "__self__", None)).__name__ == "BlackBox"), None
    )
    step()
    time.sleep(1.0)  # the watcher and the facts of the run have started
    began, before = time.monotonic(), cpu_of(box._watcher.pid) if box else 0.0
    found = block(step, run)
    share = (cpu_of(box._watcher.pid) - before) / (time.monotonic() - began) if box else 0.0
    run.finish()
    return found, share


def look_cost(step: Callable[[], None], folder: str) -> float:
    """Return the CPU time of one look at a thread that trains, in microseconds; there is one each second."""
    watch = Watch(Path(folder), {"rank": 0, "process": "cost"}, lambda: -1, lambda _: True)
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            step()

    thread = threading.Thread(target=train)
    thread.start()
    watch.start()
    watch._thread = TrainingThread(thread.ident or 0, thread.native_id or 0)
    times = []
    for _ in range(200):
        began = time.thread_time()
        watch._look()
        times.append(time.thread_time() - began)
        time.sleep(0.01)
    stop.set()
    thread.join()
    watch.stop(1.0)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    step, ratios, shares = transformer(), [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FANFOLD_CACHE_DIR"] = folder
        print(f"one look, each second: {look_cost(step, folder):.0f} us of CPU", flush=True)
        for number in range(args.rounds + 1):
            order = (True, False) if number % 2 else (False, True)
            found = {on: with_box(step, folder, on=on) for on in order}
            if number:  # the first round warms up
                ratios.append(found[True][0] / found[False][0])
                shares.append(found[True][1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"transformer step with a black box: x{middle:.4f} [{low:.4f}, {high:.4f}] (limit {LIMIT})")
    print(f"watcher: {statistics.median(shares):.2%} of one core")


if __name__ == "__main__":
    main()
