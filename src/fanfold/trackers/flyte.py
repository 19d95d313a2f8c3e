"""Flyte: the log history as a Deck of the running task. It is published whole each time, so nothing can be there twice.

A Deck belongs to the task's context, which a process of its own does not have: there, the same HTML goes to a file.
"""

from __future__ import annotations

import base64
import contextvars
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from ..errors import notices
from .base import Adapter, Alert, Identity, Point, Refusal, flat_config, on_main_process, prepared
from .tools import replace

ROWS = 10_000
SHARE = 0.05  # of the time may go into drawing the page again
_STYLE = "<style>table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:2px 6px;text-align:left}</style>"


class FlyteTracker(Adapter):
    """Show what is logged as the Deck `deck`; outside a task, as `deck.html` in `directory`. The last `rows` rows are shown."""

    name: ClassVar[str] = "flyte"
    delivery: ClassVar[str] = "idempotent"

    def __init__(
        self, run_name: str, *, deck: str = "Log History", directory: str | os.PathLike[str] | None = None, rows: int = ROWS
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self.deck_name = deck
        self.directory = None if directory is None else Path(directory)
        self.shown = rows
        self.deck: Any = None
        self._adopted = False
        self._history = History(rows)
        self._facts: dict[str, dict[str, Any]] = {}
        self._facts_saved = ""
        self._draw_seconds, self._drawn_at = 0.0, 0.0

    @classmethod
    def unusable(cls) -> str | None:
        return None if in_task() else "a Deck belongs to a running Flyte task"

    def adopt(self, identity: Identity) -> None:
        self.run_name = identity.name
        self.directory = self.directory or identity.directory
        self._adopted = True

    @on_main_process
    def start(self) -> None:
        if self._adopted and self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._history.load(self.directory / "history.jsonl")
            self._facts = _read_facts(self.directory / "facts.json")
        if in_task():
            self._context = contextvars.copy_context()  # a relay's thread has none of its own
            self.deck = _new_deck(self)
            return
        self.directory = self.directory or Path.cwd()
        notices.once(
            "flyte:file",
            f"The Flyte tracker is not inside a running task, so there is no Deck to publish. The same page is written to "
            f"{self.directory / 'deck.html'}. Pass relay='thread' to fanfold.init inside the task to have the Deck.",
        )

    @property
    def tracker(self) -> Any:
        """The Deck, or the file that stands for it."""
        return self.deck if self.deck is not None or self.directory is None else self.directory / "deck.html"

    @property
    def remote(self) -> str | None:
        return None if self.directory is None else str(self.directory)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._facts["Config"] = flat_config(values)

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        words = {"name": name, "group": group, "tags": ", ".join(tags), "notes": notes}
        self._facts["Run"] = {**self._facts.get("Run", {}), **{key: value for key, value in words.items() if value}}

    def set_summary(self, values: Mapping[str, Any]) -> None:
        self._facts["Summary"] = flat_config(values)

    def alert(self, alert: Alert) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(alert.time))
        at = "" if alert.step is None else f", step {alert.step}"
        self._facts.setdefault("Alerts", {})[f"{alert.level}, {when}{at}"] = f"{alert.title}: {alert.text}".removesuffix(": ")

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        cells, refused = prepared(points, lambda _point, _key, value: _cell(value))
        for point, row in zip(points, cells, strict=True):
            self._history.add(point.step, point.time, row)
        return refused

    def settle(self) -> None:
        """Keep the new rows in a file of their own, which a new start reads, and publish when that costs little."""
        if self._adopted and self.directory is not None:
            self._history.save(self.directory / "history.jsonl")
            self._save_facts(self.directory)
        if time.monotonic() - self._drawn_at > self._draw_seconds / SHARE:
            self.publish()

    def _save_facts(self, directory: Path) -> None:
        """Keep what describes the run: a later start is told of changes only."""
        text = json.dumps(self._facts)
        if text != self._facts_saved:
            replace(directory / "facts.json", text)
            self._facts_saved = text

    def publish(self) -> None:
        """Bring the Deck or the file up to date."""
        began = time.monotonic()
        if self.deck is not None:
            self._context.run(_publish)
        elif self.directory is not None:
            head = f'<!doctype html><meta charset="utf-8"><title>{escape(self.run_name)}</title>'
            replace(self.directory / "deck.html", head + self.html)
        self._drawn_at = time.monotonic()
        self._draw_seconds = self._drawn_at - began

    @property
    def html(self) -> str:
        """The page as it is now."""
        facts = "".join(_facts_table(title, values) for title, values in self._facts.items())
        return f"{_STYLE}<h2>{escape(self.run_name)}</h2>{facts}{self._history.html()}"

    @on_main_process
    def sync_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Save a checkpoint with the task, so that a retry of it can go on from there."""
        from flytekit import current_context

        if self.deck is None:
            raise RuntimeError("Not inside a running Flyte task, so there is no checkpoint to save to. Call it in the task.")
        self._context.run(lambda: current_context().checkpoint.save(str(path)))

    @on_main_process
    def finish(self) -> None:
        self.publish()

    def close(self, status: str) -> None:
        self._facts["Run"] = {**self._facts.get("Run", {}), "status": status}
        self.finish()


class History:
    """Rows by step and time, each a dict of HTML cells; the same row added again is the same row."""

    def __init__(self, shown: int) -> None:
        self.shown = shown
        self.rows: dict[tuple[Any, ...], dict[str, str]] = {}
        self.fresh: list[tuple[int | None, float | None, dict[str, str]]] = []
        self.left_out = 0

    def add(self, step: int | None, when: float | None, cells: Mapping[str, str]) -> None:
        """Add a row, or what it did not have yet."""
        self.fresh.append((step, when, dict(cells)))
        self._place(step, when, cells)

    def _place(self, step: int | None, when: float | None, cells: Mapping[str, str]) -> None:
        copy = 0 if when is not None else len(self.rows) + self.left_out  # without a time, each call is a row
        while any(self.rows.get((step, when, copy), {}).get(key, cell) != cell for key, cell in cells.items()):
            copy += 1
        self.rows.setdefault((step, when, copy), {}).update(cells)
        while len(self.rows) > self.shown:
            del self.rows[next(iter(self.rows))]
            self.left_out += 1

    def load(self, path: Path) -> None:
        """Read the rows of an earlier start, up to a torn end."""
        if not path.exists():
            return
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    self._place(*json.loads(line))
                except ValueError:  # the last line of a process that was killed; its row is sent again
                    continue

    def save(self, path: Path) -> None:
        """Append the rows that are new."""
        lines = "".join(json.dumps(row) + "\n" for row in self.fresh)
        if lines:
            with path.open("ab", buffering=0) as file:
                file.write(("\n" + lines).encode())  # the empty line ends a torn one
        self.fresh = []

    def html(self) -> str:
        """Draw the table, with a word about rows it has no room for."""
        rows = list(self.rows.items())
        keys = list(dict.fromkeys(key for _, cells in rows for key in cells))
        more = f"<p>{self.left_out} earlier rows are in the journal: <code>fanfold show</code></p>" if self.left_out else ""
        head = "".join(f"<th>{escape(key)}</th>" for key in ["step", *keys])
        body = "".join(_row(step, keys, cells) for (step, *_), cells in rows)
        return f"{more}<table class='history'><tr>{head}</tr>{body}</table>"


def in_task() -> bool:
    """Tell whether this is inside a running Flyte task. Where flytekit is not imported, it cannot be; it is not imported here."""
    if "flytekit" not in sys.modules:
        return False
    from flytekit.core.context_manager import ExecutionState, FlyteContextManager

    state = FlyteContextManager.current_context().execution_state
    modes = (ExecutionState.Mode.TASK_EXECUTION, ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    return state is not None and state.mode in modes


def _new_deck(tracker: FlyteTracker) -> Any:
    """Make a Deck that is drawn when it is asked for: what the task shows at its end is always the last state."""
    from flytekit import Deck

    class HistoryDeck(Deck):  # type: ignore[misc]
        @property
        def html(self) -> str:
            return tracker.html

    return HistoryDeck(tracker.deck_name)


def _read_facts(path: Path) -> dict[str, dict[str, Any]]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _publish() -> None:
    from flytekit import Deck, current_context

    if getattr(current_context(), "enable_deck", True):
        Deck.publish()
    else:
        notices.once("flyte:disabled", "This task shows no Decks, so none is published. Write @task(enable_deck=True).")


def _facts_table(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>" for key, value in values.items())
    return f"<h3>{escape(title)}</h3><table class='{escape(title.lower())}'>{rows}</table>"


def _row(step: int | None, keys: Sequence[str], cells: Mapping[str, str]) -> str:
    columns = "".join(f"<td>{cells.get(key, '')}</td>" for key in keys)
    return f"<tr><td>{'' if step is None else step}</td>{columns}</tr>"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "".join(_cell(item) for item in value)
    if isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return f"<pre>{escape(value)}</pre>"
    return "".join(_media(value))


def _media(value: Any) -> Iterator[str]:
    """Draw media as HTML that needs nothing else."""
    if value.kind == "text":
        yield f"<pre>{escape(value.text)}</pre>"
    elif value.kind == "table":
        yield _table(value.columns, value.rows)
    elif value.kind == "histogram":
        yield _table(["from", "to", "count"], zip(value.edges[:-1], value.edges[1:], value.counts, strict=True))
    elif value.kind == "html" or (value.kind == "figure" and not value.png):
        yield f'<iframe sandbox="allow-scripts" srcdoc="{escape(value.html)}"></iframe>'
    elif value.kind == "figure":
        yield f'<img src="{_data("image/png", value.png)}">'
    else:
        encoded = value.encode()
        yield _element(value.kind, encoded.ext, bytes(encoded.data))
    if getattr(value, "caption", None):
        yield f"<div>{escape(value.caption)}</div>"


def _element(kind: str, ext: str, data: bytes) -> str:
    if kind == "image" or ext == "gif":
        return f'<img src="{_data(f"image/{ext}", data)}">'
    return f'<{kind} controls src="{_data(f"{kind}/{ext}", data)}"></{kind}>'


def _data(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _table(columns: Sequence[str], rows: Any) -> str:
    head = "".join(f"<th>{escape(str(column))}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
