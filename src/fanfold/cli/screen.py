"""The live screen of `fanfold top`: keys in, frames out. It holds what is chosen; the runs themselves are the watcher's."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..errors import FanfoldError
from ..store.filter import Filter, FilterError
from ..store.query import Name
from . import output, show_sections, top
from .text import STATUS, clean
from .watch import ORDER, SORTS, Look, Watcher, spark

# What terminals send for keys that are no letters.
_SEQUENCES = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b[C": "enter", b"\x1bOC": "enter",
              b"\x1b[D": "escape", b"\x1bOD": "escape", b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\x1b[H": "home",
              b"\x1b[F": "end", b"\x1b[1~": "home", b"\x1b[4~": "end", b"\x1b": "escape", b"\r": "enter", b"\n": "enter",
              b"\x7f": "back", b"\x08": "back", b"\x15": "clear"}  # fmt: skip
_LETTERS = {"j": "down", "k": "up", "g": "home", "G": "end", " ": "page down", "l": "enter", "h": "escape"}
_LOOKS = {"stalled": ("!", "yellow"), **STATUS}
HELP = "q quit  j k move  enter show  s sort  / filter"
FIXED = {"status": 11, "step": 7, "rate": 6, "value": 8, "seen": 5, "load": 5}
LEAST_NAME, LEAST_PROJECT, LEAST_CURVE, MOST_CURVE = 13, 8, 9, 40
RIGHT = frozenset({"step", "rate", "value", "seen", "load"})
ROOM = 5  # lines that are not runs: head, titles, chosen, help, and what went wrong


def keys(data: bytes) -> Iterator[str]:
    """Yield the keys in what a terminal sent: names for the special ones, else the letter."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    while data:
        known = next((size for size in (4, 3, 1) if data[:size] in _SEQUENCES), 0)
        if known == 1 and data[:1] == b"\x1b" and data[1:2] in (b"[", b"O"):  # one we have no name for
            known = next((i + 1 for i, byte in enumerate(data[2:], 2) if 0x40 <= byte <= 0x7E), len(data))
        elif known:
            yield _SEQUENCES[data[:known]]
        else:
            yield from (char for char in decoder.decode(data[:1]) if char.isprintable())
        data = data[known or 1 :]


class Screen:
    """What is on the screen: the table, a filter being typed above it, or one run."""

    def __init__(self, watcher: Watcher, *, filter: str, sort: str, interval: float) -> None:
        self.watcher = watcher
        self.filter = filter
        self.sort = sort
        self.interval = interval
        self.looks: list[Look] = []
        self.chosen: Name | None = None  # the run the bar is on: it stays on it when the order changes
        self.first = 0  # the line at the top: of the table, or of a run's lines
        self.typed: str | None = None
        self.shown: list[str] | None = None  # the lines of the one run that is looked at
        self.said = ""
        self.console = output.console()

    # The loop

    def run(self) -> None:
        """Show frames until q. The terminal is put back whatever happens."""
        from rich.live import Live

        with _raw(), Live(console=self.console, screen=True, auto_refresh=False) as live:
            due = 0.0
            while True:
                if time.monotonic() >= due:
                    self.look()
                    due = time.monotonic() + self.interval
                live.update(self.frame(), refresh=True)
                if not all(self.press(key) for key in _typed(max(0.0, due - time.monotonic()))):
                    return

    def look(self) -> None:
        """Read what is new."""
        self.looks = self.watcher.looks(self.filter, self.sort)
        if self.shown is not None and self.chosen is not None:
            self._show(*self.chosen)

    # Keys

    def press(self, key: str) -> bool:
        """Do what a key asks; tell whether to go on."""
        if self.typed is not None:
            self._type(key)
            return True
        if key == "q" and self.shown is None:
            return False
        key = _LETTERS.get(key, key)
        if self.shown is not None:
            self._scroll(key)
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            self.look()
        elif key == "/":
            self.typed = self.filter
        elif key == "enter" and self.looks:
            self.first = 0
            self._show(*self.looks[self.place].name)
        elif self.looks:
            self._move(key, self._room())
        return True

    @property
    def place(self) -> int:
        """Which line the bar is on."""
        return next((i for i, look in enumerate(self.looks) if look.name == self.chosen), 0)

    def _move(self, key: str, room: int) -> None:
        steps = {"up": -1, "down": 1, "page up": -room, "page down": room, "home": -len(self.looks), "end": len(self.looks)}
        to = min(max(self.place + steps.get(key, 0), 0), len(self.looks) - 1)
        self.chosen = self.looks[to].name

    def _type(self, key: str) -> None:
        """Take a letter of the filter; enter applies, escape cancels. One that cannot be understood is said and kept."""
        assert self.typed is not None
        if key == "escape":
            self.typed, self.said = None, ""
        elif key == "enter":
            try:
                Filter(self.typed)
            except FilterError as error:
                self.said = str(error).partition("\n")[0]
                return
            self.filter, self.typed, self.said, self.first = self.typed, None, "", 0
            self.look()
        elif key in ("back", "clear"):
            self.typed = self.typed[:-1] if key == "back" else ""
        elif len(key) == 1:
            self.typed += key

    def _show(self, project: str, id: str) -> None:
        """Take the lines of `fanfold show` for one run."""
        self.chosen = (project, id)
        try:
            page = show_sections.Report(self.watcher.store.run(project, id))
        except FanfoldError as error:
            self.shown = [clean(str(error))]
            return
        with page.console.capture() as captured:
            page.print()
        self.shown = captured.get().splitlines()

    def _scroll(self, key: str) -> None:
        assert self.shown is not None
        if key in ("q", "escape", "back"):
            self.shown, self.first = None, 0
            return
        room = max(1, self.console.height - 1)
        steps = {"up": -1, "down": 1, "page up": -room, "page down": room, "home": -len(self.shown), "end": len(self.shown)}
        self.first = min(max(self.first + steps.get(key, 0), 0), max(0, len(self.shown) - room))

    # Frames

    def _room(self) -> int:
        return max(1, int(self.console.height) - ROOM)

    def frame(self) -> Any:
        """Return what the screen is to show now."""
        from rich.text import Text

        if self.shown is not None:
            rows = self.shown[self.first : self.first + max(1, self.console.height - 1)]
            return _stacked([*map(Text.from_ansi, rows), Text("q back  j k scroll", style="dim")])
        return _stacked([self._head(), *self._table(), self._said(), self._bottom()])

    def _head(self) -> Any:
        from rich.text import Text

        counts = Counter(look.status for look in self.looks)
        head = Text("fanfold top", style="bold", no_wrap=True, overflow="ellipsis")
        for status in ORDER:
            if counts[status]:
                head.append(f"  {counts[status]} {status}", style=_LOOKS[status][1])
        head.append(f"  sort: {self.sort}", style="dim")
        return head.append(f"  filter: {clean(self.filter)}", style="dim") if self.filter else head

    def _table(self) -> list[Any]:
        """Return the titles and as many runs as there is room for, those round the bar."""
        from rich.text import Text

        room = self._room()
        if not self.looks:
            empty = "No run matches the filter." if self.filter else "No runs to watch yet. They appear here when they start."
            return [Text(""), Text(empty, style="dim")]
        at = self.place
        self.first = max(at - room + 1, min(self.first, at, max(0, len(self.looks) - room)))
        shown = [self.watcher.whole(look) for look in self.looks[self.first : self.first + room]]
        widths = self._widths(shown)
        titles = {name: name for name in widths} | {"value": _title(shown, widths["value"])}
        head = Text(" ".join(_cell(titles[name], wide, name in RIGHT) for name, wide in widths.items()), style="bold dim")
        return [head, *(self._line(look, widths, place == at) for place, look in enumerate(shown, self.first))]

    def _widths(self, shown: list[Look]) -> dict[str, int]:
        """Return each column's width: what is left beside the fixed ones goes to names and curves."""
        from rich.cells import cell_len

        several = len({look.row.project for look in self.looks}) > 1
        names = max(cell_len(clean(look.row.name)) for look in shown)
        projects = max(cell_len(clean(look.row.project)) for look in shown) if several else 0
        columns = 9 if several else 8
        left = self.console.width - sum(FIXED.values()) - (columns - 1)
        left -= LEAST_NAME + LEAST_CURVE + (LEAST_PROJECT if several else 0)
        name = LEAST_NAME + max(0, min(left, names - LEAST_NAME))
        left -= name - LEAST_NAME
        project = LEAST_PROJECT + max(0, min(left, projects - LEAST_PROJECT))
        left -= project - LEAST_PROJECT if several else 0
        found = {"status": FIXED["status"], "name": name, **({"project": project} if several else {})}
        found |= {"step": FIXED["step"], "rate": FIXED["rate"], "value": FIXED["value"]}
        return found | {"curve": LEAST_CURVE + max(0, min(left, MOST_CURVE - LEAST_CURVE)), "seen": FIXED["seen"],
                        "load": FIXED["load"]}  # fmt: skip

    def _line(self, look: Look, widths: dict[str, int], chosen: bool) -> Any:
        from rich.text import Text

        symbol, colour = _LOOKS.get(look.status, ("?", "white"))
        said = {"status": f"{symbol} {look.status}", "name": clean(look.row.name), "project": clean(look.row.project),
                "step": top.step_text(look), "rate": top.rate_text(look.rate), "value": top.value_text(look.value),
                "curve": spark(look.curve, widths["curve"]), "seen": top.age_text(look.facts()["age"]),
                "load": top.load_text(look)}  # fmt: skip
        styles = {"status": colour, "curve": "cyan", "project": "dim", "seen": "dim"}
        line = Text(style="reverse" if chosen else "", no_wrap=True, overflow="crop")
        for place, (name, wide) in enumerate(widths.items()):
            line.append(" " if place else "").append(_cell(said[name], wide, name in RIGHT), style=styles.get(name, ""))
        return line

    def _said(self) -> Any:
        """Return the line about the chosen run, or what is wrong with the filter."""
        from rich.text import Text

        if self.said:
            return Text(clean(self.said), style="red", no_wrap=True, overflow="ellipsis")
        if not self.looks:
            return Text("")
        look = self.looks[self.place]
        error = (look.row.get("error") or "").strip().splitlines()[-1:]
        words = [look.row.id, look.key, f"{look.row.ranks} ranks" if look.row.ranks > 1 else "", *error]
        return Text(clean("  ".join(filter(None, words))), style="dim", no_wrap=True, overflow="ellipsis")

    def _bottom(self) -> Any:
        from rich.text import Text

        if self.typed is None:
            return Text(HELP, style="dim", no_wrap=True, overflow="ellipsis")
        return Text.assemble(("filter: ", "bold"), clean(self.typed), ("▏", "blink"), ("  enter applies, escape cancels", "dim"))


def _title(shown: list[Look], wide: int) -> str:
    """Return the key's name where all runs show the same, cut at its front: the end tells more."""
    names = {look.key for look in shown} - {""}
    name = clean(names.pop()) if len(names) == 1 else "value"
    return name if len(name) <= wide else "…" + name[1 - wide :]


def _cell(text: str, wide: int, right: bool) -> str:
    """Return a text of exactly so many cells; one that is too long ends in an ellipsis."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) > wide:
        return set_cell_size(text, wide - 1) + "…"
    return " " * (wide - cell_len(text)) + text if right else set_cell_size(text, wide)


def _stacked(rows: list[Any]) -> Any:
    from rich.console import Group

    return Group(*rows)


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Get each key as it is pressed, without showing it; Ctrl-C stays what it is."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _typed(seconds: float) -> Iterator[str]:
    """Wait for keys, at most so long."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return
    data = os.read(sys.stdin.fileno(), 4096)
    if not data:  # the terminal is gone
        yield "q"
    yield from keys(data)
