"""List the PyTorch APIs (and those of your own libraries) that runs use, and the model files they wrote and read.

Recorded by runs started with ops=True, and by fanfold.log_api_usage_once(). It stays with the runs; nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
from typing import Any

from ..drawing.numbers import plural
from ..store import StoredRun
from . import choose, output
from .text import age, size

EXAMPLE = """examples:
  fanfold usage --project llm
  fanfold usage --api torch.jit.save          who still calls it, with which versions
  fanfold usage --api 'torchvision.*' --json
  fanfold usage - --files                     the model files the newest run wrote and read"""

Records = list[tuple[StoredRun, dict[str, Any]]]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="runs (default: all, or those of --project)")
    parser.add_argument("--api", metavar="X", help="who uses this API; may contain *, such as 'torch.jit.*'")
    parser.add_argument("--files", action="store_true", help="model files written and read, as torch names them")
    choose.add_filters(parser)


def run(args: argparse.Namespace) -> int:
    runs = choose.chosen(args)
    records = [(stored, record) for stored in runs for record in stored.usage()]
    code = (_files if args.files else _users if args.api else _overview)(args, records)
    if not runs:
        choose.report_none(args)
    elif code:
        _report_nothing(args, records, len(runs))
    return code


def _report_nothing(args: argparse.Namespace, records: Records, runs: int) -> None:
    what = "model files were" if args.files else f"use of {args.api} was" if args.api else "use of an API was"
    if not records:
        hint = "Start runs with fanfold.init(ops=True) or FANFOLD_OPS=1 to record it."
    elif args.files:
        hint = "Only files that torch itself writes and reads are; `fanfold show RUN` lists what a run with stamp=True saved."
    else:
        keys = sorted({record["key"] for _, record in records})
        near = difflib.get_close_matches(args.api, keys, 3) or [key for key in keys if args.api.strip("*").lower() in key.lower()]
        meant = f"Did you mean {' or '.join(near[:3])}? " if near else ""
        hint = meant + "`fanfold usage` lists all that were; 'torch.jit.*' is a pattern."
    output.remark(args, f"no {what} recorded in {plural(runs, 'run')}. Nothing is shown. {hint}")


def _process(stored: StoredRun, record: dict[str, Any]) -> tuple[Any, ...]:
    return (stored.path, *(record[name] for name in ("rank", "node", "pid")))


def _overview(args: argparse.Namespace, records: Records) -> int:
    keys: dict[str, dict[str, Any]] = {}
    for stored, record in records:
        row = keys.setdefault(record["key"], {"key": record["key"], "runs": set(), "processes": set(), "records": 0})
        row["runs"].add(stored.id)
        row["processes"].add(_process(stored, record))
        row["records"] += 1
    return output.listed(
        args,
        sorted(keys.values(), key=lambda row: (-len(row["runs"]), row["key"])),
        ("api", "runs", "processes"),
        lambda row: [row["key"], f"{len(row['runs']):,}", f"{len(row['processes']):,}"],
        facts=lambda row: {**row, "runs": sorted(row["runs"]), "processes": len(row["processes"])},
        right=("runs", "processes"),
    )


def _users(args: argparse.Namespace, records: Records) -> int:
    found: dict[tuple[Any, str], dict[str, Any]] = {}
    for stored, record in records:
        if fnmatch.fnmatchcase(record["key"], args.api):
            row = found.setdefault((stored.path, record["key"]), {
                "run": stored.id, "name": stored.name, "project": stored.project, "user": str(stored.facts.get("user") or ""),
                "script": str(stored.facts.get("script") or ""), "key": record["key"], "processes": set(), "time": record["time"],
                "versions": _versions(stored, record["key"])})  # fmt: skip
            row["processes"].add(_process(stored, record))
            row["time"] = max(row["time"], record["time"])
    # The last columns are those that a narrow terminal can do without.
    code = output.listed(
        args,
        sorted(found.values(), key=lambda row: -row["time"]),
        ("api", "run", "user", "versions", "project", "last", "processes"),
        lambda row: [row["key"], row["name"], row["user"], ", ".join(map(" ".join, row["versions"].items())), row["project"],
                     age(row["time"]), str(len(row["processes"]))],
        facts=lambda row: {**row, "processes": len(row["processes"])},
        right=["processes"],
        whole=["versions", "last"],
    )  # fmt: skip
    if found and not args.json:
        runs = len({(row["project"], row["run"]) for row in found.values()})
        output.remark(args, f"{plural(runs, 'run')} {'uses' if runs == 1 else 'use'} {args.api}")
    return code


def _versions(stored: StoredRun, key: str) -> dict[str, str]:
    """Return the versions of the library that an API belongs to, of torch and of Python."""
    packages, python = stored.facts.get("packages") or {}, stored.facts.get("python")
    owner = key.partition(".")[0]
    found = {name: str(packages[name]) for name in (owner, owner.replace("_", "-"), "torch") if name in packages}
    return {**found, **({"python": str(python.get("version") if isinstance(python, dict) else python)} if python else {})}


def _files(args: argparse.Namespace, records: Records) -> int:
    rows = [
        {"run": stored.id, "rank": record["rank"], "time": record["time"],
         "how": "read" if "reader" in record["key"] or "load" in record["key"] else "written",
         **{name: record["data"].get(name, "") for name in ("file_name", "file_size", "serialization_id")}}
        for stored, record in records if "file_size" in record["data"]
    ]  # fmt: skip
    names = ("file_name", "how", "file_size", "serialization_id", "run", "rank")
    return output.listed(
        args,
        rows,
        ("file", "how", "size", "serialization id", "run", "rank"),
        lambda row: [_size(row[name]) if name == "file_size" else str(row[name]) for name in names],
    )


def _size(text: str) -> str:
    return size(int(text)) if text.isdigit() else text
