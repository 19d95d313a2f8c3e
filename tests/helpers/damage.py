"""Deliberately damaged journals, and what readers find in them."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from fanfold.journal import Journal


def read(path: Path) -> Journal:
    journal = Journal(path)
    journal.refresh()
    return journal


def points(journal: Journal) -> Counter[tuple[Any, ...]]:
    """Return everything a reader sees, as a multiset: numbers as (key, step, time, value), records as (kind, repr)."""
    found: Counter[tuple[Any, ...]] = Counter()
    for key in journal.by_key:
        column = journal.column(key)
        found.update((key, *row) for row in zip(*(c.tolist() for c in column), strict=True))
    found.update((record.kind, repr(record.data)) for record in journal.records(*range(4, 256)))
    return found


def renewed(path: Path, data: bytes) -> Path:
    """Replace a file with new bytes under the same name, so that a mapping of the old file stays valid."""
    aside = path.with_suffix(".new")
    aside.write_bytes(data)
    aside.replace(path)
    return path


def damaged(data: bytes, how: str, start: float, length: float, byte: int) -> bytes:
    a = int(start * len(data))
    b = min(len(data), a + 1 + int(length * 200))
    return {
        "flip": lambda: data[:a] + bytes([data[a] ^ byte]) + data[a + 1 :] if data else data,
        "cut": lambda: data[:a],
        "insert": lambda: data[:a] + random.Random(byte).randbytes(b - a) + data[a:],
        "duplicate": lambda: data[:b] + data[a:b] + data[b:],
        "zero": lambda: data[:a] + bytes(b - a) + data[b:],
        "remove": lambda: data[:a] + data[b:],
        "swap": lambda: data[b:] + data[:b],
    }[how]()
