"""Rows of wandb's history as columns, fast: the items of a row of plain numbers are found by one regular expression.

A row is a message of items in any order, each a key (in parts, if nested) and a value as JSON. A row that the expression does not
cover to the last byte has something else in it, and is decoded item by item.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..plain import from_json
from . import protobuf as pb
from .tfrecord import nanoseconds

MOST_ROWS: Final = 1 << 13
MOST_SHAPES: Final = 64
_ITEM: Final = re.compile(
    rb"\n[\x00-\x7f][\n\x12][\x00-\x7f]([^\x12\x82]+)\x82\x01[\x00-\x7f](-?[0-9][0-9.eE+-]*|-?Infinity|NaN)", re.DOTALL
)
_AROUND: Final = 7  # bytes of an item that are neither key nor value

_numbers: Final = msgspec.json.Decoder(list[float])
Columns = dict[str, NDArray[Any]]


def numbers_in(data: bytes) -> dict[bytes, bytes] | None:
    """Return the items of a row by key if all of them are plain numbers; None if there is anything else."""
    found = _ITEM.findall(data)
    items = dict(found)
    if len(items) != len(found) or not found:
        return None
    rest = len(data) - _AROUND * len(items) - sum(map(len, items)) - sum(map(len, items.values()))
    if rest and (rest > 13 or data[-rest] != 0x12 or data[1 - rest] != rest - 2):  # the step may follow
        return None
    return items


def path_of(item: pb.Message) -> list[str]:
    """Return the parts of an item's key."""
    return pb.texts(item, 2) or [pb.text(item, 1)]


def nested(record: pb.Message) -> dict[str, Any]:
    """Return a record's items as nested dicts: a dict arrives as one item for each of its leaves."""
    found: dict[str, Any] = {}
    for item in pb.messages(record, 1):
        *path, last = path_of(item)
        target = found
        for key in path:
            inner = target.setdefault(key, {})
            if not isinstance(inner, dict):
                inner = target[key] = {}
            target = inner
        target[last] = value_of(item)
    return found


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values with their keys joined by `/`. Media are dicts, too, and stay whole."""
    for key, value in values.items():
        if isinstance(value, dict) and value and "_type" not in value:
            yield from flat(value, f"{before}{key}/")
        else:
            yield f"{before}{key}", value


def row_of(data: bytes) -> tuple[dict[str, Any], int]:
    """Return the values of a row by key, and its step."""
    history = pb.message(data)
    return dict(flat(nested(history))), pb.integer(pb.inner(history, 2), 1)


def value_of(item: pb.Message) -> Any:
    """Return an item's value, whichever of the fields for it is used."""
    if 16 in item:
        return from_json(json.loads(pb.text(item, 16), parse_int=_integer))
    if 6 in item:
        return pb.double(item, 6)
    if 5 in item:
        number = pb.integer(item, 5) & 0xFFFF_FFFF_FFFF_FFFF
        return (number >> 1) ^ -(number & 1)
    if 4 in item:
        return bool(pb.integer(item, 4))
    if 7 in item:
        return pb.text(item, 7)
    return from_json(json.loads(pb.text(item, 8))) if 8 in item else None


def _integer(text: str) -> float | int:
    return -0.0 if text == "-0" else int(text) if len(text) < 400 else float("inf")


def number_of(text: bytes) -> float | int:
    """Return a number written as JSON."""
    try:
        return -0.0 if text == b"-0" else int(text)
    except ValueError:
        return float(text)


class _Shape:
    """Rows with the same keys."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys
        self.values: Callable[[dict[bytes, bytes]], tuple[bytes, ...]] = itemgetter(*keys)
        self.rows: list[tuple[bytes, ...]] = []


class RowBatch:
    """Rows waiting to become columns. `axis` is the key that holds the step."""

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self._shapes: list[_Shape] = []
        self._loose: dict[tuple[Any, ...], list[tuple[int, int, tuple[Any, ...]]]] = {}
        self._count = 0

    @property
    def full(self) -> bool:
        return self._count >= MOST_ROWS

    def add(self, data: bytes) -> bool:
        """Take a row of plain numbers; return False if it has anything else."""
        items = numbers_in(data)
        if items is None or b"_step" not in items or b"_timestamp" not in items:
            return False
        size = len(items)
        for shape in self._shapes:
            if len(shape.keys) == size:
                try:
                    shape.rows.append(shape.values(items))
                except KeyError:
                    continue
                self._count += 1
                return True
        if len(self._shapes) >= MOST_SHAPES:
            return False
        shape = _Shape(list(items))
        shape.rows.append(shape.values(items))
        self._shapes.append(shape)
        self._count += 1
        return True

    def put(self, values: Mapping[str, Any], step: int, time_ns: int) -> None:
        """Take numbers that were read one by one."""
        kinds = tuple(bool if isinstance(v, bool) else int if isinstance(v, int) else float for v in values.values())
        self._loose.setdefault((tuple(values), kinds), []).append((step, time_ns, tuple(values.values())))
        self._count += 1

    def flush(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], Columns]]:
        """Yield steps, times and columns of everything held."""
        self._count = 0
        shapes, self._shapes = self._shapes, []
        for shape in shapes:
            yield self._columns(shape)
        loose, self._loose = self._loose, {}
        for (keys, kinds), found in loose.items():
            steps, times, values = zip(*found, strict=True)
            types: list[Any] = [np.bool_ if kind is bool else np.int64 if kind is int else np.float64 for kind in kinds]
            columns = {
                key: np.array(column, kind) for key, kind, column in zip(keys, types, zip(*values, strict=True), strict=True)
            }
            yield np.array(steps, np.int64), np.array(times, np.int64), columns

    def _columns(self, shape: _Shape) -> tuple[NDArray[np.int64], NDArray[np.int64], Columns]:
        names = [key.decode("utf-8", "replace") for key in shape.keys]
        columns = {key: _column(texts) for key, texts in zip(names, zip(*shape.rows, strict=True), strict=True)}
        times = nanoseconds(columns["_timestamp"].astype(np.float64))
        steps = columns.get(self.axis, columns["_step"])
        if steps.dtype != np.int64:
            steps = np.nan_to_num(steps, nan=0.0, posinf=0.0, neginf=0.0).astype(np.int64)
        return steps, times, columns


def _column(texts: tuple[bytes, ...]) -> NDArray[Any]:
    """Return numbers written as JSON: integers if all of them are."""
    try:
        numbers = list(map(int, texts))
    except ValueError:
        return _floats(texts)
    if b"-0" not in texts and max(numbers) < 1 << 63 and min(numbers) >= -(1 << 63):
        return np.array(numbers, np.int64)
    return _floats(texts)


def _floats(texts: tuple[bytes, ...]) -> NDArray[np.float64]:
    try:
        return np.array(_numbers.decode(b"[%b]" % b",".join(texts)), np.float64)
    except msgspec.DecodeError:  # NaN and infinities
        return np.array([_float(text) for text in texts])


def _float(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:  # "1-2": made of the right characters, and no number
        return float("nan")
