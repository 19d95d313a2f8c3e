"""How long a request to a running job takes until it is answered, and what looking for requests costs a training step.

python benchmarks/tell.py [--requests 20]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import fanfold
from fanfold.fleet.client import Client
from fanfold.fleet.wire import Telling
from fleet_tools import Forwarder, Gateway
from tell_tools import Job


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20)
    count = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, microseconds in cost_of_a_step(folder / "steps").items():
            print(f"{name}: {microseconds:.2f} µs")
        for number, (kind, ranks) in enumerate([("alone", 1), ("group", 2), ("group", 8), ("apart", 8)]):
            (here := folder / str(number)).mkdir()
            show(f"{ranks} rank(s), {kind}", latencies(here, kind, ranks, count))
        (here := folder / "fleet").mkdir()
        show("through a gateway", through_gateway(here, count))


def show(what: str, seconds: list[float]) -> None:
    print(f"{what}: median {statistics.median(seconds):.2f} s, slowest {max(seconds):.2f} s of {len(seconds)}", flush=True)


if __name__ == "__main__":
    main()
