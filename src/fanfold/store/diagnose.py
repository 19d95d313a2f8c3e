"""What went wrong in a run, or limits it: findings, each with the evidence it rests on. The worst come first."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ..drawing.numbers import plural
from ..errors import FanfoldError
from .query import Store
from .rows import cause
from .run import Series, StoredRun

SEVERITIES = ("error", "warning", "info")
MAX_LOOKS = 2_000  # metrics times ranks that are searched for NaN
MAX_RANKS = 64  # whose memory is looked at
MAX_ALERTS = 10
LAST_LINES, LAST_BYTES = 10, 4_000  # of the console output of a run that ended badly
LONG_GAP_SECONDS = 60.0
LONG_GAP_RATIO = 20.0  # against the usual time between two points
PARTS = 8  # of a run, whose speeds are compared
SLOWER = 0.7  # of the usual speed
DATA_SHARE = 0.2
SLOW_RANK = 1.15  # against the median rank
GROWTH = 1.25
FULL_PERCENT = 95.0
FEW = 20  # points below which nothing is said about a trend
# Seconds per step, and the part of them that is not computing: of StragglerCallback, and of the Transformers integration.
DATA_KEYS = (("time/data", "time/step", False), ("rank/data_seconds", "rank/step_seconds", True))  # True: is contained in it
MEMORY_ENDS = ("memory_gb", "rss_gb", "memory_bytes")
# The text of NonFiniteCallback's alert; see callbacks/nonfinite.py.
_NOT_FINITE = re.compile(r"(?P<what>gradient|value) of (?P<names>.+) at step (?P<step>\d+) on rank (?P<rank>\d+)")


class Finding(msgspec.Struct, frozen=True):
    """One thing worth knowing: a word for programs, a sentence for people, and the numbers behind it."""

    kind: str
    severity: str
    text: str
    evidence: dict[str, Any]


class _Case:
    """A run that is being looked at, and what several looks need of it."""

    def __init__(self, store: Store, run: StoredRun) -> None:
        self.store = store
        self.run = run

    @cached_property
    def longest(self) -> Series | None:
        """The metric with the most points, of the lowest rank: its times show how the training went."""
        ranks = self.run.ranks
        counts = {key: self._count(key, ranks[0]) for key in self.run.keys("number")} if ranks else {}
        key = max(counts, key=counts.__getitem__, default=None)
        return self.run.series(key, rank=ranks[0], own=True) if key is not None and counts[key] else None

    def _count(self, key: str, rank: int) -> int:
        return sum(journal.count(key) for _, journal in self.run.holding(key) if journal.header.rank == rank)

    @cached_property
    def usual(self) -> float:
        """The usual seconds between two points of the longest metric."""
        return (
            float(np.median(np.diff(np.sort(self.longest.times)))) if self.longest is not None and len(self.longest) > 1 else 0.0
        )

    def mean(self, key: str, rank: int) -> float | None:
        try:
            values = self.run.series(key, rank=rank, own=True).values.astype(float)
        except FanfoldError:  # this rank has no such metric
            return None
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None


def diagnose(store: Store, run: StoredRun) -> list[Finding]:
    """Look at a run in every way we know; return what was found, the worst first."""
    case = _Case(store, run)
    looks = (_end, _not_finite, _alerts, _losses, _repeated, _gap, _stalled, _speed, _data, _ranks, _memory)
    found = [finding for look in looks for finding in look(case)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _end(case: _Case) -> Iterator[Finding]:
    verdict = case.run.verdict
    status = verdict["status"]
    if status in ("finished", "running"):
        return
    lines = str(verdict.get("error") or verdict.get("reason") or "").strip().splitlines()
    parts = [f"signal {verdict['signal']}" if verdict.get("signal") else "", lines[-1] if lines else ""]
    why = ", ".join(part for part in parts if part) or "no process reported a cause"
    rank = f" on rank {verdict['rank']}" if len(case.run.ranks) > 1 and verdict.get("rank") is not None else ""
    severity = "warning" if status == "preempted" else "error"
    text = f"The run failed{rank}: {why}." if status == "failed" else f"The run was {status}{rank}: {why}."
    printed = _printed_last(case.run) if "Traceback" not in str(verdict.get("error")) else []
    text += f" It printed last: {printed[-1]}" if printed else ""
    yield Finding("end", severity, text, {"status": status, **cause(verdict), "console": printed})


def _printed_last(run: StoredRun) -> list[str]:
    """Return the last lines of a run's console output."""
    text = run.console()[-LAST_BYTES:].decode("utf-8", "replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LAST_LINES:]


def _not_finite(case: _Case) -> Iterator[Finding]:
    run, first = case.run, {}
    ranks = run.ranks[: max(1, MAX_LOOKS // max(1, len(run.keys())))]
    for key in run.keys()[:MAX_LOOKS]:
        found = [(*odd, rank) for rank in ranks if (odd := _first_odd(case, key, rank)) is not None]
        if found:
            first[key] = min(found)
    reported = [match.groupdict() for alert in run.alerts if (match := _reported(alert))]
    if not first and not reported:
        return
    order = sorted(first.items(), key=lambda item: item[1][0])
    evidence = [{"key": name, "step": at, "value": what, "rank": who} for name, (at, what, who) in order[:20]]
    parameters = [
        {"what": one["what"], "names": one["names"], "step": int(one["step"]), "rank": int(one["rank"])} for one in reported[:20]
    ]
    yield Finding("not finite", "error", _first_words(order, parameters), {"first": evidence, "reported": parameters})


def _first_words(order: list[tuple[str, tuple[float, str, int]]], reported: list[dict[str, Any]]) -> str:
    """Return where a run first was not finite: the parameter if a callback watched them, and the metric."""
    words = []
    if reported:
        one = min(reported, key=lambda one: int(one["step"]))
        words.append(f"The {one['what']} of {one['names']} is not finite at step {one['step']} on rank {one['rank']}.")
    if order:
        key, (step, value, rank) = order[0]
        words.append(f"{key} is {value} at step {step:g} on rank {rank}, before any other metric.")
    if len(order) > 1:
        words.append(f"{plural(len(order) - 1, 'more metric')} {'follows' if len(order) == 2 else 'follow'}.")
    return " ".join(words)


def _reported(alert: dict[str, Any]) -> re.Match[str] | None:
    return _NOT_FINITE.fullmatch(str(alert.get("text"))) if alert.get("title") == "not finite" else None


def _first_odd(case: _Case, key: str, rank: int) -> tuple[float, str] | None:
    """Return where a metric of a rank is first NaN or infinite, and which."""
    try:
        curve = case.store.series(case.run, key, buckets=64, rank=rank)
    except FanfoldError:  # this rank has no such metric
        return None
    if not curve.raw:
        return (curve.marks[0][0], curve.marks[0][1]) if curve.marks else None
    odd = np.flatnonzero(~np.isfinite(curve.first))
    return (float(curve.x[odd[0]]), _word(curve.first[odd[0]])) if len(odd) else None


def _word(value: float) -> str:
    return "NaN" if np.isnan(value) else "inf" if value > 0 else "-inf"


def _alerts(case: _Case) -> Iterator[Finding]:
    counts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for alert in case.run.alerts:
        if not _reported(alert):
            counts.setdefault((str(alert.get("title")), str(alert.get("level"))), []).append(alert)
    for (title, level), alerts in list(counts.items())[:MAX_ALERTS]:
        times = f" ({len(alerts)} times)" if len(alerts) > 1 else ""
        text = str(alerts[0].get("text") or "")
        severity = "error" if level == "error" else "warning" if level in ("warn", "warning") else "info"
        evidence = {"level": level, "step": alerts[0].get("s"), "rank": alerts[0].get("rank"), "count": len(alerts)}
        yield Finding("alert", severity, f"Alert: {title}{f': {text}' if text else ''}{times}", evidence)


def _losses(case: _Case) -> Iterator[Finding]:
    run = case.run
    if run.dropped:
        text = f"{plural(run.dropped, 'log() call')} could not be written (disk full?)."
        yield Finding("dropped", "error", text, {"calls": run.dropped})
    if lost := run.lost_values:
        why = sorted({str(one.get("why")) for one in lost})[:5]
        text = f"{plural(len(lost), 'value')} on a device never arrived: {why[0]}."
        yield Finding("lost values", "warning", text, {"values": len(lost), "reasons": why})
    if run.damaged:
        yield Finding(
            "damaged", "warning", f"{plural(run.damaged, 'byte')} of the journals cannot be read.", {"bytes": run.damaged}
        )


def _repeated(case: _Case) -> Iterator[Finding]:
    series, run = case.longest, case.run
    if series is None or len(run.attempts) < 2:
        return
    every = len(run.series(series.key, rank=run.ranks[0], raw=True))
    again = every - len(series)
    if again > 0:
        text = f"{again} of {every} points were logged again after a restart: the run went back to an earlier checkpoint."
        yield Finding("repeated steps", "warning", text, {"attempts": len(run.attempts), "points": again, "key": series.key})


def _gap(case: _Case) -> Iterator[Finding]:
    series = case.longest
    if series is None or len(series) < FEW:
        return
    gaps = np.diff(np.sort(series.times))
    at = int(gaps.argmax())
    longest = float(gaps[at])
    if longest > max(LONG_GAP_SECONDS, LONG_GAP_RATIO * case.usual):
        step = int(series.steps[np.argsort(series.times)[at]])
        text = f"Nothing was logged for {longest:.0f} s after step {step}; usually it takes {case.usual:.3g} s to the next point."
        yield Finding("gap", "warning", text, {"seconds": longest, "usual": case.usual, "step": step, "key": series.key})


def _stalled(case: _Case) -> Iterator[Finding]:
    """Find a run whose processes are alive and log nothing any more."""
    series = case.longest
    if series is None or case.run.status != "running" or not len(series):
        return
    last = int(series.times.argmax())
    silent = time.time() - float(series.times[last])
    if silent > max(LONG_GAP_SECONDS, LONG_GAP_RATIO * case.usual):
        step = int(series.steps[last])
        text = f"The run is stalled: its processes are alive and have logged nothing for {silent:.0f} s, since step {step}."
        yield Finding("stalled", "error", text, {"seconds": silent, "usual": case.usual, "step": step, "key": series.key})


def _speed(case: _Case) -> Iterator[Finding]:
    """Find the part of a run in which its steps took longest."""
    series = case.longest
    if series is None or len(series) < PARTS * FEW // 2:
        return
    order = np.argsort(series.times, kind="stable")
    parts = [part for part in np.array_split(order, PARTS) if len(part) > 1]
    speeds = [_rate(series.steps[part], series.times[part]) for part in parts]
    usual, slowest = float(np.median(speeds)), int(np.argmin(speeds))
    if not usual or not 0 < speeds[slowest] < SLOWER * usual:
        return
    stays = all(speed < SLOWER * usual for speed in speeds[slowest:])
    last = parts[-1] if stays else parts[slowest]
    lo, hi = int(series.steps[parts[slowest][0]]), int(series.steps[last[-1]])
    after = " and the run did not recover" if stays else ""
    text = f"From step {lo} to {hi} it ran at {speeds[slowest]:.3g} steps/s; usually it runs at {usual:.3g}{after}."
    yield Finding("slower", "warning", text, {"from": lo, "to": hi, "speed": speeds[slowest], "usual": usual, "key": series.key})


def _rate(steps: Any, times: Any) -> float:
    """Return steps per second by the median, so that one pause does not count."""
    usual = float(np.median(np.diff(times)))
    return float(np.median(np.diff(steps))) / usual if usual > 0 else 0.0


def _data(case: _Case) -> Iterator[Finding]:
    for (data_key, step_key, inside), rank in itertools.product(DATA_KEYS, case.run.ranks[:1]):
        data, step = case.mean(data_key, rank), case.mean(step_key, rank)
        if not data or not step:
            continue
        share = data / (step if inside else data + step)
        if share > DATA_SHARE:
            text = f"{share:.0%} of the time goes between the steps, mostly waiting for data. More data loader workers may help."
            yield Finding("data wait", "warning", text, {data_key: data, step_key: step, "share": share})
            return


def _ranks(case: _Case) -> Iterator[Finding]:
    means = {rank: mean for rank in case.run.ranks if (mean := case.mean("time/compute", rank))}
    if len(means) < 2:
        return
    slowest = max(means, key=means.__getitem__)
    ratio = means[slowest] / float(np.median([mean for rank, mean in means.items() if rank != slowest]))
    if ratio > SLOW_RANK:
        text = f"Rank {slowest} computes {ratio:.2f} times as long as the others, who wait for it at every step."
        yield Finding("slow rank", "warning", text, {"rank": slowest, "ratio": ratio, "seconds": means})


def _memory(case: _Case) -> Iterator[Finding]:
    run = case.run
    for key in dict.fromkeys([*run.keys("system"), *run.keys()]):
        if not (key.endswith((*MEMORY_ENDS, "/memory"))):
            continue
        ranks = sorted({journal.header.rank for _, journal in run.holding(key) if journal.count(key)})[:MAX_RANKS]
        found = [one for rank in ranks if (one := _memory_of(case, key, rank)) is not None]
        if found:
            yield max(found, key=lambda one: float(one.evidence["last"]))


def _memory_of(case: _Case, key: str, rank: int) -> Finding | None:
    """Look at the memory of one rank: it may be nearly full, or grow all the time."""
    values = case.run.series(key, rank=rank, own=True).values.astype(float)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    where = f"{key} of rank {rank}" if len(case.run.ranks) > 1 else key
    evidence = {"key": key, "rank": rank, "first": float(values[0]), "last": float(values[-1]), "max": float(values.max())}
    if key.endswith("/memory"):
        full = values.max() > FULL_PERCENT
        return Finding("memory", "warning", f"{where} reached {values.max():.0f} %.", evidence) if full else None
    if len(values) < FEW or not _grows(values):
        return None
    scale = 1e9 if key.endswith("_bytes") else 1.0
    text = (
        f"{where} grew from {values[0] / scale:.3g} to {values[-1] / scale:.3g} GB. Something may be kept that should be freed."
    )
    return Finding("memory", "warning", text, evidence)


def _grows(values: Any) -> bool:
    """Return whether values rise by a quarter or more, in every quarter of their time."""
    quarters = [float(part.mean()) for part in np.array_split(values, 4)]
    return quarters[-1] > GROWTH * quarters[0] and all(a < b for a, b in itertools.pairwise(quarters))
