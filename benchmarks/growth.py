"""How costs grow: each in two or three sizes, with the exponent between the last two. Part of `make bench`.

python benchmarks/growth.py [--quick] [--only points,runs,ranks,metrics,readers,week]

Costs are CPU seconds of a process of its own, so that a busy machine does not change them much. An exponent of 1 is a cost that
grows as the work does; a target fails if it grows faster, or costs more at the last size than its budget.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from report import Sheet
from store import write

FASTER = 1.15  # the exponent from which on a cost grows faster than the work; below it is noise
cpu = time.process_time


@dataclass(frozen=True)
class Target:
    """A cost by size: what prepares the data, what is measured, the sizes, and the most it may be at the last one."""

    what: str
    prepare: Callable[[Path, int], None]
    measure: Callable[[Path, int], float]
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    most: float
    unit: str = "ms"
    repeats: int = 3
    exponent: float = FASTER


# Data


def long_run(root: Path, rows: int) -> None:
    write(root, rows, 10, id="long")


def many_runs(root: Path, count: int) -> None:
    for place in range(count):
        write(root, 20, 20, id=f"run{place}", noise=place % 50)
    _settled(root)


def hundred_runs(root: Path, _size: int) -> None:
    many_runs(root, 100)


def many_metrics(root: Path, keys: int) -> None:
    for place in range(100):
        write(root, 3, keys, id=f"run{place}", noise=place % 50)
    _settled(root)


def many_ranks(root: Path, ranks: int) -> None:
    from fanfold.journal import Writer
    from fanfold.journal import format as fmt

    for rank in range(ranks):
        header = {"format": [fmt.MAJOR, fmt.MINOR], "rank": rank, "role": "main", "attempt": "a", "run": "wide",
                  "project": "bench", "ordinal": 1}  # fmt: skip
        out, clock = Writer(root / "bench" / "wide" / "journal", header), 1_790_000_000_000_000_000
        for step in range(1000):
            out.row({"loss": step * 0.5 + rank}, "d", time_ns=clock + step * 1_000_000, step=step)
        out.close({"status": "finished", "t": clock})


def nothing(_root: Path, _size: int) -> None:
    pass


def _settled(root: Path) -> None:
    for journal in root.glob("*/*/journal/*.ffj"):
        os.utime(journal, (time.time() - 600,) * 2)  # they ended a while ago


# Measurements, each in a process of its own with a cache of its own


def cold_series(root: Path, _size: int) -> float:
    import fanfold

    began = cpu()
    fanfold.open("long", dir=root).series("metric/3")
    return (cpu() - began) * 1e3


def cached_series(root: Path, size: int) -> float:
    """Read it in a process that finds the index of another."""
    here = [sys.executable, __file__, "--measure", "cold_series", str(root), str(size)]
    subprocess.run(here, check=True, capture_output=True)
    return cold_series(root, size)


def cold_listing(root: Path, _size: int) -> float:
    from fanfold.store.query import LocalStore

    began = cpu()
    LocalStore(root).runs("bench")
    return (cpu() - began) * 1e3


def listing_ratio(root: Path, size: int) -> float:
    """Compare a listing that reads every journal with one of a new reader that finds the catalogue."""
    cold = cold_listing(root, size)
    return cold / min(cold_listing(root, size) for _ in range(3))


def first_answer(root: Path, _size: int) -> float:
    """Measure what a page waits for before its first chart: the newest runs of a server that has listed them before."""
    from fanfold.server import data
    from fanfold.store.query import LocalStore

    store = LocalStore(root)
    store.runs("bench")
    began = cpu()
    data.runs(store, "bench", "", "", 300)
    return (cpu() - began) * 1e3


def first_bytes(root: Path, _size: int) -> float:
    import msgspec

    from fanfold.server import data
    from fanfold.store.query import LocalStore

    return len(msgspec.json.encode(data.runs(LocalStore(root), "bench", "", "", 300))) / 1e3


def folded(root: Path, _size: int) -> float:
    import fanfold

    run = fanfold.open("wide", dir=root)
    run.series("loss", rank=0)
    began = cpu()
    run.series("loss", fold="mean")
    return (cpu() - began) * 1e3


def readers(root: Path, size: int) -> float:
    """Let several threads of one server ask for the same hundred series."""
    from fanfold.server import data
    from fanfold.store.query import LocalStore

    store = LocalStore(root)
    query = data.SeriesQuery("bench", [f"run{place}" for place in range(100)], ["metric/2"])
    data.series(store, query)
    threads = [threading.Thread(target=data.series, args=(store, query)) for _ in range(size)]
    began = cpu()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (cpu() - began) * 1e3


def week(root: Path, calls: int) -> float:
    """Log for a simulated week: 200 keys in turn, and a picture now and then. Return the MB added after the first tenth."""
    import numpy as np

    import fanfold

    run = fanfold.init("week", dir=root, system=False, quiet=True)
    names, picture = [f"part/metric{place}" for place in range(200)], np.zeros((32, 32, 3), np.uint8)
    first = 0.0
    for step in range(calls):
        run.log({names[step % 200]: step * 0.5}, step=step)
        if step % (calls // 100) == 0:
            picture[step % 32] = step % 251
            run.log({"picture": fanfold.Image(picture)}, step=step)
        if step == calls // 10:
            run.flush()
            first = _resident()
    run.flush()
    grown = _resident() - first
    run.finish()
    return max(0.0, grown)


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


TARGETS = {
    "points": [
        Target("points: a series, cold: every byte checked", long_run, cold_series, (10_000, 100_000, 1_000_000), (10_000, 50_000), 200),
        Target("points: the same, in a new process with the index", long_run, cached_series, (100_000, 1_000_000), (10_000, 50_000), 50),
    ],
    "runs": [
        Target("runs: the first listing", many_runs, cold_listing, (100, 1000, 10_000), (30, 100), 5000, repeats=2),
        Target("runs: the first listing to a later one", many_runs, listing_ratio, (1000, 10_000), (30, 100), 5, "times", repeats=2),
        Target("runs: the answer before the first chart", many_runs, first_answer, (60, 10_000), (30, 100), 200),
        Target("runs: bytes of that answer", many_runs, first_bytes, (60, 10_000), (30, 100), 300, "KB", repeats=1),
    ],
    "ranks": [Target("ranks: a fold of 1,000 steps", many_ranks, folded, (20, 200, 2000), (5, 20), 1000)],
    "metrics": [Target("metrics: the first listing of 100 runs", many_metrics, cold_listing, (4, 40, 400), (4, 40), 1000)],
    "readers": [Target("readers: 100 series each, at once", hundred_runs, readers, (1, 4, 16), (1, 4), 1000)],
    "week": [Target("week: memory after the first tenth", nothing, week, (10_000_000,), (100_000,), 5, "MB", repeats=1)],
}  # fmt: skip
MEASURES = {target.measure.__name__: target.measure for targets in TARGETS.values() for target in targets}


def measured(target: Target, root: Path, size: int) -> float:
    """Measure in new processes, each with an empty cache; return the least, because other work on the machine only adds."""
    found = []
    for _ in range(target.repeats):
        with tempfile.TemporaryDirectory(prefix="fanfold-growth-cache-") as cache:
            command = [sys.executable, __file__, "--measure", target.measure.__name__, str(root), str(size)]
            done = subprocess.run(
                command, env={**os.environ, "FANFOLD_CACHE_DIR": cache}, capture_output=True, text=True, check=True
            )
            found.append(float(json.loads(done.stdout.splitlines()[-1])))
    return min(found)


def grown(target: Target, work: Path, quick: bool) -> tuple[list[str], bool]:
    """Measure one target; return its row, and whether it is kept."""
    sizes = target.quick if quick else target.sizes
    costs = []
    for size in sizes:
        root = work / f"{target.prepare.__name__}-{size}"
        if not root.exists():
            root.mkdir()
            target.prepare(root, size)
        costs.append(measured(target, root, size))
    exponent = math.log(max(costs[-1], 1e-9) / max(costs[-2], 1e-9)) / math.log(sizes[-1] / sizes[-2]) if len(sizes) > 1 else 0.0
    kept = costs[-1] <= target.most and exponent <= target.exponent
    shown = ", ".join(f"{size:,}: {cost:,.3g}" for size, cost in zip(sizes, costs, strict=True))
    row = [target.what, f"{shown} {target.unit}", f"{exponent:.2f}" if len(sizes) > 1 else "-", f"{target.most:g} {target.unit}"]
    return [*row, "yes" if kept else "**no**"], kept


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: a check, not a measurement")
    parser.add_argument("--only", default=",".join(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        import numpy as np  # noqa: F401  (its import is not what is measured)

        name, root, size = args.measure
        print(json.dumps(MEASURES[name](Path(root), int(size))))
        return
    rows: list[list[str]] = []
    kept: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="fanfold-growth-", ignore_cleanup_errors=True) as work:
        for name in args.only.split(","):
            for target in TARGETS[name]:
                row, good = grown(target, Path(work), args.quick)
                rows.append(row)
                kept.append(good)
    note = f"CPU time of a new process each, the least of a few; load {os.getloadavg()[0]:.0f} meanwhile."
    Sheet("Growth", ["", "size: cost", "exponent", "at most", "kept"], rows, note).print(
        Console(width=None if sys.stdout.isatty() else 170)
    )
    if not all(kept) and not args.quick:
        raise SystemExit(f"{kept.count(False)} of {len(kept)} targets were missed.")


if __name__ == "__main__":
    main()
