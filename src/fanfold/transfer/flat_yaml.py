"""The small part of YAML that tools write for flat facts: scalars, quoted texts, texts over several lines, maps and lists.

A user who left a tool has uninstalled its libraries, so this needs none. A tag such as `!!python/object` is only text here.
"""

from __future__ import annotations

import re
from typing import Any

MOST_DEPTH = 8
_ENTRY = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s#'"\[{][^#]*?):(?:[ \t]+(.*))?$""")
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}$")
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,400}\.[0-9]{0,400}|\.[0-9]{1,400})(?:[eE][-+]?[0-9]{1,4})?$")
_WORDS: dict[str, Any] = {
    "": None, "~": None, "null": None, "true": True, "false": False, ".nan": float("nan"), ".inf": float("inf"),
    "-.inf": -float("inf"), "[]": [], "{}": {},
}  # fmt: skip
_ESCAPES = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b", " ": " ", '"': '"',
    "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029",
}  # fmt: skip


def read(text: str) -> dict[str, Any]:
    """Return the top-level map of a document. Lines that do not fit are left out."""
    found = _block(text.replace("\r\n", "\n").split("\n"), 0)
    return found if isinstance(found, dict) else {}


def _block(lines: list[str], depth: int) -> Any:
    """Return a map or a list; a line that is indented more, or blank, belongs to the entry before it."""
    content = [i for i, line in enumerate(lines) if _is_content(line)]
    if not content or depth > MOST_DEPTH:
        return None
    indent = _indent(lines[content[0]])
    starts = [i for i in content if _indent(lines[i]) <= indent]
    if lines[starts[0]].lstrip().startswith("- "):
        return [_scalar(lines[i].strip()[2:].strip(), []) for i in starts if lines[i].lstrip().startswith("- ")]
    starts = [i for i in starts if not lines[i].lstrip().startswith("- ")]  # a list may be no deeper than its key
    found: dict[str, Any] = {}
    for i, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        entry = _ENTRY.match(lines[i].strip()) if _indent(lines[i]) == indent else None
        if entry is not None:
            found[str(_scalar(entry[1], []))] = _value((entry[2] or "").strip(), lines[i + 1 : end], depth)
    return found


def _is_content(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#") and line not in ("---", "...")


def _value(first: str, below: list[str], depth: int) -> Any:
    end = len(below)
    while end and not below[end - 1].strip():
        end -= 1
    below = below[:end]
    if first[:1] in ("|", ">") and len(first) <= 3:
        joined = ("\n" if first[0] == "|" else " ").join(line.strip() for line in below)
        return joined if first.endswith("-") else joined + "\n"
    if not first and below and (_ENTRY.match(below[0].strip()) or below[0].lstrip().startswith("- ")):
        return _block(below, depth + 1)
    return _scalar(first, below)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _scalar(first: str, below: list[str]) -> Any:
    """Return a value whose text may continue on the lines below."""
    text = _folded(first, below)
    if text.startswith('"'):
        return re.sub(
            r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", _escape, text[1:].removesuffix('"'), flags=re.DOTALL
        )
    if text.startswith("'"):
        return text[1:].removesuffix("'").replace("''", "'")
    return _plain(text)


def _folded(text: str, below: list[str]) -> str:
    r"""Join lines as YAML does: one break is a space, each blank line a newline, and `\` at the end of a line joins directly."""
    parts, blank, quoted = [text], 0, text.startswith('"')
    for line in below:
        last = parts[-1]
        if not line.strip():
            blank += 1
        elif quoted and not blank and (len(last) - len(last.rstrip("\\"))) % 2:
            parts[-1] = last[:-1]
            parts.append(line.strip())
        else:
            parts += ["\n" * blank or " ", line.strip()]
            blank = 0
    return "".join(parts)


def _plain(text: str) -> Any:
    text = text.partition(" #")[0].rstrip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.match(text):
        return int(text)
    return float(text) if _FLOAT.match(text) else text


def _escape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) == 1:
        return _ESCAPES.get(code, code)
    number = int(code[1:], 16)
    return chr(number) if number < 0x110000 else "\ufffd"
