"""Slow nodes and GPUs, found by comparing ranks of the same step, over many runs.

In synchronous training the steps of all ranks take equally long, because the others wait for the slowest. So ranks are compared
by their own time: a step without the wait for other ranks. Each rank is compared with ranks of other nodes in its own run, which
had the same model, batch and code; a node is judged by the median of that over runs, so that one bad run does not condemn it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..errors import FanfoldError
from ..journal import Kind
from . import deadline, ops
from .goodput import timelines
from .run import StoredRun

LEAST_RUNS = 3
SLOW_RATIO = 1.05
SURE, VERY_SURE = 3.0, 6.0  # standard errors
LEAST_NOISE = 0.005  # of a run: two runs that happen to agree do not prove anything to the thousandth
_TO_SIGMA, _MEDIAN_ERROR = 1.4826, 1.2533  # for normally distributed values: MAD to sigma, error of a median to that of a mean


class Rank(NamedTuple):
    """One rank in one attempt of a run: where it ran, and its own seconds per step."""

    rank: int
    node: str
    gpu: str
    seconds: float


class NodeSpeed(msgspec.Struct):
    """A node or GPU: how slow it was, in how many runs, and how sure that is."""

    name: str
    ratio: float  # its own time per step, divided by that of the others in the same run: the median over runs
    spread: float  # of that ratio over runs (MAD, scaled to a standard deviation)
    runs: int
    slower: int  # runs in which it was slower than the others
    seconds: float  # of its ranks' own time, per step, in the latest run
    sigmas: float
    verdict: str  # slow, perhaps slow, too few runs, ok
    device: str = ""  # the GPU's model and id, if known

    @property
    def sure(self) -> str:
        if self.verdict == "slow":
            return "very sure" if self.sigmas >= VERY_SURE else "sure"
        return "not sure" if self.verdict == "perhaps slow" else ""


class NodeSpeeds(msgspec.Struct):
    """Nodes and GPUs, the slowest first, and the number of runs that were compared and that could not be."""

    nodes: list[NodeSpeed]
    gpus: list[NodeSpeed]
    compared: int = 0
    alone: int = 0  # runs of one rank, or on one node: nothing to compare a node with
    unmeasured: int = 0  # runs that did not record how long ranks wait for each other


def slow_places(runs: Iterable[StoredRun], *, since: float = 0.0, least: int = LEAST_RUNS) -> NodeSpeeds:
    """Compare nodes and GPUs over runs; attempts that ended before `since` (seconds since 1970) are left out."""
    nodes: dict[str, list[tuple[float, float]]] = {}
    gpus: dict[str, list[tuple[float, float]]] = {}
    devices: dict[str, str] = {}
    found = NodeSpeeds([], [])
    for run in runs:
        deadline.check()
        if run.seen < since:
            continue
        if len(run.ranks) < 2:
            found.alone += 1
            continue
        compared = False
        for ranks in measured(run, since):
            devices.update(_devices(run, ranks))
            for name, where in (("node", nodes), ("gpu", gpus)):
                for place, ratio, seconds in _against_others(ranks, name):
                    where.setdefault(place, []).append((math.log(ratio), seconds))
                    compared = True
        found.compared += compared
        found.unmeasured += not compared
    found.nodes = _judged(nodes, least, {})
    found.gpus = _judged(gpus, least, devices)
    return found


def measured(run: StoredRun, since: float = 0.0) -> list[list[Rank]]:
    """Return the ranks of each attempt whose own time per step is known."""
    lives = [
        [one for one in _from_callback(run, number) if 0 < one.seconds < math.inf]
        for number, attempt in enumerate(run.attempts)
        if attempt.seen / 1e9 >= since
    ]
    if not any(len(ranks) > 1 for ranks in lives):
        lives = [*_from_spans(run, since).values()]
    if not any(len(ranks) > 1 for ranks in lives):
        lives = [_from_profile(run)]
    return [ranks for ranks in lives if len(ranks) > 1]


def _from_callback(run: StoredRun, number: int) -> list[Rank]:
    """Use the times that StragglerCallback logs: medians over some steps, without the wait."""
    import numpy as np

    found: dict[int, Rank] = {}
    for journal in run.attempts[number].mains:
        if journal.count("time/compute"):
            values = [
                journal.column(key).values.astype(np.float64) for key in ("time/compute", "time/data") if journal.count(key)
            ]
            seconds = float(sum(np.nanmedian(one) if np.isfinite(one).any() else 0.0 for one in values))
            found[journal.header.rank] = Rank(journal.header.rank, *_place(journal.header), seconds)
    return list(found.values())


def _place(header: Any) -> tuple[str, str]:
    node = header.node or "unknown"
    return node, f"{node}:{header.local_rank if header.local_rank is not None else header.rank}"


def _from_spans(run: StoredRun, since: float) -> dict[int, list[Rank]]:
    """Use the timelines of goodput, for attempts in which ranks recorded their waits for each other."""
    found: dict[int, list[Rank]] = {}
    for one in timelines(run):
        own = one.ns["productive"] + one.ns["repeated"] + one.ns["data"]
        if "ranks" in one.seen and one.steps and one.until / 1e9 >= since:
            node = one.node or "unknown"
            found.setdefault(one.attempt, []).append(Rank(one.rank, node, f"{node}:{one.gpu}", own / 1e9 / one.steps))
    return found


def _from_profile(run: StoredRun) -> list[Rank]:
    """Use the operator profile: the time per step without the collectives, which the slowest rank spends least time in."""
    waits: dict[tuple[int, str], float] = {}
    for row in ops.rows(run):
        if row["kind"] == "collective" and row["role"] == "main":
            place = (row["rank"], row["node"])
            waits[place] = waits.get(place, 0.0) + row["total_ns"] * row["scale"] / 1e9
    locals_ = {journal.header.rank: _place(journal.header) for attempt in run.attempts for journal in attempt.mains}
    found = []
    for table in ops.tables(run):
        facts = table.facts
        rank, node, steps = int(facts.get("rank") or 0), str(facts.get("node") or ""), int(facts.get("steps") or 0)
        spent = (int(facts.get("now") or 0) - int(facts.get("started") or 0)) / 1e9
        if steps and not facts.get("worker") and (rank, node) in waits and spent > waits[rank, node]:
            found.append(Rank(rank, *locals_.get(rank, (node, f"{node}:{rank}")), (spent - waits[rank, node]) / steps))
    return found


def _against_others(ranks: Sequence[Rank], name: str) -> list[tuple[str, float, float]]:
    """Return each place with its time divided by the others', and its time. A node is compared with ranks of other nodes."""
    places: dict[str, list[float]] = {}
    for one in ranks:
        places.setdefault(getattr(one, name), []).append(one.seconds)
    found = []
    for place, own in places.items():
        others = [one.seconds for one in ranks if getattr(one, name) != place]
        if others:
            mine = statistics.median(own)
            found.append((place, mine / statistics.median(others), mine))
    return found


def _judged(samples: Mapping[str, Sequence[tuple[float, float]]], least: int, devices: Mapping[str, str]) -> list[NodeSpeed]:
    every = [value for some in samples.values() for value, _ in some]
    noise = max(_mad(every), LEAST_NOISE) if every else LEAST_NOISE
    return sorted((_verdict(name, some, noise, least, devices.get(name, "")) for name, some in samples.items()),
                  key=lambda place: (-place.ratio, place.name))  # fmt: skip


def _verdict(name: str, some: Sequence[tuple[float, float]], noise: float, least: int, device: str) -> NodeSpeed:
    values = [value for value, _ in some]
    middle, spread = statistics.median(values), _mad(values)
    sigmas = middle / (_MEDIAN_ERROR * max(spread, noise) / math.sqrt(len(values)))
    ratio = math.exp(middle)
    if len(values) < least:
        verdict = "too few runs"
    elif ratio < SLOW_RATIO:
        verdict = "ok"
    else:
        verdict = "slow" if sigmas >= SURE else "perhaps slow"
    slower = sum(value > 0 for value in values)
    return NodeSpeed(name, ratio, spread, len(values), slower, some[0][1], sigmas, verdict, device)


def _mad(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return _TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def _devices(run: StoredRun, ranks: Sequence[Rank]) -> dict[str, str]:
    """Return the model and id of each rank's GPU, from the facts its process recorded."""
    wanted = {one.rank: one.gpu for one in ranks}
    found: dict[str, str] = {}
    for journal in (journal for attempt in run.attempts for journal in attempt.mains if journal.header.rank in wanted):
        for record in journal.records(Kind.INFO):
            facts = record.data.given.get("facts")
            gpus = facts.get("gpus") if isinstance(facts, dict) else None
            at = journal.header.local_rank or 0
            if isinstance(gpus, list) and at < len(gpus) and isinstance(gpus[at], dict):
                found[wanted[journal.header.rank]] = " ".join(str(gpus[at].get(key) or "") for key in ("name", "uuid")).strip()
    return found


def readable(run: StoredRun) -> bool:
    """Return whether a run's journals can be opened; a fleet always has some that cannot."""
    try:
        run.attempts  # noqa: B018 - opens them
    except (FanfoldError, OSError):
        return False
    return True
