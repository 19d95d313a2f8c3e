"""What reading costs while a fleet writes: a page of charts, latest values, and how old a point is when it is seen elsewhere."""

from __future__ import annotations

import json
import os
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fanfold.clickhouse.decode import run_number
from fanfold.clickhouse.intake import ClickHouseIntake
from fanfold.clickhouse.store import ClickHouseStore
from fanfold.errors import FanfoldError
from fleet_ingest import KEYS
from fleet_load import Metrics, Tally, VirtualFleet
from fleet_stage import Plan, Stage, cpu_of, metered

RUNS, CHARTS, WIDE = 20, 40, 100
PIECE = 2000  # rows of one piece
TRAIN = """
import random, sys, time, fanfold
pause, count, seconds = map(float, sys.argv[2:])
run = fanfold.init("probe", id=sys.argv[1], system=False, quiet=True)
keys, began, step = [f"m{k}" for k in range(int(count))], time.time(), 0
while time.time() - began < seconds:
    run.log({key: random.gauss(1, 0.1) for key in keys} | {"m0": time.time()}, step=step)
    step += 1
    time.sleep(max(0.0, began + step * pause - time.time()))
run.finish()
"""


# What is read


def fill(stage: Stage, project: str, metrics: Metrics, steps: int) -> VirtualFleet:
    """Store runs of one process each, as a gateway would."""
    fleet = VirtualFleet(RUNS, metrics, stage.urls, project=project, per_run=1, first=stage.numbers())
    intake = ClickHouseIntake(stage.database, gather=0.0)
    for start in range(0, steps, PIECE):
        pieces = [process.piece(min(PIECE, steps - start)) for process in fleet.processes]
        kept = intake.append_all(project, pieces).result(120)
        assert kept == [process.offset for process in fleet.processes], kept
    intake.close()
    return fleet


def timed(what: Callable[[], Any], repeats: int) -> str:
    """Return the middle and the longest of several."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        what()
        times.append(time.perf_counter() - began)
    return f"{statistics.median(times) * 1e3:.0f} ms ({max(times) * 1e3:.0f})"


class Readers:
    """The questions, asked of the store itself and through a gateway."""

    def __init__(self, stage: Stage, plan: Plan) -> None:
        self.stage, self.plan = stage, plan
        self.charts, self.wide = Metrics(CHARTS), Metrics(WIDE)
        self.page = fill(stage, "page", self.charts, plan.steps)
        self.table = fill(stage, "table", self.wide, 1)
        self.store = ClickHouseStore(stage.database)
        self.intake = ClickHouseIntake(stage.database, gather=0.0)

    def charts_of_store(self) -> None:
        runs = [self.store.run("page", process.run) for process in self.page.processes]
        wanted = [(run, key) for key in self.charts.shape.keys for run in runs]
        found = self.store.series_many(wanted, buckets=330)
        assert all(one is not None and one.total == self.plan.steps for one in found)

    def charts_of_gateway(self) -> None:
        runs = [process.run for process in self.page.processes]
        body = {"project": "page", "runs": runs, "keys": list(self.charts.shape.keys), "n": 330}
        found = answered(self.stage.get(f"{self.stage.urls[0]}/ui/api/series", body))
        assert len(found) == RUNS * CHARTS

    def grow(self) -> None:
        """Add a row to every run of the table, so that nothing of it can be answered from memory."""
        self.intake.append_all("table", [process.piece(1) for process in self.table.processes]).result(60)

    def latest(self) -> None:
        rows = self.store.runs("table")
        assert sum(len(row["latest"]) for row in rows) == RUNS * WIDE

    def latest_after_growth(self, repeats: int) -> str:
        times = []
        for _ in range(repeats):
            self.grow()
            began = time.perf_counter()
            self.latest()
            times.append(time.perf_counter() - began)
        return f"{statistics.median(times) * 1e3:.0f} ms ({max(times) * 1e3:.0f})"

    def all(self) -> list[str]:
        return [
            timed(self.charts_of_store, self.plan.repeats),
            timed(self.charts_of_gateway, self.plan.repeats),
            self.latest_after_growth(self.plan.repeats),
        ]


def answered(answer: bytes) -> list[list[float]]:
    """Return the values of each series in an answer to the page."""
    _, size = struct.unpack_from("<II", answer)
    places = [item["columns"]["y"] for item in json.loads(answer[8 : 8 + size])["items"]]
    return [np.frombuffer(answer, f"<{kind}", length, 8 + size + at).tolist() for kind, at, length in places]


# Beside a fleet that writes


@contextmanager
def writing(stage: Stage, plan: Plan) -> Iterator[Tally]:
    """Have a part of the fleet log each second meanwhile."""
    fleet = VirtualFleet(
        plan.processes // 5, Metrics(KEYS), stage.urls, project="beside", token=stage.token, first=stage.numbers()
    )
    stop = threading.Event()
    tally = Tally()

    def work() -> None:
        done = fleet.go_on(64, stop.is_set)
        tally.points, tally.requests, tally.waits = done.points, done.requests, done.waits

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(5)  # by then all of them have begun
        yield tally
    finally:
        stop.set()
        thread.join()
        fleet.close()


READ_HEAD = ["", "40 charts of 20 runs, by the store", "the same, through a gateway", "latest of 2,000 series"]


def reads(stage: Stage, plan: Plan) -> tuple[list[list[str]], str]:
    readers = Readers(stage, plan)
    readers.charts_of_store()
    rows = [["alone", *readers.all()]]
    with metered(stage) as used, writing(stage, plan) as tally:
        rows.append(["while the fleet writes", *readers.all()])
    rate = tally.points / used.wall
    note = (
        f"Middle (longest) of {plan.repeats}. The charts: {plan.steps:,} points a series, thinned to 330 buckets with exact extremes. Latest values: "
        "the list of 20 runs with 100 keys each, every one of which has grown since it was asked for last. Meanwhile "
        f"{plan.processes // 5:,} processes log 100 metrics a second each; {rate:,.0f} points/s were taken in, an answer took {statistics.median(tally.waits):.2f} s."
    )
    return rows, note


# How old a point is


@contextmanager
def node(stage: Stage, name: str, words: list[str]) -> Iterator[tuple[Path, int]]:
    """A real node: a training process that logs what time it is, and a real forwarder."""
    folder = stage.folder / name
    settings = {"FANFOLD_DIR": str(folder), "FANFOLD_SERVER_TOKEN": stage.token, "FANFOLD_NODE": name}
    environment = {**os.environ, **settings}
    folder.mkdir()
    with (stage.folder / f"{name}.log").open("wb") as log:
        forwarder = subprocess.Popen(
            [sys.executable, "-m", "fanfold", "forward", "--dir", str(folder), "--to", stage.urls[0]], env=environment, stderr=log
        )
        training = subprocess.Popen([sys.executable, "-c", TRAIN, name, *words], env=environment, stderr=log)
    try:
        yield folder, forwarder.pid
        training.wait(120)
    finally:
        for process in (training, forwarder):
            process.terminate()
            process.wait(30)


def ages(look: Callable[[], Sequence[float]], seconds: float) -> list[float]:
    """Ask for all values, each the time it was logged at, again and again; return how old each was when it was first seen."""
    found: list[float] = []
    seen, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(FanfoldError, OSError, KeyError, ValueError):
            values, now = look(), time.time()
            found += [now - value for value in values[seen:]]
            seen = len(values)
        time.sleep(0.05)
    return sorted(found)


def age_rows(stage: Stage, plan: Plan) -> list[list[str]]:
    store = ClickHouseStore(stage.database)
    rows = []
    with writing(stage, plan):
        for title, look in (("by the store's API", _by_store), ("by the page's API, of the other gateway", _by_page)):
            name = f"age{len(rows)}"
            with node(stage, name, ["0.1", "10", str(plan.seconds + 5)]):
                found = ages(partial(look, stage, store, name), plan.seconds)
            rows.append([title, *(f"{found[min(len(found) - 1, len(found) * part // 100)]:.2f} s" for part in (50, 95, 100))])
    return rows


def _by_store(_stage: Stage, store: ClickHouseStore, name: str) -> Sequence[float]:
    return [float(value) for value in store.run("probe", name).series("m0").values]


def _by_page(stage: Stage, _store: ClickHouseStore, name: str) -> Sequence[float]:
    body = {"project": "probe", "runs": [name], "keys": ["m0"], "n": 5000}
    found = answered(stage.get(f"{stage.urls[-1]}/ui/api/series", body))
    return found[0] if found else []


def forwarder_row(stage: Stage, plan: Plan) -> str:
    """Return the share of a core a forwarder takes at 10,000 points a second, once it runs."""
    with node(stage, "busy", ["0.01", "100", str(plan.seconds + 6)]) as (_, pid):
        time.sleep(4)
        before, began = cpu_of(pid), time.monotonic()
        have = _stored(stage, "busy")
        time.sleep(plan.seconds)
        share = (cpu_of(pid) - before) / (time.monotonic() - began)
        rate = (_stored(stage, "busy") - have) / (time.monotonic() - began)
    return f"{share * 100:.1f} % at {rate:,.0f} points/s"


def _stored(stage: Stage, run: str) -> float:
    return float(stage.database.one("SELECT count() AS n FROM points WHERE run = {r:UInt64}", r=run_number("probe", run))["n"])
