"""Import speed, and a TensorBoard folder opened cold: by `fanfold ui` and by TensorBoard itself.

python benchmarks/imports.py [--data FOLDER] [--runs 100] [--metrics 20] [--steps 1000] [--quick]

`make bench` runs it. Import speed is points per second of CPU time, reading and writing included. Opening is the time from
starting the command until the data of every run and every chart can be fetched, from an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from budgets import decode

START = 1_700_000_000.0


def write_events(folder: Path, runs: int, metrics: int, steps: int) -> np.ndarray[Any, Any]:
    """Write event files with torch's writer, unless they are there; return the values, by run, step and metric."""
    from torch.utils.tensorboard import SummaryWriter

    values = np.random.default_rng(0).normal(size=(runs, steps, metrics)).astype(np.float32)
    for run in range(0 if folder.exists() else runs):
        log = SummaryWriter(folder / f"run{run:03}", max_queue=100_000, flush_secs=600)
        for step in range(steps):
            for metric in range(metrics):
                log.add_scalar(f"group{metric % 4}/metric{metric}", values[run, step, metric], step, walltime=START + step)
        log.close()
    return values


def write_wandb(folder: Path, metrics: int, steps: int) -> None:
    import wandb

    run = wandb.init(project="bench", mode="offline", dir=folder, settings=wandb.Settings(silent=True, x_disable_stats=True))
    values = np.random.default_rng(0).normal(size=(steps, metrics))
    for step in range(steps):
        run.log({f"group{metric % 4}/metric{metric}": values[step, metric] for metric in range(metrics)})
    run.finish()


def import_speed(source: Path) -> tuple[int, float, float]:
    """Import a folder in a process of its own; return the points, the points per second of CPU time, and MB of memory added."""
    code = """
import json, sys, time
from fanfold.transfer.importing import import_runs
from fanfold.transfer.importers import importers
importers()
memory = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
before, began = memory(), time.process_time()
accounts = import_runs(sys.argv[1], dir=sys.argv[2])
print(json.dumps([sum(one.points for one in accounts), time.process_time() - began, memory() - before]))
"""
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run([sys.executable, "-c", code, str(source), scratch], capture_output=True, text=True, check=True)
    points, seconds, megabytes = json.loads(done.stdout)
    return points, points / seconds, megabytes


def get(url: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data else {})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def open_fanfold(source: Path, values: np.ndarray[Any, Any]) -> tuple[float, int]:
    """Return the seconds from `fanfold ui FOLDER` until every chart was fetched, and how many extremes were not the data's."""
    runs, _, metrics = values.shape
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "FANFOLD_CACHE_DIR": cache}
        began = time.perf_counter()
        command = [sys.executable, "-m", "fanfold", "ui", str(source), "--port", "0", "--json", "--no-token"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        try:
            assert child.stdout is not None
            base = json.loads(child.stdout.readline())["address"]
            while True:
                projects = json.loads(get(f"{base}api/projects"))["projects"]
                if sum(one["runs"] for one in projects) == runs:
                    rows = json.loads(get(f"{base}api/runs?project={source.name}"))
                    if len(rows["runs"]) == runs and len(rows["keys"]) == metrics:
                        break
                time.sleep(0.05)
            ids = [row["id"] for row in rows["runs"]]
            keys = [key if isinstance(key, str) else key["key"] for key in rows["keys"]]
            names = {row["id"]: row["name"] for row in rows["runs"]}
            charts = [get(f"{base}api/series", {"project": source.name, "runs": ids, "keys": [key], "n": 330}) for key in keys]
            seconds = time.perf_counter() - began
            return seconds, sum(wrong_extremes(chart, names, values) for chart in charts)
        finally:
            child.terminate()
            child.wait()


def wrong_extremes(chart: bytes, names: dict[str, str], values: np.ndarray[Any, Any]) -> int:
    """Return how many of a chart's lowest and highest values are not those of the data."""
    wrong = 0
    lines = decode(chart)
    for line in lines:
        there = values[int(names[line["run"]][3:]), :, int(line["key"].rpartition("metric")[2])]
        low, high = line.get("lo", line["y"]).min(), line.get("hi", line["y"]).max()
        wrong += int(np.float32(low) != there.min()) + int(np.float32(high) != there.max())
    return wrong + 2 * (len(values) - len(lines))


def open_tensorboard(source: Path, values: np.ndarray[Any, Any]) -> float:
    """Return the seconds from `tensorboard --logdir FOLDER` until every run has its last step and all charts were fetched."""
    runs, steps, metrics = values.shape
    began = time.perf_counter()
    port = 16006
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(source), "--port", str(port), "--reload_interval", "1"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        base = f"http://localhost:{port}/data/plugin/scalars/"
        names = [f"run{run:03}" for run in range(runs)]
        tags = [f"group{metric % 4}/metric{metric}" for metric in range(metrics)]
        while True:
            try:
                found = json.loads(get(f"{base}tags"))
                if len(found) == runs and len(found.get(names[-1], {})) == metrics:
                    points = json.loads(get(f"{base}scalars?tag={tags[-1]}&run={names[-1]}"))
                    if points and points[-1][1] == steps - 1:
                        break
            except (urllib.error.URLError, ConnectionError):
                pass
            time.sleep(0.05)
        for tag in tags:
            body = urllib.parse.urlencode([("tag", tag), *(("runs", name) for name in names)]).encode()
            with urllib.request.urlopen(f"{base}scalars_multirun", body, timeout=120) as answer:
                answer.read()
        return time.perf_counter() - began
    finally:
        child.terminate()
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--metrics", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    args = parser.parse_args()
    args.runs = max(1, args.runs // 10) if args.quick else args.runs
    data = args.data or Path(tempfile.mkdtemp(prefix="fanfold-imports-"))
    values = write_events(data / "runs", args.runs, args.metrics, args.steps)
    if not (data / "wandb").exists():
        write_wandb(data, args.metrics, 10 * args.steps)
    for name, source in (("event files", data / "runs"), (".wandb", data / "wandb")):
        points, speed, memory = import_speed(source)
        print(f"import of {name}: {points:,} points, {speed:,.0f} points/s (promised: 500,000), {memory:,.0f} MB of memory")
    (ours, wrong), theirs = open_fanfold(data / "runs", values), open_tensorboard(data / "runs", values)
    print(f"{args.runs} runs x {args.metrics} metrics x {args.steps:,} steps, opened cold, until every chart's data was fetched:")
    print(f"fanfold ui {ours:.2f} s, TensorBoard {theirs:.2f} s: {theirs / ours:.1f} times sooner (promised: 3)")
    print(f"extremes that are not those of the data: {wrong} of {2 * args.runs * args.metrics:,} (promised: 0)")
    if not args.data:
        shutil.rmtree(data)


if __name__ == "__main__":
    main()
