"""Helpers of the fleet's tests: runs to ship, pieces of them, real gateways and forwarders, and connections that break."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import fanfold
from fanfold.fleet.wire import Piece
from fanfold.journal import Journal, Record
from fanfold.journal.walker import RowSpan


def write_run(folder: Path, rows: int = 200, *, id: str = "r1", project: str = "llm") -> Path:
    """Write a run and return its journal."""
    run = fanfold.init(project, dir=folder, id=id, system=False, quiet=True)
    for step in range(rows):
        run.log({"loss": 1 / (step + 1), "acc": step / 7}, step=step)
    run.log({"note": "a text"}, step=rows)
    run.finish()
    (file,) = (run.path / "journal").glob("*.ffj")
    return file


def frames_of(file: Path) -> list[bytes]:
    journal = Journal(file)
    journal.refresh()
    data = file.read_bytes()
    return [data[at:end] for at, end in bounds(journal.walk(0))]


def bounds(items: Iterable[RowSpan | Record]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each frame."""
    for item in items:
        stride = item.stride if isinstance(item, RowSpan) else item.end - item.offset
        yield from ((at, at + stride) for at in range(item.offset, item.end, stride))


def pieces_of(file: Path, *cuts: int, run: str = "r1") -> list[Piece]:
    """Split a journal into pieces after the given numbers of frames."""
    frames = frames_of(file)
    edges = [0, *cuts, len(frames)]
    pieces, offset = [], 0
    for start, stop in itertools.pairwise(edges):
        data = b"".join(frames[start:stop])
        pieces.append(Piece(run, file.stem, offset, 0, data))
        offset += len(data)
    return pieces


def kept(store: Path, file: Path, run: str = "r1", project: str = "llm") -> Path:
    return store / project / run / "journal" / file.name


class Process:
    """A fanfold command in its own process, which ends with the test."""

    def __init__(self, *words: str, log: Path, **settings: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "fanfold", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **settings},
            )

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.popen.kill()
        self.wait()

    def terminate(self) -> int:
        self.popen.terminate()
        return self.wait()

    def wait(self) -> int:
        code = self.popen.wait(30)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        return code

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.wait()


class Gateway(Process):
    """A real gateway on a local port."""

    def __init__(self, store: Path | str, *words: str, port: int = 0, log: Path | None = None) -> None:
        quick = ("--durability", "process") if "--durability" not in words else ()
        log = log or Path(store).with_name("gateway.log")
        super().__init__("serve", "--store", str(store), "--port", str(port), "--json", *quick, *words, log=log)
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, log.read_text()
        self.url: str = json.loads(line)["address"]
        self.port = int(self.url.rpartition(":")[2])


class Forwarder(Process):
    """A real forwarder of one node's directory."""

    def __init__(self, node: Path, url: str, *words: str, **settings: str) -> None:
        log = node.with_name(f"{node.name}.log")
        super().__init__("forward", "--dir", str(node), "--to", url, "--interval", "0.05", *words, log=log, **settings)


class Line:
    """A proxy between forwarder and gateway, which can cut connections at random bytes, or be very slow."""

    def __init__(self, port: int, *, cut: float = 0.0, seed: int = 1, bytes_per_second: float | None = None) -> None:
        self.target = port
        self.cut = cut  # the probability of a cut with each block
        self.cuts = self.passed = 0
        self.rate = bytes_per_second
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, here = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass(reader, here, writer), self._pass(there, writer, here), return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, other: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while block := await reader.read(4096):
                if self._random.random() < self.cut:
                    self.cuts += 1
                    writer.write(block[: self._random.randrange(len(block) + 1)])
                    with contextlib.suppress(OSError):
                        await writer.drain()
                    break
                writer.write(block)
                await writer.drain()
                self.passed += len(block)
                if self.rate:
                    await asyncio.sleep(len(block) / self.rate)
        for one in (writer, other):
            one.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


TRAIN = """
import os, sys, time, fanfold
run = fanfold.init("llm", system=False, quiet=True)
count, pace = int(sys.argv[1]), float(sys.argv[2])
for step in range(count):
    run.log({"loss": 1.0 / (step + 1), "rank": float(run.rank)}, step=step)
    if pace:
        time.sleep(pace)
if "--image" in sys.argv:
    run.log({"text": fanfold.Text("x" * 5000)}, step=count)
if "--hang" in sys.argv:
    print("logged", flush=True)
    time.sleep(600)
if "--forget" not in sys.argv:
    run.finish()
"""


def train(
    node: Path, rank: int, count: int, *words: str, pace: float = 0.0, world: int = 2, **settings: str
) -> subprocess.Popen[bytes]:
    """Start a training process of the run `job` on a node with its own directory."""
    where = {"FANFOLD_DIR": str(node), "FANFOLD_RUN_ID": "job", "FANFOLD_RANK": str(rank), "FANFOLD_WORLD_SIZE": str(world)}
    names = {"FANFOLD_NODE": node.name, **settings}
    command = [sys.executable, "-c", TRAIN, str(count), str(pace), *words]
    node.parent.mkdir(exist_ok=True)
    return subprocess.Popen(command, env={**os.environ, **where, **names}, stdout=subprocess.PIPE, cwd=node.parent)


def trained(*processes: subprocess.Popen[bytes]) -> None:
    for one in processes:
        assert one.wait(60) == 0
        assert one.stdout is not None
        one.stdout.close()


def journals(root: Path) -> dict[str, bytes]:
    """Return the content of all journals below a directory, by project, run and file."""
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*.ffj")}


def arrived(store: Path, *nodes: Path) -> bool:
    """Return whether the store has the nodes' data, byte for byte."""
    source = {name: data for node in nodes for name, data in journals(node).items()}
    return bool(source) and journals(store) == source


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait until a condition on other processes holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
