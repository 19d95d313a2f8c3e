"""HTML in which no text from a run can become markup: text is escaped on entry, and only `tag` creates tags."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from html import escape as _html

# As on the dashboard: eight colours per theme, distinguishable in four kinds of vision; from the ninth run on, dashes too.
LIGHT = ("#1da5a5", "#f9651a", "#3f1af9", "#6d2603", "#b27de8", "#1f3051", "#be7855", "#650495")
DARK = ("#6afbfb", "#bd9e05", "#fb6afb", "#9cd590", "#af1af9", "#f9f91a", "#178270", "#636f2a")
DASHES = ("", "6 3", "2 2", "8 2 2 2")
# status: symbol and class. The word is always shown too, so that nothing depends on colour or shape alone.
STATUS = {"running": ("●", "good"), "finished": ("✓", "dim"), "failed": ("✗", "bad"), "killed": ("■", "bad"),
          "preempted": ("‖", "warn"), "lost": ("?", "warn")}  # fmt: skip
_GROUNDS = (
    {"bg": "#f7f7f5", "panel": "#ffffff", "ink": "#1b1f24", "dim": "#5b6370", "line": "#e4e5e3", "good": "#14713a",
     "bad": "#b3261e", "warn": "#8a5300", "accent": "#2f5bd0", **{f"c{i}": colour for i, colour in enumerate(LIGHT)}},
    {"bg": "#0e1013", "panel": "#15181c", "ink": "#e3e7eb", "dim": "#98a2ad", "line": "#262b31", "good": "#56c783",
     "bad": "#ff8a80", "warn": "#e9b04a", "accent": "#86abff", **{f"c{i}": colour for i, colour in enumerate(DARK)}},
)  # fmt: skip
_BIDI = frozenset({"Cc", "Cf", "Cs"})  # invisible, or able to reverse the reading order


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Return text escaped as HTML, and Markup unchanged. Control and invisible characters become U+FFFD."""
    if isinstance(text, Markup):
        return text
    shown = str(text)
    if not (shown.isascii() and shown.isprintable()):
        shown = "".join(char if char in "\n\t" or unicodedata.category(char) not in _BIDI else "\ufffd" for char in shown)
    return Markup(_html(shown))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element. `class_` is class, `_` in an attribute's name is `-`; None leaves an attribute out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items() if value is not None
    )
    inside = "".join(map(escape, children))
    return Markup(f"<{name}{given}>{inside}</{name}>")


def lone(name: str, /, **attributes: object) -> Markup:
    """Return an HTML element that has no end tag."""
    return Markup(tag(name, **attributes).removesuffix(f"</{name}>"))


def join(parts: Iterable[object]) -> Markup:
    return Markup("".join(map(escape, parts)))


def status(word: str) -> Markup:
    """Return a status: symbol, word, colour."""
    symbol, look = STATUS.get(word, ("?", "dim"))
    return tag("span", f"{symbol} {word}", class_=look)


def swatch(place: int) -> Markup:
    """Return a sample of the line a run is drawn with."""
    line = tag("line", x1=0, y1=5, x2=18, y2=5, stroke_width=2.5, **stroke(place))
    return tag("svg", line, width=18, height=10, aria_hidden="true", class_="swatch")


def stroke(place: int) -> dict[str, object]:
    """Return the attributes that colour a line. `stroke` is for places that drop styles; the class supports both themes."""
    return {
        "class_": f"s{place % 8}",
        "stroke": LIGHT[place % 8],
        "stroke_dasharray": DASHES[place // 8 % 4] or None,
        "fill": "none",
    }


def table(titles: Sequence[object], rows: Iterable[Sequence[object]], *, label: str, right: Sequence[int] = ()) -> Markup:
    """Return a table that scrolls sideways; the first cell of each row is its header."""
    looks = ["num" if place in right else None for place in range(len(titles))]
    head = tag("tr", *(tag("th", title, scope="col", class_=look) for title, look in zip(titles, looks, strict=True)))
    body = []
    for first, *others in rows:
        cells = (tag("td", cell, class_=look) for cell, look in zip(others, looks[1:], strict=True))
        body.append(tag("tr", tag("th", first, scope="row"), *cells))
    whole = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=label)


def _variables(which: int) -> str:
    return "".join(f"--ff-{name}:{colour};" for name, colour in _GROUNDS[which].items())


def _style() -> str:
    series = "".join(f".fanfold .s{i}{{stroke:var(--ff-c{i})}}.fanfold .f{i}{{fill:var(--ff-c{i})}}" for i in range(8))
    return (
        f".fanfold{{{_variables(0)}color-scheme:light;color:var(--ff-ink);background:var(--ff-bg);"
        "font:13px/1.45 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Noto Sans',sans-serif;"
        "font-variant-numeric:tabular-nums}"
        # A notebook states its theme; elsewhere the system's applies.
        f"@media (prefers-color-scheme:dark){{body:not([data-jp-theme-light]):not([data-vscode-theme-kind]) .fanfold,"
        f"body.fanfold{{{_variables(1)}color-scheme:dark}}}}"
        f"body[data-jp-theme-light='false'] .fanfold,body.vscode-dark .fanfold{{{_variables(1)}color-scheme:dark}}"
        ".fanfold .dim{color:var(--ff-dim)}.fanfold .good{color:var(--ff-good)}.fanfold .bad{color:var(--ff-bad)}"
        ".fanfold .warn{color:var(--ff-warn)}.fanfold a{color:var(--ff-accent)}"
        ".fanfold .scroll{overflow-x:auto;max-width:100%}.fanfold .swatch{vertical-align:middle;margin-right:6px}"
        ".fanfold table{border-collapse:collapse;border:0;margin:0;background:none;color:inherit;font-size:inherit}"
        ".fanfold th,.fanfold td{text-align:left;padding:4px 14px 4px 0;border:0;border-bottom:1px solid var(--ff-line);"
        "vertical-align:top;background:none;font-weight:400;max-width:44ch;overflow-wrap:break-word}"
        ".fanfold thead th{color:var(--ff-dim)}.fanfold tbody th{font-weight:600}.fanfold th .dim{font-weight:400}"
        ".fanfold thead th{white-space:nowrap}.fanfold .num{text-align:right;white-space:nowrap}"
        ".fanfold svg text{fill:var(--ff-dim);font:11px system-ui,sans-serif}.fanfold .grid{stroke:var(--ff-line)}"
        ".fanfold .plot{display:block;width:100%;height:auto}"
        ".fanfold figure{margin:0;padding:10px 12px;background:var(--ff-panel);border:1px solid var(--ff-line);border-radius:7px;"
        "min-width:0}.fanfold figure h3{margin:0 0 4px;font-size:13px;overflow-wrap:anywhere}"
        ".fanfold .charts{display:grid;gap:12px;"
        "grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--ff-wide,420px)),1fr))}"
        ".fanfold .legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px 0 0;padding:0}"
        ".fanfold .legend li{overflow-wrap:anywhere;margin:0}"
        f"{series}"
    )


STYLE = _style()
