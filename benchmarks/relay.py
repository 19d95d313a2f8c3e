"""What trackers cost the training process, and whether everything reaches them: the relay's own page of figures.

`make bench` runs it; `python benchmarks/relay.py --quick` is a check of a few minutes. A full run writes its block of
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import delivery
import relay_share

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
MARKS = ("<!-- relay: written by `make bench`, do not edit by hand -->", "<!-- relay: end -->")
FINISH_SECONDS = 10.0
now = time.perf_counter_ns
Log = Callable[[dict[str, float], int], None]
Loop = dict[str, float]


# The loops, each in a process of its own


def nothing(_folder: Path, _trackers: list[str]) -> tuple[Log, Callable[[], None]]:
    return (lambda _values, _step: None), lambda: None


def through_fanfold(folder: Path, trackers: list[str]) -> tuple[Log, Callable[[], None]]:
    import fanfold

    if {"raising", "hanging"} & set(trackers):
        sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
        __import__("relay_trackers")
    run = fanfold.init("contract", id="contract-1", dir=folder / "runs", system=False, quiet=True, trackers=trackers)
    return run.log, lambda: run.finish(timeout=FINISH_SECONDS if "hanging" in trackers else 300)


def through_accelerate(folder: Path, trackers: list[str]) -> tuple[Log, Callable[[], None]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=trackers, project_dir=str(folder))
    accelerator.init_trackers("bench")
    return (lambda values, step: accelerator.log(values, step=step)), accelerator.end_training


WAYS = {"nothing": nothing, "fanfold": through_fanfold, "accelerate": through_accelerate}


def work(turns: int) -> float:
    """Be a training step: the same computation each time, so that its CPU time is the same, too."""
    total = 0.0
    for i in range(turns):
        total += math.sqrt(i)
    return total


def turns_for(seconds: float) -> int:
    """Return how many turns of work() take so long here."""
    work(100_000)
    began = time.process_time()
    work(2_000_000)
    return max(1, round(2_000_000 * seconds / (time.process_time() - began)))


def child(way: str, trackers: list[str], folder: Path, steps: int, turns: int) -> Loop:
    """Run one loop and measure this process: CPU time while it trains, each log(), and what its relays took in all."""
    log, end = WAYS[way](folder, trackers)
    gc.collect()
    spent: list[int] = []
    cpu, wall = cpu_seconds(resource.RUSAGE_SELF), time.perf_counter()
    for step in range(steps):
        work(turns)
        values = {f"m{k}": math.sin(step + k) for k in range(10)}
        began = now()
        log(values, step)
        spent.append(now() - began)
    cpu, wall = cpu_seconds(resource.RUSAGE_SELF) - cpu, time.perf_counter() - wall
    began = now()
    end()
    finish = (now() - began) / 1e9
    spent.sort()
    return {
        "cpu_ms": cpu / steps * 1e3, "wall_ms": wall / steps * 1e3, "p50_us": spent[len(spent) // 2] / 1e3,
        "p99_us": spent[len(spent) * 99 // 100] / 1e3, "finish_s": finish, "relays_s": cpu_seconds(resource.RUSAGE_CHILDREN),
    }  # fmt: skip


def cpu_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


# The comparison


def measure(way: str, trackers: list[str], steps: int, turns: int, folder: Path) -> Loop | None:
    """Run a loop in a fresh process; None where it fails, or where a tracker that should have everything has not."""
    arguments = {"--child": way, "--trackers": ",".join(trackers), "--steps": steps, "--turns": turns, "--folder": folder}
    command = [sys.executable, str(HERE / "relay.py"), *(str(word) for pair in arguments.items() for word in pair)]
    done = subprocess.run(command, env={**os.environ, **delivery.offline(folder)}, cwd=folder, capture_output=True, text=True,
                          timeout=900, check=False)  # fmt: skip
    end_relays(folder)
    behind = [
        line
        for line in done.stderr.splitlines()
        if "not delivered yet" in line and line.split()[1].rstrip(":") in delivery.TRACKERS
    ]
    if done.returncode != 0 or behind:  # a tracker that got nothing costs nothing: no figure
        print(f"{way} {trackers}: {behind or done.stderr[-500:]}", file=sys.stderr)
        return None
    return dict(json.loads((folder / "figures.json").read_text()))


def end_relays(folder: Path) -> None:
    """End the relays of trackers that hang or raise for ever: each says its pid in its cursor."""
    for path in folder.rglob("*.cursor"):
        owner = json.loads(path.read_text()).get("owner")
        if owner:
            os.kill(owner["pid"], signal.SIGKILL)


def compare(cases: dict[str, tuple[str, list[str]]], steps: int, repeats: int, base: Path) -> dict[str, Loop]:
    """Measure every case once, then every case again: a busy minute hurts all alike. Return the medians."""
    found: dict[str, list[Loop]] = {}
    turns = turns_for(0.001)
    for _ in range(repeats):
        for title, (way, trackers) in cases.items():
            one = measure(way, trackers, steps, turns, Path(tempfile.mkdtemp(dir=base)))
            if one is not None:
                found.setdefault(title, []).append(one)
    return {
        title: {name: statistics.median(one[name] for one in several) for name in several[0]} for title, several in found.items()
    }


def loop_cost(base: Path, quick: bool) -> list[list[str]]:
    """Compare the CPU time of a loop that logs nothing, one that logs to four trackers, and one through Accelerate."""
    four = list(delivery.TRACKERS)
    cases = {"nothing logged": ("nothing", []), "fanfold, no tracker": ("fanfold", []),
             "fanfold, four trackers": ("fanfold", four), "Accelerate, the same four": ("accelerate", four)}  # fmt: skip
    found = compare(cases, 1000 if quick else 5000, 1 if quick else 3, base)
    least = found["nothing logged"]["cpu_ms"]
    return [
        [title, f"{one['cpu_ms']:.3f} ms", f"{one['cpu_ms'] / least:.3f}", f"{one['wall_ms']:.3f} ms", f"{one['p50_us']:.1f} µs",
         f"{one['p99_us']:.1f} µs", f"{one['finish_s']:.1f} s", f"{one['relays_s']:.1f} s" if title.startswith("fanfold") else "-"]
        for title, one in found.items()
    ]  # fmt: skip


LOOP_HEAD = ["", "CPU a step", "to nothing", "step", "log() p50", "log() p99", "finish()", "CPU of the relays, in all"]
LOOP_NOTE = (
    "Steps that compute for 1 ms and log ten numbers, to TensorBoard, wandb (offline), MLflow (SQLite) and Trackio. CPU time of the "
    "training process while it loops. The relays' is that of their whole lives, imports and finish included."
)


def trouble(base: Path, quick: bool) -> list[list[str]]:
    """See what one tracker that raises and one that hangs do to log(), to finish(), and to a healthy one."""
    steps = 1000 if quick else 5000
    rows = []
    turns, times = turns_for(0.001), []
    for title, trackers in {
        "a healthy tracker": ["tensorboard"],
        "and one that raises, and one that hangs": ["tensorboard", "raising", "hanging"],
    }.items():
        several = []
        for _ in range(1 if quick else 3):
            play = delivery.Play(base, trackers)
            one = measure("fanfold", trackers, steps, turns, play.folder)
            if one is not None:
                several.append(one)
        seen = play.seen("tensorboard")["scalars"]
        exact = all(sorted(step for step, _ in seen.get(f"m{k}", [])) == list(range(steps)) for k in range(10))
        times.append(statistics.median(one["p99_us"] for one in several))
        finish = max(one["finish_s"] for one in several)
        rows.append([title, f"{statistics.median(one['p50_us'] for one in several):.1f} µs", f"{times[-1]:.1f} µs",
                     f"{times[-1] / times[0]:.2f}", "every point, once" if exact else "NOT all", f"{finish:.1f} s"])  # fmt: skip
    return rows


TROUBLE_HEAD = ["", "log() p50", "log() p99", "to the first row", "the healthy one has", "finish(timeout=10), longest"]
DELIVERY_NOTE = (
    "Every point that log() returned for, compared by step and value with what the tracker's own reader finds. TensorBoard keeps 32-bit "
    "numbers and no status."
)


def sheets(base: Path, quick: bool, only: list[str]) -> list[Any]:
    from report import Sheet

    made = {
        "loop": lambda: Sheet("Trackers beside a training loop", LOOP_HEAD, loop_cost(base, quick), LOOP_NOTE),
        "share": lambda: Sheet("Whose the CPU time of a relay is", relay_share.HEAD, relay_share.rows(), relay_share.NOTE),
        "trouble": lambda: Sheet("Trackers in trouble", TROUBLE_HEAD, trouble(base, quick)),
        "delivery": lambda: Sheet("What arrives", delivery.HEAD, delivery.figures(base, quick), DELIVERY_NOTE),
    }
    return [made[name]() for name in only]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats: a check, not a measurement")
    parser.add_argument("--only", default="loop,share,trouble,delivery")
    parser.add_argument("--page", type=Path, help="write the block into this page (a full run: docs/benchmarks.md)")
    for name, kind in (("--child", str), ("--trackers", str), ("--steps", int), ("--turns", int), ("--folder", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        trackers = [name for name in options.trackers.split(",") if name]
        figures = child(options.child, trackers, options.folder, options.steps, options.turns)
        (options.folder / "figures.json").write_text(json.dumps(figures))
        return
    from rich.console import Console

    from report import machine, write_page

    console, facts = Console(width=None if sys.stdout.isatty() else 160), machine()
    with tempfile.TemporaryDirectory(prefix="fanfold-relay-", ignore_cleanup_errors=True) as base:
        found = sheets(Path(base), options.quick, options.only.split(","))
    for sheet in found:
        sheet.print(console)
    whole = not options.quick and options.only == parser.get_default("only")
    if page := options.page or (PAGE if whole else None):
        write_page(page, facts, found, marks=MARKS)


if __name__ == "__main__":
    main()
