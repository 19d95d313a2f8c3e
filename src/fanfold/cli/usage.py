"""Tell which PyTorch APIs (and those of your own libraries) runs use, and which model files they wrote and read.

Recorded by runs started with ops=True, and by fanfold.log_api_usage_once(). It stays with the runs; nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import fnmatch
from typing import Any

from ..store import StoredRun
from . import output
from .choose import everything, several
from .text import age, plural, size

EXAMPLE = """examples:
  fanfold usage --project llm
  fanfold usage --api torch.jit.save          who still calls it, with which versions
  fanfold usage --api 'torchvision.*' --json
  fanfold usage - --files                     the model files the newest run wrote and read"""
FILES = ("file_name", "file_size", "serialization_id")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="runs (default: all, or those of --project)")
    parser.add_argument("--api", metavar="X", help="who uses this API; may hold *, such as 'torch.jit.*'")
    parser.add_argument("--files", action="store_true", help="the model files written and read, with size and serialization id")


def run(args: argparse.Namespace) -> int:
    runs = several(args, args.runs) if args.runs else everything(args)
    records = [(stored, record) for stored in runs for record in stored.usage()]
    show = _files if args.files else _who if args.api else _overview
    found = show(args, records)
    if not found:
        output.remark(args, "no such use was recorded. Start runs with fanfold.init(ops=True) or FANFOLD_OPS=1 to record it.")
    return 0 if found else 1


def versions(stored: StoredRun) -> dict[str, str]:
    """Return the versions that matter when an API is to be retired."""
    facts = stored.facts
    packages = facts.get("packages") or {}
    known = {name: str(packages[name]) for name in ("torch", "torchvision", "transformers") if name in packages}
    python = facts.get("python")
    return {**known, **({"python": str(python.get("version") if isinstance(python, dict) else python)} if python else {})}


def _overview(args: argparse.Namespace, records: list[tuple[StoredRun, dict[str, Any]]]) -> int:
    keys: dict[str, tuple[set[str], int]] = {}
    for stored, record in records:
        runs, count = keys.get(record["key"], (set(), 0))
        keys[record["key"]] = (runs | {stored.id}, count + 1)
    rows = sorted(keys.items(), key=lambda item: (-len(item[1][0]), item[0]))
    if args.json:
        output.print_json([{"key": key, "runs": sorted(runs), "records": count} for key, (runs, count) in rows])
    elif rows:
        output.table(
            ["api", "runs", "records"],
            [[key, str(len(runs)), str(count)] for key, (runs, count) in rows],
            right=["runs", "records"],
        )
    return len(rows)


def _who(args: argparse.Namespace, records: list[tuple[StoredRun, dict[str, Any]]]) -> int:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for stored, record in records:
        if fnmatch.fnmatchcase(record["key"], args.api):
            row = found.setdefault((stored.id, record["key"]), {
                "run": stored.id, "name": stored.name, "project": stored.project, "key": record["key"], "processes": 0,
                "time": record["time"], "versions": versions(stored)})  # fmt: skip
            row["processes"] += 1
            row["time"] = max(row["time"], record["time"])
    rows = sorted(found.values(), key=lambda row: -row["time"])
    if args.json:
        output.print_json(rows)
    elif rows:
        cells = [[row["key"], row["name"], row["project"], str(row["processes"]), age(row["time"]),
                  " ".join(f"{name} {version}" for name, version in row["versions"].items())] for row in rows]  # fmt: skip
        output.table(["api", "run", "project", "processes", "last", "versions"], cells, right=["processes"])
        output.remark(args, f"{plural(len({row['run'] for row in rows}), 'run')} use {args.api}")
    return len(rows)


def _files(args: argparse.Namespace, records: list[tuple[StoredRun, dict[str, Any]]]) -> int:
    rows = [
        {"run": stored.id, "rank": record["rank"], "time": record["time"], "how": _how(record["key"]),
         **{name: record["data"].get(name, "") for name in FILES}}
        for stored, record in records if "file_size" in record["data"]
    ]  # fmt: skip
    if args.json:
        output.print_json(rows)
    elif rows:
        cells = [
            [row["file_name"], row["how"], _size(row["file_size"]), row["serialization_id"], row["run"], str(row["rank"])]
            for row in rows
        ]
        output.table(["file", "how", "size", "serialization id", "run", "rank"], cells)
    return len(rows)


def _size(text: str) -> str:
    return size(int(text)) if text.isdigit() else text


def _how(key: str) -> str:
    return "read" if "reader" in key or "load" in key else "written"
