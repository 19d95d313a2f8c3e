"""Operator tables that forked children (DataLoader workers) left in the run: merged into one when their process has ended."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import notices
from ..journal.files import open_regular
from . import op_table

ADDED = ("count", "total_ns", "self_ns", "own_ns", "device_count", "device_ns")
SAME = ("op", "overload", "scope", "thread", "label", "inputs")


LOST = ("overflow", "usage_lost", "device_lost")


def merge(
    into: dict[tuple[Any, ...], dict[str, Any]],
    rows: list[dict[str, Any]],
    added: tuple[str, ...] = ADDED,
    room: int | None = None,
) -> int:
    """Add rows to those with the same operator, scope, thread, label and inputs; return how many calls had no room."""
    beyond = 0
    for row in rows:
        key = tuple(row[name] for name in SAME)
        found = into.get(key)
        if found is None and room is not None and len(into) >= room:
            beyond += row["count"]
            continue
        if found is None:
            into[key] = {**row, "hist": dict(row["hist"])}
            continue
        for name in added:
            found[name] += row[name]
        found["max_ns"] = max(found["max_ns"], row["max_ns"])
        for bucket, count in row["hist"].items():
            found["hist"][bucket] = found["hist"].get(bucket, 0) + count
    return beyond


def say_full(facts: Mapping[str, Any]) -> None:
    """Warn once if the table was full for some calls."""
    if facts["overflow"]:
        notices.once(
            "ops table full",
            f"the operator table is full: it holds {facts['capacity']} rows, and calls of further operators are only "
            "counted. The rows it has stay exact. Use fewer labels or names of ranges, or inputs=False.",
        )


def read_file(path: Path) -> bytes | None:
    """Read a table file, up to the largest possible table; return None if it is gone or not a regular file."""
    largest = op_table.ROWS + op_table.MAX_ROWS * op_table.ROW_SIZE
    try:
        with open_regular(path) as file:
            return file.read(largest)
    except OSError:
        return None


def pack_rows(rows: list[dict[str, Any]]) -> bytes:
    """Compress rows that do not come from a native table."""
    return zlib.compress(msgspec.msgpack.encode(rows), 3)


class Workers:
    """The forked children of one process, past and present."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._facts: dict[str, Any] = {}
        self._ended: list[Path] = []
        self._folded: list[str] = []
        self._processes = 0
        self._lost = dict.fromkeys(LOST, 0)
        self.usage: list[dict[str, Any]] = []  # of children that the journal does not have yet

    def sweep(self, parent: str, *, living: bool = False) -> bool:
        """Merge the tables of children of `parent` that have ended, or with `living` of all; return whether there were any."""
        for path in self._folder.glob(f"{self._rank}-*.ops"):
            table = self._child(path, parent)
            if table is None or (alive(table.facts["pid"]) and not living):
                continue
            for name in LOST:
                self._lost[name] += table.facts[name]
            self._lost["overflow"] += merge(self._rows, table.rows, room=op_table.MAX_ROWS)
            self._facts = {**table.facts, "steps": 0}
            self.usage += [{**record, "pid": table.facts["pid"]} for record in table.usage]
            self._ended.append(path)
            self._folded.append(table.facts["id"])
            self._processes += 1
        return bool(self._ended)

    def _child(self, path: Path, parent: str) -> op_table.OpTable | None:
        data = read_file(path)
        try:
            table = op_table.parse_file(data) if data and path not in self._ended else None
        except op_table.NotATable:
            return None
        return table if table is not None and table.facts["parent"] == parent else None

    def event(self, parent: str) -> dict[str, Any]:
        """Return the journal's record of all children that have ended so far, merged into one."""
        facts = {**self._facts, **self._lost, "id": f"{parent}-workers", "processes": self._processes}
        return {"id": facts["id"], "facts": facts, "folded": self._folded, "table": pack_rows(list(self._rows.values()))}

    def forget(self) -> None:
        """Delete the files of children that the journal has."""
        for path in self._ended:
            with contextlib.suppress(OSError):
                path.unlink()
        self._ended, self._folded, self.usage = [], [], []


def alive(pid: int) -> bool:
    """Return whether a child is still running; a zombie is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
