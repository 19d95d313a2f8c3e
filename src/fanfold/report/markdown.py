"""Notes in a small subset of Markdown: text can become these few elements and nothing else.

Headings, paragraphs, lists, quotes, rules, fenced code, tables; `code`, **strong**, *emphasis* and links to web and mail
addresses. Pictures are not loaded: a report loads nothing from outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ..drawing.markup import Markup, join, lone, tag

_INLINE = re.compile(
    r"(?P<code>`+)(?P<inside>.+?)(?P=code)(?!`)"
    r"|!?\[(?P<text>[^\[\]]*)\]\((?P<link>[^()\s]+)\)"
    r"|\*\*(?P<strong>\S(?:.*?\S)?)\*\*(?!\*)"
    r"|(?<!\w)_(?P<under>\S(?:.*?\S)?)_(?!\w)"
    r"|\*(?P<em>[^\s*](?:[^*]*[^\s*])?)\*",
    re.DOTALL,
)
_SAFE = re.compile(r"(?:https?://|mailto:)[^\s]+", re.IGNORECASE)
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*$")
_FENCE = re.compile(r"(```+|~~~+)")
_BULLET = re.compile(r"[-*+]\s+(.*)")
_COUNTED = re.compile(r"\d{1,9}[.)]\s+(.*)")
_RULE = re.compile(r"(?:-\s*){3,}$|(?:\*\s*){3,}$|(?:_\s*){3,}$")
_DIVIDER = re.compile(r"\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$")
DEEPEST = 4  # levels of nested emphasis, and of nested quotes


def html(text: str, *, depth: int = 0) -> Markup:
    """Return a note as HTML. Headings are one level below the report's title."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4).split("\n")
    return join(_blocks(lines, depth))


def _blocks(lines: list[str], depth: int) -> Iterator[Markup]:
    at = 0
    while at < len(lines):
        if not lines[at].strip():
            at += 1
            continue
        size, block = next(found for kind in _KINDS if (found := kind(lines[at:], depth)) is not None)
        at += size
        yield block


Block = tuple[int, Markup] | None


def _taken(lines: list[str], fits: Callable[[str], bool]) -> int:
    return next((place for place, line in enumerate(lines) if not fits(line)), len(lines))


def _code(lines: list[str], _depth: int) -> Block:
    fence = _FENCE.match(lines[0].strip())
    if fence is None:
        return None
    end = 1 + _taken(lines[1:], lambda line: not line.strip().startswith(fence[1]))
    return end + 1, tag("pre", tag("code", "\n".join(lines[1:end])))


def _heading(lines: list[str], _depth: int) -> Block:
    found = _HEADING.match(lines[0].strip())
    return None if found is None else (1, tag(f"h{min(6, len(found[1]) + 1)}", inline(found[2])))


def _rule(lines: list[str], _depth: int) -> Block:
    return (1, lone("hr")) if _RULE.match(lines[0].strip()) else None


def _quote(lines: list[str], depth: int) -> Block:
    size = _taken(lines, lambda line: line.lstrip().startswith(">"))
    if not size or depth >= DEEPEST:
        return None
    inner = "\n".join(re.sub(r"^\s*> ?", "", line) for line in lines[:size])
    return size, tag("blockquote", html(inner, depth=depth + 1))


def _list(lines: list[str], _depth: int) -> Block:
    """Parse a list; an indented line continues its item."""
    pattern = next((one for one in (_BULLET, _COUNTED) if one.match(lines[0].strip())), None)
    if pattern is None:
        return None
    items: list[str] = []
    size = 0
    for line in lines:
        found = pattern.match(line.strip())
        if found is None and not (line.startswith("  ") and line.strip()):
            break
        if found is not None:
            items.append(found[1])
        else:
            items[-1] += "\n" + line.strip()
        size += 1
    return size, tag("ul" if pattern is _BULLET else "ol", *(tag("li", inline(item)) for item in items))


def _table(lines: list[str], _depth: int) -> Block:
    if len(lines) < 2 or "|" not in lines[0] or not _DIVIDER.match(lines[1].strip()):
        return None
    size = 2 + _taken(lines[2:], lambda line: "|" in line)
    titles = _cells(lines[0])
    rows = [(_cells(line) + [""] * len(titles))[: len(titles)] for line in lines[2:size]]
    head = tag("tr", *(tag("th", inline(title), scope="col") for title in titles))
    body = [tag("tr", *(tag("td", inline(cell)) for cell in row)) for row in rows]
    return size, tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll", tabindex=0, role="region",
                     aria_label="Table")  # fmt: skip


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _paragraph(lines: list[str], depth: int) -> Block:
    others = (_code, _heading, _rule, _quote, _list)
    more = _taken(lines[1:], lambda line: bool(line.strip()) and all(kind([line], depth) is None for kind in others))
    return 1 + more, tag("p", inline("\n".join(line.strip() for line in lines[: 1 + more])))


_KINDS = (_code, _heading, _rule, _quote, _list, _table, _paragraph)


def inline(text: str, *, depth: int = 0) -> Markup:
    """Return a line's text with inline markup; everything else is escaped."""
    parts: list[object] = []
    at = 0
    for found in _INLINE.finditer(text):
        parts += [text[at : found.start()], _marked(found, depth)]
        at = found.end()
    return join([*parts, text[at:]])


def _marked(found: re.Match[str], depth: int) -> object:
    if found["inside"] is not None:
        return tag("code", found["inside"].strip())
    if depth >= DEEPEST:
        return found[0]
    if found["link"] is not None:
        return _link(found["text"], found["link"], depth)
    name = "strong" if found["strong"] is not None else "em"
    return tag(name, inline(found["strong"] or found["under"] or found["em"], depth=depth + 1))


def _link(text: str, address: str, depth: int) -> object:
    """Return a link if its address is a web or mail address, otherwise only its text."""
    shown = inline(text or address, depth=depth + 1)
    return tag("a", shown, href=address, rel="noreferrer noopener") if _SAFE.fullmatch(address) else shown
