"""Runs as data frames: one row per step, one column per key."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import needed

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


_LIBRARIES = {"arrow": ("pyarrow", "table"), "pandas": ("pandas", "DataFrame"), "polars": ("polars", "DataFrame")}


def frame(run: StoredRun, kind: str, keys: list[str] | None, *, rank: int | None, fold: str | None) -> Any:
    """Return a table of the given kind."""
    library, constructor = _LIBRARIES[kind]
    with needed(library, kind, f"to_{kind}()"):
        module = importlib.import_module(library)
    return getattr(module, constructor)(columns(run, keys, rank=rank, fold=fold))
