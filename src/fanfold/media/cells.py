"""One cell of a table: the values it may hold, and how those without a msgpack type are packed."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

import msgspec

from fanfold.errors import clean_text
from fanfold.media.arrays import Landing, is_a, is_array, is_numeric, is_tensor, on_device, to_numpy
from fanfold.media.base import Encoded, Media, broken, decode, refused
from fanfold.media.figure import Figure, is_matplotlib, is_plotly
from fanfold.media.image import Image, is_pil

if TYPE_CHECKING:
    from fanfold.media.arrays import Array

NATIVE = {bool, float, bytes, NoneType}  # msgpack stores these exactly
TIMES = {dt.datetime, dt.date, dt.time, dt.timedelta}
PLAIN = NATIVE | TIMES | {int, str}
BIG_INT, DATETIME, DATE, TIME, TIMEDELTA, MEDIA, ARRAY = range(1, 8)
DTYPES = ("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
SPANS = tuple(f"<{kind}8[{unit}]" for kind in "Mm" for unit in ("D", "s", "ms", "us", "ns"))
MAX_DEPTH = 32


def clean(value: Any, depth: int = 0) -> Any:
    """Copy a cell's value as a type that tables support, or raise an error."""
    if type(value) in PLAIN:
        return value
    if depth > MAX_DEPTH:
        raise refused(ValueError, f"A table cell is nested more than {MAX_DEPTH} deep", "Flatten it")
    if isinstance(value, (list, tuple, set, frozenset)):
        return [clean(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return {str(key): clean(item, depth + 1) for key, item in value.items()}
    for convert in (_media, _array, _subclass):
        found = convert(value)
        if found is not NotImplemented:
            return found
    raise refused(
        TypeError,
        f"A table cell is a {type(value).__module__}.{type(value).__name__}",
        "Use numbers, strings, bools, None, dates, bytes, arrays or media; str(value) always works",
    )


def _media(value: Any) -> Any:
    if isinstance(value, Media):
        if value.kind == "table":
            raise refused(TypeError, "A table cell is a table", "Log it under a key of its own")
        return value
    if is_pil(value):
        return Image(value)
    return Figure(value) if is_matplotlib(value) or is_plotly(value) else NotImplemented


def _array(value: Any) -> Any:
    """Copy an array: as a number if it is a scalar, as a Landing while it is on a device."""
    if is_a(value, "numpy", "generic"):
        return _scalar(value)
    if not is_array(value):
        return NotImplemented
    if not is_numeric(value):
        return clean(value.tolist(), 1) if not is_tensor(value) else NotImplemented
    landing = Landing(value)
    return landing if on_device(value) else landed(landing)


def landed(landing: Landing) -> Any:
    """Return the number or array that arrived from the device."""
    array = landing.value()
    return array.item() if array.ndim == 0 else array


def _scalar(value: Any) -> Any:
    if value.dtype.kind in "Mm":
        return None if value != value else value.astype(f"{value.dtype.kind}8[us]").item()  # noqa: PLR0124 - NaT
    if value.dtype.kind in "biufUS":
        return float(value) if value.dtype.kind == "f" else value.item()
    return NotImplemented


def _subclass(value: Any) -> Any:
    """Convert subclasses (enums, pandas' timestamps, numpy's strings) to the plain type."""
    if value != value or type(value).__name__ == "NAType":  # noqa: PLR0124 - NaT, which is an instance of datetime
        return None if not isinstance(value, float) else float(value)
    if isinstance(value, dt.datetime):
        return dt.datetime(
            value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond, value.tzinfo
        )
    if isinstance(value, dt.timedelta):
        return dt.timedelta(value.days, value.seconds, value.microseconds)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        return str.__str__(value)
    number = int if isinstance(value, int) else float if isinstance(value, float) else None
    return NotImplemented if number is None else number(value)


def pending_in(cell: Any) -> list[Media]:
    """Return the parts of a cell, at any depth, that are still on a device."""
    if isinstance(cell, Media):
        return cell.waiting()
    inner = cell if isinstance(cell, list) else cell.values() if isinstance(cell, dict) else ()
    return [part for item in inner if type(item) not in PLAIN for part in pending_in(item)]


def pack(cells: list[Any]) -> Any:
    """Return cells in a form that msgpack can store."""
    kinds = set(map(type, cells))
    return cells if kinds <= NATIVE else [_packed(cell) for cell in cells]


def _packed(cell: Any) -> Any:
    kind = type(cell)
    if kind is int:
        return cell if -(2**63) <= cell < 2**64 else _ext(BIG_INT, hex(cell))
    if kind is str:
        return clean_text(str(cell))
    if kind in NATIVE:
        return cell
    if kind is list:
        return [_packed(item) for item in cell]
    if kind is dict:
        return {clean_text(str(key)): _packed(item) for key, item in cell.items()}
    return _packed_object(cell)


def _packed_object(cell: Any) -> Any:
    if isinstance(cell, Landing):
        return _packed(landed(cell))
    if isinstance(cell, Media):
        return _ext(MEDIA, _embedded(cell.kind, cell.encode()))
    for code, kind in ((DATETIME, dt.datetime), (DATE, dt.date), (TIME, dt.time)):
        if type(cell) is kind:
            return _ext(code, cell.isoformat())
    if isinstance(cell, dt.timedelta):
        return _ext(TIMEDELTA, hex(cell // dt.timedelta(microseconds=1)))
    array = little(cell)
    return _ext(ARRAY, [array.dtype.str, list(array.shape), array.tobytes()])


def _embedded(kind: str, encoded: Encoded) -> list[Any]:
    return [kind, {**encoded.meta, "ext": encoded.ext}, encoded.data]


def _ext(code: int, body: Any) -> Any:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(body))


def unpack(code: int, body: memoryview) -> Any:
    """Decode a value that has no msgpack type; raise an error for malformed bytes."""
    value = msgspec.msgpack.decode(body)
    read = READERS.get(code)
    if read is None:
        raise ValueError(f"a cell of unknown type {code}")
    return read(value)


def _read_media(value: Any) -> Media:
    kind, meta, data = value
    if kind == "table" or not isinstance(data, bytes):
        raise ValueError("a cell holds media that cannot be in a cell")
    return decode(kind, meta, data)


def _read_array(value: Any) -> Array:
    dtype, shape, data = value
    array = from_bytes(dtype, bytearray(data))
    around = 1
    for length in shape:
        around *= max(int(length), 1)
    if around > max(array.size, 1 << 16):  # an empty array may claim any number of empty rows
        raise ValueError(f"an array of {array.size} numbers claims the shape {shape}")
    shaped: Array = array.reshape(shape)
    return shaped


READERS: dict[int, Callable[[Any], Any]] = {
    BIG_INT: lambda text: int(text, 16),
    DATETIME: dt.datetime.fromisoformat,
    DATE: dt.date.fromisoformat,
    TIME: dt.time.fromisoformat,
    TIMEDELTA: lambda text: dt.timedelta(microseconds=int(text, 16)),
    MEDIA: _read_media,
    ARRAY: _read_array,
}


def little(array: Any) -> Array:
    """Return a contiguous little-endian array of a type that tables store."""
    import numpy as np

    host = to_numpy(array)
    if host.dtype.kind == "f" and host.dtype.itemsize > 8:
        host = host.astype(np.float64)
    return np.ascontiguousarray(host, host.dtype.newbyteorder("<"))


def from_bytes(dtype: Any, data: Any) -> Array:
    """Read numbers of a declared type from bytes, whose length must match it."""
    import numpy as np

    if dtype not in DTYPES + SPANS:
        raise broken("table", f"it declares numbers of type {str(dtype)[:40]!r}")
    if len(data) % np.dtype(dtype).itemsize:
        raise broken("table", f"{len(data)} bytes are not a whole number of {dtype}")
    array = np.frombuffer(data, "|u1" if dtype == "|b1" else dtype)
    numbers: Array = array != 0 if dtype == "|b1" else array
    return numbers
