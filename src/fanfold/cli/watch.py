"""What `fanfold top` knows of each run: how it stands, how fast it goes, and the curve of what people look at first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..drawing.order import curve_order
from ..errors import FanfoldError
from ..store import StoredRun
from ..store.buckets import Buckets
from ..store.query import Name, Store
from ..store.rows import Row
from . import chart

# Who needs a look first. A run whose processes live but have logged nothing for long is stalled.
ORDER = ("failed", "killed", "lost", "stalled", "preempted", "running", "finished")
LIVE = frozenset({"running", "lost", "stalled"})
STALLED_SECONDS = 60.0
STALLED_STEPS = 20  # and this many times its usual pause between two steps
PACE_ROWS = 200  # the last rows from which a run's speed is taken
SPARK = 64  # buckets kept for a curve; a narrow screen shows fewer
PROBES = ("system/", "energy/")
SORTS = ("trouble", "newest", "name", "rate", "seen")


@dataclass
class Look:
    """One line of the table."""

    row: Row
    status: str
    step: int | None = None
    rate: float | None = None  # steps a second
    key: str = ""
    value: Any = None
    curve: list[float] = field(default_factory=list)
    cpu: float | None = None
    gpu: float | None = None
    whole: bool = False

    @property
    def name(self) -> Name:
        return self.row.project, self.row.id

    def facts(self) -> dict[str, Any]:
        """Return it as plain data."""
        row = self.row
        same = {name: row[name] for name in ("id", "name", "project", "seen", "created", "ranks", "path")}
        return {**same, "status": self.status, "step": self.step, "rate": self.rate, "key": self.key or None, "value": self.value,
                "age": max(0.0, time.time() - row.seen), "cpu": self.cpu, "gpu": self.gpu}  # fmt: skip


class Watcher:
    """Looks at the runs again and again; what has not changed is not read again."""

    def __init__(self, store: Store, *, project: str | None, since: float | None, key: str | None) -> None:
        self.store = store
        self.project = project
        self.since = since
        self.key = key
        self._kept: dict[Name, tuple[tuple[Any, ...], Look]] = {}

    def looks(self, filter: str = "", sort: str = SORTS[0], *, now: float | None = None) -> list[Look]:
        """Return a line per run that lives or lived lately, those that need a look first.

        Those that live are read to their end; of the others the catalogue knows enough until they are shown (see `whole`).
        """
        now = time.time() if now is None else now
        rows = [row for row in self.store.runs(self.project, filter) if not row.archived]
        kept = [row for row in rows if self.since is None or row.status in LIVE or now - row.seen < self.since]
        found = [self._look(row, now) for row in kept]
        return sorted(found, key=lambda look: place(look, sort))

    def _look(self, row: Row, now: float) -> Look:
        latest = row.latest
        look = Look(row, row.status)
        look.cpu, look.gpu = _load(latest)
        keys = [key for key, value in latest.items() if isinstance(value, (int, float)) and not key.startswith(PROBES)]
        look.key = self.key if self.key and self.key in keys else next(iter(curve_order(keys)), "")
        look.value = latest.get(look.key)
        return self.whole(look, now) if row.status in LIVE else look

    def whole(self, look: Look, now: float | None = None) -> Look:
        """Add what only the run's journals know: its step, speed and curve. One that ended is read once."""
        if look.whole:
            return look
        look.whole = True
        signs = (look.row.status, look.row.seen, look.key)
        known = self._kept.get(look.name)
        if known is not None and known[0] == signs:
            look.step, look.curve, look.value = known[1].step, known[1].curve, known[1].value
            return look
        with contextlib.suppress(FanfoldError):  # deleted or damaged since it was listed: its row is what we have
            self._read(look, self.store.run(*look.name), time.time() if now is None else now)
        if look.row.status not in LIVE:
            self._kept[look.name] = (signs, look)
        return look

    def _read(self, look: Look, run: StoredRun, now: float) -> None:
        found = run.curve(look.key, buckets=SPARK)
        if found is None:
            return
        look.curve = found.last.tolist()
        if found.low is not None:
            look.value = last_fold(run, found)
        look.step, rate, silent, pause = pace(run, look.key, now)
        if look.status == "running":
            stalled = silent > max(STALLED_SECONDS, STALLED_STEPS * pause)
            look.status, look.rate = ("stalled", 0.0) if stalled else ("running", rate)


def last_fold(run: StoredRun, found: Buckets) -> float:
    """Return the last mean over ranks, NaN included: a bucket of many points speaks of the finite ones alone."""
    return float(found.last[-1] if found.raw else run.series(found.key, fold="mean").values[-1])


def _load(latest: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return how busy CPU and GPUs are, in percent; several GPUs as their mean."""
    cpu = latest.get("system/cpu")
    gpus = [float(value) for key, value in latest.items() if key.startswith("system/gpu/") and key.endswith("/util")]
    return (float(cpu) if isinstance(cpu, (int, float)) else None), (sum(gpus) / len(gpus) if gpus else None)


def pace(run: StoredRun, key: str, now: float) -> tuple[int | None, float | None, float, float]:
    """Return a run's last step, its steps a second, for how long it has been silent, and its usual pause between rows."""
    journals = [journal for journal in run.attempts[-1].mains if journal.by_key.get(key)]
    if not journals:
        return None, None, 0.0, 0.0
    journal = min(journals, key=lambda one: one.header.rank)
    steps, times, _ = journal.column(key, since=journal.back([key], PACE_ROWS))
    if not len(steps):
        return None, None, 0.0, 0.0
    span = float(times[-1] - times[0])
    rate = float(steps[-1] - steps[0]) / span if span > 0 else None
    return int(steps[-1]), rate, now - float(times[-1]), span / max(1, len(times) - 1)


def place(look: Look, sort: str) -> tuple[Any, ...]:
    """Return where a line belongs."""
    row = look.row
    if sort == "name":
        return (str(row.name).lower(), row.id)
    if sort == "newest":
        return (-row.created, row.id)
    if sort == "rate":
        return (-(look.rate or 0.0), row.id)
    if sort == "seen":
        return (-row.seen, row.id)
    return (ORDER.index(look.status) if look.status in ORDER else len(ORDER), -row.created, row.id)


def spark(curve: Sequence[float], width: int) -> str:
    return chart.spark(curve, width)
