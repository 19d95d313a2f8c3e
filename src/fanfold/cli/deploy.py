"""`fanfold doctor --deploy PATH`: would this code run from its .pyc files alone? It is compiled, imported and read to see.

The tree itself is not touched: its modules are compiled into a temporary copy and imported there, by a process of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import sources
from ..errors import FanfoldError
from . import output
from .scan import Finding, scan
from .text import clean, plural

MAX_FILES = 20_000
SECONDS = 120.0
_SKIPPED = ("__pycache__", "node_modules")
_NOT_IMPORTED = ("__main__.py", "setup.py", "conftest.py")  # these do something when they are imported
_CHILD = "import sys; del sys.path[0]; from fanfold.cli.trial import main; main(sys.argv[1])"


class Tree(NamedTuple):
    """What is to be deployed: the folder that will be on sys.path, the part of it that counts, and the files it needs to run.

    A part of a package needs all of it: nothing in it is imported without the package's own `__init__`.
    """

    root: Path
    part: Path
    files: list[Path]

    @property
    def code(self) -> list[Path]:
        """The modules that are looked at."""
        return [file for file in self.files if file.suffix == ".py" and file.is_relative_to(self.part)]

    def name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deploy", metavar="PATH", help="say what in this package or folder breaks when only .pyc files are shipped"
    )
    parser.add_argument(
        "--sources", metavar="FILE", help="with --deploy: write the zip of sources that fanfold.sources.install() takes"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help=f"with --deploy: seconds the import of one module may take ({SECONDS:g})"
    )


def run(args: argparse.Namespace) -> int:
    _check(args)
    tree = _tree(args.deploy)
    if args.sources and (target := Path(args.sources).resolve()).is_relative_to(tree.root) and target not in tree.files:
        tree.files.append(target)  # it will be there when the modules are imported: some install it themselves
    with tempfile.TemporaryDirectory(prefix="fanfold-deploy-") as place:
        found = _examine(tree, Path(place), args)
    found["sources"] = args.sources
    left = [one for one in found["findings"] if not (args.sources and one.repaired)]
    found["healthy"] = not left and not _blind(found)
    if args.json:
        output.print_json({**found, "findings": [one._asdict() for one in found["findings"]]})
    else:
        _print(found, tree, quiet=args.quiet)
    return 0 if found["healthy"] else 1


def _check(args: argparse.Namespace) -> None:
    if args.sources == "":
        raise FanfoldError("--sources has no name. Nothing was checked. Give the zip to write.")
    if args.timeout is not None and not args.timeout > 0:
        raise FanfoldError(
            f"--timeout {args.timeout:g} leaves no time to import anything. Nothing was checked. Give more than 0 s."
        )


def _blind(found: dict[str, Any]) -> bool:
    """Say whether there were modules to import and nothing became known of any."""
    return bool(found["modules"]) and len(found["not_importable"]) + len(found["too_slow"]) == found["modules"]


def _tree(path: str) -> Tree:
    """Find what belongs to a package, a folder of modules, or a single file."""
    target = Path(path).resolve()
    single = target.is_file() and target.suffix == ".py"
    if not path or not (single or target.is_dir()):
        raise FanfoldError(
            f"{path or 'An empty name'} is no folder and no .py file. Nothing was checked. "
            "Give a package, or a folder that holds some."
        )
    root, package = target.parent if single else target, target
    while (root / "__init__.py").is_file() and root.parent != root:
        root, package = root.parent, root
    found = Tree(root, target, [target] if package.is_file() else list(_files(package)))
    if not found.code:
        raise FanfoldError(f"{path} holds no .py file. Nothing was checked. Give a package, or a folder that holds some.")
    return found


def _files(folder: Path) -> Iterator[Path]:
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _SKIPPED and not Path(place, name, "pyvenv.cfg").exists()
        )
        for name in names:
            if name.startswith(".") and name.endswith(".py"):
                continue  # no module: an editor's lock or copy
            count += 1
            if count > MAX_FILES:
                raise FanfoldError(f"{folder} holds more than {MAX_FILES:,} files. Nothing was checked. Give the package alone.")
            yield Path(place, name)


def _examine(tree: Tree, place: Path, args: argparse.Namespace) -> dict[str, Any]:
    copy, archive = place / "tree", place / "sources.zip"
    broken = list(_compile(tree, copy))
    bad = {one.file for one in broken}
    sources.pack(tree.root, [file for file in tree.files if file.suffix == ".py" and tree.name(file) not in bad], archive)
    if args.sources:
        shutil.copyfile(archive, args.sources)
    modules = sorted({name for file in tree.code if tree.name(file) not in bad and (name := _module(tree, file))})
    limit = args.timeout or SECONDS
    bare = _trial(tree, copy, modules, place, limit)
    failed = [name for name, result in bare.items() if "error" in result and not result.get("late")]
    before = _trial(tree, tree.root, failed, place, limit)
    failed = [name for name in failed if "error" not in before[name]]
    after = _trial(tree, copy, failed, place, limit, archive=archive)
    looked_at = {tree.name(file) for file in tree.code}
    findings = [one for one in broken if one.file in looked_at]
    findings += _broken(tree, copy, {name: bare[name] for name in failed}, after)
    names = frozenset(file.name for file in tree.code)
    for file in tree.code:
        if tree.name(file) not in bad:
            findings += scan(file, tree.name(file), names)
    imported = [name for name in modules if "error" not in bare[name]]
    late = {name: result["error"] for results in (bare, before) for name, result in results.items() if result.get("late")}
    return {
        "path": str(tree.root),
        "compiled": len(looked_at - bad),
        "modules": len(modules),
        "imported": len(imported),
        "findings": _once(findings),
        "not_importable": {name: one["error"] for name, one in before.items() if "error" in one and name not in late},
        "too_slow": late,
        "elsewhere": [name for name in imported if not str(bare[name]["file"]).startswith(f"{copy}{os.sep}")],
    }


def _compile(tree: Tree, copy: Path) -> Iterator[Finding]:
    """Make the copy: a .pyc for every .py, a link for everything else; yield what does not compile."""
    known = frozenset(tree.files)
    for file in tree.files:
        target = copy / tree.name(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".py":
            line, said = _compile_one(file, target)
            if said:
                yield Finding(tree.name(file), line, "compile", said, repaired=False, breaks_import=True)
        elif file.suffix != ".pyc" or file.with_suffix(".py") not in known:
            target.symlink_to(file)


def _compile_one(file: Path, target: Path) -> tuple[int, str]:
    """Compile a file to `target` with a c behind it; return the line and what is wrong, where something is."""
    try:
        file.open("rb").close()
        # The name inside is one that does not exist, else Python would find the source by it and nothing would fail.
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(file), f"{target}c", str(target), doraise=True, invalidation_mode=mode)
    except (py_compile.PyCompileError, ValueError) as error:
        cause = getattr(error, "exc_value", None)
        return getattr(cause, "lineno", 0) or 0, f"does not compile: {getattr(cause, 'msg', None) or error}"
    except OSError as error:
        if error.filename != str(file):
            raise  # the copy cannot be written
        return 0, "is a link to a file that is not there" if file.is_symlink() else f"cannot be read: {error.strerror}"
    return 0, ""


def _module(tree: Tree, file: Path) -> str:
    """Return the name a file is imported by; none where it has no such name, or does something when it is imported."""
    parts = list(file.relative_to(tree.root).with_suffix("").parts)
    if file.name in _NOT_IMPORTED or not all(part.isidentifier() for part in parts):
        return ""
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _trial(
    tree: Tree, root: Path, modules: Sequence[str], place: Path, limit: float, *, archive: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Import modules in a child; one that ends the child, or takes too long, is named, and another child goes on behind it."""
    report, order = place / "report", place / "order"
    found: dict[str, dict[str, Any]] = {}
    told = {
        "root": str(root),
        "away": str(tree.root),
        "beside": [] if tree.root == tree.part else [str(tree.root)],
        "sources": str(archive) if archive else None,
        "report": str(report),
    }
    waiting = list(modules)
    while waiting:
        report.write_text("")
        order.write_text(json.dumps({**told, "modules": waiting}))
        end, seen = _child(order, report, tree.root, len(waiting), limit)
        lines = report.read_text().splitlines()
        for line in lines:
            result = json.loads(line)
            found[result.pop("module")] = result
        waiting = [name for name in waiting if name not in found]
        if waiting and end:
            found[waiting.pop(0)] = {"error": f"it ended the process ({end})", "at": None, "line": 0}
        elif waiting and len(lines) == seen:  # else one was done at the last moment, and the next had no time at all
            late = [name for name in waiting if f"{name}.".startswith(f"{waiting[0]}.")]  # a package, and all that is in it
            found |= {name: {"error": f"it took more than {limit:g} s; --timeout allows more", "late": True} for name in late}
            waiting = [name for name in waiting if name not in late]
    return {name: found[name] for name in modules}


def _child(order: Path, report: Path, folder: Path, count: int, limit: float) -> tuple[str, int]:
    """Run one child until it has reported `count` modules, or one took too long, or it ended; return how, and how many it did."""
    work = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(order)],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    done, since = 0, time.monotonic()
    try:
        while done < count and time.monotonic() - since < limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return f"exit code {work.wait(0.02)}", done
            if (lines := report.read_bytes().count(b"\n")) > done:
                done, since = lines, time.monotonic()
        return "", done
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(work.pid, signal.SIGKILL)  # what the modules started, too
        work.wait()


def _broken(tree: Tree, copy: Path, failed: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Turn failed imports into places of the tree; modules that fail for the same cause share one."""
    for name, result in failed.items():
        if result["at"]:
            file = Path(result["at"]).relative_to(copy).as_posix()
        else:
            file = next(tree.name(item) for item in tree.code if _module(tree, item) == name)
        repaired = "error" not in after[name]
        yield Finding(file, result["line"], "import", f"stops the import: {result['error']}", repaired, breaks_import=True)


def _once(findings: list[Finding]) -> list[Finding]:
    """Keep one finding per place, by file and line; what the import showed and what the scan read become one."""
    kept: dict[tuple[str, int], Finding] = {}
    for one in findings:
        place = (one.file, one.line)
        other = kept.get(place)
        if other is None:
            kept[place] = one
        elif other.breaks_import and not one.breaks_import:
            kept[place] = other._replace(use=one.use)
        elif other.repaired and not one.repaired:
            kept[place] = one
    return [kept[place] for place in sorted(kept)]


def _print(found: dict[str, Any], tree: Tree, *, quiet: bool) -> None:
    from rich.text import Text

    console = output.console(soft_wrap=True)
    said = f"{found['compiled']} of {plural(len(tree.code), 'module')} compiled, {found['imported']} imported from .pyc alone"
    console.print(Text(clean(f"{found['path']}: {said}"), style="bold"))
    for one in found["findings"]:
        sign, colour = ("✗", "red") if one.breaks_import else ("!", "yellow")
        remedy = "the source loader repairs it" if one.repaired else "the source loader does not help"
        console.print(Text.assemble((f"  {sign} ", colour), (clean(f"{one.file}:{one.line}"), "bold"), clean(f"  {one.use}")))
        console.print(Text(clean(f"      {one.what}; {remedy}"), style="dim"))
    if _blind(found):
        console.print(Text.assemble(("  ✗ ", "red"), "no module could be imported, so nothing is known of this code"))
    if not quiet:
        for line in _remarks(found):
            console.print(Text(clean(line), style="dim"))


def _remarks(found: dict[str, Any]) -> Iterator[str]:
    for name, error in found["not_importable"].items():
        yield f"  · {name} cannot be imported from its source either, so nothing is known of it: {error}"
    for name, error in found["too_slow"].items():
        yield f"  · {name} was given up, so nothing is known of it: {error}"
    if found["elsewhere"]:
        yield f"  · found elsewhere on the path, and not in this tree: {', '.join(found['elsewhere'][:10])}"
    if found["sources"]:
        yield f"  → ship {found['sources']} too, and call fanfold.sources.install({found['sources']!r}) before the first import"
    elif any(one.repaired for one in found["findings"]):
        yield "  → `--sources FILE` writes the zip of sources that the source loader reads"
    elif not found["findings"] and not _blind(found):
        yield "  ✓ nothing here needs its sources"
