"""Neptune: Parquet files of neptune-exporter, folders of offline runs (1.x), and local databases of neptune-scale.

What they hold of a run is a set of attributes, each with a path and a type; here they become events.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import neptune_offline, neptune_parquet, neptune_scale
from .events import Event, Found


class NeptuneImporter:
    """Runs that Neptune's exporter or clients left on disk."""

    kind = "neptune"
    title = "Neptune"

    def find(self, path: Path) -> Iterator[Found]:
        """Yield the runs of an exported project, of an offline folder, or of a local database."""
        if path.is_file():
            yield from neptune_scale.find(path)
        elif neptune_offline.is_run(path) or neptune_offline.is_home(path):
            yield from neptune_offline.find(path)
        else:
            yield from neptune_parquet.find(path)

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        """Yield a run's events."""
        source = neptune_scale if found.paths[0].is_file() and not _is_parquet(found.paths[0]) else neptune_parquet
        yield from (neptune_offline if found.paths[0].is_dir() else source).read(found, position)


def _is_parquet(path: Path) -> bool:
    return re.search(r"_part_[0-9]+\.parquet$", path.name) is not None
