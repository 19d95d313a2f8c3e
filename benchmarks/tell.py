"""How long a request to a running job takes until it is answered, and what looking for requests costs a training step.

`make bench` runs it; `python benchmarks/tell.py --quick` asks less often. A full run writes its block of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from rich.console import Console

import fanfold
from fanfold.fleet.client import Client
from fanfold.fleet.wire import Telling
from fleet_tools import Forwarder, Gateway
from report import Sheet, cpu, us, write_page
from tell_tools import Job

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
MARKS = ("<!-- tell: written by `make bench`, do not edit by hand -->", "<!-- tell: end -->")
JOBS = (
    ("one process", "alone", 1, "2 s"),
    ("2 ranks, through the process group's store", "group", 2, "2 s"),
    ("8 ranks, through the process group's store", "group", 8, "2 s"),
    ("8 ranks without a process group, through files", "apart", 8, "2 s"),
)
HEAD = ["job", "median", "slowest", "requests", "goal"]
NOTE = (
    "From `tell()` to its answer, polled ten times a second, at a step of 0.02 s (the ranks without a process group: every other one at 0.04 s). "
    "The requests come at any moment."
)


def latencies(folder: Path, kind: str, ranks: int, count: int) -> list[float]:
    """Ask a job of some ranks again and again, and return the seconds until each answer."""
    found = []
    with Job(folder, kind, "pace=0.02", ranks=ranks) as job:
        for number in range(count):
            time.sleep(0.137 * (number % 7))  # at any moment of the second in which rank 0 looks
            began = time.monotonic()
            assert job.run.tell("set", lr=number / count).state == "done"
            found.append(time.monotonic() - began)
        job.run.tell("stop")
        job.ends()
    return found


def through_gateway(folder: Path, count: int) -> list[float]:
    node, found = folder / "node", []
    node.mkdir()
    gateway = Gateway(folder / "store", log=folder / "gateway.log")
    try:
        with Job(node, "alone", "pace=0.02") as job:
            forwarder = Forwarder(node, gateway.url)
            try:
                client = Client(gateway.url)
                while not [run for run in fanfold.runs("tell", dir=folder / "store") if run.status == "running"]:
                    time.sleep(0.2)
                for number in range(count):
                    time.sleep(0.137 * (number % 7))
                    began = time.monotonic()
                    asked = client.tell("tell", job.run.id, Telling("set", {"lr": number / count}))
                    while client.answer("tell", job.run.id, asked.id).state == "asked":
                        time.sleep(0.05)
                    found.append(time.monotonic() - began)
            finally:
                forwarder.close()
    finally:
        gateway.close()
    return found


def cost_of_a_step(folder: Path) -> dict[str, float]:
    """Return microseconds per call: of log(), and of reading should_stop, in a run that nobody asks anything."""
    run = fanfold.init("p", dir=folder, system=False, quiet=True)
    run.log({"loss": 1.0}, step=0)
    found = {}
    for name, call in (("log() of one number", lambda step: run.log({"loss": 1.0}, step=step)),
                       ("run.control.should_stop", lambda _step: run.control.should_stop),
                       ("log() after should_stop was read", lambda step: run.log({"loss": 1.0}, step=step))):  # fmt: skip
        times = []
        for step in range(1, 20_001):
            began = time.perf_counter_ns()
            call(step)
            times.append(time.perf_counter_ns() - began)
        found[name] = statistics.median(times) / 1000
    run.finish()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests: a check, not a measurement")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--page", type=Path, help="write the block into this page (a full run: docs/benchmarks.md)")
    options = parser.parse_args()
    count = 5 if options.quick else options.requests
    facts = [
        f"{cpu()}, {os.cpu_count()} cores; Python {sys.version.split()[0]}; {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}"
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        costs = [[name, us(microseconds)] for name, microseconds in cost_of_a_step(folder / "steps").items()]
        rows = []
        for number, (title, kind, ranks, goal) in enumerate(JOBS):
            (here := folder / str(number)).mkdir()
            rows.append(row(title, latencies(here, kind, ranks, count), goal))
        (here := folder / "fleet").mkdir()
        rows.append(row("one process, through a gateway", through_gateway(here, count), "5 s"))
    sheets = [
        Sheet("A request until it is answered", HEAD, rows, NOTE),
        Sheet("In a step that nobody asks anything of", ["call", "time"], costs),
    ]
    for sheet in sheets:
        sheet.print(Console(width=None if sys.stdout.isatty() else 150))
    if page := options.page or (None if options.quick else PAGE):
        write_page(page, facts, sheets, marks=MARKS)


def row(title: str, seconds: list[float], goal: str) -> list[str]:
    print(f"{title}: {statistics.median(seconds):.2f} s", flush=True)
    return [title, f"{statistics.median(seconds):.2f} s", f"{max(seconds):.2f} s", str(len(seconds)), goal]


if __name__ == "__main__":
    main()
