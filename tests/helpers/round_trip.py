"""A random run, sent to a tracker with `fanfold sync --to X`, and imported from there."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import fanfold
from fanfold.trackers.base import flat_config as flat

RUN = "round-trip-1"
_PLAY = """
    import fanfold, math, random, sys
    import numpy as np
    rng, words = np.random.default_rng({seed}), random.Random({seed})
    def text():
        return "".join(words.choice("abc äöü€😀 \\n\\t\\"'{{}}[]\\\\:,#") for _ in range(words.randrange(1, 200))) + "."
    run = fanfold.init("round trip", id="round-trip-1", name="a name, ü", dir="runs", system=False, quiet=True, group="a group",
                       tags=["one", "two words"], notes="notes\\nin two lines")
    run.config.update({{"lr": 0.1, "layers": 3, "flag": True, "text": text(), "nested": {{"deep": {{"er": 2.5}}, "list": [1, "a"]}}}})
    run.summary["best"] = float(rng.normal())
    run.summary["verdict"] = "good"
    odd = [float("nan"), math.inf, -math.inf, 5e-324, 1.7e308, 0.1 + 0.2, -1e-300]
    for i in range(300):
        row = {{"loss": float(rng.normal()), "val/acc": float(rng.random()), "count": int(rng.integers(0, 1 << 40))}}
        if i % 10 == 0:
            row["odd"] = odd[i // 10 % len(odd)]
        run.log(row, step=i * 3)
    for i in range(5):
        run.log({{"essay": text()}}, step=1000 + i)
    for i in range(3):
        run.log({{"image": fanfold.Image(rng.integers(0, 255, (8, 9, 3), dtype=np.uint8), caption="c")}}, step=2000 + i)
        run.log({{"histogram": fanfold.Histogram(rng.normal(size=100))}}, step=2000 + i)
        run.log({{"table": fanfold.Table(columns=["a", "b"], data=[[i, text()], [2, None]])}}, step=2000 + i)
        run.log({{"audio": fanfold.Audio(rng.normal(size=800).astype(np.float32) / 9, sample_rate=8000)}}, step=2000 + i)
    with open("model.bin", "wb") as file:
        file.write(rng.bytes(1000))
    run.artifact("model.bin", name="model.bin")
    {more}
    run.finish()
"""


def played(folder: Path, seed: int, more: str = "pass") -> fanfold.StoredRun:
    """Record a random run in its own process, and return it."""
    _python(folder, textwrap.dedent(_PLAY).format(seed=seed, more=more))
    return run_in(folder / "runs")


def run_in(directory: Path) -> fanfold.StoredRun:
    """Return the only run of a directory."""
    (found,) = fanfold.runs(dir=directory)
    return found


def send(folder: Path, tracker: str, kwargs: dict[str, Any] | None = None, **env: str) -> None:
    """Deliver the run with the user's command."""
    words = ["-m", "fanfold", "sync", RUN, "--to", tracker, "--dir", "runs", "--timeout", "120"]
    words += ["--kwargs", json.dumps(kwargs)] if kwargs else []
    _run(folder, words, **env)


def brought_back(source: Path, directory: Path, **options: Any) -> tuple[fanfold.StoredRun, Any]:
    """Import a tracker's data into an empty directory; return the run and its account."""
    (account,) = fanfold.import_runs(source, dir=directory, **options)
    assert account.outcome == "imported", account
    return run_in(directory), account


def _python(folder: Path, script: str, **env: str) -> None:
    _run(folder, ["-c", script], **env)


def _run(folder: Path, words: list[str], **env: str) -> None:
    home = {"HOME": str(folder / "home"), "FANFOLD_CACHE_DIR": str(folder / "cache")}
    (folder / "home").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **home, **env}, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# Comparing


def bits(value: Any) -> bytes:
    """Return a number's bits; all NaNs are equal."""
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


def points(run: fanfold.StoredRun, key: str, *, time_unit: float = 1e-6) -> list[tuple[int, bytes, int]]:
    """Return a key's points: step, bits of the value, and the time at the tracker's resolution."""
    series = run.series(key, raw=True)
    rows = zip(series.steps.tolist(), series.values.tolist(), series.times.tolist(), strict=True)
    return sorted((step, bits(value), round(time / time_unit)) for step, value, time in rows)


def same_points(one: fanfold.StoredRun, two: fanfold.StoredRun, key: str, *, time_unit: float = 1e-6, skip: Any = None) -> None:
    """Check that a key has the same points in both runs; `skip` selects values that the tracker cannot store."""
    wanted = [point for point in points(one, key, time_unit=time_unit) if skip is None or not skip(point[1])]
    found = points(two, key, time_unit=time_unit)
    assert [point[:2] for point in found] == [point[:2] for point in wanted], key
    apart = max((abs(a[2] - b[2]) for a, b in zip(found, wanted, strict=True)), default=0)
    assert apart <= 1, f"{key}: times are {apart * time_unit} s apart"


def same_texts(one: fanfold.StoredRun, two: fanfold.StoredRun, key: str) -> None:
    """Check that a key has the same texts."""
    assert [(point.step, point.text) for point in two.texts(key)] == [(point.step, point.text) for point in one.texts(key)]


def same_images(one: fanfold.StoredRun, two: fanfold.StoredRun, key: str) -> None:
    """Check that a key has the same images, pixel by pixel; a tracker may have added an opaque alpha channel."""
    wanted, found = ([(point.step, point.load().array()[..., :3].tolist()) for point in run.media(key)] for run in (one, two))
    assert found == wanted


def same_histograms(one: fanfold.StoredRun, two: fanfold.StoredRun, key: str) -> None:
    """Check that a key has the same histograms."""
    wanted, found = (
        [(point.step, point.load().counts.tolist(), point.load().edges.tolist()) for point in run.media(key)]
        for run in (one, two)
    )
    assert found == wanted


def same_tables(one: fanfold.StoredRun, two: fanfold.StoredRun, key: str) -> None:
    """Check that a key has the same tables."""
    wanted, found = ([(point.step, point.load().columns, point.load().rows) for point in run.media(key)] for run in (one, two))
    assert found == wanted


def same_bytes(one: fanfold.StoredRun, two: fanfold.StoredRun, key: str) -> None:
    """Check that a key has the same media files, byte for byte."""
    wanted, found = ([(point.step, bytes(point.load().encode().data)) for point in run.media(key)] for run in (one, two))
    assert found == wanted


def same_file(one: fanfold.StoredRun, two: fanfold.StoredRun, name: str) -> None:
    """Check that a single-file artifact has the same content."""
    wanted, found = (
        [run.artifact_file(artifact["files"][0]["blob"]).read_bytes() for artifact in run.artifacts if artifact["name"] == name]
        for run in (one, two)
    )
    assert found == wanted
    assert found


def flat_config(run: fanfold.StoredRun) -> dict[str, Any]:
    """Return a run's config with flat keys."""
    return flat(run.config)
