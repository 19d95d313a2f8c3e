"""Reader of a process's operator table: from its memory, its file in the run, or a snapshot in a journal.

The layout is defined in native/table.h. A run directory is untrusted input, so all lengths are checked.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

MAGIC: Final = b"FANFOPS\0"
VERSIONS: Final = (1, 2)  # version 1 always observed ranges, and had no flag for it
HEAD: Final = struct.Struct("<8sIIIIiIIIQQQdIIIIQQQQQQQQQQ64sI4xQQQQ")
ROW: Final = struct.Struct("<IHHHHBBHQQQQQQQQ96s80s")
KINDS, LABELS, USAGE, ROWS = 512, 1536, 34304, 99840
ROW_SIZE: Final = 768
MAX_ROWS: Final = 4096
BUCKETS: Final = 128
USER, TOLD = 7, 12  # ranges from torch's callbacks; waits for data reported by step_hooks.py, every one of them
SCOPES: Final = {0: "forward", 1: "backward", 2: "torchscript", USER: "user", 10: "compile", 11: "sampled", TOLD: "user"}
_HIST = struct.Struct(f"<{BUCKETS}I")
_RECORD = struct.Struct("<IQ")
_NO_HIST = bytes(_HIST.size)


class NotATable(ValueError):
    """Bytes that are not an operator table this version can read."""


@dataclass
class OpTable:
    """The profile of one process: facts about how it was counted, and the rows."""

    facts: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)


_FACTS = (
    "magic version row_size capacity pid rank every window worker id parent started sampling used labels kinds usage_bytes steps "
    "observed windows seen_ns opened orphans overflow usage_lost device_lost now node ranges "
    "cpu_started cpu_opened cpu_seen cpu_now"
).split()


def take(library: Any) -> bytes:
    """Copy this process's table: the head and the rows in use, without the usage records."""
    library.ff_stamp_time()
    base = library.ff_block()
    used = min(ctypes.c_uint32.from_address(base + 72).value, MAX_ROWS)
    return ctypes.string_at(base, USAGE) + ctypes.string_at(base + ROWS, used * ROW_SIZE)


def pack(table: bytes) -> bytes:
    """Compress a table for the journal: most of it is zeros."""
    return zlib.compress(table, 3)


def unpack(data: bytes) -> bytes:
    """Undo pack(), within the size a table can have."""
    stream = zlib.decompressobj()
    try:
        return stream.decompress(data, USAGE + MAX_ROWS * ROW_SIZE)
    except zlib.error as error:
        raise NotATable(str(error)) from error


def from_file(data: bytes) -> bytes:
    """Convert the content of a table file to the form take() returns."""
    return data[:USAGE] + data[ROWS:]


def parse(table: bytes) -> OpTable:
    """Parse a table as returned by take(), from_file() or unpack()."""
    if len(table) < USAGE:
        raise NotATable("too short")
    facts = dict(zip(_FACTS, HEAD.unpack_from(table), strict=True))
    version = facts.pop("version")
    if facts.pop("magic") != MAGIC or version not in VERSIONS or facts.pop("row_size") != ROW_SIZE:
        raise NotATable("another magic, version or row size")
    facts["ranges"] = bool(facts["ranges"]) or version == 1
    facts["id"], facts["parent"] = f"{facts['id']:016x}", f"{facts['parent']:016x}"
    facts["node"] = _text(facts["node"])
    kinds = [_text(table[at : at + 16]) for at in range(KINDS, LABELS, 16)]
    labels = [_text(table[at : at + 128]) for at in range(LABELS, USAGE, 128)]
    return OpTable(facts, list(_rows(table, facts, kinds, labels)))


def _rows(table: bytes, facts: dict[str, Any], kinds: list[str], labels: list[str]) -> Iterator[dict[str, Any]]:
    room = (len(table) - USAGE) // ROW_SIZE
    for at in range(USAGE, USAGE + min(facts["used"], room, MAX_ROWS) * ROW_SIZE, ROW_SIZE):
        (ready, name, overload, inputs, label, scope, kind, _, _, count, total, own, whole, longest, pairs, device,
         names, shapes) = ROW.unpack_from(table, at)  # fmt: skip
        if ready != 1 or not count:
            continue
        text = names[: name + overload].decode("utf-8", "replace")
        row = {
            "op": text[:name],
            "overload": text[name:],
            "scope": SCOPES.get(scope, str(scope)),
            "thread": kinds[kind] if kind < len(kinds) else "",
            "label": labels[label] if label < len(labels) else "",
            "inputs": shapes[:inputs].decode("utf-8", "replace"),
            "all": scope == TOLD or (scope == USER and facts["ranges"]),
            "count": count,
            "total_ns": total,
            # Self time is known only for calls inside which everything was observed, so it is scaled up. Inside a wait for
            # data, nothing else is likely to run: if none was observed in full, all of its time is self time.
            "self_ns": round(total * own / whole) if whole else total if scope == TOLD else 0,
            "own_ns": own,
            "max_ns": longest,
            "device_count": pairs,
            "device_ns": device,
            "hist": _histogram(table, at + ROW.size),
        }
        yield row


def _histogram(table: bytes, at: int) -> dict[int, int]:
    data = table[at : at + _HIST.size]
    return {} if data == _NO_HIST else {bucket: count for bucket, count in enumerate(_HIST.unpack(data)) if count}


def scale_of(facts: dict[str, Any], row: dict[str, Any]) -> float:
    """Return how many calls each observed call of a row stands for."""
    if row.get("all", row["scope"] == "user"):  # every call was observed; rows without this flag are from version 1
        return 1.0
    if facts["sampling"]:
        return 1.0 / max(float(facts["sampling"]), 1e-9)
    if facts["every"] and facts["window"] >= facts["every"] and not facts.get("profiler"):
        return 1.0
    if facts["observed"]:
        return max(1.0, float(facts["steps"] / facts["observed"]))
    # Without steps, short moments were observed. They are weighted by CPU time if it is known: the thread that opens and closes
    # them is scheduled mostly when others are not, so by wall time, moments in which the program is idle would count too much.
    if (seen := facts.get("cpu_seen", 0)) and facts["cpu_now"] > facts["cpu_started"]:
        return max(1.0, float((facts["cpu_now"] - facts["cpu_started"]) / seen))
    elapsed = max(facts["now"] - facts["started"], 0)
    return max(1.0, float(elapsed / facts["seen_ns"])) if facts["seen_ns"] and facts["now"] else 1.0


def bucket_start(bucket: int) -> float:
    """Return the lower bound of a histogram bucket, in nanoseconds."""
    return float(bucket) if bucket < 4 else float(1 << (bucket // 4 + 1)) * (1 + (bucket % 4) / 4)


def quantile(hist: dict[int, int], share: float) -> float:
    """Return the duration that `share` of the calls do not exceed, in nanoseconds, to within a bucket (a fifth)."""
    left = share * sum(hist.values())
    for bucket in sorted(hist):
        if hist[bucket] >= left:
            low, high = bucket_start(bucket), bucket_start(bucket + 1)
            return low + (high - low) * left / hist[bucket]
        left -= hist[bucket]
    return 0.0


def parse_file(data: bytes) -> OpTable:
    """Parse a table file, with the API usage its process could not pass on."""
    table = parse(from_file(data))
    table.usage = file_usage(data)
    return table


def usage_records(data: bytes) -> list[dict[str, Any]]:
    """Parse API usage records: each has a key, a time and, for metadata events, names and values."""
    found, at = [], 0
    while at + _RECORD.size <= len(data):
        size, when = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if at + size > len(data):
            break
        key, *rest = data[at : at + size].decode("utf-8", "replace").split("\0")
        at += size
        found.append({"key": key, "t": when, "data": dict(zip(rest[::2], rest[1::2], strict=False))})
    return found


def file_usage(data: bytes) -> list[dict[str, Any]]:
    """Parse the API usage records in a table file: those its process could not pass on."""
    size = min(struct.unpack_from("<I", data, 84)[0], ROWS - USAGE) if len(data) >= ROWS else 0
    return usage_records(data[USAGE : USAGE + size])


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("utf-8", "replace")
