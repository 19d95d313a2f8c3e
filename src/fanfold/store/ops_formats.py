"""Operator profiles as monitoring systems read them: Prometheus text, and OpenTelemetry's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .._version import __version__
from ..probes.op_table import bucket_start
from .ops import steps_of
from .run import StoredRun

NAMES = ("op", "overload", "scope", "thread", "label", "role", "inputs")


class ProfileMetric(NamedTuple):
    """One metric: its value is computed from a row of a profile."""

    kind: str
    name: str
    unit: str
    meaning: str
    value: Callable[[dict[str, Any]], float]


# Counters only grow: they count what was observed. Estimates for all calls are gauges, corrected with every observed step.
METERS = (
    ProfileMetric("counter", "observed_calls", "1", "Calls of the operator that were observed.", lambda row: row["count"]),
    ProfileMetric("counter", "observed_host_seconds", "s", "Host time of the observed calls.", lambda row: row["total_ns"] / 1e9),
    ProfileMetric(
        "counter", "observed_self_seconds", "s", "Their self time, where it is known.", lambda row: row["own_ns"] / 1e9
    ),
    # Only for rows that have any: most processes have no device, and few calls are timed there.
    ProfileMetric("counter", "device_timed_calls", "1", "Calls that were timed on the device.", lambda row: row["device_count"]),
    ProfileMetric("counter", "device_seconds", "s", "Device time of those calls.", lambda row: row["device_ns"] / 1e9),
    ProfileMetric("gauge", "calls", "1", "Calls so far, estimated.", lambda row: row["count"] * row["scale"]),
    ProfileMetric("gauge", "host_seconds", "s", "Host time so far, estimated.", lambda row: row["total_ns"] * row["scale"] / 1e9),
    ProfileMetric("gauge", "self_seconds", "s", "Self time so far, estimated.", lambda row: row["self_ns"] * row["scale"] / 1e9),
)
STEPS = {"steps": "Optimizer steps taken.", "observed_steps": "Optimizer steps observed in full."}
LINE_ROWS = 128  # 0.3 MB of JSON, 0.9 with long names: a collector's file receiver takes lines of up to 1 MiB
OCTAVES = tuple(2.0**power for power in range(8, 36, 2))  # 256 ns to 17 s

Found = list[tuple[StoredRun, list[dict[str, Any]]]]


def _meters(rows: list[dict[str, Any]]) -> Iterator[tuple[ProfileMetric, list[tuple[dict[str, Any], float]]]]:
    """Yield each metric with the rows that have it, and their values."""
    for meter in METERS:
        having = [row for row in rows if row["device_count"]] if meter.name.startswith("device_") else rows
        if having or having is rows:
            yield meter, [(row, float(meter.value(row))) for row in having]


def prometheus(found: Found) -> str:
    """Return the text format that node_exporter's textfile collector reads."""
    lines: list[str] = []

    def add(name: str, kind: str, meaning: str, values: list[tuple[dict[str, Any], float]]) -> None:
        name = f"fanfold_{name}" + "_total" * (kind == "counter")
        lines.extend([f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"])
        lines.extend(f"{name}{{{_labels(row)}}} {value:.15g}" for row, value in values)

    for meter, values in _meters([{**row, "project": run.project, "run": run.id} for run, rows in found for row in rows]):
        add(f"op_{meter.name}", meter.kind, meter.meaning, values)
    steps = [{**one, "project": run.project, "run": run.id} for run, rows in found if rows for one in steps_of(run)]
    for name, meaning in STEPS.items():
        add(name, "counter", meaning, [(one, one[name]) for one in steps])
    return "\n".join(lines) + "\n"


def _labels(row: dict[str, Any]) -> str:
    names = [name for name in ("project", "run", "rank", "node", *NAMES) if name in row and (name != "inputs" or row[name])]
    return labels({name: row[name] for name in names})


def labels(values: dict[str, Any]) -> str:
    """Return labels as Prometheus reads them, without the braces."""
    escaped = (str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for value in values.values())
    return ",".join(f'{name}="{value}"' for name, value in zip(values, escaped, strict=True))


def otlp(found: Found) -> str:
    """Return ExportMetricsServiceRequests as JSON, one per line, as an OpenTelemetry collector's file receiver reads them."""
    return "".join(json.dumps({"resourceMetrics": [part]}) + "\n" for run, rows in found for part in resources(run, rows))


def resources(run: StoredRun, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
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
            yield {"resource": {"attributes": attributes(about)}, "scopeMetrics": [scope]}


def _metrics(run: StoredRun, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    span = _span(run)
    for meter, values in _meters(rows):
        points = [{"attributes": attributes(_named(row)), **span, "asDouble": value} for row, value in values]
        form = _sum(points) if meter.kind == "counter" else {"gauge": {"dataPoints": points}}
        yield {"name": f"fanfold.op.{meter.name}", "unit": meter.unit, "description": meter.meaning, **form}
    histogram = {"dataPoints": [{**_histogram(row), **span} for row in rows], "aggregationTemporality": 2}
    yield {"name": "fanfold.op.duration", "unit": "s", "description": "Host time of the observed calls.", "histogram": histogram}


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


def _named(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in NAMES if row[name] != ""}


def _histogram(row: dict[str, Any]) -> dict[str, Any]:
    counts = [0] * (len(OCTAVES) + 1)
    for bucket, count in row["hist"].items():
        counts[sum(bucket_start(bucket) >= bound for bound in OCTAVES)] += count
    return {
        "attributes": attributes(_named(row)),
        "count": str(sum(counts)),
        "sum": row["total_ns"] / 1e9,
        "max": row["max_ns"] / 1e9,
        "bucketCounts": [str(count) for count in counts],
        "explicitBounds": [bound / 1e9 for bound in OCTAVES],
    }


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return names and values as OpenTelemetry's attributes."""
    return [{"key": name, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}}
            for name, value in values.items()]  # fmt: skip


FORMATS: dict[str, Callable[[Found], str]] = {"prometheus": prometheus, "otlp": otlp}
