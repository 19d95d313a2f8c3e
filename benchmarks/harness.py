"""Start measurements as processes, wait for them or kill them, and keep what they found."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).parent
Figures = dict[str, Any]
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}  # as after pip install: else each process compiles every module that it imports


@dataclass
class Bench:
    """Start children, wait for them, and keep every figure they hand back."""

    work: Path
    quick: bool
    names: list[str]
    console: Console
    raw: dict[str, list[Figures]] = field(default_factory=dict)
    made: int = 0

    def place(self) -> Path:
        self.made += 1
        return self.work / str(self.made)

    def start(self, what: str, name: str, dir: Path, *, env: dict[str, str] | None = None, **options: Any) -> Child:
        out = self.work / f"{self.made}-{what}-{len(self.raw)}-{time.monotonic_ns()}.json"
        arguments = [f"{key}={json.dumps(value)}" for key, value in options.items()]
        command = [sys.executable, str(HERE / "child.py"), what, name, str(dir), str(out), *arguments]
        log = out.with_suffix(".log")
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, **BYTECODE, **(env or {})}, start_new_session=True
            )
        return Child(self, f"{what} {name}", process, out, log)

    def run(self, what: str, name: str, dir: Path, *, timeout: float = 900, **options: Any) -> Figures:
        return self.start(what, name, dir, **options).wait(timeout)

    def keep(self, section: str, name: str, figures: Figures) -> None:
        self.raw.setdefault(f"{section}: {name}", []).append(figures)

    def median(self, section: str, name: str, figure: str) -> float | None:
        found = [f[figure] for f in self.raw.get(f"{section}: {name}", []) if f.get(figure) is not None]
        return statistics.median(found) if found else None

    def medians(self, section: str, figure: str) -> dict[str, float | None]:
        return {name: self.median(section, name, figure) for name in self.names}


@dataclass
class Child:
    """One running measurement."""

    bench: Bench
    title: str
    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    def wait(self, timeout: float = 900) -> Figures:
        """Wait for its figures; a failure is said and leaves a gap in the table."""
        try:
            code: int | str = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"no end after {timeout} s"
        self.sweep()
        if self.out.exists():
            return json.loads(self.out.read_text())
        last = (self.log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        self.bench.console.print(f"[red]{self.title} failed ({code}): {last}")
        return {}

    def sweep(self) -> None:
        """End the helpers a library left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def await_calls(victims: list[tuple[Path, Child]], calls: int, *, timeout: float = 180) -> list[int]:
    """Watch the counters the victims share, and kill each the moment its last call has returned."""
    maps = [mmap.mmap(os.open(ack, os.O_RDONLY), 8, prot=mmap.PROT_READ) for ack, _ in victims]
    done, deadline = [0] * len(victims), time.monotonic() + timeout
    waiting = set(range(len(victims)))
    while waiting and time.monotonic() < deadline:
        for at in list(waiting):
            done[at] = struct.unpack("<q", maps[at][:])[0]
            process = victims[at][1].process
            if done[at] >= calls or process.poll() is not None:
                process.kill()
                waiting.discard(at)
        time.sleep(50e-6)
    return done


def seconds_of(command: list[str], env: dict[str, str] | None = None) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **BYTECODE, **(env or {})})
    return time.perf_counter() - start


def size(dir: Path) -> int:
    return sum(file.stat().st_size for file in dir.rglob("*") if file.is_file())
