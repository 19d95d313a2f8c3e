"""Operator profiles as monitoring systems read them: Prometheus text, and OpenTelemetry's JSON. Printed, never sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from .. import __version__
from ..probes.op_table import bucket_start
from ..store import StoredRun
from ..store.ops import steps_of

NAMES = ("op", "overload", "scope", "thread", "label", "role")
Meter = tuple[str, str, str, Callable[[dict[str, Any]], float]]  # name, unit, what it says, and how a row tells it
# What was observed only grows. What it stands for does not: that is corrected with every step that is observed.
COUNTERS: tuple[Meter, ...] = (
    ("observed_calls", "1", "Calls of the operator that were observed.", lambda row: float(row["count"])),
    ("observed_host_seconds", "s", "Host time of the calls observed.", lambda row: row["total_ns"] / 1e9),
    ("observed_self_seconds", "s", "Of it their own, where it is known.", lambda row: row["own_ns"] / 1e9),
)
GAUGES: tuple[Meter, ...] = (
    ("calls", "1", "Calls of the operator in the run so far, estimated.", lambda row: row["count"] * row["scale"]),
    ("host_seconds", "s", "Host time inside the operator so far, estimated.", lambda row: row["total_ns"] * row["scale"] / 1e9),
    ("self_seconds", "s", "Host time of its own so far, estimated.", lambda row: row["self_ns"] * row["scale"] / 1e9),
)
STEPS = {"steps": "Optimizer steps taken.", "observed_steps": "Optimizer steps observed in full."}
# Only of rows that have any: most processes have no device, and of the others few calls are timed there.
DEVICE: tuple[Meter, ...] = (
    ("device_timed_calls", "1", "Calls of the operator that were timed on the device.", lambda row: float(row["device_count"])),
    ("device_seconds", "s", "Device time of the calls that were timed there.", lambda row: row["device_ns"] / 1e9),
)
LINE_ROWS = 128  # 0.3 MB of JSON, 0.9 with long names: a collector's file receiver takes lines of up to 1 MiB
OCTAVES = tuple(2.0**power for power in range(8, 36, 2))  # 256 ns to 17 s


Found = list[tuple[StoredRun, list[dict[str, Any]]]]


def prometheus(found: Found) -> str:
    """Write the text form that node_exporter's textfile collector takes."""
    named = [(_labels(run, row), row) for run, rows in found for row in rows]
    timed = [(labels, row) for labels, row in named if row["device_count"]]
    lines: list[str] = []
    for meters, kind in ((COUNTERS + DEVICE * bool(timed), "counter"), (GAUGES, "gauge")):
        for name, _, meaning, value in meters:
            full = f"fanfold_op_{name}" + "_total" * (kind == "counter")
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}"]
            counted = timed if name.startswith("device_") else named
            lines += [f"{full}{{{labels}}} {value(row):.15g}" for labels, row in counted]
    steps = [(run, one) for run, rows in found if rows for one in steps_of(run)]
    for name, meaning in STEPS.items():
        lines += [f"# HELP fanfold_{name}_total {meaning}", f"# TYPE fanfold_{name}_total counter"]
        lines += [f"fanfold_{name}_total{{{_labels(run, one)}}} {one[name]}" for run, one in steps]
    return "\n".join(lines) + "\n"


def _labels(run: StoredRun, row: dict[str, Any]) -> str:
    named = {"project": run.project, "run": run.id, "rank": row["rank"], "node": row["node"]}
    named |= {name: row[name] for name in NAMES if name in row}
    if row.get("inputs"):
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
            metrics += [] if at else list(_steps(run, rank, node))
            scope = {"scope": {"name": "fanfold.ops", "version": __version__}, "metrics": metrics}
            yield {"resource": {"attributes": _attributes(about)}, "scopeMetrics": [scope]}


def _metrics(run: StoredRun, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    span = _span(run)
    timed = [row for row in rows if row["device_count"]]
    for meters, form in ((COUNTERS + DEVICE * bool(timed), _sum), (GAUGES, _gauge)):
        for name, unit, meaning, value in meters:
            counted = timed if name.startswith("device_") else rows
            points = [{"attributes": _attributes(_named(row)), **span, "asDouble": value(row)} for row in counted]
            yield {"name": f"fanfold.op.{name}", "unit": unit, "description": meaning, **form(points)}
    histogram = {"dataPoints": [{**_histogram(row), **span} for row in rows], "aggregationTemporality": 2}
    yield {"name": "fanfold.op.duration", "unit": "s", "description": "Host time of the calls observed.", "histogram": histogram}


def _steps(run: StoredRun, rank: int, node: str) -> Iterator[dict[str, Any]]:
    for one in steps_of(run):
        if (one["rank"], one["node"]) == (rank, node):
            for name, meaning in STEPS.items():
                points = [{"attributes": [], **_span(run), "asInt": str(one[name])}]
                yield {"name": f"fanfold.{name}", "unit": "1", "description": meaning, **_sum(points)}


def _span(run: StoredRun) -> dict[str, str]:
    return {"startTimeUnixNano": str(int(run.started * 1e9)), "timeUnixNano": str(int(run.seen * 1e9))}


def _sum(points: list[dict[str, Any]]) -> dict[str, Any]:
    return {"sum": {"dataPoints": points, "aggregationTemporality": 2, "isMonotonic": True}}


def _gauge(points: list[dict[str, Any]]) -> dict[str, Any]:
    return {"gauge": {"dataPoints": points}}


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
