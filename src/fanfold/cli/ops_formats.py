"""Operator profiles as monitoring systems read them: Prometheus text, and OpenTelemetry's JSON. Printed, never sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from .. import __version__
from ..probes.image import bucket_start
from ..store import StoredRun

NAMES = ("op", "overload", "scope", "thread", "label", "role")
# name, what it counts, and how a row tells it
COUNTERS: tuple[tuple[str, str, str, Callable[[dict[str, Any]], float]], ...] = (
    ("calls", "1", "Calls of the operator, estimated from those observed.", lambda row: row["count"] * row["scale"]),
    ("observed_calls", "1", "Calls of the operator that were observed.", lambda row: float(row["count"])),
    ("host_seconds", "s", "Host time inside the operator, estimated.", lambda row: row["total_ns"] * row["scale"] / 1e9),
    ("self_seconds", "s", "Host time of the operator's own, estimated.", lambda row: row["self_ns"] * row["scale"] / 1e9),
)
# Only of rows that have any: most processes have no device, and of the others few calls are timed there.
DEVICE: tuple[tuple[str, str, str, Callable[[dict[str, Any]], float]], ...] = (
    ("device_timed_calls", "1", "Calls of the operator that were timed on the device.", lambda row: float(row["device_count"])),
    ("device_seconds", "s", "Device time of the calls that were timed there.", lambda row: row["device_ns"] / 1e9),
)
LINE_ROWS = 128  # 0.3 MB of JSON, 0.9 with long names: a collector's file receiver takes lines of up to 1 MiB
OCTAVES = tuple(2.0**power for power in range(8, 36, 2))  # 256 ns to 17 s


Found = list[tuple[StoredRun, list[dict[str, Any]]]]


def prometheus(found: Found) -> str:
    """Write the text form that node_exporter's textfile collector takes."""
    rows = [(run, row) for run, some in found for row in some]
    lines: list[str] = []
    timed = [(run, row) for run, row in rows if row["device_count"]]
    for name, _, meaning, value in COUNTERS + DEVICE * bool(timed):
        lines += [f"# HELP fanfold_op_{name}_total {meaning}", f"# TYPE fanfold_op_{name}_total counter"]
        counted = timed if name.startswith("device_") else rows
        lines += [f"fanfold_op_{name}_total{{{_labels(run, row)}}} {value(row):.15g}" for run, row in counted]
    return "\n".join(lines) + "\n"


def _labels(run: StoredRun, row: dict[str, Any]) -> str:
    named = {
        "project": run.project,
        "run": run.id,
        "rank": row["rank"],
        "node": row["node"],
        **{name: row[name] for name in NAMES},
    }
    if row["inputs"]:
        named["inputs"] = row["inputs"]
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in named.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def otlp(found: Found) -> str:
    """Write ExportMetricsServiceRequests as JSON, one a line, as an OpenTelemetry collector's file receiver takes them."""
    return "".join(json.dumps({"resourceMetrics": [part]}) + "\n" for run, rows in found for part in _resources(run, rows))


def _resources(run: StoredRun, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for rank, node in sorted({(row["rank"], row["node"]) for row in rows}):
        mine = [row for row in rows if (row["rank"], row["node"]) == (rank, node)]
        about = {
            "service.name": "fanfold",
            "host.name": node,
            "fanfold.project": run.project,
            "fanfold.run": run.id,
            "fanfold.rank": rank,
        }
        for at in range(0, len(mine), LINE_ROWS):
            metrics = list(_metrics(run, mine[at : at + LINE_ROWS]))
            scope = {"scope": {"name": "fanfold.ops", "version": __version__}, "metrics": metrics}
            yield {"resource": {"attributes": _attributes(about)}, "scopeMetrics": [scope]}


def _metrics(run: StoredRun, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    span = {"startTimeUnixNano": str(int(run.started * 1e9)), "timeUnixNano": str(int(run.seen * 1e9))}
    timed = [row for row in rows if row["device_count"]]
    for name, unit, meaning, value in COUNTERS + DEVICE * bool(timed):
        counted = timed if name.startswith("device_") else rows
        points = [{"attributes": _attributes(_named(row)), **span, "asDouble": value(row)} for row in counted]
        total = {"dataPoints": points, "aggregationTemporality": 2, "isMonotonic": True}
        yield {"name": f"fanfold.op.{name}", "unit": unit, "description": meaning, "sum": total}
    histogram = {"dataPoints": [{**_histogram(row), **span} for row in rows], "aggregationTemporality": 2}
    yield {"name": "fanfold.op.duration", "unit": "s", "description": "Host time of the calls observed.", "histogram": histogram}


def _named(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in (*NAMES, "inputs") if row[name] != ""}


def _histogram(row: dict[str, Any]) -> dict[str, Any]:
    counts = [0] * (len(OCTAVES) + 1)
    for bucket, count in row["hist"].items():
        counts[sum(bucket_start(bucket) >= bound for bound in OCTAVES)] += count
    return {
        "attributes": _attributes(_named(row)),
        "count": str(sum(counts)),
        "sum": row["total_ns"] / 1e9,
        "max": row["max_ns"] / 1e9,
        "bucketCounts": [str(count) for count in counts],
        "explicitBounds": [bound / 1e9 for bound in OCTAVES],
    }


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}}
            for name, value in values.items()]  # fmt: skip


FORMATS: dict[str, Callable[[Found], str]] = {"prometheus": prometheus, "otlp": otlp}
