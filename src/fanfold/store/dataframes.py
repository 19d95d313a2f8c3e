"""Runs as data frames: one row per step, one column per key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import missing_extra

if TYPE_CHECKING:
    from .run import StoredRun


def columns(run: StoredRun, keys: list[str] | None, *, rank: int | None, fold: str | None) -> dict[str, Any]:
    """Align all series on the union of their steps; gaps are NaN. If a step was logged twice, the last value counts."""
    import numpy as np

    names = run.keys() if keys is None else keys
    series = {name: run.series(name, rank=rank, fold=fold) for name in names}
    steps = np.unique(np.concatenate([one.steps for one in series.values()])) if series else np.empty(0, np.int64)
    table: dict[str, Any] = {"step": steps}
    for name, one in series.items():
        place = np.searchsorted(steps, one.steps)
        if len(np.unique(place)) == len(steps):
            column = np.empty(len(steps), one.values.dtype)
        else:
            column = np.full(len(steps), np.nan)
        column[place] = one.values
        table["_step" if name == "step" else name] = column
    return table


def to_arrow(run: StoredRun, keys: list[str] | None, **how: Any) -> Any:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise missing_extra("pyarrow", "arrow", "to_arrow()") from error
    return pa.table(columns(run, keys, **how))


def to_pandas(run: StoredRun, keys: list[str] | None, **how: Any) -> Any:
    try:
        import pandas as pd
    except ImportError as error:
        raise missing_extra("pandas", "pandas", "to_pandas()") from error
    return pd.DataFrame(columns(run, keys, **how))


def to_polars(run: StoredRun, keys: list[str] | None, **how: Any) -> Any:
    try:
        import polars as pl
    except ImportError as error:
        raise missing_extra("polars", "polars", "to_polars()") from error
    return pl.DataFrame(columns(run, keys, **how))
