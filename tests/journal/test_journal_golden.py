"""The format, pinned: tests/golden holds journals of every kind of frame, written once. Their bytes must never change.

A change of format is a new version and a new golden file; this one must still be read. `python tests/journal/test_journal_golden.py`
writes a golden file that is missing, and never touches one that is there.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fanfold.journal import Journal, Kind, Writer, packing, writer
from fanfold.journal.bodies import Console, End, Lost, Values, as_dict
from fanfold.journal.format import Layout
from fanfold.journal.walker import NO_STEP

GOLDEN = Path(__file__).parents[1] / "golden"
ID = "00f0e1d2c3b4a596"
NAME = f"3-{ID}.ffj"
SINGLE = "00f0e1d2c3b4a597"
FLOATS = [0.5, float(np.float32(0.1)), 3.4028234663852886e38, 1.401298464324817e-45, float("nan"), float("-inf"), -0.0]
TIME = 1_700_000_000_000_000_000
HEADER = {
    "format": [1, 0],
    "writer": "fanfold 0.1.0",
    "run": "r",
    "project": "p",
    "name": "calm-river-7",
    "role": "main",
    "rank": 3,
    "world": 8,
    "local_rank": 1,
    "attempt": "abc",
    "ordinal": 2,
    "node": "node-a",
    "boot": "b",
    "pid": 42,
    "process": "feedfeedfeedfeed",
    "launcher": "torchrun",
    "spool": None,
}


def write_every_kind(folder: Path, monkeypatch: Any) -> Path:
    """Write one frame of every kind and one row of every layout, with fixed id and clocks."""
    monkeypatch.setattr(writer, "new_id", lambda: ID)
    clock = SimpleNamespace(time_ns=lambda: TIME, monotonic_ns=lambda: 5_000_000_000, monotonic=lambda: 0.0)
    monkeypatch.setattr(writer, "time", clock)
    out = Writer(folder, HEADER)
    path = out.sheet.path
    out.row({"loss": 0.5, "n": -1, "ok": True}, "dq?", time_ns=TIME, step=0)
    out.row({"loss": float("inf"), "n": (1 << 63) - 1, "ok": False}, "dq?", time_ns=TIME + 1, step=1)
    out.row({"loss": -0.0, "n": -(1 << 63), "ok": True}, "dq?", time_ns=TIME + 2, step=1 << 40)
    out.row({"system/cpu": 12.5}, "d", time_ns=TIME + 3, step=None, origin="system")
    text = (Kind.VALUES, {"s": 2, "t": TIME + 4, "v": {"note": "größer"}, "k": None})
    out.row({"lr": 1e-3}, "d", time_ns=TIME + 4, step=2, layout=Layout.PENDING, call=(1, 2), beside=[text])
    out.row({"grad": 5e-324}, "d", time_ns=TIME + 4, step=2, layout=Layout.LATE, call=(1,))
    out.append((Kind.LOST, {"q": 1, "s": 2, "t": TIME + 4, "keys": ["aux"], "why": "the ring was full"}))
    out.append((Kind.BEAT, [TIME + 5, 6_000_000_000, 2, 0]), (Kind.INFO, {"t": TIME + 6, "tags": ["a", "b"]}))
    out.append((Kind.EVENT, {"t": TIME + 7, "event": "alert", "title": "x", "text": "y", "level": "info", "s": 2}))
    out.append((Kind.CONSOLE, {"t": TIME + 8, "n": "stdout", "b": b"\xfa\xfd\x03\x00"}))
    out.close({"t": TIME + 9, "status": "finished", "error": None})
    return path


def write_single(folder: Path, monkeypatch: Any) -> Path:
    """Write what version 1.1 added: numbers of 32 bits, alone and beside others."""
    monkeypatch.setattr(writer, "new_id", lambda: SINGLE)
    monkeypatch.setattr(writer, "time", SimpleNamespace(time_ns=lambda: TIME, monotonic_ns=lambda: 1, monotonic=lambda: 0.0))
    out = Writer(folder, HEADER | {"format": [1, 1]})
    path = out.sheet.path
    for step, value in enumerate(FLOATS):
        out.row({"a": value, "b": -value}, "ff", time_ns=TIME + step, step=step)
    out.row({"a": 0.5, "n": 7, "wide": 0.1, "ok": True}, "fqd?", time_ns=TIME + 9, step=9)
    out.row({"a": 1.5}, "f", time_ns=TIME + 10, step=10, layout=Layout.PENDING, call=(1, 1))
    out.row({"b": 2.5}, "f", time_ns=TIME + 10, step=10, layout=Layout.LATE, call=(1,))
    out.close({"t": TIME + 11, "status": "finished", "error": None})
    return path


def test_what_is_written_today_is_byte_for_byte_the_golden_file(tmp_path, monkeypatch):
    written = write_every_kind(tmp_path, monkeypatch)
    assert written.name == NAME
    assert written.read_bytes() == (GOLDEN / NAME).read_bytes()


def test_numbers_of_32_bits_are_byte_for_byte_the_golden_file_and_read_as_64(tmp_path, monkeypatch):
    written = write_single(tmp_path, monkeypatch)
    golden = GOLDEN / written.name
    assert written.read_bytes() == golden.read_bytes()
    monkeypatch.setattr(packing, "GAIN", 100.0)
    packed = packing.pack(written)
    assert packed
    for path in (golden, packed.path):
        journal = Journal(path)
        journal.refresh()
        assert (journal.damaged, journal.tail) == (0, 0)
        assert journal.column("a").values.dtype == np.float64
        np.testing.assert_array_equal(journal.column("a").values, [*FLOATS, 0.5, 1.5])
        np.testing.assert_array_equal(journal.column("b").values, [*(-value for value in FLOATS), 2.5])
        assert journal.column("wide").values.tolist() == [0.1]
        last = [row.values for row in journal.walk_rows(0)][-3:]
        assert last == [{"a": 0.5, "n": 7, "wide": 0.1, "ok": True}, {"a": 1.5}, {"b": 2.5}]


def test_the_golden_file_holds_every_kind_of_frame():
    journal = Journal(GOLDEN / NAME)
    journal.refresh()
    kinds = {kind for kind, _, _ in journal.frames} | ({int(Kind.ROW)} if journal.rows else set())
    assert kinds == {int(kind) for kind in Kind}
    assert {rows.shape.layout for rows in journal.rows.values()} == {0, 1, 2, 4, 8}


def test_the_golden_file_reads_as_it_was_written():
    journal = Journal(GOLDEN / NAME)
    journal.refresh()
    assert (journal.damaged, journal.tail) == (0, 0)
    late = {
        "journal": ID,
        "started": TIME,
        "mono": 5_000_000_000,
        "follows": None,
        "dropped": 0,
        "salvaged": False,
        "born": None,
        "fork": None,
    }
    assert as_dict(journal.header) == HEADER | late
    points: dict[str, list[tuple[int, int, object]]] = {}
    for row in journal.walk_rows(0):
        for key, value in row.values.items():
            points.setdefault(key, []).append((NO_STEP if row.step is None else row.step, row.time, value))
    assert {key: journal.column(key).values.tolist() for key in points} == {
        key: [p[2] for p in found] for key, found in points.items()
    }
    assert {key: journal.column(key).steps.tolist() for key in points} == {
        key: [p[0] for p in found] for key, found in points.items()
    }
    assert points == {
        "loss": [(0, TIME, 0.5), (1, TIME + 1, float("inf")), (1 << 40, TIME + 2, 0.0)],
        "n": [(0, TIME, -1), (1, TIME + 1, (1 << 63) - 1), (1 << 40, TIME + 2, -(1 << 63))],
        "ok": [(0, TIME, True), (1, TIME + 1, False), (1 << 40, TIME + 2, True)],
        "system/cpu": [(NO_STEP, TIME + 3, 12.5)],
        "lr": [(2, TIME + 4, 1e-3)],
        "grad": [(2, TIME + 4, 5e-324)],
    }
    assert str(journal.column("loss").values[2]) == "-0.0"
    assert [record.data for record in journal.records(Kind.LOST, Kind.VALUES, Kind.CONSOLE, Kind.END)] == [
        Values(s=2, t=TIME + 4, v={"note": "größer"}),
        Lost(q=1, s=2, t=TIME + 4, keys=["aux"], why="the ring was full"),
        Console(t=TIME + 8, b=b"\xfa\xfd\x03\x00"),
        End(t=TIME + 9, status="finished", dropped=0),
    ]


if __name__ == "__main__":
    for name, write in ((NAME, write_every_kind), (f"3-{SINGLE}.ffj", write_single)):
        if not (GOLDEN / name).exists():
            write(GOLDEN, pytest.MonkeyPatch())
