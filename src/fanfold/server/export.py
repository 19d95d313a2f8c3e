"""What a chart shows, as a Parquet file: one row a point or bucket, so that a notebook goes on where the page ends."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ..errors import missing_extra
from ..store.query import Store
from .data import SeriesQuery, found_series

if TYPE_CHECKING:
    from ..store.buckets import Buckets
    from ..store.run import StoredRun


def parquet(store: Store, query: SeriesQuery) -> bytes:
    """Return the series asked for: run, name, key, x, value, lowest, highest, points; the axis is in the file's metadata."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_extra("pyarrow", "arrow", "Saving as Parquet (CSV works without)") from error
    schema = pa.schema(
        [("run", pa.string()), ("name", pa.string()), ("key", pa.string()), ("x", pa.float64()), ("value", pa.float64()),
         ("lowest", pa.float64()), ("highest", pa.float64()), ("points", pa.int64())],
        metadata={"axis": query.x},
    )  # fmt: skip
    tables = [_table(pa, schema, id, run, one) for id, run, one in found_series(store, query)]
    out = io.BytesIO()
    pq.write_table(pa.concat_tables(tables) if tables else schema.empty_table(), out)
    return out.getvalue()


def _table(pa: Any, schema: Any, id: str, run: StoredRun, one: Buckets) -> Any:
    size = len(one.x)
    lowest, highest = (one.min, one.max) if one.low is None else (one.low, one.high)  # of a fold: over its ranks
    return pa.table(
        [[id] * size, [run.name] * size, [one.key] * size, one.x, one.last, lowest, highest, one.count], schema=schema
    )
