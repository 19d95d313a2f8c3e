"""SwanLab's store on disk, read with SwanLab's own reader for the points and config of earlier starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(file: Path) -> Iterator[Any]:
    """Yield a store's records up to a torn end; nothing if this SwanLab version has no reader."""
    try:
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.sdk.internal.core_python.store import DataStoreReader
    except ImportError:
        return
    reader = DataStoreReader()
    try:
        reader.open(file)
    except AssertionError:  # killed before its header was flushed
        return
    with contextlib.closing(reader):
        for data in reader:
            yield Record.FromString(data)


def written_config(folder: Path) -> dict[str, Any]:
    """Return the config that a start wrote to its folder."""
    import yaml

    file = folder / "files" / "config.yaml"
    found = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None
    return {key: entry["value"] for key, entry in (found or {}).items()}


def step_set() -> Any:
    """Return a set for very many steps: SwanLab's compressed one if available."""
    try:
        from pyroaring import BitMap64
    except ImportError:
        return set()
    return BitMap64()


def points_of(stores: Iterator[Path]) -> Iterator[tuple[str, int]]:
    """Yield the key and step of each point in the stores."""
    for file in stores:
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind in ("scalar", "media"):
                point = getattr(record, kind)
                yield point.key, point.step
