"""Show where a model file comes from: its stamp, format and run. No weights are loaded."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .text import clean, size

EXAMPLE = """examples:
  fanfold inspect model.safetensors
  fanfold inspect checkpoint-500/ --json"""

MAX_LINE = 2000  # letters of one field; --json has all of them


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", help="a model file or a checkpoint directory")


def run(args: argparse.Namespace) -> int:
    from ..provenance import inspect

    found = inspect(args.path)
    folder = _folder(args, found["stamp"])
    if args.json:
        from . import output

        output.print_json({**found, "run": None if folder is None else _run(folder, found["stamp"]["run"])})
    else:
        print("\n".join(_lines(found, folder)))
    if any("error" in entry for entry in found.get("files", [])):
        return 2
    return 0 if found["stamp"] else 1


def _folder(args: argparse.Namespace, stamp: Mapping[str, Any] | None) -> Path | None:
    """Find the run a stamp names, where it is on this machine: by its id alone, since a file is anybody's.

    Folders' names are enough. Loading what reads runs would take longer than all the rest.
    """
    named = _table(stamp or {}, "run").get("id")
    if not isinstance(named, str):
        return None
    from ..settings import find_directory, is_address, store_address

    if is_address(store_address(args.dir)):
        return None
    for folder in find_directory(args.dir).glob("*/*"):
        wanted = _is(folder.name, named) and (args.project is None or _is(folder.parent.name, args.project))
        linked = any(path.is_symlink() for path in (folder / "journal", folder, folder.parent))
        if wanted and (folder / "journal").is_dir() and not linked:
            return folder
    return None


def _is(component: str, name: str) -> bool:
    """Tell whether a folder has a name; names are percent-encoded on a disk where they need it."""
    if "%" not in component:
        return component == name
    from ..journal.directory import decode_name

    return decode_name(component) == name


def _run(folder: Path, named: Mapping[str, Any]) -> dict[str, Any]:
    """Say where the run is; its status takes longer to read than all the rest, and `fanfold show` has it."""
    return {**{name: named.get(name) for name in ("id", "name", "project")}, "path": str(folder)}


def _lines(found: Mapping[str, Any], folder: Path | None) -> Iterator[str]:
    yield f"{clean(found['path'])}  {found['format']}, {size(found['size'])}"
    yield from _facts(found["facts"])
    yield from (f"  damaged   {clean(entry['error'])}" for entry in found.get("files", []) if "error" in entry)
    stamp = found["stamp"]
    if "beside" in found["facts"]:
        yield f"  beside    {found['facts']['beside']}"
    if (foreign := found["facts"].get("producer_info")) is not None:
        fields = ", ".join(f"{name}={value}" for name, value in foreign.items())
        yield _short("foreign", f"another program's producer_info.json: {fields or 'it says nothing'}")
    if not stamp:
        yield "  no stamp, so its run is unknown. Save with fanfold.init(stamp=True), or call fanfold.stamp(path)."
        return
    yield from (_short(name, value) for name, value in _told(stamp) if value)
    if folder is not None:
        yield f"  here      {clean(str(folder))} · fanfold show {clean(_table(stamp, 'run')['id'])}"
    for entry in found.get("files", [])[:20]:
        yield f"    {clean(entry['path'])}  {entry['format']}, {size(entry['size'])}"


def _short(name: str, value: str) -> str:
    return f"  {name:<9} {clean(value[:MAX_LINE])}{'…' * (len(value) > MAX_LINE)}"


def _facts(facts: Mapping[str, Any]) -> Iterator[str]:
    if "parameters" in facts:
        kinds = ", ".join(f"{clean(name)} x {count}" for name, count in facts["dtypes"].items())
        yield f"  holds     {facts['parameters']:,} parameters in {facts['tensors']} tensors ({kinds})"
    if facts.get("serialization_id"):
        yield _short("id", f"{facts['serialization_id']} (as in `fanfold usage --files`)")
    if facts.get("producer"):
        yield f"  exporter  {clean(facts['producer'])} {clean(facts.get('producer_version', ''))}"


def _told(stamp: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Say a stamp's fields in words; any of them may be missing or odd, since a file is anybody's."""
    run, code = _table(stamp, "run"), _table(stamp, "git")
    step = f", step {run['step']}" if run.get("step") is not None else ""
    yield "run", f"{run.get('name') or run.get('id')} ({run.get('id')}) of {run.get('project')}{step}" if run.get("id") else ""
    yield "saved", f"{stamp.get('time', '')} by {stamp.get('producer', '')}"
    changed = " with uncommitted changes" if code.get("dirty") else ""
    yield "code", f"{str(code.get('commit'))[:12]}{changed}, {code.get('remote') or 'no remote'}" if code.get("commit") else ""
    command = stamp.get("command")
    yield "command", " ".join(map(str, command)) if isinstance(command, list) else ""
    yield "config", str(run.get("config") or "")
    yield "data", str(stamp.get("data") or "")
    parent = _table(stamp, "parent")
    yield (
        "made from",
        f"{parent.get('name') or parent.get('id')} ({parent.get('id')}) of {parent.get('project')}" if parent else "",
    )
    yield "packages", ", ".join(f"{name} {version}" for name, version in _table(stamp, "packages").items())
    node = _table(stamp, "node")
    gpus = node.get("gpus")
    yield (
        "node",
        ", ".join(str(part) for part in [node.get("cpu"), node.get("os"), *(gpus if isinstance(gpus, list) else [])] if part),
    )
    yield "extra", ", ".join(f"{name}={value}" for name, value in _table(stamp, "extra").items())


def _table(stamp: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = stamp.get(name)
    return found if isinstance(found, Mapping) else {}
