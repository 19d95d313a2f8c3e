"""What we promise of our own dashboard below the page: bytes, requests and the store. What is promised of the page: page.py."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import random
import shutil
import struct
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from boards import PROJECT, Fanfold, Size, get, served
from store import best, merging, write

SPIKES = (0.123456, 0.876543)  # where, in parts of the series, one point stands far above and one far below


@dataclass
class Budget:
    """One promise: what was measured, and the most it may be. Nothing measured is a failure that says why."""

    what: str
    value: float | None
    most: float
    unit: str
    note: str = ""

    @property
    def kept(self) -> bool:
        return self.value is not None and self.value <= self.most

    def row(self) -> list[str]:
        measured = (
            "-"
            if self.value is None
            else f"{self.value:,.3g} {self.unit}"
            if self.value < 1000
            else f"{self.value:,.0f} {self.unit}"
        )
        return [self.what, measured, f"{self.most:g} {self.unit}", "yes" if self.kept else "**no**", self.note]


@dataclass(frozen=True)
class Plan:
    """How much of everything: the promise's own sizes, or a quick look."""

    data: Path
    size: Size
    quick: bool
    soak: float  # seconds of live heap

    @property
    def latest(self) -> tuple[int, int]:
        """Runs and keys whose latest values are asked for."""
        return self.of(1000, 50), self.of(100, 20)

    @property
    def table(self) -> tuple[int, int]:
        """Runs and columns of the table that is sorted and filtered."""
        return self.of(5000, 200), self.of(1000, 50)

    def of(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@contextlib.contextmanager
def dashboard(dir: Path) -> Iterator[str]:
    with served(Fanfold(), dir, Size()) as base:
        if not base:
            raise SystemExit(f"`fanfold ui --dir {dir}` did not answer. The budgets were not measured. See {dir}.server.log.")
        yield base


def prepare(plan: Plan) -> None:
    """Write the data that the budgets ask for, once."""
    long_run(plan)
    for runs, keys in (plan.latest, plan.table):
        many_runs(plan, runs, keys)


# Bytes and requests


def first_page(base: str, urls: dict[str, str]) -> list[Budget]:
    """Sum what the browser fetched as code for the first page."""
    code = [url for url, kind in urls.items() if kind in ("Script", "Stylesheet") and url.startswith(base)]
    packed = sum(len(gzip.compress(get(url), 9)) for url in code) / 1000
    names = ", ".join(sorted(urllib.parse.urlsplit(url).path.strip("/") for url in code))
    return [Budget("JS + CSS of the first page, gz", packed if code else None, 60, "KB", names)]


class Client:
    """One kept connection, as a page has it."""

    def __init__(self, base: str) -> None:
        self.host = urllib.parse.urlsplit(base).netloc
        self.connection = http.client.HTTPConnection(self.host, timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        self.connection.request(
            "POST", path, json.dumps(body), {"content-type": "application/json", "origin": f"http://{self.host}"}
        )
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path} answered {answer.status}: {data[:200]!r}. The budgets were not measured.")
        return data


def decode(data: bytes) -> list[dict[str, Any]]:
    """Read an answer of columns (docs/dashboard.md)."""
    import numpy as np

    version, length = struct.unpack_from("<II", data)
    assert version == 1
    head, start = json.loads(data[8 : 8 + length]), 8 + length
    for item in head["items"]:
        item |= {
            name: np.frombuffer(data, f"<{type}", count, start + at) for name, (type, at, count) in item.pop("columns").items()
        }
    return head["items"]


def series_request(base: str, plan: Plan) -> list[Budget]:
    client, runs = Client(base), [f"run{i:03d}" for i in range(plan.size.runs)]
    asked = {"project": PROJECT, "runs": runs, "keys": [plan.size.names[0]], "n": 330}
    size = len(client.post("/api/series", asked))
    least, median = best(lambda: client.post("/api/series", asked), plan.of(31, 9))
    note = f"{size / 1000:,.0f} KB; median of a kept connection, best {least:.1f} ms"
    return [Budget(f"series request, {len(runs)} runs x 330 buckets", median, 20, "ms", note)]


# Exactness


def extremes(base: str, plan: Plan) -> list[Budget]:
    """Compare what the server sends for drawing with the raw data: whole series, and windows as a zoom asks for them."""
    client, raw = Client(base), [plan.size.values(run).astype("f4") for run in range(plan.size.runs)]
    wrong = looked = 0
    rng = random.Random(1)
    windows = [(0, plan.size.steps - 1)] + [tuple(sorted(rng.sample(range(plan.size.steps), 2))) for _ in range(plan.of(20, 5))]
    for lo, hi in windows:
        asked = {
            "project": PROJECT,
            "runs": [f"run{i:03d}" for i in range(plan.size.runs)],
            "keys": plan.size.names,
            "n": 50,
            "lo": lo,
            "hi": hi,
        }
        for item in decode(client.post("/api/series", asked)):
            there = raw[int(item["run"][3:])][lo : hi + 1, plan.size.names.index(item["key"])]
            inside = (item["x"] >= lo) & (item["x"] <= hi)
            low, high = item.get("lo", item["y"])[inside].min(), item.get("hi", item["y"])[inside].max()
            wrong += (low.astype("f4") != there.min()) + (high.astype("f4") != there.max())
            looked += 2
    note = f"{looked:,} extremes of {len(windows)} ranges in 50 buckets, compared with the data"
    return [Budget("extremes lost on the way to the page", int(wrong) if looked else None, 0, "", note)]


# The store


def long_run(plan: Plan) -> tuple[Path, int]:
    """Write a long run with two single points out of line, once."""
    from fanfold.journal import Writer
    from fanfold.journal import format as fmt

    points = plan.of(1_000_000, 20_000)
    root = plan.data / f"long-{points}"
    if root.with_suffix(".done").exists():
        return root, points
    shutil.rmtree(root, ignore_errors=True)  # what an interrupted run left
    noise, spikes = random.Random(1), {int(points * at): 50.0 * sign for at, sign in zip(SPIKES, (1, -1), strict=True)}
    header = {
        "format": [fmt.MAJOR, fmt.MINOR],
        "rank": 0,
        "role": "main",
        "attempt": "a",
        "run": "long",
        "project": "long",
        "ordinal": 1,
    }
    out, clock = Writer(root / "long" / "long" / "journal", header), 1_790_000_000_000_000_000
    for step in range(points):
        clock += 10_000_000
        out.row({"loss": spikes.get(step) or noise.gauss(0, 1)}, "d", time_ns=clock, step=step)
    out.close({"status": "finished", "t": clock})
    root.with_suffix(".done").touch()
    return root, points


def long_series(plan: Plan) -> list[Budget]:
    from fanfold.store.merge import merge
    from fanfold.store.query import LocalStore

    root, points = long_run(plan)
    journals = list((root / "long" / "long" / "journal").glob("*.ffj"))
    found, merged = [], 0
    for origin, most in (("a journal", 20), ("a segment", 3)):
        store = LocalStore(root)  # a reader that opens the run anew sees its segments
        ask = partial(store.series, store.run("long", "long"), "loss", buckets=1000)
        least, median = best(ask, 15)
        note = f"median of the same question asked again, best {least:.2f} ms"
        found.append(Budget(f"{points:,} points to 1,000 buckets from {origin}", median, most, "ms", note))
        merged = sum(one.points for journal in journals for one in merge(journal)) if origin == "a journal" else merged
    found[-1].note += f"; {merged:,} points merged" if merged else "; too short to be merged, so still the journal"
    return found


def many_runs(plan: Plan, runs: int, keys: int) -> Path:
    """Write runs of one step with many keys, once; they ended a while ago."""
    root = plan.data / f"wide-{runs}x{keys}"
    if not root.with_suffix(".done").exists():
        shutil.rmtree(root, ignore_errors=True)
        for i in range(runs):
            folder = write(root, 1, keys, id=f"run{i}", project="wide", noise=i)
            for journal in (folder / "journal").glob("*.ffj"):
                os.utime(journal, (time.time() - 600,) * 2)
        root.with_suffix(".done").touch()
    return root


def latest_values(plan: Plan) -> list[Budget]:
    from fanfold.store.query import LocalStore

    runs, keys = plan.latest
    root = many_runs(plan, runs, keys)
    LocalStore(root).runs("wide")
    fresh, _ = best(lambda: LocalStore(root).runs("wide"), 5)
    store = LocalStore(root)
    store.runs("wide")
    least, median = best(lambda: store.runs("wide"), 9)
    note = f"median in a server that is up, best {least:.1f} ms; a new process with the catalogue on disk {fresh:.0f} ms"
    return [Budget(f"latest values of {runs:,} runs x {keys} keys", median, 50, "ms", note)]


def merge_long(plan: Plan, scratch: Path) -> list[Budget]:
    """Merge a run of a hundred million points while it is written and read."""
    points = plan.of(100_000_000, 2_000_000)
    done = merging(scratch / "merge", points)
    note = (
        f"5 M points a second; {done.points / done.seconds / 1e6:.1f} M, with {done.reads:.0f} reads of a series meanwhile; "
        f"in one go afterwards {done.rate:.1f} M; {done.memory:.0f} MB of memory at most"
    )
    return [Budget(f"merging {done.points:,.0f} points while the run is written and read", done.seconds, points / 5e6, "s", note)]
