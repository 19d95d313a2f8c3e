"""Questions about a whole sweep: which config values matter for a metric."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import SettingError
from ..plain import flat
from ..store import importance as forests
from ..store.query import Store
from . import data


class ImportanceQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which metric (a column such as `metric:loss` or `min:loss`), over which runs; without `runs`, over all of the project."""

    project: str
    metric: str
    runs: list[str] | None = None


def importance(store: Store, query: ImportanceQuery) -> dict[str, Any]:
    """Return how much each config value matters for a metric."""
    if query.runs is not None and len(query.runs) > data.MOST_RUNS:
        raise SettingError(f"that is more than {data.MOST_RUNS} runs. None was read. Ask for fewer.")
    asked = data.ColumnQuery(query.project, [query.metric], query.runs)
    rows, cells = data.column(store, asked, query.metric)
    found = forests.importance([flat(row.config) for row in rows], cells)
    for field in found["fields"]:
        field["name"] = f"config:{field['name']}"
    return {"metric": query.metric, **found}
