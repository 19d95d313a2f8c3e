"""Messages: what a person reads about one event or a group of them, and the same as JSON for programs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..process import digest
from ..store.run import StoredRun
from .events import MOST_TEXT, RunEvent

VERSION = 1
MOST_EVENTS = 100  # listed one by one in a group's JSON
MOST_TITLES = 10  # listed one by one in a group's text
_RANKED = ("error", "warning", "info")


@dataclass(frozen=True)
class Message:
    """One message. `id` stays the same when it has to be sent again."""

    id: str
    level: str
    title: str
    text: str
    events: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)  # as JSON, for webhooks and commands
    draw: Callable[[], bytes | None] = lambda: None  # a picture as PNG, drawn only for services that take one

    @functools.cached_property
    def picture(self) -> bytes | None:
        return self.draw()


def compose(run: StoredRun, events: Sequence[RunEvent], *, again: bool = False) -> Message:
    """Return a message about one event, or about several together."""
    worst = min(events, key=lambda event: _RANKED.index(event.level))
    one = len(events) == 1
    about = f"{run.name} ({run.project})"
    title = f"{about}: {worst.title or worst.kind}" if one else f"{about}: {len(events)} events"
    title = " ".join(title.split())[:500]  # one line: it may become the subject of an e-mail
    text = _lines(run, worst) if one else _counted(events)
    text += "\n\nThis may be a repeat: the notifier was interrupted while it was sending." if again else ""
    ids = tuple(event.id for event in events)
    id = ids[0] if one else "group-" + digest(" ".join(ids))
    facts = {
        "version": VERSION,
        "id": id,
        "event": worst.kind if one else "group",
        "level": worst.level,
        "title": title,
        "text": text,
        "run": {"id": run.id, "name": run.name, "project": run.project, "status": run.status},
        "events": [_facts(event) for event in events[:MOST_EVENTS]],
        "count": len(events),
        "repeat": again,
    }
    key = next((event.key for event in events if event.key), None)
    return Message(id, worst.level, title, text, ids, facts, functools.partial(_drawn, run, key, worst))


def _lines(run: StoredRun, event: RunEvent) -> str:
    first = event.text[:MOST_TEXT]
    place = ["" if event.step is None else f"step {event.step:,}", f"rank {event.rank}" if event.rank else "", f"run {run.id}"]
    return "\n".join(part for part in (first, " · ".join(filter(None, place))) if part)


def _counted(events: Sequence[RunEvent]) -> str:
    counts = Counter((event.title or event.kind)[:200] for event in events)
    lines = [f"{number}x {title}" for title, number in counts.most_common(MOST_TITLES)]
    more = len(counts) - MOST_TITLES
    return "\n".join([*lines, *([f"and {more} other titles"] if more > 0 else [])])


def _facts(event: RunEvent) -> dict[str, Any]:
    return {"id": event.id, "event": event.kind, "level": event.level, "title": event.title[:500], "text": event.text[:MOST_TEXT],
            "time": event.time, "step": event.step, "rank": event.rank, "key": event.key, "rule": event.rule}  # fmt: skip


def _drawn(run: StoredRun, key: str | None, event: RunEvent) -> bytes | None:
    from .picture import draw

    if key is None and event.is_end:
        key = next((name for name in run.keys("number") if "loss" in name.lower()), None)
    return draw(run, key, event.step) if key else None
