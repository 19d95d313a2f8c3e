"""What the fleet is measured on: a ClickHouse, gateways before it with tokens, and what each has used of the machine."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fanfold.clickhouse import schema
from fanfold.clickhouse.address import parse
from fanfold.clickhouse.cells import left, roll
from fanfold.clickhouse.database import Database
from fanfold.clickhouse.decode import run_number
from fanfold.clickhouse.gateway_tables import TokenTable
from fleet_load import VirtualFleet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
GATEWAYS = 2


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    processes: int
    rounds: int  # requests of each node, in a measurement
    seconds: float  # of the measurements that go by the clock
    steps: int  # of the page's series
    repeats: int


FULL = Plan(10_000, 6, 20.0, 10_000, 15)
QUICK = Plan(1_000, 3, 5.0, 2_000, 5)


class Stage:
    """A ClickHouse, gateways before it, and what they have used of the machine."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self._numbers = itertools.count(1_000_000, 1_000_000)
        from clickhouse_server import Database as Place
        from clickhouse_server import Server

        self.server = Server(folder / "clickhouse").start()
        stack.callback(self.server.stop)
        self.url = Place([self.server], "fleet").url
        self.database = Database(parse(self.url))
        schema.migrate(self.database)
        self.token = TokenTable(self.database).create("bench", projects=["*"], scopes=["read", "write"])[1]
        self.gateways = [self._gateway(at) for at in range(GATEWAYS)]

    def _gateway(self, at: int) -> tuple[int, str]:
        log = (self.folder / f"gateway{at}.log").open("ab")
        words = ["serve", "--store", self.url, "--port", "0", "--rate", "1000", "--json", "--log-level", "warning"]
        process = subprocess.Popen([sys.executable, "-m", "fanfold", *words], stdout=subprocess.PIPE, stderr=log)
        self.stack.callback(_end, process)
        assert process.stdout is not None
        return process.pid, json.loads(process.stdout.readline())["address"]

    def numbers(self) -> int:
        """Return the first of a million numbers for processes, so that no two fleets have a journal in common."""
        return next(self._numbers)

    @property
    def urls(self) -> list[str]:
        return [url for _, url in self.gateways]

    def ask(self, sql: str) -> float:
        return float(self.database.one(sql)["n"])

    def points(self, project: str, fleet: VirtualFleet) -> int:
        """Count what is stored of a fleet: each point once, and in a cell those that there should be cells of."""
        runs = sorted({run_number(project, process.run) for process in fleet.processes})
        roll(self.database, left(self.database))
        found = self.database.one(
            "SELECT count() AS n, countIf(pos < upto) AS made, (SELECT sum(count) FROM cells FINAL WHERE run IN {r:Array(UInt64)}) "
            "AS rolled FROM (SELECT journal, pos FROM points FINAL WHERE run IN {r:Array(UInt64)}) AS p LEFT JOIN (SELECT journal, "
            "max(upto) AS upto FROM rolled GROUP BY journal) AS r ON p.journal = r.journal", r=runs,
        )  # fmt: skip
        assert found["made"] == found["rolled"], found
        return int(found["n"])

    def received(self) -> float:
        return sum(self._metric(url, "fanfold_gateway_received_bytes_total") for url in self.urls)

    def _metric(self, url: str, name: str) -> float:
        lines = self.get(f"{url}/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def get(self, url: str, body: Any = None) -> bytes:
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(30)
    if process.stdout is not None:
        process.stdout.close()


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Used:
    """What a measurement took: the wall clock, CPU by party, inserts, bytes on the wire."""

    wall: float = 0.0
    clickhouse: float = 0.0
    gateways: float = 0.0
    generator: float = 0.0
    inserts: float = 0.0
    wire: float = 0.0


@contextmanager
def metered(stage: Stage, *, gateways: bool = True) -> Iterator[Used]:
    inserts = "SELECT sum(value) AS n FROM system.events WHERE event = 'InsertQuery'"

    def now() -> list[float]:
        wire = stage.received() if gateways else 0.0
        return [time.perf_counter(), cpu_of(stage.server.pid), sum(cpu_of(pid) for pid, _ in stage.gateways),
                time.process_time(), stage.ask(inserts), wire]  # fmt: skip

    used, before = Used(), now()
    yield used
    for name, one, other in zip(vars(used), before, now(), strict=True):
        setattr(used, name, other - one)
