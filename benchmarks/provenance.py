"""What a stamp costs: beside saving the file it goes into, by hand and automatically, and what reading it back takes.

`make bench` runs it; `python benchmarks/provenance.py --quick` is a check with a small file. A full run saves files of 1 GB
and writes its block of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

import fanfold
from report import Sheet, cpu, ms, short, version, write_page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
MARKS = ("<!-- provenance: written by `make bench`, do not edit by hand -->", "<!-- provenance: end -->")
HEAD = ["", "saving it", "stamp by hand", "ratio", "spread", "saved stamped", "ratio", "spread", "read back"]
FORMATS: dict[str, tuple[str, Callable[[Any, Path], Any]]] = {
    "safetensors": ("m.safetensors", save_file),
    "torch.save": ("m.pt", torch.save),
}
LIMIT, LIMIT_INSPECT_MS = 1.05, 100.0


class Clock:
    """CPU seconds of this process and its wall seconds, between two looks; writing back is waited for outside of both."""

    def __init__(self) -> None:
        os.sync()  # each file starts with a disk that has nothing else to do
        self.cpu, self.wall = _cpu(), time.perf_counter()

    def stop(self) -> tuple[float, float]:
        return _cpu() - self.cpu, time.perf_counter() - self.wall


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    clock = Clock()
    action()
    return clock.stop()


def measure(save: Callable[[Any, Path], Any], weights: Any, file: Path, runs: Path, pairs: int) -> dict[str, list[float]]:
    """Save plainly, stamp that by hand, save again while a run stamps; the first pair is for warming up."""
    found: dict[str, list[float]] = {name: [] for name in ("plain", "hand", "auto", "plain_wall", "hand_wall", "inspect")}
    for turn in range(pairs + 1):
        with fanfold.init("bench", dir=runs, quiet=True, system=False) as run:
            file.unlink(missing_ok=True)
            plain, plain_wall = timed(lambda: save(weights, file))
            hand, hand_wall = timed(lambda: fanfold.stamp(file, data="benchmark"))
        began = time.perf_counter()
        assert fanfold.inspect(file)["stamp"]["run"]["id"] == run.id
        inspected = time.perf_counter() - began
        with fanfold.init("bench", dir=runs, quiet=True, system=False, stamp=True):
            file.unlink()
            auto, _ = timed(lambda: save(weights, file))
        if turn:
            for name, value in zip(found, (plain, hand, auto, plain_wall, hand_wall, inspected), strict=True):
                found[name].append(value)
    return found


def row(name: str, found: dict[str, list[float]]) -> tuple[list[str], float, float]:
    hand = [(plain + stamp) / plain for plain, stamp in zip(found["plain"], found["hand"], strict=True)]
    auto = [stamped / plain for plain, stamped in zip(found["plain"], found["auto"], strict=True)]
    middle = {part: statistics.median(values) * 1000 for part, values in found.items()}
    cells = [
        name,
        ms(middle["plain"]),
        ms(middle["hand"]),
        *_ratio(hand),
        ms(middle["auto"]),
        *_ratio(auto),
        ms(middle["inspect"]),
    ]
    return cells, statistics.median(hand), statistics.median(auto)


def _ratio(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.3f}", f"{min(values):.3f} to {max(values):.3f}"


def command(file: Path) -> float:
    """Return the milliseconds of the whole command, the start of Python among them."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "fanfold", "inspect", str(file)], check=True, stdout=subprocess.DEVNULL)
        times.append((time.perf_counter() - began) * 1000)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small file and few pairs: a check, not a measurement")
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs of each kind (9)")
    parser.add_argument("--page", type=Path, help="write the block into this page (a full run: docs/benchmarks.md)")
    options = parser.parse_args()
    parts, pairs = (8, 2) if options.quick else (250, options.pairs)
    weights = {f"layer{n}.weight": torch.randn(1000, 1000) for n in range(parts)}  # 4 MB each
    rows, worst, walls = [], 0.0, []
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as place:
        for name, (file, save) in FORMATS.items():
            found = measure(save, weights, Path(place, file), Path(place, "runs"), pairs)
            cells, hand, auto = row(f"{name}, {short(parts * 0.004)} GB", found)
            rows.append(cells)
            worst = max(worst, hand, auto)
            wall = statistics.median(found["hand_wall"]), statistics.median(found["plain_wall"])
            walls.append(f"{name} {ms(wall[0] * 1000)} after {ms(wall[1] * 1000)} of saving")
            slowest = max(found["inspect"]) * 1000
        whole = command(Path(place, "m.pt"))
    note = (
        f"CPU time of the process, {pairs} interleaved pairs, medians, lowest and highest ratio; the disk is idle at each start. "
        f"By the wall clock a stamp by hand takes: {'; '.join(walls)}. The command `fanfold inspect` takes {whole:.0f} ms "
        f"with the start of Python; reading alone at most {slowest:.1f} ms. Wanted: at most {LIMIT} of saving, {LIMIT_INSPECT_MS:.0f} ms."
    )
    sheet = Sheet("Stamping a model file", HEAD, rows, note)
    sheet.print(Console(width=None if sys.stdout.isatty() else 170))
    facts = [
        f"{cpu()}; Python {sys.version.split()[0]}; {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}",
        f"torch {version('torch')}, safetensors {version('safetensors')}",
    ]
    if page := options.page or (None if options.quick else PAGE):
        write_page(page, facts, [sheet], marks=MARKS)
    return int(not options.quick and worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
