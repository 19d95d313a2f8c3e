"""Counts of a run's processes: operators and API usage, from their journals and from the table files in the run."""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from ..journal import Kind, bodies
from ..journal.files import is_folder
from ..probes import op_table
from ..probes.worker_tables import ADDED, merge, read_file

MAX_UNPACKED = 32 << 20
MAX_ROWS = 1 << 16  # of a table that is not an image; images have at most 4096
KEPT = 3  # snapshots per process: if the newest is unusable, an earlier one may work
_WHERE = ("rank", "node", "role")
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | Annotated[float, msgspec.Meta(ge=0, le=1e300)]


class _Row(msgspec.Struct):
    """One row of a table that is not an image of native memory, and therefore untrusted."""

    op: str
    scope: str
    count: bodies.Count
    total_ns: bodies.Count
    self_ns: bodies.Count
    max_ns: bodies.Count
    overload: str = ""
    thread: str = ""
    label: str = ""
    inputs: str = ""
    all: bool | msgspec.UnsetType = msgspec.UNSET  # rows without it are of the first version
    own_ns: bodies.Count | msgspec.UnsetType = msgspec.UNSET
    device_count: bodies.Count = 0
    device_ns: bodies.Count = 0
    hist: dict[Annotated[int, msgspec.Meta(ge=0, lt=op_table.BUCKETS)], bodies.Count] = {}


class _Facts(msgspec.Struct):
    """The facts of such a table that are used in calculations."""

    id: str = ""
    rank: bodies.Rank | None = None
    node: str | None = None
    pid: bodies.Int64 | None = None
    worker: bool | bodies.Int64 | None = None
    sampling: _Number = 0
    every: _Number = 0
    window: _Number = 0
    observed: _Number = 0
    steps: _Number = 0
    now: _Number = 0
    started: _Number = 0
    seen_ns: _Number = 0
    cpu_started: _Number = 0
    cpu_seen: _Number = 0
    cpu_now: _Number = 0
    overflow: _Number = 0
    capacity: _Number = 0


_decoder = msgspec.msgpack.Decoder(Annotated[list[_Row], msgspec.Meta(max_length=MAX_ROWS)])


def tables(run: Any) -> list[op_table.OpTable]:
    """Return the newest table of each process of a run; a file left in the run is newer than the journal."""
    newest: dict[str, deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=KEPT))
    for event in _events(run, "ops"):
        newest[str(event.get("id"))].append(event)
    found: dict[str, op_table.OpTable] = {}
    folded: set[str] = set()
    for id, events in newest.items():  # unpacking is slow, and a day has a thousand snapshots
        for event in reversed(events):
            if (table := table_of(event)) is not None:
                found[id] = table
                folded |= {str(child) for child in event.get("folded") or ()}
                break
    for table in _files(run):
        if table.facts["id"] not in folded:
            found[table.facts["id"]] = table
    return list(found.values())


def _events(run: Any, name: str) -> Iterator[dict[str, Any]]:
    for journal in run.journals:
        for record in journal.records(Kind.EVENT):
            if record.data.event == name:
                found = {name: value for name, value in bodies.as_dict(record.data).items() if value is not None}
                # Usage of a forked child has its own pid.
                yield {"rank": journal.header.rank, "node": journal.header.node, "pid": journal.header.pid, **found}


def table_of(event: Mapping[str, Any]) -> op_table.OpTable | None:
    data = event.get("table")
    if not isinstance(data, bytes):
        return None
    try:
        if isinstance(event.get("facts"), dict):
            rows = _decoder.decode(zlib.decompressobj().decompress(data, MAX_UNPACKED))
            known = msgspec.to_builtins(msgspec.convert(event["facts"], _Facts))
            return op_table.OpTable({**event["facts"], **known}, [_row(row) for row in rows])
        return op_table.parse(op_table.unpack(data))
    except (op_table.NotATable, msgspec.MsgspecError, zlib.error):
        return None  # written by another version, or by something else


def _row(row: _Row) -> dict[str, Any]:
    found = msgspec.structs.asdict(row)
    if row.all is msgspec.UNSET:
        del found["all"]
    return {**found, "own_ns": row.self_ns if row.own_ns is msgspec.UNSET else row.own_ns}


def _files(run: Any) -> Iterator[op_table.OpTable]:
    for path in sorted((run.path / "ops").glob("*.ops")) if is_folder(run.path / "ops") else ():
        data = read_file(path)
        try:
            if data:
                table = op_table.parse(op_table.from_file(data))
                table.facts["now"] = max(table.facts["now"], int(path.stat().st_mtime * 1e9))
                table.usage = op_table.file_usage(data)
                yield table
        except (op_table.NotATable, OSError):
            continue


def rows(run: Any) -> list[dict[str, Any]]:
    """Return one row per operator, scope, thread, label, inputs and rank, sorted by self time, longest first."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[str, Any]]] = {}
    for table in tables(run):
        facts = table.facts
        where = (int(facts.get("rank") or 0), str(facts.get("node") or ""), "worker" if facts.get("worker") else "main")
        for row in table.rows:
            row["estimate"] = row["count"] * op_table.scale_of(facts, row)
        merge(groups.setdefault(where, {}), table.rows, (*ADDED, "estimate"))
    done = [_finished(row, dict(zip(_WHERE, where, strict=True))) for where, found in groups.items() for row in found.values()]
    return sorted(done, key=lambda row: (-row["self_ns"] * row["scale"], -row["total_ns"], row["op"]))


def steps_of(run: Any) -> list[dict[str, Any]]:
    """Return the optimizer steps of each rank and node of a run, and how many of them were observed in full."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for facts in (table.facts for table in tables(run)):
        rank, node = int(facts.get("rank") or 0), str(facts.get("node") or "")
        into = found.setdefault((rank, node), {"rank": rank, "node": node, "steps": 0, "observed_steps": 0})
        into["steps"] += int(facts.get("steps") or 0)
        into["observed_steps"] += int(facts.get("observed") or 0)
    return list(found.values())


def _finished(row: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    hist = {int(bucket): int(count) for bucket, count in row.pop("hist").items()}
    estimate = row.pop("estimate")
    row.pop("all", None)
    return {
        **row,
        "kind": kind_of(row["op"], row["scope"]),
        "p50_ns": min(round(op_table.quantile(hist, 0.5)), row["max_ns"]),
        "p99_ns": min(round(op_table.quantile(hist, 0.99)), row["max_ns"]),
        "scale": estimate / row["count"] if row["count"] else 1.0,
        "hist": hist,
        **where,
    }


def kind_of(op: str, scope: str) -> str:
    """Return the kind of a row: an operator, a compiled region, a collective, a user-defined range, and so on."""
    if scope == "compile":
        return "compiling"
    for kind, beginnings in _KINDS.items():
        if op.startswith(beginnings):
            return kind
    return {"user": "range", "torchscript": "script"}.get(scope, "operator")


_KINDS: dict[str, tuple[str, ...]] = {
    "optimizer": ("Optimizer.",),
    "data": ("enumerate(DataLoader)#",),
    "collective": ("c10d::", "gloo:", "nccl:", "mpi:", "ucc:", "record_param_comms", "DistributedDataParallel."),
    "compiled region": (
        "Torch-Compiled Region",
        "CompiledFunction",
        "## Call CompiledFxGraph",
        "graph_",
        "inductor::",
        "triton_",
    ),
    "compiler": ("TorchDynamo", "AOTDispatcher", "Pregraph bytecode", "_compile."),
    "autograd engine": ("autograd::engine::",),
}
KINDS = ("operator", *_KINDS, "compiling", "range", "script")


def together(rows: Iterable[Mapping[str, Any]], by: tuple[str, ...]) -> list[dict[str, Any]]:
    """Sum rows over everything but `by`, scaled to all calls they represent; sorted by self time, longest first."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in by)
        start = {**dict(zip(by, key, strict=True)), "calls": 0.0, "total_ns": 0.0, "self_ns": 0.0, "max_ns": 0, "observed": 0,
                 "device_count": 0, "device_ns": 0, "hist": {}}  # fmt: skip
        into = found.setdefault(key, start)
        into["calls"] += row["count"] * row["scale"]
        into["observed"] += row["count"]
        into["total_ns"] += row["total_ns"] * row["scale"]
        into["self_ns"] += row["self_ns"] * row["scale"]
        into["max_ns"] = max(into["max_ns"], row["max_ns"])
        into["device_count"] += row["device_count"]
        into["device_ns"] += row["device_ns"]
        for bucket, count in row["hist"].items():
            into["hist"][bucket] = into["hist"].get(bucket, 0) + count
    for row in found.values():
        row["mean_ns"] = row["total_ns"] / row["calls"] if row["calls"] else 0.0
        row["p50_ns"], row["p99_ns"] = (min(round(op_table.quantile(row["hist"], share)), row["max_ns"]) for share in (0.5, 0.99))
    return sorted(found.values(), key=lambda row: (-row["self_ns"], -row["total_ns"]))


def usage(run: Any) -> list[dict[str, Any]]:
    """Return the APIs a run's processes used: each key once per process, and each model file written or read."""
    found: list[dict[str, Any]] = []
    seen: set[tuple[Any, ...]] = set()
    left = [{**record, "rank": table.facts["rank"], "node": table.facts["node"], "pid": table.facts["pid"]}
            for table in _files(run) for record in table.usage]  # fmt: skip
    for event in (*_events(run, "usage"), *left):
        data = {str(name): value for name, value in (event.get("data") or {}).items()}
        once = (event.get("key"), event.get("rank"), event.get("node"), event.get("pid"))
        if not data and once in seen:
            continue
        seen.add(once)
        found.append({"key": str(event.get("key")), "time": event.get("t", 0) / 1e9, "data": data,
                      **{name: event.get(name) for name in ("rank", "node", "pid")}})  # fmt: skip
    return sorted(found, key=lambda record: record["time"])
