"""Rows: the facts of a run known without opening its journals, kept by the catalogue, read by filters and the dashboard."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..journal.bodies import Fork

LIVE = frozenset({"running", "lost"})  # the two statuses that can change without a write


class AttemptRow(msgspec.Struct, array_like=True):
    """One attempt of a run: its key, its status, and when it started and was last active (ns)."""

    key: str
    status: str
    started: int
    seen: int


class RunRow(msgspec.Struct, kw_only=True):
    """The facts of one run, read-only. `row["id"]` is `row.id`, for every field and property."""

    id: str = ""
    project: str = ""
    name: str = ""
    group: Any = None
    notes: Any = None
    tags: list[Any] = []
    config: dict[Any, Any] = {}
    verdict: dict[str, Any] = {}
    created: float = msgspec.field(default=0.0, name="started")
    seen: float = 0.0
    rank_list: list[int] = msgspec.field(default_factory=list, name="ranks")
    summary: dict[str, Any] = {}
    rules: dict[str, str] = {}
    lives: list[AttemptRow] = msgspec.field(default_factory=list, name="attempts")
    latest: dict[str, Any] = {}
    media: list[str] = []
    archived: bool = False
    fork: Fork | None = None
    unsummed: list[str] = []  # only in the stored form: keys of `latest` that `summary` leaves out
    path: str = ""
    stats: dict[str, Any] | None = None  # statistics of metrics, if requested

    @property
    def status(self) -> str:
        return str(self.verdict.get("status") or "lost")

    @property
    def error(self) -> str | None:
        return self.verdict.get("error")

    @property
    def ranks(self) -> int:
        return len(self.rank_list)

    @property
    def attempts(self) -> int:
        return len(self.lives)

    @property
    def duration(self) -> float:
        return lasted(((life.started, life.seen) for life in self.lives), running=self.status == "running")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def slim(self) -> RunRow:
        """Return the row as it is stored: without summary values that are also in `latest`, in a wide run nearly all of them."""
        latest, summary = self.latest, self.summary
        own = {key: value for key, value in summary.items() if latest.get(key, self) is not value}
        return msgspec.structs.replace(self, path="", summary=own, unsummed=[key for key in latest if key not in summary])

    def whole(self, path: str) -> RunRow:
        """Restore a stored row: set its path, and fill in the summary values it shares with `latest`."""
        own, without = self.summary, set(self.unsummed)
        if own or without:
            own = {**{key: value for key, value in self.latest.items() if key not in without}, **own}
        self.path, self.summary, self.unsummed = path, own or self.latest, []
        return self


class RunRows(list[RunRow]):
    """Rows of runs. `unreadable` has the path and the reason of each run that could not be read."""

    def __init__(self, rows: Iterable[RunRow] = (), unreadable: Sequence[dict[str, str]] = ()) -> None:
        super().__init__(rows)
        self.unreadable = list(unreadable)


class Project(msgspec.Struct):
    """A project: how many runs it has, and when one of them was last active."""

    name: str
    runs: int
    last: float

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def cause(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return how a run ended and on which rank; the time is in seconds since 1970."""
    ended = verdict.get("time")
    found = {name: verdict.get(name) for name in ("rank", "signal", "exit_code", "error", "reason")}
    return {**found, "time": ended / 1e9 if ended else None}


def lasted(lives: Iterable[tuple[int, int]], *, running: bool) -> float:
    """Return a run's total duration in seconds: each attempt from its start to its last sign of life, a running one until now."""
    spans = list(lives)
    if spans and running:
        spans[-1] = (spans[-1][0], time.time_ns())
    return sum(max(0, end - begin) for begin, end in spans) / 1e9
