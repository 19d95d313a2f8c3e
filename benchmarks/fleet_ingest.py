"""What taking points in costs: the store alone, and the whole way from ten thousand processes through gateways."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from fanfold.clickhouse import schema
from fanfold.clickhouse.address import parse
from fanfold.clickhouse.cells import roll
from fanfold.clickhouse.database import Database
from fanfold.clickhouse.decode import PointBlock, run_number, scan
from fanfold.journal.format import seed_of
from fleet_load import Metrics, Tally, VirtualFleet, batches
from fleet_stage import FULL, QUICK, Plan, Stage, Used, metered

KEYS = 100
ON_THEIR_WAY = 640  # requests at once: half the nodes of the whole fleet


# The store path alone


STORE_HEAD = ["a batch", "points/s", "an insert, p50", "ClickHouse CPU a point", "writers' CPU a point", "stored a point"]
STORE_NOTE = (
    "Decoded journal batches through the store's own insert into one ClickHouse, which keeps latest values by a view; two "
    "writers, and whoever makes the batches beside them, on the same cores. Making all cells at the end is in the figures, and merges are in the figures as far as they ran meanwhile; stored bytes "
    "are all tables', as they are right after."
)


def decoded(fleet: VirtualFleet, seconds: int) -> dict[str, Any]:
    """Return the columns of one batch of a fleet's journals, as a gateway decodes them."""
    block = PointBlock()
    for process, piece in next(batches(fleet, seconds)):
        shapes = {0: process.metrics.shape}
        found = scan(piece.data, piece.offset, seed_of(process.id), shapes)
        block.add(run_number("store", process.run), int(process.id, 16), found)
    return dict(block.columns())


def store_path(stage: Stage, plan: Plan) -> list[list[str]]:
    small = plan is QUICK
    shapes = {  # processes, keys, seconds of each in a batch
        "300,000 points: 3,000 processes, 1 row each": (300 if small else 3000, KEYS, 1),
        "300,000 points: 300 processes, 10 rows each": (60 if small else 300, KEYS, 10),
        "300,000 points: 30 processes, 100 rows each": (6 if small else 30, KEYS, 100),
    }
    return [_store_row(stage, plan, title, *shape) for title, shape in shapes.items()]


def _store_row(stage: Stage, plan: Plan, title: str, processes: int, keys: int, seconds: int) -> list[str]:
    name = f"path{processes}x{seconds}"
    url = f"{stage.url.rpartition('/')[0]}/{name}"
    schema.migrate(Database(parse(url)))
    fleet = VirtualFleet(processes, Metrics(keys), ["http://127.0.0.1:1"], project="store")
    decoded(fleet, seconds)  # the first one holds headers
    batch = decoded(fleet, seconds)
    waits: list[float] = []
    stop = time.monotonic() + plan.seconds

    def write(number: int) -> None:
        database, turn = Database(parse(url)), number
        columns = {**batch, "journal": batch["journal"] + np.uint64(number)}
        while time.monotonic() < stop:
            columns["step"] = columns["step"] + seconds
            columns["pos"] = columns["pos"] + np.uint64(seconds * 1000)
            columns["time"] = columns["time"] + seconds * 1_000_000_000
            columns["value"] = np.roll(columns["value"], turn * 7919)
            began = time.perf_counter()
            database.insert("points", columns, token=f"{number}:{turn}")
            waits.append(time.perf_counter() - began)
            turn += 2
        database.close()

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    with metered(stage, gateways=False) as used:
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        at = Database(parse(url))
        ends = at.ask("SELECT run, journal, max(pos) + 1 AS upto FROM points GROUP BY run, journal")
        roll(at, {(run, journal): upto for run, journal, upto in zip(*(one.tolist() for one in ends.values()), strict=True)})
    points = len(waits) * len(batch["step"])
    stored = sum(table["bytes"] for table in schema.sizes(at))
    assert at.one("SELECT sum(count) AS n FROM cells FINAL")["n"] == points
    at.run(f"DROP DATABASE {name} SYNC")
    return [title if plan is FULL else title.replace("300,000", f"{len(batch['step']):,}"), f"{points / used.wall / 1e6:.2f} M",
            f"{statistics.median(waits) * 1e3:.0f} ms", f"{used.clickhouse / points * 1e9:.0f} ns",
            f"{used.generator / points * 1e9:.0f} ns", f"{stored / points:.1f} B"]  # fmt: skip


# The whole way


WAY_HEAD = ["", "points/s", "requests/s", "inserts/s", "an answer, p50", "p99", "CPU a point: gateways", "ClickHouse", "generator",
            "wire"]  # fmt: skip
WAY_NOTE = (
    "Simulated processes with 100 metrics each, eight to a node; each node's requests go through the real client to one of two gateways with "
    "tokens, and the next follows on the answer. Journals' bytes are made before the clock starts; compressing them is the generator's CPU. "
    "Afterwards every acknowledged point is counted in ClickHouse, once. Everything shares the cores of this machine: the sum of "
    "CPU a point is what bounds the rate."
)


DISK_HEAD = ["table", "right after", "merged"]
DISK_NOTE = (
    "Bytes on disk a point, of all that the whole way brought: values as float32 on a device, as Python floats in the journal."
)


@dataclass
class Way:
    """What the whole way cost, for the estimate."""

    gateway_ns: float
    clickhouse_ns: float
    wire: float


def whole_way(stage: Stage, plan: Plan) -> tuple[list[list[str]], Way, int]:
    """Drive the fleet; return the table, what a point of the steady state cost, and how many points there are now."""
    fleet = VirtualFleet(plan.processes, Metrics(KEYS), stage.urls, token=stage.token)
    rows, ways = [], []
    sent = 0
    begin, steady, behind = f"{plan.processes:,} processes begin", "1 s of each at a time", "10 s of each at a time"
    for title, rounds, seconds in ((begin, 1, 1), (steady, plan.rounds, 1), (behind, plan.rounds // 2, 10)):
        fleet.prepare(rounds, seconds)
        with metered(stage) as used:
            tally = fleet.drive(ON_THEIR_WAY)
        sent += tally.points
        rows.append(_way_row(title, tally, used))
        ways.append(Way(used.gateways / tally.points * 1e9, used.clickhouse / tally.points * 1e9, used.wire / tally.points))
        have = stage.points("fleet", fleet)
        assert have == sent, f"{have:,} points are stored, {sent:,} were acknowledged"
    fleet.close()
    return rows, ways[1], sent


def _way_row(title: str, tally: Tally, used: Used) -> list[str]:
    waits = sorted(tally.waits)
    per = 1e9 / tally.points
    return [title, f"{tally.points / used.wall:,.0f}", f"{tally.requests / used.wall:.0f}", f"{used.inserts / used.wall:.1f}",
            f"{waits[len(waits) // 2]:.2f} s", f"{waits[len(waits) * 99 // 100]:.2f} s", f"{used.gateways * per:.0f} ns",
            f"{used.clickhouse * per:.0f} ns", f"{used.generator * per:.0f} ns", f"{used.wire / tally.points:.1f} B"]  # fmt: skip


def on_disk(stage: Stage, points: int) -> tuple[list[list[str]], float]:
    """Return what each table takes for a point, as inserts left it and when all is merged; and the sum of the latter."""
    before = _sizes(stage)
    for table in before:
        stage.server.client(stage.database.address.database).command(f"OPTIMIZE TABLE {table} FINAL")
    after = _sizes(stage)
    large = [name for name, size in before.items() if size / points >= 0.05]
    named = [(name, before[name], after.get(name, 0.0)) for name in large]
    rows = [[name, f"{one / points:.2f} B", f"{two / points:.2f} B"] for name, one, two in named]
    total = sum(after.values())
    return [*rows, ["all", f"{sum(before.values()) / points:.2f} B", f"{total / points:.2f} B"]], total / points


def _sizes(stage: Stage) -> dict[str, float]:
    return {table["table"]: float(table["bytes"]) for table in schema.sizes(stage.database)}
