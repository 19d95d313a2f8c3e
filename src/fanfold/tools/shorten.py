"""Answers that fit: an agent reads only so much, so long lists, dicts and texts are cut, and what was cut is named."""

from __future__ import annotations

from typing import Any

import msgspec

from ..plain import json_safe

MAX_BYTES = 60_000
LIMITS = (1_000, 300, 100, 30, 10, 3, 1)  # items of a list or dict, tried in this order
CHARACTERS = 20  # of a text, for each item


def fitted(value: Any) -> tuple[Any, list[str]]:
    """Return a value as plain JSON of at most MAX_BYTES, and what was left out of it."""
    plain = json_safe(value)
    for limit in (1 << 30, *LIMITS):
        left_out: list[str] = []
        cut = _cut(plain, limit, "", left_out)
        if len(msgspec.json.encode(cut)) <= MAX_BYTES:
            return cut, left_out[:20]
    return None, ["everything: the answer is too long. Ask for less."]


def _cut(value: Any, limit: int, path: str, left_out: list[str]) -> Any:
    if isinstance(value, str):
        most = limit * CHARACTERS
        if len(value) > most:
            left_out.append(f"{path or 'text'}: {len(value) - most} of {len(value)} characters")
        return value if len(value) <= most else value[:most] + "…"
    if isinstance(value, dict):
        kept = list(value.items())[:limit]
        _note(len(value), len(kept), path, left_out)
        return {name: _cut(one, limit, f"{path}.{name}" if path else str(name), left_out) for name, one in kept}
    if isinstance(value, list):
        items = value[:limit]
        _note(len(value), len(items), path, left_out)
        return [_cut(one, limit, f"{path}[{place}]", left_out) for place, one in enumerate(items)]
    return value


def _note(whole: int, kept: int, path: str, left_out: list[str]) -> None:
    if kept < whole:
        left_out.append(f"{path or 'answer'}: {whole - kept} of {whole} items")
