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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

import fanfold
from report import Sheet, cpu, ms, short, version, write_page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
MARKS = ("<!-- provenance: written by `make bench`, do not edit by hand -->", "<!-- provenance: end -->")
HEAD = [
    "",
    "saving it",
    "automatic",
    "of pairs",
    "a stamp by hand",
    "saving and stamp",
    "of pairs",
    "by the clock, to the disk",
    "read back",
]
# A file's name, its saver, and the part of the weights that is one tensor, the first in the file.
FORMATS: dict[str, tuple[str, Callable[[Any, Path], Any], float]] = {
    "safetensors": ("m.safetensors", save_file, 0),
    "safetensors, 40 % in its first tensor": ("n.safetensors", save_file, 0.4),
    "torch.save": ("m.pt", torch.save, 0),
}


class Clock:
    """CPU seconds of this process and its wall seconds, between two looks."""

    def __init__(self) -> None:
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
    """Save plainly and while a run stamps, in turn; then save and stamp by hand. The first of each is for warming up."""
    found: dict[str, list[float]] = {
        name: [] for name in ("plain", "auto", "saved", "saved_wall", "hand", "hand_wall", "inspect", "disk", "stamped_disk")
    }
    savers = {"plain": as_long(save, weights, file, runs), "auto": save}
    for turn in range(pairs + 1):
        for name in ("plain", "auto") if turn % 2 else ("auto", "plain"):  # what is saved second finds other memory
            value = in_run(savers[name], weights, file, runs, stamp=name == "auto")
            found[name] += [value] if turn else []
    for turn in range(pairs + 1):
        values = by_hand(save, weights, file, runs)
        for name, value in zip(("saved", "saved_wall", "hand", "hand_wall", "inspect"), values, strict=True):
            found[name] += [value] if turn else []
    for turn in range(pairs + 1):
        for name in ("disk", "stamped_disk") if turn % 2 else ("stamped_disk", "disk"):
            value = to_the_disk(save, weights, file, runs, stamp=name == "stamped_disk")
            found[name] += [value] if turn else []
    return found


def as_long(save: Callable[[Any, Path], Any], weights: Any, file: Path, runs: Path) -> Callable[[Any, Path], Any]:
    """Return a saver without a stamp whose safetensors header is as long as with one: where weights begin decides a tenth of the time."""
    if save is not save_file:
        return save
    lengths = []
    in_run(save, weights, file, runs, stamp=True)
    lengths.append(int.from_bytes(file.open("rb").read(8), "little"))
    save_file(weights, file, metadata={"filler": ""})
    lengths.append(int.from_bytes(file.open("rb").read(8), "little"))
    return partial(save_file, metadata={"filler": "x" * (lengths[0] - lengths[1])})


def make_weights(parts: int, first: float) -> dict[str, torch.Tensor]:
    """Return so many parts of 4 MB, some of them in one tensor that stands in front, as an embedding does."""
    one = int(parts * first)
    embedding = {"embedding.weight": torch.randn(one * 1000, 1000)} if one else {}
    return embedding | {f"layer{n}.weight": torch.randn(1000, 1000) for n in range(parts - one)}


def plain(save: Callable[[Any, Path], Any], weights: Any, file: Path) -> tuple[float, float]:
    """Return CPU and wall seconds of saving; it starts with a disk that has nothing else to do, and no old file to give back."""
    file.unlink(missing_ok=True)
    os.sync()
    return timed(lambda: save(weights, file))


def in_run(save: Callable[[Any, Path], Any], weights: Any, file: Path, runs: Path, *, stamp: bool) -> float:
    """Return the CPU seconds of saving beside a run, which has work of its own at its start, with stamps or without.

    Its name is always the same: a stamp of another length would move the weights.
    """
    with fanfold.init("bench", name="bench", dir=runs, quiet=True, system=False, stamp=stamp):
        return plain(save, weights, file)[0]


def by_hand(save: Callable[[Any, Path], Any], weights: Any, file: Path, runs: Path) -> list[float]:
    """Return CPU and wall seconds of saving and of stamping right after it, and what reading the stamp takes."""
    saved = plain(save, weights, file)
    with fanfold.init("bench", name="bench", dir=runs, quiet=True, system=False) as run:
        stamped = timed(lambda: fanfold.stamp(file, data="benchmark"))
    began = time.perf_counter()
    assert fanfold.inspect(file)["stamp"]["run"]["id"] == run.id
    return [*saved, *stamped, time.perf_counter() - began]


def to_the_disk(save: Callable[[Any, Path], Any], weights: Any, file: Path, runs: Path, *, stamp: bool) -> float:
    """Return the wall seconds until a file is saved, stamped by hand or not, and on the disk."""
    file.unlink(missing_ok=True)
    os.sync()
    with fanfold.init("bench", name="bench", dir=runs, quiet=True, system=False):
        began = time.perf_counter()
        save(weights, file)
        if stamp:
            fanfold.stamp(file, data="benchmark")
        with file.open("rb+") as written:
            os.fsync(written.fileno())
        return time.perf_counter() - began


def row(name: str, found: dict[str, list[float]]) -> list[str]:
    """Compare the lowest figures, which other load does not reach, and give the median and the spread of the pairs."""
    automatic = [stamped / plain for plain, stamped in zip(found["plain"], found["auto"], strict=True)]
    by_hand = [1 + stamp / saved for saved, stamp in zip(found["saved"], found["hand"], strict=True)]
    disk = [stamped / plain for plain, stamped in zip(found["disk"], found["stamped_disk"], strict=True)]
    low = {part: min(values) * 1000 for part, values in found.items()}
    saving = min(low["plain"], low["saved"])
    first = [f"{low['auto'] / low['plain']:.3f}", _pairs(automatic)]
    hand = [ms(low["hand"]), f"{1 + low['hand'] / saving:.3f}", _pairs(by_hand), _pairs(disk)]
    return [name, ms(saving), *first, *hand, ms(low["inspect"])]


def _pairs(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def command(file: Path) -> float:
    """Return the milliseconds of the whole command, the start of Python among them, with bytecode as an installed package has it."""
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(file.parent / "bytecode")}
    words, times = [sys.executable, "-m", "fanfold", "inspect", str(file)], []
    for _ in range(9):
        began = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **bytecode})
        times.append((time.perf_counter() - began) * 1000)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small file and few pairs: a check, not a measurement")
    parser.add_argument("--pairs", type=int, default=16, help="interleaved pairs of each kind (16)")
    parser.add_argument("--page", type=Path, help="write the block into this page (a full run: docs/benchmarks.md)")
    options = parser.parse_args()
    parts, pairs = (8, 2) if options.quick else (250, options.pairs)
    rows, walls, slowest = [], [], 0.0
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as place:
        for name, (file, save, first) in FORMATS.items():
            found = measure(save, make_weights(parts, first), Path(place, file), Path(place, "runs"), pairs)
            rows.append(row(f"{short(parts * 0.004)} GB, {name}", found))
            wall = statistics.median(found["hand_wall"]), statistics.median(found["saved_wall"])
            walls.append(f"{name} {ms(wall[0] * 1000)} after {ms(wall[1] * 1000)} of saving")
            slowest = max(slowest, *(seconds * 1000 for seconds in found["inspect"]))
        with fanfold.init("bench", name="bench", dir=Path(place, "runs"), quiet=True, system=False):
            fanfold.stamp(Path(place, "m.pt"), data="benchmark")
        whole = command(Path(place, "m.pt"))
    note = (
        f"CPU time of the process but where the clock is named; ratios to saving without a stamp: of the lowest of {pairs}, then the median, lowest and highest of the "
        f"pairs. For safetensors, automatic is beside a save with as long a header: "
        f"whether weights begin at a multiple of 32 bytes decides a tenth of the time. A stamp by hand follows right after the saving; by the wall clock, medians: {'; '.join(walls)}; "
        f"to the disk: saving, stamp and fsync beside saving and fsync, pairs in turn. Reading a stamp takes "
        f"{slowest:.1f} ms at most, the command `fanfold inspect` {whole:.0f} ms with the start of Python."
    )
    sheet = Sheet("Stamping a model file", HEAD, rows, note)
    sheet.print(Console(width=None if sys.stdout.isatty() else 170))
    facts = [
        f"{cpu()}; Python {sys.version.split()[0]}; {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}",
        f"torch {version('torch')}, safetensors {version('safetensors')}",
    ]
    if page := options.page or (None if options.quick else PAGE):
        write_page(page, facts, [sheet], marks=MARKS)


if __name__ == "__main__":
    main()
