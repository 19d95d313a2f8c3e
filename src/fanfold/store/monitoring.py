"""Live runs as monitoring systems read them: Prometheus text to be scraped, OpenTelemetry requests (OTLP) to be pushed.

What a run logged is a label (`key="train/loss"`) and never the name of a metric, so that the names are the same for all runs.
The number of series is bounded, and those left out are counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._version import __version__
from ..errors import FanfoldError, SettingError, suggestion
from ..plain import json_safe
from . import deadline
from .goodput import goodput
from .ops_formats import attributes, labels, resources
from .ops_formats import prometheus as ops_text
from .query import Store
from .run import StoredRun

WHAT = ("metrics", "goodput", "ops")
RECENT_SECONDS = 300.0  # a run that has just ended is still shown, so that its last values are scraped
MOST_KEYS = 1_000  # of one run
MOST_SERIES = 100_000  # of one answer
STATUSES = ("running", "finished", "failed", "killed", "preempted", "lost")


class Family(NamedTuple):
    """One metric: its name, unit and meaning, and a value for each set of labels."""

    name: str
    unit: str
    meaning: str
    samples: list[tuple[dict[str, Any], float]]


class MonitoredRun(NamedTuple):
    """What is shown of one run."""

    run: StoredRun
    families: list[Family]
    ops: list[dict[str, Any]]


def check(words: str) -> tuple[str, ...]:
    """Return the parts named in a comma-separated list, or raise."""
    found = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    for word in found:
        if word not in WHAT:
            raise SettingError(f"{word[:100]!r} is not known. Nothing was shown.{suggestion(word, WHAT)}")
    return found or WHAT[:1]


def live(store: Store, project: str | None = None, *, now: float | None = None) -> list[StoredRun]:
    """Return the runs that run, or ended in the last minutes."""
    at = time.time() if now is None else now
    return [run for run in store.listed(project) if run.status == "running" or at - run.seen <= RECENT_SECONDS]


def collect(runs: Iterable[StoredRun], what: Sequence[str] = WHAT[:1]) -> tuple[list[MonitoredRun], int]:
    """Return what is shown of some runs, and how many series were left out because there are too many."""
    found: list[MonitoredRun] = []
    room, left_out = MOST_SERIES, 0
    for run in runs:
        deadline.check()
        try:
            families, dropped = _families(run, what, max(0, min(room, MOST_KEYS)))
            rows = run.ops() if "ops" in what else []
        except (FanfoldError, OSError):  # deleted, or damaged, since it was listed: the others are shown
            continue
        kept = rows[: max(0, room)]
        left_out += dropped + len(rows) - len(kept)
        room -= sum(len(family.samples) for family in families) + len(kept)
        found.append(MonitoredRun(run, families, kept))
    return found, left_out


def _families(run: StoredRun, what: Sequence[str], most: int) -> tuple[list[Family], int]:
    row = run.row()
    ended = 0.0 if row.status == "running" else row.seen
    families = [
        Family("run_status", "1", "1 for the run's status.", [({"status": one}, float(one == row.status)) for one in STATUSES]),
        Family("run_info", "1", "The run's name and group.", [({"name": row.name, "group": row.group or ""}, 1.0)]),
        Family("run_started_seconds", "s", "When the run began, in seconds since 1970.", [({}, row.created)]),
        Family("run_seen_seconds", "s", "When one of its processes was last active.", [({}, row.seen)]),
        Family("run_ended_seconds", "s", "When it ended; 0 while it runs.", [({}, ended)]),
        Family("run_ranks", "1", "Its processes.", [({}, float(row.ranks))]),
        Family("run_attempts", "1", "How often it was started.", [({}, float(row.attempts))]),
    ]
    left_out = 0
    if "metrics" in what:
        numbers = [(str(key), float(value)) for key, value in row.latest.items() if isinstance(value, (int, float))]
        left_out = max(0, len(numbers) - most)
        samples: list[tuple[dict[str, Any], float]] = [({"key": key}, value) for key, value in numbers[:most]]
        families.append(Family("metric", "1", "The last value the run logged under a key.", samples))
    if "goodput" in what:
        spent = goodput(run)
        parts: list[tuple[dict[str, Any], float]] = [({"part": part}, ns / 1e9) for part, ns in spent.ns.items()]
        families.append(Family("goodput_seconds", "s", "Where the run's wall time went: the mean over its ranks.", parts))
    return families, left_out


# Prometheus


def prometheus(shown: Sequence[MonitoredRun], left_out: int = 0) -> str:
    """Return Prometheus' text format."""
    merged: dict[str, tuple[Family, list[str]]] = {}
    for run, families, _ in shown:
        for family in families:
            _, lines = merged.setdefault(family.name, (family, []))
            known = {"project": run.project, "run": run.id}
            lines += [f"fanfold_{family.name}{{{labels(known | more)}}} {_number(value)}" for more, value in family.samples]
    text: list[str] = []
    for family, lines in merged.values():
        text += [f"# HELP fanfold_{family.name} {family.meaning}", f"# TYPE fanfold_{family.name} gauge", *lines]
    text += ["# HELP fanfold_series_left_out Series that this answer leaves out, because there are too many.",
             "# TYPE fanfold_series_left_out gauge", f"fanfold_series_left_out {left_out}"]  # fmt: skip
    profile = [(one.run, one.ops) for one in shown if one.ops]
    whole = "\n".join(text) + "\n" + (ops_text(profile) if profile else "")
    return whole.encode("utf-8", "replace").decode()  # a name may contain half a character


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.15g}" if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"


# OpenTelemetry


def otlp(shown: Sequence[MonitoredRun]) -> Iterator[dict[str, Any]]:
    """Yield ExportMetricsServiceRequests as plain data for JSON, one or more per run."""
    for run, families, rows in shown:
        about = {"service.name": "fanfold", "fanfold.project": run.project, "fanfold.run": run.id, "fanfold.name": run.name}
        scope = {"scope": {"name": "fanfold.runs", "version": __version__}, "metrics": [_metric(run, one) for one in families]}
        yield {"resourceMetrics": [{"resource": {"attributes": attributes(about)}, "scopeMetrics": [scope]}]}
        for part in resources(run, rows):
            yield {"resourceMetrics": [part]}


def _metric(run: StoredRun, family: Family) -> dict[str, Any]:
    when = str(max(0, int(run.seen * 1e9)))
    points = [
        {"attributes": attributes(more), "timeUnixNano": when, "asDouble": json_safe(value)} for more, value in family.samples
    ]
    name = f"fanfold.{family.name}"
    return {"name": name, "unit": family.unit, "description": family.meaning, "gauge": {"dataPoints": points}}
