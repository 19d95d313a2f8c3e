"""The operator profile and API usage: the newest rows of each process, which are those with the most observed calls.

Times and calls are estimates for all calls, so an older row may have higher ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import JournalError
from ..journal.bodies import Ops, Usage, as_dict, decode
from ..journal.format import Kind
from ..probes import op_table
from ..store.ops import table_of
from .decode import Other

MOST_TABLES = 8  # per piece: a journal belongs to one process and its children
MOST_ROWS = 1 << 17  # per request, beyond which it stops; the tables of a node have a few thousand

Profile = Mapping[str, Sequence[dict[str, Any]]]
_NOTHING: Profile = {"ops": (), "usage": ()}  # what most pieces have


def profile_of(run: int, rank: int, others: Sequence[Other]) -> Profile:
    """Return the rows of the tables `ops` and `usage` in a piece.

    Tables are compressed and may expand a thousandfold, so only the newest of each process is unpacked.
    """
    if not others:
        return _NOTHING
    newest: dict[str, Ops] = {}
    uses: list[dict[str, Any]] = []
    for event in map(_event, others):
        if isinstance(event, Ops):
            newest.pop(event.id, None)
            newest[event.id] = event
        elif isinstance(event, Usage):
            uses.append(_use(run, rank, event))
    tables = list(newest.values())[-MOST_TABLES:]
    return {"ops": [row for event in tables for row in _operators(run, rank, event)], "usage": uses}


def add_profile(tables: dict[str, dict[str, Any]], profiles: Sequence[Profile]) -> None:
    """Add the rows of a batch's profiles to the columns of their tables."""
    for name in ("ops", "usage"):
        rows = [row for profile in profiles for row in profile[name]]
        if rows:
            tables[name] = {column: _column(column, [row[column] for row in rows]) for column in rows[0]}


def _event(other: Other) -> Any:
    if other.kind != Kind.EVENT:
        return None
    try:
        return decode(other.kind, other.body)
    except JournalError:
        return None  # damage, which readers count


_TEXTS = ("op", "overload", "scope", "thread", "label", "inputs")


def _operators(run: int, rank: int, event: Ops) -> Iterator[dict[str, Any]]:
    table = table_of(as_dict(event))
    if table is None:
        return
    whose = {"run": run, "process": event.id, "rank": rank, "node": str(table.facts.get("node") or "")}
    for row in table.rows:
        scale = op_table.scale_of(table.facts, row)
        yield {
            **whose, **{name: str(row.get(name) or "") for name in _TEXTS}, "calls": row["count"] * scale,
            "observed": row["count"], "total_ns": row["total_ns"] * scale,
            "self_ns": row["self_ns"] * scale, "max_ns": row["max_ns"],
            "device_ns": float(row.get("device_ns") or 0),
        }  # fmt: skip


def _use(run: int, rank: int, event: Usage) -> dict[str, Any]:
    import msgspec

    pid = event.pid or 0
    return {
        "run": run, "key": event.key, "rank": rank, "node": event.node or "", "pid": pid if 0 <= pid < 1 << 32 else 0,
        "data": msgspec.json.encode(event.data or {}).decode(), "time": event.t,
    }  # fmt: skip


_TYPES = {"run": "uint64", "rank": "uint32", "pid": "uint32", "observed": "uint64", "max_ns": "uint64", "time": "int64",
          "calls": "float64", "total_ns": "float64", "self_ns": "float64", "device_ns": "float64"}  # fmt: skip


def _column(name: str, values: list[Any]) -> Any:
    import numpy as np

    return np.array(values, _TYPES[name]) if name in _TYPES else values
