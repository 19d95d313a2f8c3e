"""Frames with a valid checksum and an invalid body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

DEEP: Any = 1


MISSING = object()


WRONG: list[Any] = [
    MISSING, None, True, 2**64 - 1, -(2**63), -1, 7, 1.5, float("nan"), float("inf"), "text", "", b"bytes", [], [1], [None], {},
    {"a": 1}, {1: 2}, {"a": {"b": [None, {"c": b"x"}]}}, [["a", "b"]], [{"type": 1}], {"type": "image", "blob": "../../etc/passwd"},
    msgspec.msgpack.Ext(7, b"x"), DEEP,
]  # fmt: skip


def mutated(body: Any) -> Iterator[Any]:
    """Return variants of a body: each field, nested ones included, forged in turn, and whole bodies of other types."""
    yield from (wrong for wrong in WRONG if wrong is not MISSING)
    places = list(body) if isinstance(body, dict) else range(len(body))
    for place in places:
        for wrong in WRONG:
            forged = dict(body) if isinstance(body, dict) else list(body)
            if wrong is MISSING:
                del forged[place]
            else:
                forged[place] = wrong
            yield forged
        inner = body[place]
        if isinstance(inner, (dict, list)) and inner:
            for one in mutated(inner):
                forged = dict(body) if isinstance(body, dict) else list(body)
                forged[place] = one
                yield forged
