"""What happened to a run that a person may want to know, read from its journals. Every event has an id that never changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..journal import Kind
from ..journal.bodies import Alert
from ..process import digest
from ..store.attempts import Attempt
from ..store.run import StoredRun

ENDS = {"finished": "info", "failed": "error", "killed": "error", "lost": "error", "preempted": "warning"}
GRACE_SECONDS = 30.0  # how long the other ranks of a broken attempt get to end, before its end is reported without them
MOST_TEXT = 4_000


@dataclass(frozen=True)
class RunEvent:
    """One thing that happened."""

    id: str
    kind: str  # alert, rule, finished, failed, killed, lost, preempted or resumed
    level: str
    title: str
    text: str
    time: float
    step: int | None = None
    rank: int | None = None
    key: str | None = None
    rule: str | None = None
    unsure: bool = False  # other ranks still run: wait for them a moment

    @property
    def urgent(self) -> bool:
        """Whether it is sent in quiet hours, too."""
        return self.level == "error"

    @property
    def is_end(self) -> bool:
        return self.kind in ENDS


def happened(run: StoredRun, *, resumed: bool = False) -> list[RunEvent]:
    """Return everything that happened to a run so far, oldest first."""
    found = [*_alerts(run)]
    for number, attempt in enumerate(run.attempts):
        if not attempt.mains:
            continue
        if number and resumed:
            found.append(_resumed(attempt, number))
        found += _end(attempt, number)
    return sorted(found, key=lambda event: event.time)


def crossing_id(rule: str, key: str | None, time: int) -> str:
    """Return the id of a rule that fired: the same from whoever evaluates it."""
    return "rule-" + digest(f"{rule} {key} {time}")


def _alerts(run: StoredRun) -> Iterator[RunEvent]:
    known: set[str] = set()
    for journal in run.journals:
        for record in journal.records(Kind.EVENT):
            data = record.data
            if not isinstance(data, Alert):
                continue
            id = crossing_id(data.rule, data.key, data.t) if data.rule else f"alert-{journal.id}-{record.offset}"
            if id not in known:  # two readers may have seen the same crossing at the same time
                known.add(id)
                level = data.level if data.level in ("info", "error") else "warning"
                step = data.s if data.s is not None and data.s >= 0 else None
                rank = journal.header.rank if not data.rule else None
                kind = "rule" if data.rule else "alert"
                yield RunEvent(id, kind, level, data.title, data.text, data.t / 1e9, step, rank, data.key, data.rule)


def _name(attempt: Attempt) -> str:
    """Return a name of an attempt that stays the same however many others follow it."""
    return min(attempt.mains, key=lambda journal: (journal.header.rank, journal.header.mono, journal.id)).id


def _resumed(attempt: Attempt, number: int) -> RunEvent:
    return RunEvent(f"resumed-{_name(attempt)}", "resumed", "info", "resumed", f"attempt {number + 1}", attempt.started / 1e9)


def _end(attempt: Attempt, number: int) -> Iterator[RunEvent]:
    verdict = attempt.verdict()
    status = str(verdict["status"])
    if status == "running":
        return
    rank = verdict.get("rank")
    seen = max((one.seen for one in attempt.mains if one.header.rank == rank), default=attempt.seen)
    id = f"lost-{_name(attempt)}-{seen}" if status == "lost" else f"end-{_name(attempt)}"
    level, title = ENDS[status], status
    text = _cause(verdict)
    if status == "failed" and text.startswith("KeyboardInterrupt"):
        level, title, text = "info", "stopped by Ctrl-C", ""
    others = any(end["status"] == "running" for end in attempt.ends())
    several = len({one.header.rank for one in attempt.mains}) > 1
    text = f"rank {rank}: {text}" if several and status in ("failed", "killed", "lost") else text
    text += f" (attempt {number + 1})" if number else ""
    when = (verdict.get("time") or max([seen, *_alert_times(attempt)])) / 1e9
    yield RunEvent(id, status, level, title, text.strip(": "), when, rank=rank, unsure=others)


def _alert_times(attempt: Attempt) -> Iterator[int]:
    """Return when its program raised alerts: the last signs of life of a process that was killed right after one."""
    for journal in attempt.mains:
        yield from (record.data.t for record in journal.records(Kind.EVENT) if isinstance(record.data, Alert))


def _cause(verdict: dict[str, Any]) -> str:
    error = str(verdict.get("error") or "").strip()
    if error:
        return error.splitlines()[-1][:MOST_TEXT]
    if verdict.get("signal"):
        return f"signal {verdict['signal']}"
    return {"killed": "the process disappeared without a last word: kill -9, out of memory, or a crash",
            "lost": "no sign of life from its machine for over a minute"}.get(
        str(verdict["status"]), str(verdict.get("reason") or "")
    )  # fmt: skip
