"""Tables from and to pandas, polars and Arrow. Each library is used only if the user passed or requested its type."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import TYPE_CHECKING, Any

from fanfold.errors import needed, notices
from fanfold.media.arrays import is_a
from fanfold.media.base import Media
from fanfold.media.cells import PLAIN, clean
from fanfold.media.columns import Column, listed, narrowed

if TYPE_CHECKING:
    from fanfold.media.arrays import Array

NULLABLE = {"bool": "boolean", "float16": "Float32", "float32": "Float32", "float64": "Float64"}
NULLABLE |= {f"int{bits}": f"Int{bits}" for bits in (8, 16, 32, 64)}
NULLABLE |= {f"uint{bits}": f"UInt{bits}" for bits in (8, 16, 32, 64)}


def is_pandas(value: object) -> bool:
    """Return whether a value is a pandas DataFrame."""
    return is_a(value, "pandas", "DataFrame")


def is_polars(value: object) -> bool:
    """Return whether a value is a polars DataFrame."""
    return is_a(value, "polars", "DataFrame")


def is_arrow(value: object) -> bool:
    """Return whether a value is an Arrow table or record batch."""
    return is_a(value, "pyarrow", "Table", "RecordBatch")


def is_frame(value: object) -> bool:
    """Return whether a value is a DataFrame or an Arrow table."""
    return is_pandas(value) or is_polars(value) or is_arrow(value)


def snapshot(frame: Any) -> Any:
    """Return a frame that keeps its current content, copying the data only if the library offers nothing cheaper."""
    if is_pandas(frame):
        return frame.copy(deep=not _copies_on_write())
    return frame.clone() if is_polars(frame) else frame  # Arrow tables are immutable


def _copies_on_write() -> bool:
    import pandas as pd

    return int(pd.__version__.split(".")[0]) >= 3


def names(frame: Any) -> list[str]:
    """Return the column names, preceded by those of a pandas index that holds information."""
    if is_arrow(frame):
        return [str(name) for name in frame.schema.names]
    return [name for name, _ in _index(frame)] + [str(name) for name in frame.columns]


def columns(frame: Any) -> list[Column]:
    """Return the columns of a frame."""
    if is_pandas(frame):
        index = [level.to_series() for _, level in _index(frame)]
        return [_from_pandas(series) for series in [*index, *(frame.iloc[:, i] for i in range(frame.shape[1]))]]
    if is_polars(frame):
        return [_from_polars(series) for series in frame.iter_columns()]
    return [_from_arrow(frame.column(i)) for i in range(frame.num_columns)]


def _index(frame: Any) -> list[tuple[str, Any]]:
    """Return the levels of a pandas index that have a name or are not integers; plain row numbers hold no information."""
    if not is_pandas(frame):
        return []
    index, taken = frame.index, {str(name) for name in frame.columns}
    levels = [index.get_level_values(level) for level in range(index.nlevels)]
    telling = [level for level in levels if level.name is not None or level.dtype.kind not in "iu"]
    named = [(f"index{at or ''}" if level.name is None else str(level.name), level) for at, level in enumerate(telling)]
    return [(name, level) for name, level in named if name not in taken]


def _from_pandas(series: Any) -> Column:
    dtype, kind = series.dtype, getattr(series.dtype, "kind", "O")
    zone = getattr(dtype, "tz", None)
    if zone is not None:
        return Column(series.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy(), zone=str(zone))
    if type(dtype).__module__.startswith("numpy") and kind in "biufMm":
        return Column(series.to_numpy())
    if kind in "biuf" and hasattr(dtype, "numpy_dtype") and type(dtype).__name__ != "ArrowDtype":
        missing = series.isna().to_numpy()
        values = series.to_numpy(dtype=dtype.numpy_dtype, na_value=False if kind == "b" else 0)
        return Column(values, ~missing if missing.any() else None)
    cells = series.astype(object).tolist()
    if type(dtype).__module__.startswith("numpy"):
        return _from_objects(cells)
    return _from_objects([None if gone else cell for cell, gone in zip(cells, series.isna().tolist(), strict=True)])


def _from_objects(values: list[Any]) -> Column:
    """Return a column of cells of any type; objects that tables do not support are stored as text."""
    if set(map(type, values)) <= PLAIN:
        return Column(cells=values)
    return Column(cells=[_clean_or_text(value) for value in values])


def _clean_or_text(value: Any) -> Any:
    try:
        return clean(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        notices.once(
            f"table cell {kind}",
            f"A DataFrame has cells of type {kind}, which tables do not keep. They were stored as their text. "
            "Convert that column before logging it to choose how it is kept.",
        )
        return str(value)


def _from_polars(series: Any) -> Column:
    import polars as pl

    kind = series.dtype
    if str(kind) in ("Int128", "UInt128"):
        return Column(cells=series.to_list())
    if (kind.is_numeric() and not kind.is_decimal()) or kind == pl.Boolean:
        filled = series.fill_null(False if kind == pl.Boolean else 0)
        return Column(filled.to_numpy(), _valid(series.null_count(), lambda: series.is_not_null().to_numpy()))
    if kind in (pl.Datetime, pl.Duration):
        letter = "M" if kind == pl.Datetime else "m"
        ticks = series.to_physical().fill_null(-(2**63)).to_numpy()  # the smallest int64 is NaT
        return Column(ticks.view(f"<{letter}8[{kind.time_unit}]"), zone=getattr(kind, "time_zone", None))
    return _from_objects(series.to_list())


def _from_arrow(column: Any) -> Column:
    import pyarrow as pa

    kind, types = column.type, pa.types
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        filled = column.fill_null(pa.scalar(False if types.is_boolean(kind) else 0).cast(kind)) if column.null_count else column
        valid = _valid(column.null_count, lambda: column.is_valid().to_numpy(zero_copy_only=False))
        return Column(filled.to_numpy(zero_copy_only=False), valid)
    if types.is_timestamp(kind) or types.is_duration(kind):
        letter = "M" if types.is_timestamp(kind) else "m"
        ticks = column.cast(pa.int64()).fill_null(-(2**63)).to_numpy(zero_copy_only=False)
        return Column(ticks.view(f"<{letter}8[{kind.unit}]"), zone=getattr(kind, "tz", None))
    return _from_objects(column.to_pylist())


def _valid(missing: int, mark: Callable[[], Array]) -> Array | None:
    return mark() if missing else None


def to_pandas(named: list[tuple[str, Column]]) -> Any:
    """Build a pandas DataFrame."""
    with needed("pandas", "pandas", "Table.to_pandas()"):
        import pandas as pd
    return pd.DataFrame({name: _to_pandas(pd, narrowed(column)) for name, column in named})


def _to_pandas(pd: Any, column: Column) -> Any:
    if column.values is None:
        cells = listed(column)
        text = str in (kinds := set(map(type, cells))) and kinds <= {str, NoneType}
        return pd.Series(cells) if text else pd.Series(cells, dtype=object)
    series = pd.Series(column.values)
    if column.zone is not None:
        return series.dt.tz_localize("UTC").dt.tz_convert(column.zone)
    if column.valid is not None:
        series = series.astype(NULLABLE[column.values.dtype.name]).mask(~column.valid)
    return series


def to_polars(named: list[tuple[str, Column]]) -> Any:
    """Build a polars DataFrame."""
    with needed("polars", "polars", "Table.to_polars()"):
        import polars as pl
    return pl.DataFrame([_to_polars(pl, name, narrowed(column)) for name, column in named])


def _to_polars(pl: Any, name: str, column: Column) -> Any:
    if column.values is None:
        cells = listed(column)
        if any(isinstance(cell, Media) for cell in cells):
            return pl.Series(name, cells, dtype=pl.Object)
        try:
            return pl.Series(name, cells if len(set(map(type, cells)) - {NoneType}) < 2 else _texts(cells))
        except (TypeError, OverflowError, pl.exceptions.ComputeError, pl.exceptions.SchemaError):
            return pl.Series(name, _texts(cells))
    values = column.values
    if values.dtype.kind in "Mm" and values.dtype.str.endswith("[s]"):  # the coarsest unit of polars is milliseconds
        values = values.astype(values.dtype.str.replace("[s]", "[ms]"))
    series = pl.Series(name, values)
    if column.zone is not None:
        series = series.dt.replace_time_zone("UTC").dt.convert_time_zone(column.zone)
    if column.valid is not None:
        series = series.set(pl.Series(~column.valid), None)
    return series


def _texts(cells: list[Any]) -> list[str | None]:
    """Return cells of mixed types as text, the only type that can represent them all."""
    return [None if cell is None else str(cell) for cell in cells]


def to_arrow(named: list[tuple[str, Column]]) -> Any:
    """Build an Arrow table; media become their encoded bytes."""
    with needed("pyarrow", "arrow", "Table.to_arrow()"):
        import pyarrow as pa
    return pa.table({name: _to_arrow(pa, narrowed(column)) for name, column in named})


def _to_arrow(pa: Any, column: Column) -> Any:
    if column.values is None:
        cells = [bytes(cell.encode().data) if isinstance(cell, Media) else cell for cell in listed(column)]
        try:
            return pa.array(cells)
        except (TypeError, OverflowError, pa.ArrowException):
            return pa.array(_texts(cells), pa.string())
    missing = None if column.valid is None else ~column.valid
    filled = pa.array(column.values, mask=missing)
    if column.zone is None:
        return filled
    return filled.cast(pa.timestamp(filled.type.unit, "UTC")).cast(pa.timestamp(filled.type.unit, column.zone))
