"""A reader for wandb's transaction log, the `.wandb` file: the library writes it but offers no reader.

A header of 7 bytes, then blocks of 32 KiB with chunks (crc32, length, type, data) as in LevelDB's log; a record is one protobuf
message in one or more chunks. A log may be read while it grows: a torn end is left for the next read.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = b":W&B\xe1\xbe"
BLOCK = 32768
_CHUNK = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


class WandbLog:
    """One `.wandb` file; each read continues where the last one ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: Counter[str] = Counter()  # records by kind: history (a row), config, artifact, alert, …
        self.summary: set[str] = set()
        self.exit: int | None = None
        self.last_step = -1
        self.keys: Counter[str] = Counter()
        self._at = len(HEADER) + 1

    def refresh(self) -> WandbLog:
        """Read new records and update the counts."""
        for record in self.records():
            kind = record.WhichOneof("record_type")
            self.seen[kind] += 1
            if kind == "history":
                self.last_step = max(self.last_step, record.history.step.num)
                self.keys.update({key_of(item) for item in record.history.item})
            elif kind == "summary":
                self.summary.update(key_of(item) for item in record.summary.update)
            elif kind == "exit":
                self.exit = record.exit.exit_code
        return self

    def records(self) -> Iterator[Any]:
        """Yield the complete records after the last one yielded."""
        from wandb.proto import wandb_internal_pb2

        for data in self._messages():
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined,unused-ignore]
            record.ParseFromString(data)
            yield record

    def _messages(self) -> Iterator[bytes]:
        start, blob = self._read()
        at, parts = 0, b""
        while at + _CHUNK.size <= len(blob):
            rest = BLOCK - (start + at) % BLOCK
            if rest < _CHUNK.size:  # a block's last bytes never start a chunk
                at += rest
                continue
            crc, length, kind = _CHUNK.unpack_from(blob, at)
            data = blob[at + _CHUNK.size : at + _CHUNK.size + length]
            if len(data) < length or crc != zlib.crc32(bytes([kind]) + data):
                return
            at += _CHUNK.size + length
            parts = data if kind in (_FULL, _FIRST) else parts + data
            if kind in (_FULL, _LAST):
                self._at = start + at
                yield parts

    def _read(self) -> tuple[int, bytes]:
        try:
            with self.path.open("rb") as file:
                known = file.read(len(HEADER)) == HEADER
                file.seek(self._at)
                return self._at, file.read() if known else b""
        except FileNotFoundError:
            return self._at, b""


def key_of(item: Any) -> str:
    """Return the key of a history or config item: a dict arrives as one item per leaf."""
    return str(item.nested_key[0] if item.nested_key else item.key)


def put(target: dict[str, Any], item: Any) -> None:
    """Insert an item's value at its place in a nested dict."""
    *path, last = list(item.nested_key) or [item.key]
    for key in path:
        target = target.setdefault(key, {})
    target[last] = json.loads(item.value_json, parse_int=_integer)


def _integer(text: str) -> float:
    return -0.0 if text == "-0" else int(text)  # a float without a fraction is written like an integer, including its sign


def logs_of(folder: Path, run_id: str) -> list[WandbLog]:
    """Return every log of a run id in wandb's folder, oldest first: each attempt has its own folder."""
    found = [path for path in folder.glob("*run-*/run-*.wandb") if path.name == f"run-{run_id}.wandb"]
    return [WandbLog(path) for path in sorted(found, key=lambda path: path.parent.name.removeprefix("offline-"))]
