"""Show where a model file comes from: its format, its stamp and its run. No weights are loaded."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .text import clean, size

EXAMPLE = """examples:
  fanfold inspect model.safetensors
  fanfold inspect checkpoint-500/ --json"""

MAX_LINE = 2000  # characters of one field; --json has all of them


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", help="a model file or a checkpoint directory")


def run(args: argparse.Namespace) -> int:
    from ..provenance import inspect

    found = inspect(args.path)
    folder = _folder(args, found["stamp"])
    if args.json:
        from . import output

        # Without the run's status, which takes longer to read than everything else; `fanfold show` has it.
        names = {name: found["stamp"]["run"].get(name) for name in ("id", "name", "project")} if folder else {}
        output.print_json({**found, "run": {**names, "path": str(folder)} if folder else None})
    else:
        print("\n".join(_lines(found, folder)))
    if any("error" in entry for entry in found.get("files", [])):
        return 2
    return 0 if found["stamp"] else 1


def _folder(args: argparse.Namespace, stamp: Mapping[str, Any] | None) -> Path | None:
    """Find the run that a stamp names, if it is on this machine. Only its id counts, since the file may come from anybody.

    The names of folders are enough: opening runs would take longer than everything else here.
    """
    from ..settings import find_directory, is_address, store_address

    named = _table(stamp or {}, "run").get("id")
    if not isinstance(named, str) or is_address(store_address(args.dir)):
        return None
    for folder in find_directory(args.dir).glob("*/*"):
        wanted = _is(folder.name, named) and (args.project is None or _is(folder.parent.name, args.project))
        linked = any(path.is_symlink() for path in (folder / "journal", folder, folder.parent))
        if wanted and (folder / "journal").is_dir() and not linked:
            return folder
    return None


def _is(component: str, name: str) -> bool:
    """Return whether a folder has a name; special characters are percent-encoded on disk."""
    if "%" not in component:
        return component == name
    from ..journal.directory import decode_name

    return decode_name(component) == name


def _lines(found: Mapping[str, Any], folder: Path | None) -> Iterator[str]:
    facts, stamp, files = found["facts"], found["stamp"], found.get("files", [])
    yield f"{clean(found['path'])}  {found['format']}, {size(found['size'])}"
    yield from (_line(name, value) for name, value in _facts(facts) if value)
    yield from (_line("damaged", entry["error"]) for entry in files if "error" in entry)
    if not stamp:
        yield "  no stamp, so its run is unknown. Save with fanfold.init(stamp=True), or call fanfold.stamp(path)."
        return
    yield from (_line(name, value) for name, value in _stamp(stamp) if value)
    if folder is not None:
        yield _line("here", f"{folder} · fanfold show {_table(stamp, 'run')['id']}")
    yield from (f"    {clean(entry['path'])}  {entry['format']}, {size(entry['size'])}" for entry in files[:20])


def _line(name: str, value: str) -> str:
    return f"  {name:<9} {clean(value[:MAX_LINE])}{'…' * (len(value) > MAX_LINE)}"


def _facts(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "parameters" in facts:
        kinds = _pairs(facts["dtypes"], " x ")
        yield "holds", f"{facts['parameters']:,} parameters in {facts['tensors']} tensors ({kinds})"
    if facts.get("serialization_id"):
        yield "id", f"{facts['serialization_id']} (as in `fanfold usage --files`)"
    if facts.get("producer"):
        yield "exporter", f"{facts['producer']} {facts.get('producer_version', '')}"
    yield "beside", facts.get("beside", "")
    if (foreign := facts.get("producer_info")) is not None:
        yield "foreign", f"another program's producer_info.json: {_pairs(foreign, '=') or 'it is empty'}"


def _stamp(stamp: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a stamp's fields as text; any of them may be missing or odd, since the file may come from anybody."""
    run, code, parent, node = (_table(stamp, name) for name in ("run", "git", "parent", "node"))
    step = f", step {run['step']}" if run.get("step") is not None else ""
    yield "run", f"{_named(run)}{step}" if run.get("id") else ""
    yield "saved", f"{stamp.get('time', '')} by {stamp.get('producer', '')}"
    changed = " with uncommitted changes" if code.get("dirty") else ""
    yield "code", f"{str(code.get('commit'))[:12]}{changed}, {code.get('remote') or 'no remote'}" if code.get("commit") else ""
    command, gpus = stamp.get("command"), node.get("gpus")
    yield "command", " ".join(map(str, command)) if isinstance(command, list) else ""
    yield "config", str(run.get("config") or "")
    yield "data", str(stamp.get("data") or "")
    yield "made from", _named(parent) if parent else ""
    yield "packages", _pairs(_table(stamp, "packages"), " ")
    yield "node", ", ".join(map(str, filter(None, [node.get("cpu"), node.get("os"), *(gpus if isinstance(gpus, list) else [])])))
    yield "extra", _pairs(_table(stamp, "extra"), "=")


def _named(run: Mapping[str, Any]) -> str:
    return f"{run.get('name') or run.get('id')} ({run.get('id')}) of {run.get('project')}"


def _pairs(values: Mapping[str, Any], sign: str) -> str:
    return ", ".join(f"{name}{sign}{value}" for name, value in values.items())


def _table(stamp: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = stamp.get(name)
    return found if isinstance(found, Mapping) else {}
