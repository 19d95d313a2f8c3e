"""One measurement in a process of its own: what it measures is not disturbed by another library, and may be killed.

python child.py MEASUREMENT PEER DIR OUT key=value... writes its figures to OUT as JSON.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import PEERS, Peer, settle_in

Figures = dict[str, Any]
now = time.perf_counter_ns


def values(keys: int, step: int) -> dict[str, float]:
    """Make numbers with all their digits, as losses have them: short ones would flatter text formats."""
    return {f"m{k}": math.sin(step + k) for k in range(keys)}


def ms(since: int) -> float:
    return (now() - since) / 1e6


def disk(dir: Path) -> int:
    return sum(file.stat().st_size for file in dir.rglob("*") if file.is_file())


def clock_cost() -> int:
    """Measure what reading the clock twice adds to a timed call."""
    pairs = [(now(), now()) for _ in range(10_000)]
    return round(statistics.median(end - start for start, end in pairs))


def opened(peer: Peer, dir: Path) -> float:
    """Open a run, and say how many milliseconds that took beyond the import."""
    __import__(peer.module)
    start = now()
    peer.open(dir)
    return ms(start)


def timed_calls(peer: Peer, keys: int, calls: int, seconds: float) -> list[int]:
    """Time each log() by itself, until there are enough of them or the time is up."""
    log, spent = peer.log, []
    deadline = now() + int(seconds * 1e9)
    for step in range(1, calls + 1):
        row = values(keys, step)
        start = now()
        log(row, step)
        end = now()
        spent.append(end - start)
        if end > deadline and step >= 20:
            break
    return spent


def latency(peer: Peer, dir: Path, *, keys: int, calls: int, seconds: float, finish: int = 1) -> Figures:
    """Time log() on the calling thread, then finish(); the first call is warm-up."""
    open_ms = opened(peer, dir)
    peer.log(values(keys, 0), 0)
    before = disk(dir)
    spent = sorted(timed_calls(peer, keys, calls, seconds))
    cost = clock_cost()
    figures: Figures = {"open_ms": open_ms, "calls": len(spent), "clock_ns": cost, "disk_before": before}
    figures["p50_us"] = (spent[len(spent) // 2] - cost) / 1e3
    figures["p99_us"] = (spent[len(spent) * 99 // 100] - cost) / 1e3
    figures["max_us"] = (spent[-1] - cost) / 1e3
    if finish:
        start = now()
        peer.finish()
        figures["finish_ms"] = ms(start)
    return figures


def kill(peer: Peer, dir: Path, *, calls: int, hz: float, ack: str) -> Figures:
    """Log, and say after each call that it returned; then wait to be killed."""
    peer.open(dir)
    rows = [values(10, step) for step in range(calls)]
    with Path(ack).open("r+b") as file, mmap.mmap(file.fileno(), 8) as acknowledged:
        start = time.monotonic()
        for step, row in enumerate(rows):
            if hz:
                time.sleep(max(0.0, start + step / hz - time.monotonic()))
            peer.log(row, step)
            struct.pack_into("<q", acknowledged, 0, step + 1)
        time.sleep(600)
    return {}


def count(peer: Peer, dir: Path) -> Figures:
    """Count what a kill left on disk."""
    return {"rows": peer.count(dir, "m0")}


def cpu_seconds() -> float:
    """Sum the CPU time of this process and of the helpers the library started."""
    import psutil

    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (me, *me.children(recursive=True)))


def load(peer: Peer, dir: Path, *, seconds: float) -> Figures:
    """Log as fast as it goes for some seconds; say what CPU time each point took, finish() included."""
    opened(peer, dir)
    peer.log(values(10, 0), 0)
    before, calls, row = cpu_seconds(), 0, values(10, 1)
    deadline = now() + int(seconds * 1e9)
    while now() < deadline:
        for _ in range(100):
            calls += 1
            peer.log(row, calls)
    peer.finish()
    return {"calls": calls, "cpu_us_per_point": (cpu_seconds() - before) * 1e6 / (calls * 10)}


def rss_mb() -> float:
    import psutil

    return psutil.Process().memory_info().rss / 2**20


def memory(peer: Peer, dir: Path, *, calls: int) -> Figures:
    """Log two numbers per call, and watch this process's memory from a tenth of the way to the end."""
    opened(peer, dir)
    marks = {0: rss_mb()}
    for step in range(1, calls + 1):
        peer.log({"loss": step * 0.001, "lr": 0.1}, step)
        if step % (calls // 10) == 0:
            gc.collect()
            marks[step] = rss_mb()
    peer.finish()
    return {"marks": marks}


def write(peer: Peer, dir: Path, *, calls: int) -> Figures:
    """Write one long run, ten keys a call."""
    peer.open(dir)
    rows = [values(10, step) for step in range(1000)]
    start = now()
    for step in range(calls):
        peer.log(rows[step % 1000], step)
    seconds = ms(start) / 1e3
    peer.finish()
    return {"calls": calls, "points_per_second": calls * 10 / seconds, "disk": disk(dir)}


def read(peer: Peer, dir: Path) -> Figures:
    """Read one long series twice in this process: the first time finds whatever cache is on disk."""
    import numpy as np  # noqa: F401  (its import is not what is measured)

    import fanfold

    figures: Figures = {}
    for name in ("first_ms", "second_ms"):
        start = now()
        series = fanfold.runs(dir=dir)[0].series("m0")
        total = float(series.values.sum())
        figures[name] = ms(start)
        figures["points"], figures["sum"] = len(series.steps), total
    return figures


def many(peer: Peer, dir: Path, *, runs: int) -> Figures:
    """Make many short runs; say what opening and finishing one takes."""
    __import__(peer.module)
    opens, finishes = [], []
    for n in range(runs):
        start = now()
        peer.open(dir)
        opens.append(ms(start))
        peer.log(values(10, n), n)
        start = now()
        peer.finish()
        finishes.append(ms(start))
    median, worst = statistics.median, max
    return {
        "open_ms": median(opens),
        "open_max_ms": worst(opens),
        "finish_ms": median(finishes),
        "finish_max_ms": worst(finishes),
    }


MEASUREMENTS: dict[str, Callable[..., Figures]] = {f.__name__: f for f in (latency, kill, count, load, memory, write, read, many)}


def main(measurement: str, name: str, dir: str, out: str, *options: str) -> None:
    peer, place = PEERS[name], Path(dir).resolve()
    target = Path(out).resolve()
    settle_in(peer, place)
    named = dict(option.split("=", 1) for option in options)
    arguments = {key: json.loads(value) for key, value in named.items()}
    target.write_text(json.dumps(MEASUREMENTS[measurement](peer, place, **arguments)))
    sys.stdout.flush()
    if not arguments.get("finish", 1):
        os._exit(0)  # a queue nobody waits for would drain for minutes at exit


if __name__ == "__main__":
    main(*sys.argv[1:])
