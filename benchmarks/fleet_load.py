"""A fleet that is not there: thousands of processes whose journals are made from templates and shipped by the real client.

Every frame is valid, with its own step, time and checksum; clocks are virtual, so that a process logs once in each second
of its own, however fast its seconds go by.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from fanfold.fleet.client import Client, PieceResult, Unreachable
from fanfold.fleet.wire import Piece
from fanfold.journal.format import Kind, Shape, frame, pack, seed_of
from fanfold.journal.writer import Packer

PER_NODE = 8  # processes
PER_RUN = 16
TEMPLATES = 2048
SECOND = 1_000_000_000
_FRONT = struct.Struct("<Iqi")  # shape, time, step


@dataclass(frozen=True)
class Metrics:
    """What every process of a fleet logs: so many numbers, as float32 on a device, read back as Python floats."""

    count: int
    shape: Shape = field(init=False)
    rows: list[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        keys = tuple(f"layer{at // 10}/metric{at % 10}" for at in range(self.count))
        object.__setattr__(self, "shape", Shape(0, 0, "d" * self.count, keys))
        noise = np.random.default_rng(7).normal(1, 0.1, (TEMPLATES, self.count)).astype(np.float32).astype("<f8")
        object.__setattr__(self, "rows", [row.tobytes() for row in noise])


class VirtualProcess:
    """One process: its journal's name, and how far it has come. Its bytes are made when they are asked for."""

    def __init__(self, project: str, run: str, rank: int, number: int, metrics: Metrics, start: int) -> None:
        self.run, self.rank, self.metrics = run, rank, metrics
        self.id = f"{(number * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 64):016x}"
        self.offset = self.step = 0
        self._start = start + number * 1_000_003 % SECOND  # processes do not log in the same nanosecond
        self._template = number * 7919
        self._packer = Packer(metrics.shape, seed_of(self.id))
        self._first = self._head(project)

    def _head(self, project: str) -> bytes:
        header = {
            "format": [1, 0], "writer": "fanfold", "run": self.run, "project": project, "name": self.run, "role": "main",
            "rank": self.rank, "world": PER_RUN, "local_rank": self.rank % PER_NODE, "attempt": self.run, "ordinal": 1,
            "node": f"node{self.rank // PER_NODE}", "boot": "virtual", "pid": 1000 + self.rank, "journal": self.id,
            "started": self._start, "mono": self._start, "follows": None, "spool": None, "dropped": 0,
        }  # fmt: skip
        return frame(Kind.HEADER, pack(header), 0) + frame(Kind.SHAPE, self.metrics.shape.body(), seed_of(self.id))

    def piece(self, seconds: int) -> Piece:
        """Let so many seconds go by, and return what they left in the journal."""
        parts = [self._first] if not self.offset else []
        rows, head, crc = self.metrics.rows, self._packer.head, self._packer.crc
        for step in range(self.step, self.step + seconds):
            front = _FRONT.pack(0, self._start + step * SECOND + step * 7919 % 1_000_000, step)
            values = rows[(self._template + step * 31) % TEMPLATES]
            parts += (head, crc32(values, crc32(front, crc)).to_bytes(4, "little"), front, values)
        data = b"".join(parts)
        piece = Piece(self.run, f"{self.rank}-{self.id}", self.offset, 0, data)
        self.offset, self.step = self.offset + len(data), self.step + seconds
        return piece


@dataclass
class Tally:
    """What was acknowledged, and how long each request took."""

    points: int = 0
    requests: int = 0
    again: int = 0  # requests that had to be sent again
    waits: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, points: int, wait: float) -> None:
        with self.lock:
            self.points += points
            self.requests += 1
            self.waits.append(wait)


class VirtualNode:
    """One node: its processes, and the forwarder's line to a gateway."""

    def __init__(self, processes: Sequence[VirtualProcess], project: str, url: str, token: str | None) -> None:
        self.processes, self.project = processes, project
        self.client = Client(url, token)
        self.ready: list[tuple[int, list[Piece]]] = []  # rounds that were made in advance, each with its number of points

    def prepare(self, rounds: int, seconds: int) -> None:
        points = sum(process.metrics.count for process in self.processes) * seconds
        self.ready += [(points, [process.piece(seconds) for process in self.processes]) for _ in range(rounds)]

    def ship(self, tally: Tally) -> bool:
        """Send the next round until all of it is acknowledged; tell whether there was one."""
        if not self.ready:
            return False
        (points, pieces), began = self.ready.pop(0), time.perf_counter()
        while pieces:
            try:
                results = self.client.append(self.project, pieces)
                pieces = [piece for piece, result in zip(pieces, results, strict=True) if not _is_there(piece, result)]
            except Unreachable as error:
                time.sleep(max(error.after, 0.2))
            if pieces:
                tally.again += 1
        tally.add(points, time.perf_counter() - began)
        return True


def _is_there(piece: Piece, result: PieceResult) -> bool:
    """Tell whether a gateway has a piece: it says so, or stands behind it already."""
    if result.status not in (200, 409, 503):
        raise RuntimeError(f"a gateway refuses a sound piece: {result}")
    return (result.offset or 0) >= piece.offset + len(piece.data)


class VirtualFleet:
    """Nodes spread over gateways, driven by as many threads as there are requests on their way at once."""

    def __init__(self, count: int, metrics: Metrics, gateways: Sequence[str], *, project: str = "fleet", token: str | None = None,
                 per_run: int = PER_RUN, first: int = 0) -> None:  # fmt: skip
        start = time.time_ns() - 86400 * SECOND
        self.metrics = metrics
        self.processes = [
            VirtualProcess(project, f"run{(first + at) // per_run:05d}", at % per_run, first + at, metrics, start)
            for at in range(count)
        ]
        self.nodes = [
            VirtualNode(self.processes[at : at + PER_NODE], project, gateways[at // PER_NODE % len(gateways)], token)
            for at in range(0, count, PER_NODE)
        ]

    def prepare(self, rounds: int, seconds: int) -> None:
        for node in self.nodes:
            node.prepare(rounds, seconds)

    def drive(self, threads: int) -> Tally:
        """Ship all that is prepared: of each node, the next as soon as there is an answer."""
        return self._drive(threads, _empty)

    def go_on(self, threads: int, until: Callable[[], bool]) -> Tally:
        """Let the processes log once a second of the wall clock, and ship it each second."""
        return self._drive(threads, lambda nodes, tally: _each_second(nodes, tally, until))

    def _drive(self, threads: int, work: Callable[[Sequence[VirtualNode], Tally], None]) -> Tally:
        tally = Tally()
        shares = [self.nodes[at::threads] for at in range(threads)]
        workers = [threading.Thread(target=work, args=(share, tally), daemon=True) for share in shares if share]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return tally

    def close(self) -> None:
        for node in self.nodes:
            node.client.close()


def _empty(nodes: Sequence[VirtualNode], tally: Tally) -> None:
    while sum(node.ship(tally) for node in nodes):
        pass


def _each_second(nodes: Sequence[VirtualNode], tally: Tally, until: Callable[[], bool]) -> None:
    """Serve nodes in turn, each once a second; where answers take longer, more seconds go into the next request."""
    began = [time.monotonic() - 1 + at / len(nodes) for at in range(len(nodes))]
    while not until():
        for at, node in enumerate(nodes):
            time.sleep(max(0.0, began[at] + 1 - time.monotonic()))
            seconds = int(time.monotonic() - began[at])
            began[at] += seconds
            node.prepare(1, seconds)
            node.ship(tally)


def batches(fleet: VirtualFleet, seconds: int) -> Iterator[list[tuple[VirtualProcess, Piece]]]:
    """Yield, for ever, what one more while of the whole fleet leaves in its journals."""
    while True:
        yield [(process, process.piece(seconds)) for process in fleet.processes]
