"""List the PyTorch APIs (and those of your own libraries) that runs use, and the model files they wrote and read.

Recorded by runs started with ops=True, and by fanfold.log_api_usage_once(). It stays with the runs; nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
from typing import Any

from ..store import StoredRun
from . import choose, output
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
    parser.add_argument("--files", action="store_true", help="model files written and read, as torch names them")
    choose.add_filters(parser)


def run(args: argparse.Namespace) -> int:
    runs = choose.matching(args, choose.several(args, args.runs) if args.runs else choose.everything(args))
    records = [(stored, record) for stored in runs for record in stored.usage()]
    show = _files if args.files else _who if args.api else _overview
    found = show(args, records)
    if not runs:
        choose.say_none(args)
    elif not found:
        _say_nothing(args, records, len(runs))
    return 0 if found else 1


def _say_nothing(args: argparse.Namespace, records: list[tuple[StoredRun, dict[str, Any]]], runs: int) -> None:
    what = "model files were" if args.files else f"use of {args.api} was" if args.api else "use of an API was"
    text = f"no {what} recorded in {plural(runs, 'run')}. Nothing is shown. "
    if args.files and records:
        output.remark(
            args,
            text + "Files that torch itself writes and reads are; `fanfold show RUN` lists what a run with stamp=True saved.",
        )
    elif not records:
        output.remark(args, text + "Start runs with fanfold.init(ops=True) or FANFOLD_OPS=1 to record it.")
    else:
        keys = sorted({record["key"] for _, record in records})
        near = (
            difflib.get_close_matches(args.api, keys, 3)
            or [key for key in keys if args.api.strip("*").lower() in key.lower()][:3]
        )
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        output.remark(args, text + hint + "`fanfold usage` lists what is; 'torch.jit.*' is a pattern.")


def versions(stored: StoredRun, key: str) -> dict[str, str]:
    """Return the versions that matter when an API is to be retired: of the library whose it is, and of torch and Python."""
    facts = stored.facts
    packages = facts.get("packages") or {}
    owner = key.partition(".")[0]
    names = dict.fromkeys((owner, owner.replace("_", "-"), "torch"))
    known = {name: str(packages[name]) for name in names if name in packages}
    python = facts.get("python")
    return {**known, **({"python": str(python.get("version") if isinstance(python, dict) else python)} if python else {})}


def _process(stored: StoredRun, record: dict[str, Any]) -> tuple[Any, ...]:
    return (stored.path, *(record[name] for name in ("rank", "node", "pid")))


def _overview(args: argparse.Namespace, records: list[tuple[StoredRun, dict[str, Any]]]) -> int:
    keys: dict[str, dict[str, Any]] = {}
    for stored, record in records:
        row = keys.setdefault(record["key"], {"key": record["key"], "runs": set(), "processes": set(), "records": 0})
        row["runs"].add(stored.id)
        row["processes"].add(_process(stored, record))
        row["records"] += 1
    rows = sorted(keys.values(), key=lambda row: (-len(row["runs"]), row["key"]))
    if args.json:
        output.print_json([{**row, "runs": sorted(row["runs"]), "processes": len(row["processes"])} for row in rows])
    elif rows:
        titles = ["api", "runs", "processes"]
        output.table(titles, [[row["key"], *(f"{len(row[name]):,}" for name in titles[1:])] for row in rows], right=titles[1:])
    return len(rows)


def _who(args: argparse.Namespace, records: list[tuple[StoredRun, dict[str, Any]]]) -> int:
    found: dict[tuple[Any, str], dict[str, Any]] = {}
    for stored, record in records:
        if fnmatch.fnmatchcase(record["key"], args.api):
            row = found.setdefault((stored.path, record["key"]), {
                "run": stored.id, "name": stored.name, "project": stored.project, "user": str(stored.facts.get("user") or ""),
                "script": str(stored.facts.get("script") or ""), "key": record["key"], "processes": set(), "time": record["time"],
                "versions": versions(stored, record["key"])})  # fmt: skip
            row["processes"].add(_process(stored, record))
            row["time"] = max(row["time"], record["time"])
    rows = [{**row, "processes": len(row["processes"])} for row in sorted(found.values(), key=lambda row: -row["time"])]
    if args.json:
        output.print_json(rows)
    elif rows:
        _print_who(args, rows)
    return len(rows)


def _print_who(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print who it is and with which versions, before what a narrow terminal leaves out."""
    titles = ["api", "run", "user", "versions", "project", "last", "processes"]
    cells = [[row["key"], row["name"], row["user"], ", ".join(f"{name} {version}" for name, version in row["versions"].items()),
              row["project"], age(row["time"]), str(row["processes"])] for row in rows]  # fmt: skip
    output.table(titles, cells, right=["processes"], whole=["versions", "last"])
    runs = len({(row["project"], row["run"]) for row in rows})
    output.remark(args, f"{plural(runs, 'run')} {'uses' if runs == 1 else 'use'} {args.api}")


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
