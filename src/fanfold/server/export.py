"""Export of a chart's series as CSV or Parquet: one row for every logged point.

Series are downsampled only beyond `MOST_POINTS` rows, and the file shows it: the column `points` is how many logged points
a row stands for, and `value` is the last of them, logged at `x`.
"""

from __future__ import annotations

import csv as csv_format
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import missing_extra
from ..store.query import Store
from .data import MOST_BUCKETS, SeriesQuery, found_series

if TYPE_CHECKING:
    from ..store.buckets import Buckets
    from ..store.run import StoredRun

    Found = list[tuple[str, StoredRun, Buckets]]

MOST_POINTS = 10_000_000  # rows in one file
AT_ONCE = 50_000  # rows of CSV in memory as text


def every_point(store: Store, query: SeriesQuery) -> Found:
    """Return the requested series with all their points, or in fine buckets if there are too many for a file."""
    total = sum(one.total for _, _, one in found_series(store, query, buckets=1))
    return found_series(store, query, buckets=MOST_POINTS if total <= MOST_POINTS else MOST_BUCKETS)


def csv(store: Store, query: SeriesQuery) -> Iterator[bytes]:
    """Return CSV with run, x, value, lowest, highest, points and id; the columns x and value are named after axis and key.

    All data is read before this returns, so that a failure becomes an error response. The text is generated while it is sent.
    """
    found = every_point(store, query)
    axis = "/".join(sorted({one.axis for _, _, one in found})) or query.x
    head = _row("run", axis, ", ".join(query.keys), "lowest", "highest", "points", "id")
    return _lines(head, found)


def _lines(head: str, found: Found) -> Iterator[bytes]:
    yield f"{head}\n".encode("utf-8", "replace")
    for run_id, run, one in found:
        name, id = _row(run.name), _row(run_id)
        columns = [_as_logged(column) for column in (one.x_last, one.last, *_band(one), one.count)]
        for start in range(0, len(one.x), AT_ONCE):
            some = zip(*(column[start : start + AT_ONCE].tolist() for column in columns), strict=True)
            yield "".join(f"{name},{x},{y},{low},{high},{n},{id}\n" for x, y, low, high, n in some).encode("utf-8", "replace")


def _as_logged(column: Any) -> Any:
    """Convert a column of whole numbers to integers, so that they are written without a fraction; return others unchanged."""
    import numpy as np

    whole = column.dtype.kind == "f" and bool(np.all((column == np.floor(column)) & (np.abs(column) < 2.0**53)))
    return column.astype(np.int64) if whole else column


def _row(*cells: str) -> str:
    out = io.StringIO()
    csv_format.writer(out, lineterminator="").writerow([_safe(cell) for cell in cells])
    return out.getvalue()


def _safe(text: str) -> str:
    """Keep a spreadsheet from running a name as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text


def parquet(store: Store, query: SeriesQuery) -> bytes:
    """Return Parquet with run, name, key, x, value, lowest, highest, points; its metadata holds `axis` and `thinned`."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_extra("pyarrow", "arrow", "Saving as Parquet (CSV works without)") from error
    found = every_point(store, query)
    axis, thinned = "/".join(sorted({one.axis for _, _, one in found})) or query.x, not all(one.raw for _, _, one in found)
    schema = pa.schema(
        [("run", pa.string()), ("name", pa.string()), ("key", pa.string()), ("x", pa.float64()), ("value", pa.float64()),
         ("lowest", pa.float64()), ("highest", pa.float64()), ("points", pa.int64())],
        metadata={"axis": axis, "thinned": "yes" if thinned else "no"},
    )  # fmt: skip
    tables = [_table(pa, schema, id, run, one) for id, run, one in found]
    out = io.BytesIO()
    pq.write_table(pa.concat_tables(tables) if tables else schema.empty_table(), out)
    return out.getvalue()


def _table(pa: Any, schema: Any, id: str, run: StoredRun, one: Buckets) -> Any:
    size = len(one.x)
    names = [pa.repeat(text, size) for text in (id, run.name, one.key)]
    return pa.table([*names, one.x_last, one.last, *_band(one), one.count], schema=schema)


def _band(one: Buckets) -> tuple[Any, Any]:
    """Return the lowest and highest values: across ranks if they are folded, else of the points a row stands for."""
    return (one.min, one.max) if one.low is None else (one.low, one.high)
