"""Rows of many journals, decoded together in columns, are the points that were written, in the order of the table."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np

from fanfold.clickhouse.decode import KINDS, PointBlock, run_number, scan, series_number
from fanfold.journal.format import Kind, Layout, Shape, frame, seed_of
from fanfold.journal.walker import NO_STEP

Point = tuple[Any, ...]
TABLE_ORDER = ("run", "series", "journal", "pos")
ROWS = 30


def shapes_of(pick: random.Random, types: str) -> list[Shape]:
    """Return shapes of every layout and length, one of them without keys."""
    lengths = [(0, 5), (Layout.STEP_WIDE, 7), (Layout.STEP_NONE, 1), (Layout.PENDING, 3), (Layout.LATE, 2), (0, 0), (0, 40)]
    return [
        Shape(
            number,
            int(layout),
            "".join(pick.choice(types) for _ in range(keys)),
            tuple(f"k{number}/{key}" for key in range(keys)),
        )
        for number, (layout, keys) in enumerate(lengths)
    ]


def journal(pick: random.Random, run: int, id: str, shapes: list[Shape], base: int) -> tuple[bytes, list[Point]]:
    """Return the frames of a journal from an offset on, and their points as one reads them frame by frame."""
    seed, points = seed_of(id), []
    parts = [frame(Kind.SHAPE, shape.body(), seed) for shape in shapes]
    for _ in range(pick.randrange(ROWS)):
        shape = pick.choice(shapes)
        for _ in range(pick.choice((1, 1, 5))):  # alone, and a few of the same shape after each other
            values = [{"d": pick.gauss(0, 1), "q": pick.getrandbits(62) - (1 << 61), "?": True}[code] for code in shape.types]
            time, step = pick.getrandbits(60), pick.randrange(1000)
            steps = [] if shape.layout & Layout.STEP_NONE else [step]
            late = [9, 1] if shape.layout & Layout.PENDING else [9] if shape.layout & Layout.LATE else []
            pos = base + sum(map(len, parts))
            parts.append(frame(Kind.ROW, struct.pack(shape.codes, shape.id, time, *steps, *late, *values), seed, shape.layout))
            for code, key, value in zip(shape.types, shape.keys, values, strict=True):
                whole = value if code == "q" else 0
                points.append((run, series_number(key), int(id, 16), pos, steps[0] if steps else NO_STEP, time, float(value),
                               KINDS[code], whole))  # fmt: skip
    return b"".join(parts), points


def decoded(types: str) -> tuple[dict[str, np.ndarray[Any, Any]], list[Point], int]:
    pick, block, wanted = random.Random(5), PointBlock(), []
    shapes = shapes_of(pick, types)
    for number in range(60):
        id, run = f"{pick.getrandbits(64):016x}", run_number("llm", f"r{number % 7}")
        data, points = journal(pick, run, id, shapes, 100 * number + 1)
        found = scan(data, 100 * number + 1, seed_of(id), {})
        assert found.end == len(data) and found.points == len(points)
        block.add(run, int(id, 16), found)
        wanted += points
    return block.columns(), wanted, block.count


def rows_of(columns: dict[str, np.ndarray[Any, Any]]) -> list[Point]:
    zeros = np.zeros(len(columns["run"]), np.int64)
    names = (*TABLE_ORDER, "step", "time", "value", "kind", "whole")
    return list(zip(*(columns.get(name, zeros).tolist() for name in names), strict=True))


def test_rows_of_many_journals_and_shapes_are_the_points_that_were_written():
    columns, wanted, count = decoded("dq?")
    assert count == len(wanted) > 5000
    assert sorted(rows_of(columns)) == sorted(wanted)


def test_numbers_alone_need_no_columns_for_kinds():
    columns, wanted, _ = decoded("d")
    assert set(columns) == {"run", "series", "journal", "pos", "step", "time", "value"}
    assert sorted(rows_of(columns)) == sorted(wanted)


def test_points_of_one_shape_come_in_the_order_of_the_table():
    pick, block = random.Random(6), PointBlock()
    shape = shapes_of(pick, "dq")[1]
    for number in range(40):
        id, run = f"{pick.getrandbits(64):016x}", run_number("llm", f"r{number % 3}")
        block.add(run, int(id, 16), scan(journal(pick, run, id, [shape], 1)[0], 1, seed_of(id), {}))
    columns = block.columns()
    order = list(zip(*(columns[name].tolist() for name in TABLE_ORDER), strict=True))
    assert len(order) > 1000 and order == sorted(order)
    assert PointBlock().columns() == {}
