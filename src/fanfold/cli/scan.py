"""Find calls that need source files, without running anything: the scan of `fanfold doctor --deploy`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_TEXT = "reads the source of the code it is given, and raises OSError without it"
_LINES = "reads lines of a source file, and finds none without it"
_OWN = "reads a source file that will be missing"
# name: what it does, and whether the source loader repairs it.
NEEDS: dict[str, tuple[str, bool]] = {
    "torch.jit.script": (_TEXT, True),
    "torch.jit.script_method": (_TEXT, True),
    "torch.jit.script_if_tracing": (_TEXT, True),
    "torch.jit.interface": (_TEXT, True),
    "torch.package.PackageExporter": ("packs modules from their source files, and raises PackagingError without them", False),
    "triton.jit": (_TEXT, True),
    "inspect.getsource": (_TEXT, True),
    "inspect.getsourcelines": (_TEXT, True),
    "inspect.findsource": (_TEXT, True),
    "inspect.getcomments": ("reads the source of the code it is given, and finds no comment without it", True),
    "linecache.getline": (_LINES, False),
    "linecache.getlines": (_LINES, False),
}


class MissingSource(NamedTuple):
    """One place that breaks without sources. `repaired`: whether the source loader repairs it."""

    file: str
    line: int
    use: str
    what: str
    repaired: bool
    breaks_import: bool = False


def scan(file: Path, name: str, tree_files: frozenset[str]) -> Iterator[MissingSource]:
    """Yield the calls in a file that need sources; `name` is shown for the file, `tree_files` are the names of all sources."""
    tree = ast.parse(file.read_bytes(), filename=name)
    known = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and (use := _dotted(node, known)) in NEEDS:
            yield MissingSource(name, node.lineno, use, *NEEDS[use])
        elif isinstance(node, ast.Call) and (own := _reads_itself(node)):
            yield MissingSource(name, node.lineno, own, _OWN, repaired=False)
        elif isinstance(node, ast.Call):
            yield from (
                MissingSource(name, node.lineno, repr(text), _OWN, repaired=False) for text in _named_sources(node, tree_files)
            )


def _imported(tree: ast.AST) -> dict[str, str]:
    """Return the imported names of a file, and what they refer to."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return known


def _dotted(node: ast.AST, known: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return ""
    return ".".join([known[node.id], *reversed(parts)])


def _reads_itself(call: ast.Call) -> str:
    """Return the text of a call that opens its own file: open(__file__), Path(__file__).read_text()."""
    function: Any = call.func
    if isinstance(function, ast.Name) and function.id == "open" and _is_file(call):
        return "open(__file__)"
    reading = isinstance(function, ast.Attribute) and function.attr in ("read_text", "read_bytes", "open")
    if reading and isinstance(function.value, ast.Call) and _is_file(function.value):
        return f"Path(__file__).{function.attr}"
    return ""


def _is_file(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Name) and call.args[0].id == "__file__"


def _named_sources(call: ast.Call, tree_files: frozenset[str]) -> Iterator[str]:
    """Yield the source files that a call gets by name: run_path("worker.py"), Popen([python, "worker.py"])."""
    values = [value for argument in call.args for value in (argument.elts if isinstance(argument, ast.List) else [argument])]
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and Path(value.value).name in tree_files:
            yield value.value
