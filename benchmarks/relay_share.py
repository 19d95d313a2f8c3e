"""Whose the CPU time of a relay is: the tracker library's, or ours. Part of relay.py, each tracker in a process of its own.

A stored run of 36,000 points is delivered by the relay's own code. The library's share is what the process and its helpers spend
inside calls of the destination (it imports, opens, writes, settles and closes there); all else is ours.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "tensorboard", "trackio", "wandb")
CALLS, KEYS = 3600, 10
HEAD = ["", "CPU of a relay", "the library's", "ours", "of it, start", "ours a point"]
NOTE = (
    f"A finished run of {CALLS * KEYS:,} points, delivered offline by the relay's code in a fresh process. The library's share is spent inside calls of "
    "its destination, which import it, open, write, settle and close; ours is the rest: start of Python and imports, the journal, the points, the "
    "cursor. Threads of the library that work between its calls count as ours, processes that it starts as its own."
)
CALLED = (
    "open",
    "write",
    "settle",
    "close",
    "counts",
    "look",
    "set_config",
    "describe",
    "define_metric",
    "set_summary",
    "remote",
)


def write_run(folder: Path) -> Path:
    """Write the run that every tracker gets."""
    import fanfold

    run = fanfold.init("contract", id="contract-1", dir=folder / "runs", system=False, quiet=True)
    for step in range(CALLS):
        run.log({f"m{key}": math.sin(step + key) for key in range(KEYS)}, step=step)
    run.finish()
    return run.path


def timed(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Add the CPU time of the outermost of nested calls to `spent`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        spent[1] += 1
        began = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent[1] -= 1
            if not spent[1]:
                spent[0] += time.process_time() - began

    return call


def deliver(name: str, run: Path, out: Path) -> None:
    """Deliver a run in this process, and write down what was spent on what."""
    from fanfold.relay import process, worker
    from fanfold.trackers.face import destination_of

    start, spent = time.process_time(), [0.0, 0.0]

    def watched(tracker: Any) -> Any:
        found = destination_of(tracker)
        for method in CALLED:
            if callable(getattr(type(found), method, None)):
                setattr(found, method, timed(getattr(found, method), spent))
        return found

    worker.destination_of = watched  # type: ignore[attr-defined,assignment]
    process.make = timed(process.make, spent)
    cursor = process.serve(run, process.learn(name), {}, {}, follow=True)
    used, helpers = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = cursor.closed is not None and cursor.delivered == CALLS * KEYS
    facts = {
        "all": used + helpers.ru_utime + helpers.ru_stime,
        "library": spent[0] + helpers.ru_utime + helpers.ru_stime,
        "start": start,
    }
    out.write_text(json.dumps({**facts, "error": cursor.error or ("" if whole else f"{cursor.delivered} points delivered")}))


def rows(names: tuple[str, ...] = TRACKERS) -> list[list[str]]:
    """Deliver the run to each tracker, and return the table."""
    sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
    from reporting_cases import COMMON, settings

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        return [_row(name, Path(base) / name, {**os.environ, **COMMON}, settings) for name in names]


def _row(name: str, folder: Path, env: dict[str, str], settings: Callable[[Path], dict[str, str]]) -> list[str]:
    (folder / "tmp").mkdir(parents=True)
    run, out = write_run(folder), folder / "share.json"
    done = subprocess.run([sys.executable, str(HERE / "relay_share.py"), name, str(run), str(out)], env={**env, **settings(folder)},
                          cwd=folder, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    found = json.loads(out.read_text()) if out.exists() else {"error": done.stderr[-500:]}
    if found["error"]:
        print(f"{name}: {found['error']}", file=sys.stderr)
        return [name, *["-"] * (len(HEAD) - 1)]
    ours = found["all"] - found["library"]
    return [name, f"{found['all']:.2f} s", f"{found['library']:.2f} s ({found['library'] / found['all']:.0%})", f"{ours:.2f} s",
            f"{found['start']:.2f} s", f"{(ours - found['start']) / (CALLS * KEYS) * 1e9:,.0f} ns"]  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) == 4:
        deliver(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        for line in (HEAD, *rows(tuple(sys.argv[1:]) or TRACKERS)):
            print(" | ".join(line))
