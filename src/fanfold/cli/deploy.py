"""`fanfold doctor --deploy PATH`: would this code run from its .pyc files alone? It is compiled, imported and read to see.

The tree itself is not touched: its modules are compiled into a temporary copy and imported there, by a process of their own.
"""

from __future__ import annotations

import argparse
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
        "--timeout", type=float, default=300.0, metavar="S", help="with --deploy: seconds the imports may take (300)"
    )


def run(args: argparse.Namespace) -> int:
    tree = _tree(args.deploy)
    with tempfile.TemporaryDirectory(prefix="fanfold-deploy-") as place:
        found = _examine(tree, Path(place), time.monotonic() + args.timeout)
        if args.sources:
            shutil.copyfile(Path(place, "sources.zip"), args.sources)
    found["sources"] = args.sources
    left = [one for one in found["findings"] if not (args.sources and one.repaired)]
    found["healthy"] = not left
    if args.json:
        output.print_json({**found, "findings": [one._asdict() for one in found["findings"]]})
    else:
        _print(found, tree, quiet=args.quiet)
    return 1 if left else 0


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
            count += 1
            if count > MAX_FILES:
                raise FanfoldError(f"{folder} holds more than {MAX_FILES:,} files. Nothing was checked. Give the package alone.")
            yield Path(place, name)


def _examine(tree: Tree, place: Path, deadline: float) -> dict[str, Any]:
    copy = place / "tree"
    broken = list(_compile(tree, copy))
    bad = {one.file for one in broken}
    archive = place / "sources.zip"
    sources.pack(tree.root, [file for file in tree.files if file.suffix == ".py" and tree.name(file) not in bad], archive)
    modules = [name for file in tree.code if tree.name(file) not in bad and (name := _module(tree, file))]
    bare = _trial(tree, copy, modules, place, deadline)
    failed = [name for name, result in bare.items() if "error" in result]
    before = _trial(tree, tree.root, failed, place, deadline)
    never = {name: result["error"] for name, result in before.items() if "error" in result}
    failed = [name for name in failed if name not in never]
    after = _trial(tree, copy, failed, place, deadline, archive=archive)
    looked_at = {tree.name(file) for file in tree.code}
    findings = [one for one in broken if one.file in looked_at]
    findings += _broken(tree, copy, {name: bare[name] for name in failed}, after)
    names = frozenset(file.name for file in tree.code)
    for file in tree.code:
        if tree.name(file) not in bad:
            findings += scan(file, tree.name(file), names)
    imported = [name for name in modules if "error" not in bare[name]]
    elsewhere = sorted(name for name in imported if not str(bare[name]["file"]).startswith(f"{copy}{os.sep}"))
    return {
        "path": str(tree.root),
        "compiled": len(looked_at - bad),
        "imported": len(imported),
        "findings": _once(findings),
        "not_importable": never,
        "elsewhere": elsewhere,
    }


def _compile(tree: Tree, copy: Path) -> Iterator[Finding]:
    """Make the copy: a .pyc for every .py, a link for everything else; yield what does not compile."""
    for file in tree.files:
        target = copy / tree.name(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix != ".py":
            target.symlink_to(file)
            continue
        try:
            # The name inside is one that does not exist, else Python would find the source by it and nothing would fail.
            py_compile.compile(
                str(file),
                f"{target}c",
                str(target),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
        except (py_compile.PyCompileError, ValueError) as error:
            line = getattr(getattr(error, "exc_value", None), "lineno", 0) or 0
            said = getattr(getattr(error, "exc_value", None), "msg", None) or str(error)
            yield Finding(tree.name(file), line, "compile", f"does not compile: {said}", repaired=False, breaks_import=True)


def _module(tree: Tree, file: Path) -> str:
    """Return the name a file is imported by; none where it has no such name, or does something when it is imported."""
    parts = list(file.relative_to(tree.root).with_suffix("").parts)
    if file.name in _NOT_IMPORTED or not all(part.isidentifier() for part in parts):
        return ""
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _trial(
    tree: Tree, root: Path, modules: Sequence[str], place: Path, deadline: float, *, archive: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Import modules in a child; one that ends the child is named, and another child goes on behind it."""
    report, order = place / "report", place / "order"
    found: dict[str, dict[str, Any]] = {}
    waiting = list(modules)
    while waiting:
        report.write_text("")
        order.write_text(
            json.dumps(
                {
                    "root": str(root),
                    "away": str(tree.root),
                    "beside": [] if tree.root == tree.part else [str(tree.root)],
                    "sources": str(archive) if archive else None,
                    "modules": waiting,
                    "report": str(report),
                }
            )
        )
        end = _child(order, place, deadline)
        for line in report.read_text().splitlines():
            result = json.loads(line)
            found[result.pop("module")] = result
        waiting = [name for name in waiting if name not in found]
        if waiting:
            found[waiting.pop(0)] = {"error": f"it ended the process ({end})", "at": None, "line": 0}
    return {name: found[name] for name in modules}


def _child(order: Path, place: Path, deadline: float) -> str:
    """Run one child to its end, or to the deadline; say how it ended."""
    work = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(order)],
        cwd=place,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return f"exit code {work.wait(max(1.0, deadline - time.monotonic()))}"
    except subprocess.TimeoutExpired:
        return "it took too long; --timeout allows more"
    finally:
        if work.poll() is None:
            os.killpg(work.pid, signal.SIGKILL)
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
    if not quiet:
        for line in _remarks(found):
            console.print(Text(clean(line), style="dim"))


def _remarks(found: dict[str, Any]) -> Iterator[str]:
    for name, error in found["not_importable"].items():
        yield f"  · {name} cannot be imported from its source either, so nothing is known of it: {error}"
    if found["elsewhere"]:
        yield f"  · found elsewhere on the path, and not in this tree: {', '.join(found['elsewhere'][:10])}"
    if found["sources"]:
        yield f"  → ship {found['sources']} too, and call fanfold.sources.install({found['sources']!r}) before the first import"
    elif any(one.repaired for one in found["findings"]):
        yield "  → `--sources FILE` writes the zip of sources that the source loader reads"
    elif not found["findings"]:
        yield "  ✓ nothing here needs its sources"
