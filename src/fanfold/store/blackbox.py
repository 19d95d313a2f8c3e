"""What the black box of a run recorded: hangs with their ranks aligned, and how each rank ended, in order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from ..blackbox.memory import MemoryUse, sentence, size_text
from ..blackbox.pulse import Collective, Pulse, Spot
from ..blackbox.verdict import Standing, Verdict, described, explain, own_line
from ..errors import outcome
from .run import StoredRun

CURVE_SECONDS, AFTER_SECONDS = 600.0, 15.0
MAX_CURVES = 32
TOGETHER_SECONDS = 120.0  # watchers of several nodes see the same hang within this time
NOTICED_SECONDS = 5.0  # a silent death is noticed within this time, less than launchers wait between SIGTERM and SIGKILL
# What gloo, NCCL and torch's store say when the process at the other end is gone.
_BROKEN = re.compile("(reset|closed) by peer|broken pipe|remote (process exited|server shutdown)|was aborted", re.IGNORECASE)


class Thread(Struct):
    """A Python thread, and its frames, the innermost first."""

    id: int = 0
    name: str = ""
    frames: list[Spot] = []


class RankStand(Struct):
    """Where a rank stood when the job hung."""

    rank: int
    state: str
    seconds: float
    step: int
    node: str
    line: Spot | None
    where: list[Spot]
    waiting: list[Collective]
    threads: list[Thread]
    collectives: list[Collective]


class Hang(Struct):
    """A hang of a run."""

    id: str
    time: float
    text: str
    culprits: list[int]
    missing: list[int]
    collective: Collective | None
    over: float | None  # when training moved again
    ranks: list[RankStand]


class RankEnd(Struct):
    """How a rank ended; `first` for the one that failed first, which others may merely have followed."""

    rank: int
    time: float | None
    status: str
    cause: str
    first: bool = False
    line: Spot | None = None
    exit_code: int | None = None
    signal: str | None = None
    stack: str = ""


def evidence(run: StoredRun, *kinds: str) -> list[dict[str, Any]]:
    """Return the events of the black box, oldest first; `who` is the rank each is about."""
    found = [event for event in run.evidence if not kinds or event["kind"] in kinds]
    return [{**event, "who": event["rank"] if event.get("who") is None else event["who"]} for event in found]


def hangs(run: StoredRun) -> list[Hang]:
    """Return the hangs of a run, oldest first. What the watchers of several nodes saw is combined."""
    seen = [(event, verdict) for event in evidence(run, "hang") if (verdict := _converted(event["data"], Verdict)) is not None]
    groups: list[list[tuple[dict[str, Any], Verdict]]] = []
    for event, verdict in seen:
        if groups and event["t"] - groups[-1][0][0]["t"] <= TOGETHER_SECONDS * 1e9 and _other_node(groups[-1], event):
            groups[-1].append((event, verdict))
        else:
            groups.append([(event, verdict)])
    return [_hang(run, group) for group in groups]


def _other_node(group: Iterable[tuple[dict[str, Any], Verdict]], event: dict[str, Any]) -> bool:
    return all(other["rank"] != event["rank"] for other, _ in group)


def _hang(run: StoredRun, group: list[tuple[dict[str, Any], Verdict]]) -> Hang:
    tokens = {event["id"] for event, _ in group}
    standings: dict[int, Standing] = {}
    for _, verdict in group:
        for one in verdict.ranks:
            if one.rank not in standings or standings[one.rank].state in ("busy", "gone"):
                standings[one.rank] = one
    answers = {event["who"]: event["data"] or {} for event in evidence(run, "stacks") if event["id"] in tokens}
    for rank, data in answers.items():
        _add_answer(standings, rank, data)
    found = explain(standings.values())
    over = next((event["t"] / 1e9 for event in evidence(run, "moves") if event["id"] in tokens), None)
    ranks = [_stand(one, answers.get(one.rank, {})) for one in found.ranks]
    first = group[0][0]
    return Hang(first["id"], first["t"] / 1e9, found.text, found.culprits, found.missing, found.collective, over, ranks)


def _add_answer(standings: dict[int, Standing], rank: int, data: dict[str, Any]) -> None:
    pulse = _converted(data.get("pulse"), Pulse)
    if pulse is None:
        return
    known = standings.setdefault(rank, Standing(rank=rank, state="busy", step=pulse.step, node=pulse.node, why=pulse.busy))
    if known.state == "frozen" or not known.where:  # the last pulse of a frozen rank is from before it froze
        known.where = pulse.where or known.where
    known.waiting, known.enqueued = known.waiting or pulse.waiting, known.enqueued or pulse.enqueued


def _stand(one: Standing, answer: dict[str, Any]) -> RankStand:
    threads = _converted(answer.get("threads"), list[Thread]) or []
    collectives = _converted(answer.get("collectives"), list[Collective]) or []
    return RankStand(
        one.rank, one.state, one.seconds, one.step, one.node, own_line(one.where), one.where, one.waiting, threads, collectives
    )


def ends(run: StoredRun) -> list[RankEnd]:
    """Return how the ranks of the latest attempt ended, in order of time; those that still run come last."""
    if not run.attempts:
        return []
    attempt = run.attempts[-1]
    began = attempt.started
    deaths = {event["who"]: event for event in evidence(run, "death") if event["t"] >= began}
    stood = _stood(deaths.values())
    found = []
    for end in attempt.ends():
        death = deaths.get(end["rank"])
        over = _died(end, death) if death is not None and end["time"] is None else _ended(end)
        over.line = over.line or stood.get(over.rank)
        found.append(over)
    return in_order(found)


def in_order(found: list[RankEnd]) -> list[RankEnd]:
    """Return ends in order of time, with the one marked that came first, which others may merely have followed.

    A process that dies silently is noticed a moment later, when others may have written how they ended: the launcher told them
    to, or the line to the dead one broke. It died before them.
    """
    found.sort(key=lambda one: (one.time is None, one.time or 0.0, one.rank))
    bad = [one for one in found if one.status not in ("running", "finished") and one.time is not None]
    if bad and _follows(bad[0]):
        begun = bad[0].time or 0.0
        causes = (one for one in bad if not _follows(one) and (one.time or 0.0) - begun <= NOTICED_SECONDS)
        bad[0] = next(causes, bad[0])
        bad[0].time = begun
    if bad:
        bad[0].first = True
        found.sort(key=lambda one: (one.time is None, one.time or 0.0, not one.first, one.rank))
    return found


def _follows(end: RankEnd) -> bool:
    """Return whether a rank may have ended only because another did."""
    return end.signal == "SIGTERM" or _BROKEN.search(end.cause) is not None


def _stood(deaths: Iterable[dict[str, Any]]) -> dict[int, Spot | None]:
    """Return the line that each rank was on when the first one died."""
    first = next(iter(deaths), None)
    others = _converted((first["data"] or {}).get("others"), list[Pulse]) if first is not None else None
    return {pulse.rank: own_line(pulse.where) for pulse in others or ()}


def _ended(end: dict[str, Any]) -> RankEnd:
    lines = str(end["error"] or end["reason"] or "").strip().splitlines()
    cause = lines[-1] if lines else end["signal"] or ("" if end["status"] in ("finished", "running") else "left no trace")
    time = None if end["time"] is None else end["time"] / 1e9
    return RankEnd(end["rank"], time, end["status"], cause, exit_code=end["exit_code"], signal=end["signal"])


CAUSES = {
    "gone": "left no trace: killed from outside (SIGKILL), or ended by os._exit()",
    "exit": "ended without a word, by os._exit() or a native library",
    "killed": "killed from outside (SIGKILL), it left no trace",
    "out of memory": "killed by the kernel: out of memory on the host",
}


def _died(end: dict[str, Any], death: dict[str, Any]) -> RankEnd:
    data = death["data"] or {}
    cause, pulse = str(data.get("cause") or "killed"), _converted(data.get("pulse"), Pulse)
    signal = {"gone": None, "exit": None, "killed": "SIGKILL", "out of memory": "SIGKILL"}.get(cause, cause)
    code = data.get("code") if cause == "exit" and isinstance(data.get("code"), int) else None
    times = [data.get("crashed"), data.get("seen"), death["t"] / 1e9]  # exact; when it was noticed; when that was written
    time = min(one for one in times if isinstance(one, float) and one > 0)
    return RankEnd(
        end["rank"], time, "killed", CAUSES.get(cause, f"crashed with {cause}"), signal=signal, exit_code=code,
        line=own_line(pulse.where) if pulse else None, stack=str(data.get("text") or ""),
    )  # fmt: skip


class FailedAllocation(Struct):
    """An allocation that failed on a GPU: who asked, what held the memory, and the snapshot for PyTorch's viewer."""

    rank: int
    time: float
    text: str
    use: MemoryUse
    files: list[dict[str, Any]]


class Curve(Struct):
    """How much memory was in use before a moment."""

    key: str
    times: list[float]  # seconds before it, negative
    values: list[float]


def memory_errors(run: StoredRun) -> list[FailedAllocation]:
    """Return the allocations that failed, oldest first."""
    found = []
    for event in evidence(run, "memory"):
        use = _converted(event["data"], MemoryUse)
        if use is not None:
            found.append(FailedAllocation(event["who"], event["t"] / 1e9, sentence(use), use, event.get("files") or []))
    return found


def memory_curves(run: StoredRun, moment: float, *, rank: int | None = None) -> list[Curve]:
    """Return the memory metrics of the last minutes before a moment, of the node of a rank."""
    keys = [key for key in run.keys("system") if key.endswith(("memory_gb", "rss_gb"))]
    found = []
    for key in keys[:MAX_CURVES]:
        series, error = outcome(lambda key=key: run.series(key, rank=_sampler(run, key, rank), raw=True))  # type: ignore[misc]
        if series is None or error is not None:
            continue
        near = (series.times >= moment - CURVE_SECONDS) & (series.times <= moment + AFTER_SECONDS)
        if near.any():
            found.append(Curve(key, (series.times[near] - moment).tolist(), series.values[near].astype(float).tolist()))
    return found


def _sampler(run: StoredRun, key: str, rank: int | None) -> int | None:
    """Return the rank that samples the node of a rank: the highest one up to it that has the metric."""
    if rank is None:
        return None
    having = {journal.header.rank for _, journal in run.holding(key)}
    return max((one for one in having if one <= rank), default=None)


MAX_ROWS, SHOWN = 1024, 8


def sections(run: StoredRun) -> list[dict[str, Any]]:
    """Return what the black box found as texts and tables for the dashboard: the last hang, the ends, the last memory error."""
    if not run.evidence:
        return []
    found = []
    for hang in hangs(run)[-1:]:
        rows = [_row(one) for one in hang.ranks[:MAX_ROWS]]
        over = " It moved again by itself." if hang.over else ""
        columns = ["rank", "node", "state", "step", "line", "collective"]
        marked = [place for place, one in enumerate(hang.ranks[:MAX_ROWS]) if one.rank in hang.culprits]
        found.append({**_section("Hang", hang.text + over, columns, rows, marked), "stacks": _stacks(hang)})
    over_ = ends(run)
    for first in [one for one in over_ if one.first]:
        rows = [[one.rank, one.status, one.signal or one.exit_code, one.cause, line_text(one.line)] for one in over_[:MAX_ROWS]]
        text = f"Rank {first.rank} ended first: {first.cause or first.status}."
        columns = ["rank", "status", "code", "cause", "line"]
        curves = _curves(run, first.time or 0.0, first.rank) if first.cause == CAUSES["out of memory"] else []
        found.append({**_section("How the ranks ended", text, columns, rows, [over_.index(first)]), "curves": curves})
    for failed in memory_errors(run)[-1:]:
        rows = [[size_text(one.size), one.count, one.label, line_text(own_line(one.where))] for one in failed.use.by_stack]
        text = f"Rank {failed.rank}: {failed.text}"
        section = _section("Out of GPU memory", text, ["size", "allocations", "label", "line"], rows, [], failed.files)
        found.append({**section, "curves": _curves(run, failed.time, failed.rank)})
    return found


def _section(
    title: str, text: str, columns: list[str], rows: list[list[Any]], marked: list[int], files: Iterable[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {"title": title, "text": text, "columns": columns, "rows": rows, "marked": marked, "files": list(files),
            "curves": [], "stacks": []}  # fmt: skip


def _curves(run: StoredRun, moment: float, rank: int) -> list[dict[str, Any]]:
    found = memory_curves(run, moment, rank=rank)[:SHOWN]
    return [{"key": one.key, "times": one.times, "values": one.values} for one in found if all(map(math.isfinite, one.values))]


def _stacks(hang: Hang) -> list[dict[str, Any]]:
    """Return the threads of the ranks to blame, or else of the first ones."""
    ranks = [one for one in hang.ranks if one.rank in hang.culprits and one.threads] or hang.ranks
    return [
        {"title": f"rank {one.rank}, thread {thread.name or thread.id}", "lines": [line_text(spot) for spot in thread.frames]}
        for one in ranks[:SHOWN]
        for thread in sorted(one.threads, key=lambda thread: thread.name != "MainThread")[:SHOWN]
    ]


def _row(one: RankStand) -> list[Any]:
    waits = described(one.waiting[0]) if one.waiting else ""
    return [one.rank, one.node, _state(one), step_text(one.step), line_text(one.line), waits]


def _state(one: RankStand) -> str:
    words = {"still": "stands still", "frozen": "stuck in native code", "waiting": "waits", "busy": "works"}
    seconds = f" {one.seconds:.0f}\N{NO-BREAK SPACE}s" if one.state in ("still", "frozen", "waiting") else ""
    return words.get(one.state, one.state) + seconds


def step_text(step: int) -> str:
    """Return a step as text; "" for a rank that logs none."""
    return str(step) if step >= 0 else ""


def line_text(spot: Spot | None) -> str:
    """Return a line of code as text, with its place."""
    if spot is None:
        return ""
    return f"{spot.file}:{spot.line} in {spot.name}" + (f": {spot.code}" if spot.code else "")


def _converted(data: Any, kind: Any) -> Any:
    """Return data of an event as a type; None if it does not fit: a journal may come from anybody."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError:
        return None
