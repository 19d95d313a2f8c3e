"""The account of an import: how much was carried, what was not and why. Nothing is dropped without a line here."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from . import events
from .events import Left

MOST_EXAMPLE = 200
COUNTS = ("points", "texts", "media", "files", "alerts", "console")


class RunAccount(Struct, kw_only=True):
    """One run's import. `outcome`: imported, updated, unchanged, known (fanfold's own), busy, skipped or failed."""

    kind: str
    source: str
    id: str
    name: str = ""
    project: str = ""
    run: str = ""
    path: str = ""
    outcome: str = "imported"
    points: int = 0
    texts: int = 0
    media: int = 0
    files: int = 0
    alerts: int = 0
    console: int = 0  # bytes
    left: list[Left] = field(default_factory=list)
    why: str = ""
    growing: bool = False  # the source may get more: import again, or follow it

    def leave(self, left: Left) -> None:
        """Add something that was not carried; equal reasons are counted together."""
        for place, known in enumerate(self.left):
            if (known.what, known.why) == (left.what, left.why):
                example = known.example or left.example
                self.left[place] = Left(what=known.what, why=known.why, count=known.count + left.count, example=example)
                return
        self.left.append(Left(what=left.what, why=left.why, count=left.count, example=left.example[:MOST_EXAMPLE]))

    def count(self, event: Any) -> None:
        """Count what one event carries."""
        if isinstance(event, events.Rows):
            self.points += sum(len(column) for column in event.columns.values())
        elif isinstance(event, events.Values):
            for value in event.values.values():
                if isinstance(value, str):
                    self.texts += 1
                else:
                    self.media += len(value) if isinstance(value, list) else 1
        elif isinstance(event, events.Artifact):
            self.files += len(event.files)
        elif isinstance(event, events.Alert):
            self.alerts += 1
        elif isinstance(event, events.Console):
            self.console += len(event.text.encode("utf-8", "replace"))
        elif isinstance(event, Left):
            self.leave(event)

    @property
    def anything(self) -> bool:
        """Return whether anything was carried."""
        return any(getattr(self, name) for name in COUNTS)
