"""What the reading side costs: series from journals and segments, latest values of many runs, and merging. A few minutes at most.

python benchmarks/store.py [--points 20_000_000] [--runs 1000]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


def best(call, repeats=9):
    """Return the least of several timings in ms: other work on the machine only adds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3, sorted(times)[len(times) // 2] * 1e3


def write(root: Path, rows: int, keys: int, *, id: str, project: str = "bench", noise: int = 1) -> Path:
    """Write a journal as a training process would, float32 values as they come from a model."""
    import numpy as np

    from fanfold.journal import Writer
    from fanfold.journal import format as fmt

    values = np.random.default_rng(noise).normal(size=rows + keys).astype(np.float32).cumsum().astype(np.float32).tolist()
    header = {
        "format": [fmt.MAJOR, fmt.MINOR],
        "rank": 0,
        "role": "main",
        "attempt": "a",
        "run": id,
        "project": project,
        "ordinal": 1,
    }
    out = Writer(root / project / id / "journal", header)
    names = [f"metric/{i}" for i in range(keys)]
    codes = "d" * keys
    clock = 1_790_000_000_000_000_000
    for step in range(rows):
        clock += 10_000_000 + step % 977
        out.row(dict(zip(names, values[step : step + keys], strict=True)), codes, time_ns=clock, step=step)
    out.close({"status": "finished", "t": clock})
    return root / project / id


def line(what: str, timed: tuple[float, float], note: str = "") -> None:
    print(f"{what:<58} {timed[0]:9.2f} ms   median {timed[1]:9.2f}   {note}")


def one_series(root: Path) -> None:
    from fanfold.store.merge import merge
    from fanfold.store.query import LocalStore

    folder = write(root, 1_000_000, 10, id="million")
    store = LocalStore(root)
    run = store.run("bench", "million")
    for when in ("journal", "segment"):
        for x in ("step", "time"):
            line(
                f"1M points to 1,000 buckets over {x}, {when}", best(lambda x=x: store.series(run, "metric/3", buckets=1000, x=x))
            )
        line(
            f"zoom into 10,000 points of 1M, {when}", best(lambda: store.series(run, "metric/3", buckets=1000, lo=5e5, hi=5.1e5))
        )
        if when == "journal":
            for journal in (folder / "journal").glob("*.ffj"):
                done = list(merge(journal))
            print(f"{'bytes a point, merged':<58} {sum(d.written for d in done) / sum(d.points for d in done):9.2f}")


def many_series(root: Path, count: int = 100) -> None:
    from fanfold.store.query import LocalStore

    for i in range(count):
        write(root, 1000, 20, id=f"run{i}", project="many", noise=i)
    store = LocalStore(root)
    wanted = [(store.run("many", f"run{i}"), "metric/7") for i in range(count)]
    line(f"{count} runs x 330 buckets of 1,000 points, one call", best(lambda: store.series_many(wanted, buckets=330)))


def latest(root: Path, runs: int) -> None:
    from fanfold.store.query import LocalStore

    for i in range(runs):
        write(root, 1, 100, id=f"run{i}", project="wide")
    for journal in (root / "wide").glob("*/journal/*.ffj"):
        os.utime(journal, (time.time() - 600,) * 2)  # they ended a while ago
    LocalStore(root).runs("wide")
    line(f"latest values of {runs} runs x 100 keys, fresh reader", best(lambda: LocalStore(root).runs("wide"), 5))
    store = LocalStore(root)
    store.runs("wide")
    line(f"latest values of {runs} runs x 100 keys, server", best(lambda: store.runs("wide"), 5))
    line(
        f"filter and sort {runs} runs",
        best(lambda: store.runs("wide", filter="metric/5>0 and status=finished", sort="-metric/9"), 5),
    )
    line(f"what changed among {runs} runs", best(store.changed, 5))


WRITER = """
import sys; sys.path.insert(0, sys.argv[1])
from store import write
from pathlib import Path
write(Path(sys.argv[2]), int(sys.argv[3]), 10, id="big")
"""


AT_ONCE = """
import sys, time
from pathlib import Path
from fanfold.store.merge import merge
def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return max(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
began, points, most = time.time(), 0, 0
for one in merge(Path(sys.argv[1])):
    points += one.points
    most = max(most, memory())
print(points / (time.time() - began) / 1e6, most / 1024)
"""


@dataclass
class Merged:
    """How merging a long journal went: points, seconds spent while it was written and read, reads, then in one go."""

    points: float
    seconds: float
    reads: float
    rate: float  # million points a second, in one go
    memory: float  # MB beside the mapped journal


def merging(root: Path, points: int) -> Merged:
    """Merge a journal while it is written and read; then all of it anew."""
    from fanfold.store.merge import merge
    from fanfold.store.query import LocalStore

    here = str(Path(__file__).parent)
    child = subprocess.Popen([sys.executable, "-c", WRITER, here, str(root), str(points // 10)])
    live = spent = reads = 0.0
    store = LocalStore(root)
    while True:
        over = child.poll() is not None
        for journal in (root / "bench" / "big" / "journal").glob("*.ffj"):
            began = time.perf_counter()
            done = sum(one.points for one in merge(journal))
            spent += (time.perf_counter() - began) if done else 0.0
            live += done
            reads += store.series(store.run("bench", "big"), "metric/1").total > 0
        if over:
            break
        time.sleep(0.2)
    (folder,) = Path(os.environ["FANFOLD_CACHE_DIR"]).joinpath("segments").glob(f"*{_id(root)}*")
    shutil.rmtree(folder)
    (journal,) = (root / "bench" / "big" / "journal").glob("*.ffj")
    done = subprocess.run([sys.executable, "-c", AT_ONCE, journal], capture_output=True, text=True, check=True)
    rate, memory = map(float, done.stdout.split())
    return Merged(live, spent, reads, rate, memory)


def _id(root: Path) -> str:
    (journal,) = (root / "bench" / "big" / "journal").glob("*.ffj")
    return journal.stem.rpartition("-")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=20_000_000)
    parser.add_argument("--runs", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fanfold-store-") as folder:
        os.environ["FANFOLD_CACHE_DIR"] = f"{folder}/cache"
        root = Path(folder) / "runs"
        one_series(root)
        many_series(root)
        latest(root, args.runs)
        merged = merging(root, args.points)
    print(f"{'merged while written and read':<58} {merged.points / merged.seconds / 1e6:9.1f} M points/s   "
          f"{merged.points / 1e6:.0f} M points, {merged.reads:.0f} reads meanwhile")  # fmt: skip
    print(f"{'merged in one go':<58} {merged.rate:9.1f} M points/s   {merged.memory:.0f} MB of memory, beside the mapped journal")
    print(
        f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
