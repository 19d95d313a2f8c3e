"""The live screen of `fanfold top`: reads keys, draws frames. It knows what is selected; LiveRuns reads the runs."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.live import Live
from rich.text import Text

from ..errors import FanfoldError
from ..store.filter import Filter, FilterError
from ..store.query import Name
from . import output, show_sections, top
from .text import clean
from .top import ORDER, SORTS, LiveRuns, Look

# What terminals send for keys that are not letters.
_SEQUENCES = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b[C": "enter", b"\x1bOC": "enter",
              b"\x1b[D": "escape", b"\x1bOD": "escape", b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\x1b[H": "home",
              b"\x1b[F": "end", b"\x1b[1~": "home", b"\x1b[4~": "end", b"\x1b": "escape", b"\r": "enter", b"\n": "enter",
              b"\x7f": "back", b"\x08": "back", b"\x15": "clear"}  # fmt: skip
_LETTERS = {"j": "down", "k": "up", "g": "home", "G": "end", " ": "page down", "l": "enter", "h": "escape"}
HELP = "q quit  j k move  enter show  s sort  / filter"
FIXED = {"status": 11, "step": 7, "rate": 6, "value": 8, "seen": 5, "load": 5}  # widths; name, project and curve share the rest
CURVE, LEAST = 40, 9
RIGHT = frozenset({"step", "rate", "value", "seen", "load"})
STYLES = {"curve": "cyan", "project": "dim", "seen": "dim"}
OTHER_LINES = 5  # of the screen: head, titles, selected run, help, and one to spare


def keys(data: bytes) -> Iterator[str]:
    """Yield the keys in what a terminal sent: names of special keys, else the letter."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    while data:
        known = next((size for size in (4, 3, 1) if data[:size] in _SEQUENCES), 0)
        if known == 1 and data[:1] == b"\x1b" and data[1:2] in (b"[", b"O"):  # an unknown special key: skip it
            known = next((i + 1 for i, byte in enumerate(data[2:], 2) if 0x40 <= byte <= 0x7E), len(data))
        elif known:
            yield _SEQUENCES[data[:known]]
        else:
            yield from (char for char in decoder.decode(data[:1]) if char.isprintable())
        data = data[known or 1 :]


class Screen:
    """The screen: the table of runs, a filter being typed below it, or one run."""

    def __init__(self, watcher: LiveRuns, *, filter: str, sort: str, interval: float) -> None:
        self.watcher = watcher
        self.filter = filter
        self.sort = sort
        self.interval = interval
        self.looks: list[Look] = []
        self.chosen: Name | None = None  # the selected run; the selection follows it when the order changes
        self.first = 0  # the topmost line shown: of the table, or of a run's lines
        self.typed: str | None = None
        self.shown: list[str] | None = None  # the lines of the run that is open
        self.error = ""
        self.console = output.console()

    def run(self) -> None:
        """Show frames until q is pressed. The terminal is restored whatever happens."""
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
        """Handle a key; return False to quit."""
        if self.typed is not None:
            self._type(key)
            return True
        if key == "q" and self.shown is None:
            return False
        key = _LETTERS.get(key, key)
        if self.shown is not None:
            room = max(1, self.console.height - 1)
            if key in ("q", "escape", "back"):
                self.shown, self.first = None, 0
            else:
                self.first = max(0, min(_moved(self.first, key, room, len(self.shown)), len(self.shown) - room))
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            self.look()
        elif key == "/":
            self.typed = self.filter
        elif key == "enter" and self.looks:
            self.first = 0
            self._show(*self.looks[self.place].name)
        elif self.looks:
            self.chosen = self.looks[_moved(self.place, key, self.room, len(self.looks))].name
        return True

    @property
    def place(self) -> int:
        """The position of the selected run."""
        return next((i for i, look in enumerate(self.looks) if look.name == self.chosen), 0)

    @property
    def room(self) -> int:
        """The number of runs that fit."""
        return max(1, int(self.console.height) - OTHER_LINES)

    def _type(self, key: str) -> None:
        """Edit the filter; enter applies it and escape cancels. A filter with a mistake stays, with a message."""
        assert self.typed is not None
        if key == "escape":
            self.typed, self.error = None, ""
        elif key == "enter":
            try:
                Filter(self.typed)
            except FilterError as error:
                self.error = str(error).partition("\n")[0]
                return
            self.filter, self.typed, self.error, self.first = self.typed, None, "", 0
            self.look()
        elif key in ("back", "clear"):
            self.typed = self.typed[:-1] if key == "back" else ""
        elif len(key) == 1:
            self.typed += key

    def _show(self, project: str, id: str) -> None:
        """Open one run: its lines are those of `fanfold show`."""
        self.chosen = (project, id)
        try:
            report = show_sections.RunPrinter(self.watcher.store.run(project, id))
        except FanfoldError as error:
            self.shown = [clean(str(error))]
            return
        with report.console.capture() as captured:
            report.print()
        self.shown = captured.get().splitlines()

    # Frames

    def frame(self) -> Group:
        """Return the current content of the screen."""
        if self.shown is not None:
            rows = self.shown[self.first : self.first + max(1, self.console.height - 1)]
            return Group(*map(Text.from_ansi, rows), Text("q back  j k scroll", style="dim"))
        return Group(self._head(), *self._table(), self._about(), self._bottom())

    def _head(self) -> Text:
        counts = Counter(look.status for look in self.looks)
        head = _line("fanfold top", "bold")
        for status in ORDER:
            if counts[status]:
                head.append(f"  {counts[status]} {status}", style=top.SYMBOLS[status][1])
        head.append(f"  sort: {self.sort}", style="dim")
        return head.append(f"  filter: {clean(self.filter)}", style="dim") if self.filter else head

    def _table(self) -> list[Text]:
        """Return the titles and as many runs as fit, around the selected one."""
        if not self.looks:
            empty = "No run matches the filter." if self.filter else "No runs to watch yet. They appear here when they start."
            return [Text(""), Text(empty, style="dim")]
        at, room = self.place, self.room
        self.first = max(at - room + 1, min(self.first, at, max(0, len(self.looks) - room)))
        shown = [self.watcher.whole(look) for look in self.looks[self.first : self.first + room]]
        widths = self._widths(shown)
        titles = {name: name for name in widths} | {"value": _title(shown)}
        head = Text(" ".join(_cell(titles[name], wide, name) for name, wide in widths.items()), style="bold dim")
        return [head, *(self._row(look, widths, place == at) for place, look in enumerate(shown, self.first))]

    def _widths(self, shown: list[Look]) -> dict[str, int]:
        """Return the width of each column that fits."""
        several = len({look.row.project for look in self.looks}) > 1
        names = ["status", "name", *["project"] * several, "step", "rate", "value", "curve", "seen", "load"]
        texts = {name: max(cell_len(clean(look.row[name])) for look in shown) for name in ("name", "project")}
        widest = {**FIXED, "curve": LEAST, **{name: max(wide, len(name)) for name, wide in texts.items()}}
        room, fixed = self.console.width, [name in FIXED for name in names]
        widths = output.fit([widest[name] for name in names], fixed, room, least=LEAST, gap=1)
        found = dict(zip(names, widths, strict=False))
        if "curve" in found:  # it gets what is left
            found["curve"] = min(CURVE, LEAST + room - sum(widths) - len(widths) + 1)
        return found

    def _row(self, look: Look, widths: dict[str, int], chosen: bool) -> Text:
        texts = top.cells(look, widths.get("curve", 1))
        styles = {"status": top.SYMBOLS.get(look.status, ("", "white"))[1], **STYLES}
        line = Text(style="reverse" if chosen else "", no_wrap=True, overflow="crop")
        for place, (name, wide) in enumerate(widths.items()):
            line.append(" " * (place > 0)).append(_cell(clean(texts[name]), wide, name), style=styles.get(name, ""))
        return line

    def _about(self) -> Text:
        """Return the line about the selected run, or the mistake in the filter."""
        if self.error or not self.looks:
            return _line(clean(self.error), "red")
        look = self.looks[self.place]
        error = (look.row.get("error") or "").strip().splitlines()[-1:]
        words = [look.row.id, look.key, f"{look.row.ranks} ranks" if look.row.ranks > 1 else "", *error]
        return _line(clean("  ".join(filter(None, words))), "dim")

    def _bottom(self) -> Text:
        if self.typed is None:
            return _line(HELP, "dim")
        return Text.assemble(("filter: ", "bold"), clean(self.typed), ("▏", "blink"), ("  enter applies, escape cancels", "dim"))


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _moved(place: int, key: str, room: int, count: int) -> int:
    """Return the position after a movement key."""
    steps = {"up": -1, "down": 1, "page up": -room, "page down": room, "home": -count, "end": count}
    return min(max(place + steps.get(key, 0), 0), count - 1)


def _title(shown: list[Look]) -> str:
    """Return the title of the value column: the key if all runs show the same one, cut at its front if it is long."""
    names = {look.key for look in shown} - {""}
    name = clean(names.pop()) if len(names) == 1 else "value"
    return name if len(name) <= FIXED["value"] else "…" + name[1 - FIXED["value"] :]


def _cell(text: str, wide: int, name: str) -> str:
    """Return a text padded or cut to exactly `wide` cells."""
    if cell_len(text) > wide:
        return set_cell_size(text, wide - 1) + "…"
    return " " * (wide - cell_len(text)) + text if name in RIGHT else set_cell_size(text, wide)


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Read each key as it is pressed, without echo; Ctrl-C still interrupts."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _typed(seconds: float) -> Iterator[str]:
    """Wait for keys, at most this long."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return
    data = os.read(sys.stdin.fileno(), 4096)
    if not data:  # the terminal is gone
        yield "q"
    yield from keys(data)
