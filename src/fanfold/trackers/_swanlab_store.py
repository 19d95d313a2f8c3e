"""SwanLab's ways: its store on disk, read with its own reader, its settings, and the types it gives to values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .destination import kind_of

_TYPES = {"video": "image", "figure": "image", "histogram": "echarts", "table": "echarts", "plotly": "html"}


def records(file: Path) -> Iterator[Any]:
    """Yield a store's records up to a torn end."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

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
    """Return a set for very many steps, with SwanLab's own compression."""
    from pyroaring import BitMap64

    return BitMap64()


def points_of(stores: Iterator[Path]) -> Iterator[tuple[str, int]]:
    """Yield the key and step of each point in the stores."""
    for file in stores:
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind in ("scalar", "media"):
                point = getattr(record, kind)
                yield point.key, point.step


def arrival_counter(swanlab: Any, destination: Any) -> Any:
    """Return a callback that counts the values written by SwanLab's thread."""

    class Flushed(swanlab.Callback):  # type: ignore[misc]
        name = "fanfold"

        def on_scalar_flush(self, scalar_records: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            destination.arrived += sum(not item.key.startswith("__swanlab__") for item in scalar_records)

        on_media_flush = on_scalar_flush

    return Flushed()


def quiet_settings(swanlab: Any) -> Any:
    """Return settings without hardware probes and terminal capture: in a relay, neither describes the training process."""
    off = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)
    return swanlab.Settings(
        interactive=False, probe=swanlab.Settings.Probe(**off), terminal=swanlab.Settings.Terminal(proxy_type="none")
    )


def type_of(value: Any) -> str:
    """Return the type SwanLab assigns to a value; each key has one."""
    one = value[0] if isinstance(value, list) and value else value
    if isinstance(one, (bool, int, float)):
        return "number"
    kind = kind_of(one)
    return type(one).__name__.lower() if kind == "native" else _TYPES.get(kind, kind)


def spelled_out(value: Any) -> Any:
    """Convert values SwanLab would change to text: it turns None into {}, and drops the sign of infinity."""
    return str(value) if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
