"""`fanfold doctor --deploy PATH`: checks whether code runs from its .pyc files alone, by compiling, importing and scanning it.

The tree itself is not touched: its modules are compiled into a temporary copy and imported there, in a separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import py_compile
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import sources
from ..drawing.numbers import plural
from ..errors import FanfoldError
from . import output
from .scan import MissingSource, scan
from .text import clean

MAX_FILES = 20_000
SECONDS = 120.0
_SKIPPED = ("__pycache__", "node_modules")
_NOT_IMPORTED = ("__main__.py", "setup.py", "conftest.py")  # importing these has side effects
_CHILD = "import sys; del sys.path[0]; from fanfold.cli.trial import main; main()"


class Tree(NamedTuple):
    """What is to be deployed: the folder that will be on sys.path, the part of it to check, and all files it needs.

    A part of a package needs the whole package, whose `__init__` is imported first.
    """

    root: Path
    part: Path
    files: list[Path]

    @property
    def code(self) -> list[Path]:
        """The modules to check."""
        return [file for file in self.files if file.suffix == ".py" and file.is_relative_to(self.part)]

    def name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deploy", metavar="PATH", help="check what breaks in this folder if only .pyc files are shipped")
    parser.add_argument("--sources", metavar="FILE", help="with --deploy: write the zip for fanfold.sources.install()")
    parser.add_argument("--timeout", type=float, metavar="S", help=f"with --deploy: seconds to import one module ({SECONDS:g})")


def run(args: argparse.Namespace) -> int:
    _check(args)
    tree = _tree(args.deploy)
    if args.sources and (target := Path(args.sources).resolve()).is_relative_to(tree.root) and target not in tree.files:
        tree.files.append(target)  # modules may install it themselves when they are imported
    with tempfile.TemporaryDirectory(prefix="fanfold-deploy-") as place:
        found = _examine(tree, Path(place), args)
    found["sources"] = args.sources
    found["healthy"] = all(args.sources and one.repaired for one in found["findings"]) and not _nothing_imported(found)
    if args.json:
        output.print_json({**found, "findings": [one._asdict() for one in found["findings"]]})
    else:
        _print(found, tree, quiet=args.quiet)
    return 0 if found["healthy"] else 1


def _check(args: argparse.Namespace) -> None:
    if args.sources == "":
        raise FanfoldError("--sources is empty. Nothing was checked. Name the zip to write.")
    if args.timeout is not None and not args.timeout > 0:
        raise FanfoldError(f"--timeout {args.timeout:g} is too short to import anything. Nothing was checked. Pass more than 0.")


def _nothing_imported(found: dict[str, Any]) -> bool:
    """Return whether none of the modules could be imported, so that nothing is known about them."""
    return bool(found["modules"]) and len(found["not_importable"]) + len(found["too_slow"]) == found["modules"]


def _tree(path: str) -> Tree:
    """Find the files of a package, a folder of modules, or a single file."""
    target = Path(path).resolve()
    single = target.is_file() and target.suffix == ".py"
    if not path or not (single or target.is_dir()):
        raise FanfoldError(f"{path!r} is not a folder or .py file. Nothing was checked. Name a package or a folder of modules.")
    root, package = target.parent if single else target, target
    while (root / "__init__.py").is_file() and root.parent != root:
        root, package = root.parent, root
    found = Tree(root, target, [target] if package.is_file() else list(_files(package)))
    if not found.code:
        raise FanfoldError(f"{path} contains no .py file. Nothing was checked. Name a package or a folder of modules.")
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
                continue  # not a module: an editor's lock or backup
            count += 1
            if count > MAX_FILES:
                raise FanfoldError(f"{folder} has more than {MAX_FILES:,} files. Nothing was checked. Name the package alone.")
            yield Path(place, name)


def _examine(tree: Tree, place: Path, args: argparse.Namespace) -> dict[str, Any]:
    copy, archive, limit = place / "tree", place / "sources.zip", args.timeout or SECONDS
    broken = list(_compile(tree, copy))
    bad = {one.file for one in broken}
    good = [file for file in tree.code if tree.name(file) not in bad]
    sources.pack(tree.root, [file for file in tree.files if file.suffix == ".py" and tree.name(file) not in bad], archive)
    if args.sources:
        shutil.copyfile(archive, args.sources)
    modules = sorted({name for file in good if (name := _module(tree, file))})
    bare = _trial(tree, copy, modules, limit)
    failed = [name for name, result in bare.items() if "error" in result and not result.get("late")]
    before = _trial(tree, tree.root, failed, limit)  # those that fail from their sources too say nothing about .pyc files
    failed = [name for name in failed if "error" not in before[name]]
    after = _trial(tree, copy, failed, limit, archive=archive)
    checked = {tree.name(file) for file in tree.code}
    findings = [one for one in broken if one.file in checked]
    findings += _broken(tree, copy, {name: bare[name] for name in failed}, after)
    names = frozenset(file.name for file in tree.code)
    findings += [one for file in good for one in scan(file, tree.name(file), names)]
    imported = [name for name in modules if "error" not in bare[name]]
    late = {name: result["error"] for results in (bare, before) for name, result in results.items() if result.get("late")}
    return {
        "path": str(tree.root),
        "compiled": len(good),
        "modules": len(modules),
        "imported": len(imported),
        "findings": _once(findings),
        "not_importable": {name: one["error"] for name, one in before.items() if "error" in one and name not in late},
        "too_slow": late,
        "elsewhere": [name for name in imported if not str(bare[name]["file"]).startswith(f"{copy}{os.sep}")],
    }


def _compile(tree: Tree, copy: Path) -> Iterator[MissingSource]:
    """Create the copy: a .pyc for every .py, a link for everything else; yield what does not compile."""
    known = frozenset(tree.files)
    for file in tree.files:
        target = copy / tree.name(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".py":
            line, error = _compile_one(file, target)
            if error:
                yield MissingSource(tree.name(file), line, "compile", error, repaired=False, breaks_import=True)
        elif file.suffix != ".pyc" or file.with_suffix(".py") not in known:
            target.symlink_to(file)


def _compile_one(file: Path, target: Path) -> tuple[int, str]:
    """Compile a .py file to a .pyc; return the line and text of an error, if any."""
    try:
        file.open("rb").close()
        # The .pyc names a source file that does not exist; otherwise Python would find the source and nothing would fail.
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(file), f"{target}c", str(target), doraise=True, invalidation_mode=mode)
    except (py_compile.PyCompileError, ValueError) as error:
        cause = getattr(error, "exc_value", None)
        return getattr(cause, "lineno", 0) or 0, f"does not compile: {getattr(cause, 'msg', None) or error}"
    except OSError as error:
        if error.filename != str(file):
            raise  # the copy cannot be written
        return 0, "is a broken link" if file.is_symlink() else f"cannot be read: {error.strerror}"
    return 0, ""


def _module(tree: Tree, file: Path) -> str:
    """Return the name a file is imported by, or "" if it has none or must not be imported."""
    parts = list(file.relative_to(tree.root).with_suffix("").parts)
    if file.name in _NOT_IMPORTED or not all(part.isidentifier() for part in parts):
        return ""
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _trial(
    tree: Tree, root: Path, modules: Sequence[str], limit: float, *, archive: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Import modules in a child process. If one ends the child or takes too long, another child continues after it."""
    beside = [] if tree.root == tree.part else [str(tree.root)]
    order = {"root": str(root), "away": str(tree.root), "beside": beside, "sources": str(archive) if archive else None}
    found: dict[str, dict[str, Any]] = {}
    waiting = list(modules)
    while waiting:
        end = _child({**order, "modules": waiting}, tree.root, limit, found)
        waiting = [name for name in waiting if name not in found]
        if waiting and end:
            found[waiting.pop(0)] = {"error": f"it ended the process ({end})", "at": None, "line": 0}
        elif waiting:
            late = [name for name in waiting if f"{name}.".startswith(f"{waiting[0]}.")]  # a package, with all its modules
            found |= {name: {"error": f"it took more than {limit:g} s; --timeout allows more", "late": True} for name in late}
            waiting = [name for name in waiting if name not in late]
    return {name: found[name] for name in modules}


def _child(order: dict[str, Any], folder: Path, limit: float, found: dict[str, dict[str, Any]]) -> str:
    """Add results of a child until all modules are imported, one takes too long, or it exits; return how it exited, if it did."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    work = subprocess.Popen([sys.executable, "-c", _CHILD], cwd=folder, env=environment, start_new_session=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip
    assert work.stdin is not None
    assert work.stdout is not None
    try:
        with work.stdin as file:
            file.write(json.dumps(order).encode())
        left, rest = len(order["modules"]), b""
        while left and select.select([work.stdout], [], [], limit)[0]:
            piece = os.read(work.stdout.fileno(), 1 << 16)
            if not piece:
                return f"exit code {work.wait()}"
            *lines, rest = (rest + piece).split(b"\n")
            for result in map(json.loads, lines):
                found[result.pop("module")] = result
            left -= len(lines)
        return "" if work.poll() is None else f"exit code {work.poll()}"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(work.pid, signal.SIGKILL)  # including processes that the modules started
        work.wait()
        work.stdout.close()


def _broken(
    tree: Tree, copy: Path, failed: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> Iterator[MissingSource]:
    """Turn failed imports into findings; modules that fail for the same reason share a place."""
    for name, result in failed.items():
        if result["at"]:
            file = Path(result["at"]).relative_to(copy).as_posix()
        else:
            file = next(tree.name(item) for item in tree.code if _module(tree, item) == name)
        repaired = "error" not in after[name]
        yield MissingSource(file, result["line"], "import", f"stops the import: {result['error']}", repaired, breaks_import=True)


def _once(findings: list[MissingSource]) -> list[MissingSource]:
    """Keep one finding per file and line, combining those of the import and of the scan."""
    kept: dict[tuple[str, int], MissingSource] = {}
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
    counts = f"{found['compiled']} of {plural(len(tree.code), 'module')} compiled, {found['imported']} imported from .pyc alone"
    console.print(Text(clean(f"{found['path']}: {counts}"), style="bold"))
    for one in found["findings"]:
        sign, colour = ("✗", "red") if one.breaks_import else ("!", "yellow")
        remedy = "the source loader repairs it" if one.repaired else "the source loader does not help"
        console.print(Text.assemble((f"  {sign} ", colour), (clean(f"{one.file}:{one.line}"), "bold"), clean(f"  {one.use}")))
        console.print(Text(clean(f"      {one.what}; {remedy}"), style="dim"))
    if _nothing_imported(found):
        console.print(Text.assemble(("  ✗ ", "red"), "no module could be imported, so nothing is known about this code"))
    if not quiet:
        for line in _remarks(found):
            console.print(Text(clean(line), style="dim"))


def _remarks(found: dict[str, Any]) -> Iterator[str]:
    for name, error in found["not_importable"].items():
        yield f"  · {name} cannot be imported from its source either, so it was not checked: {error}"
    for name, error in found["too_slow"].items():
        yield f"  · {name} was skipped, so it was not checked: {error}"
    if found["elsewhere"]:
        yield f"  · imported from elsewhere on the path, not from this tree: {', '.join(found['elsewhere'][:10])}"
    if found["sources"]:
        yield f"  → ship {found['sources']} too, and call fanfold.sources.install({found['sources']!r}) before the first import"
    elif any(one.repaired for one in found["findings"]):
        yield "  → `--sources FILE` writes the zip of sources that the source loader reads"
    elif not found["findings"] and not _nothing_imported(found):
        yield "  ✓ nothing here needs its sources"
