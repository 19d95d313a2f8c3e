"""What trackers cost the training process: a loop of 1 ms steps that logs ten numbers a step, in three ways.

Nothing logged, through fanfold (each tracker in a process of its own), and through Accelerate's own trackers, which work
on the training thread. Then log() itself, with trackers that raise and hang beside a healthy one. Runs by itself or as
`run.py --only relay`.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECONDS = 0.001
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
now = time.perf_counter_ns
Log = Callable[[dict[str, float], int], None]


def offline(folder: Path) -> dict[str, str]:
    """Return the settings under which no library needs a network, and all write below one folder."""
    return {
        "HOME": str(folder), "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true", "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
        "LINES": str(folder / "lines"), "GRADIO_ANALYTICS_ENABLED": "False", "FANFOLD_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip


# The loops, each in a process of its own


def nothing(_folder: Path, _tracker: str) -> tuple[Log, Callable[[], None]]:
    return (lambda _values, _step: None), lambda: None


def through_fanfold(folder: Path, tracker: str) -> tuple[Log, Callable[[], None]]:
    import fanfold

    names = [name for name in tracker.split(",") if name]
    if {"raising", "hanging"} & set(names):
        sys.path.insert(0, str(HERE.parent / "tests"))
        __import__("relay_trackers")
    run = fanfold.init("bench", dir=folder / "runs", system=False, quiet=True, trackers=names)
    return run.log, lambda: run.finish(timeout=10 if "hanging" in names else 60)


def through_accelerate(folder: Path, tracker: str) -> tuple[Log, Callable[[], None]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=str(folder))
    accelerator.init_trackers("bench")
    return (lambda values, step: accelerator.log(values, step=step)), accelerator.end_training


WAYS = {"nothing": nothing, "fanfold": through_fanfold, "accelerate": through_accelerate}


def child(way: str, tracker: str, folder: Path, steps: int) -> dict[str, float]:
    """Run one loop and measure this process: CPU seconds while it trains, its steps, and each log()."""
    log, end = WAYS[way](folder, tracker)
    gc.collect()
    spent: list[int] = []
    cpu, wall = cpu_seconds(), time.perf_counter()
    for step in range(steps):
        time.sleep(SECONDS)  # the step: asleep, so that what logging costs is all the CPU time there is
        values = {f"m{k}": math.sin(step + k) for k in range(10)}
        began = now()
        log(values, step)
        spent.append(now() - began)
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    began = time.perf_counter()
    end()
    finish = time.perf_counter() - began
    spent.sort()
    return {
        "cpu_ms": cpu / steps * 1e3, "wall_ms": wall / steps * 1e3, "p50_us": spent[len(spent) // 2] / 1e3,
        "p99_us": spent[len(spent) * 99 // 100] / 1e3, "finish_s": finish,
    }  # fmt: skip


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# The comparison


def measure(way: str, tracker: str, steps: int, work: Path) -> dict[str, float] | None:
    """Run a loop in a fresh process; None where the library is not installed or fails."""
    folder = Path(tempfile.mkdtemp(dir=work))
    done = subprocess.run(
        [sys.executable, str(HERE / "relay.py"), "--child", way, "--tracker", tracker, "--steps", str(steps), "--folder", str(folder)],
        env={**os.environ, **offline(folder)}, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    behind = [line for line in done.stderr.splitlines() if "not delivered yet" in line and tracker in TRACKERS]
    end_relays(folder)
    if done.returncode != 0 or behind:  # a tracker that got nothing costs nothing: no figure
        print(
            f"  {way} {tracker}: {[*behind, *done.stderr.strip().splitlines(), 'failed'][0 if behind else -2]}", file=sys.stderr
        )
        return None
    return dict(json.loads((folder / "figures.json").read_text()))


def end_relays(folder: Path) -> None:
    """End the relays of trackers that hang or raise for ever: each says its pid in its cursor."""
    for path in folder.rglob("*.cursor"):
        owner = json.loads(path.read_text()).get("owner")
        if owner:
            os.kill(owner["pid"], signal.SIGKILL)


def compare(trackers: list[str], steps: int, repeats: int, work: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Measure every way once, then every way again: a busy minute hurts all alike. Return the medians."""
    cases = [("nothing", ""), ("fanfold", ""), ("fanfold", "tensorboard,raising,hanging")]
    cases += [(way, tracker) for tracker in trackers for way in ("fanfold", "accelerate")]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(repeats):
        for case in cases:
            figures = measure(*case, steps, work)
            if figures is not None:
                found.setdefault(case, []).append(figures)
    return {
        case: {name: statistics.median(one[name] for one in several) for name in several[0]} for case, several in found.items()
    }


def rows_of(found: Mapping[tuple[str, str], Mapping[str, float]]) -> list[list[str]]:
    base = found["nothing", ""]
    alone = found["fanfold", ""]
    rows = []
    for (way, tracker), one in found.items():
        extra = max(one["cpu_ms"] - base["cpu_ms"], 0.0)
        ours = found.get(("fanfold", tracker))
        ratio = f"{one['p99_us'] / ours['p99_us']:.0f} times" if way == "accelerate" and ours else ""
        ratio = f"{one['p99_us'] / alone['p99_us']:.2f} of none" if way == "fanfold" and tracker else ratio
        cost = f"{extra / max(alone['cpu_ms'] - base['cpu_ms'], 1e-4):.1f} times" if tracker else ""
        rows.append([
            {"nothing": "nothing logged", "fanfold": "fanfold", "accelerate": "Accelerate"}[way], tracker.replace(",", " + ") or "none",
            f"{one['cpu_ms']:.3f} ms", f"{extra * 1e3:+.0f} µs", cost, f"{one['wall_ms']:.3f} ms", f"{one['p50_us']:.1f} µs",
            f"{one['p99_us']:.1f} µs", ratio, f"{one['finish_s']:.1f} s",
        ])  # fmt: skip
    return rows


HEAD = [
    "",
    "trackers",
    "CPU a step",
    "beyond nothing",
    "to fanfold alone",
    "step",
    "log() p50",
    "log() p99",
    "p99 to fanfold",
    "finish()",
]
NOTE = (
    "Steps of 1 ms (asleep) that log ten numbers; CPU time of the training process alone, while the loop runs. fanfold's trackers live in "
    "processes of their own; one that raises and one that hangs stand beside a healthy one in the row that names them."
)


def measure_relay(bench: Any) -> list[Any]:
    """Be a section of run.py."""
    from report import Sheet

    found = compare(list(TRACKERS), 1000 if bench.quick else 3000, 1 if bench.quick else 3, bench.work)
    for (way, tracker), one in found.items():
        bench.keep("relay", f"{way} {tracker}", one)
    return [Sheet("Trackers beside a training loop", HEAD, rows_of(found), NOTE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trackers", nargs="*", default=list(TRACKERS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--child", choices=WAYS)
    parser.add_argument("--tracker", default="")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.child:
        figures = child(options.child, options.tracker, options.folder, options.steps)
        (options.folder / "figures.json").write_text(json.dumps(figures))
        return
    from rich.console import Console
    from rich.table import Table

    with tempfile.TemporaryDirectory(prefix="fanfold-relay-", ignore_cleanup_errors=True) as work:
        found = compare(options.trackers, options.steps, options.repeats, Path(work))
    table = Table(*HEAD, caption=NOTE)
    for row in rows_of(found):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    main()
