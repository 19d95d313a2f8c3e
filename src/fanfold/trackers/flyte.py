"""Flyte: the log history as a Deck of the running task. It is published in full each time, so nothing can appear twice.

A Deck belongs to the task's context, which a separate process does not have: there, the same HTML is written to a file.
"""

from __future__ import annotations

import contextvars
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from ..errors import notices
from ._flyte_page import History, draw, media
from .base import Alert, Identity, Point, Refusal, flat_config, on_main_process
from .destination import Destination, Item
from .face import Tracker
from .tools import read_json

ROWS = 10_000
SHARE = 0.05  # share of time that may be spent redrawing the page


class Flyte(Destination):
    """Show logged values as the Deck `deck`; outside a task, as `page`, or `deck.html` in `directory`.

    The last `rows` rows are shown.
    """

    name = "flyte"
    delivery = "idempotent"

    def __init__(
        self, run_name: str, *, deck: str = "Log History", directory: str | os.PathLike[str] | None = None, rows: int = ROWS,
        page: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(run_name)
        self.deck_name = deck
        self.directory = None if directory is None else Path(directory)
        self.page = None if page is None else Path(page)
        self.deck: Any = None
        self._history = History(rows)
        self._facts: dict[str, dict[str, Any]] = {}
        self._facts_saved = ""
        self._draw_seconds, self._drawn_at = 0.0, 0.0

    @classmethod
    def unusable(cls) -> str | None:
        return None if in_task() else "a Deck belongs to a running Flyte task"

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        self.identity = identity
        if identity is not None:  # rows and facts are saved for the next start
            self.run_name = identity.name
            self.directory = self.directory or identity.directory
            self.directory.mkdir(parents=True, exist_ok=True)
            self._history.load(self.directory / "history.jsonl")
            self._facts = read_json(self.directory / "facts.json") or {}
        if in_task():
            self._context = contextvars.copy_context()  # a relay's thread has none of its own
            self.deck = _new_deck(self)
            return
        self.directory = self.directory or Path.cwd()
        self.warn(
            "file",
            f"The Flyte tracker is not inside a running task, so there is no Deck to publish. The same page is written to "
            f"{self._page}. Pass relay='thread' to fanfold.init inside the task to have the Deck.",
        )

    @property
    def tracker(self) -> Any:
        """The Deck, or the file that replaces it."""
        return self._page if self.deck is None and self.directory is not None else self.deck

    @property
    def _page(self) -> Path:
        return self.page or (self.directory or Path.cwd()) / "deck.html"

    @property
    def remote(self) -> str | None:
        return None if self.directory is None else str(self.directory)

    def set_config(self, values: dict[str, Any]) -> None:
        self._facts["Config"] = flat_config(values)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        self._facts["Summary"] = flat_config(values)

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        words = {"name": name, "group": group, "tags": ", ".join(tags), "notes": notes}
        self._facts.setdefault("Run", {}).update({key: value for key, value in words.items() if value})

    def alert(self, alert: Alert) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(alert.time)) + f".{int(alert.time * 1000) % 1000:03d}"
        at = "" if alert.step is None else f", step {alert.step}"
        alerts, text = self._facts.setdefault("Alerts", {}), f"{alert.title}: {alert.text}".removesuffix(": ")
        key, copy = f"{alert.level}, {when}{at}", 1
        while alerts.get(key, text) != text:  # another one of the same moment
            copy += 1
            key = f"{alert.level}, {when}{at} ({copy})"
        alerts[key] = text

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        rows, refused = self.converted(points)
        for point, cells in zip(points, rows, strict=True):
            self._history.add(point.step, point.time, cells)
        return refused

    def number(self, key: str, value: float, point: Point) -> str:
        return repr(value)

    def take(self, item: Item) -> str:
        return media(item)

    def together(self, key: str, made: list[Any]) -> str:
        return "".join(made)

    def settle(self) -> None:
        """Save new rows to a file, which the next start reads, and publish if that is cheap enough."""
        if self.identity is not None and self.directory is not None:
            self._history.save(self.directory / "history.jsonl")
            if (text := json.dumps(self._facts)) != self._facts_saved:  # a later start receives only changes
                replace_text(self.directory / "facts.json", text)
                self._facts_saved = text
        if time.monotonic() - self._drawn_at > self._draw_seconds / SHARE:
            self.finish()

    def finish(self) -> None:
        """Update the Deck or the file."""
        began = time.monotonic()
        if self.deck is not None:
            self._context.run(_publish)
        elif self.directory is not None:
            head = f'<!doctype html><meta charset="utf-8"><title>{escape(self.run_name)}</title>'
            self._page.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._page, head + self.html)
        self._drawn_at = time.monotonic()
        self._draw_seconds = self._drawn_at - began

    @property
    def html(self) -> str:
        """The current page."""
        return draw(self.run_name, self._facts, self._history)

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Save a checkpoint with the running task."""
        from flytekit import current_context

        if self.deck is None:
            raise RuntimeError("Not inside a running Flyte task, so there is no checkpoint to save to. Call it in the task.")
        self._context.run(lambda: current_context().checkpoint.save(str(path)))

    def close(self, status: str) -> None:
        self._facts.setdefault("Run", {})["status"] = status
        self.finish()


class FlyteTracker(Tracker):
    destination_class = Flyte
    destination: Flyte

    @on_main_process
    def sync_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Save a checkpoint with the task, so that a retry can continue from there."""
        self.destination.save_checkpoint(path)


def in_task() -> bool:
    """Return whether this is inside a running Flyte task. It cannot be if flytekit is not imported; it is not imported here."""
    if "flytekit" not in sys.modules:
        return False
    from flytekit.core.context_manager import ExecutionState, FlyteContextManager

    state = FlyteContextManager.current_context().execution_state
    modes = (ExecutionState.Mode.TASK_EXECUTION, ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    return state is not None and state.mode in modes


def _new_deck(destination: Flyte) -> Any:
    """Return a Deck that is rendered on demand: at its end the task always shows the final state."""
    from flytekit import Deck

    class HistoryDeck(Deck):  # type: ignore[misc]
        @property
        def html(self) -> str:
            return destination.html

    return HistoryDeck(destination.deck_name)


def _publish() -> None:
    from flytekit import Deck, current_context

    if getattr(current_context(), "enable_deck", True):
        Deck.publish()
    else:
        notices.once("flyte:disabled", "This task shows no Decks, so none is published. Write @task(enable_deck=True).")
