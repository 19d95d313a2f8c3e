"""The package itself: importing does nothing, imports point one way, the public names are the documented ones."""

import ast
import builtins
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fanfold
from fanfold.recording.disabled import DisabledRun
from paths import DOCS, TESTS

SOURCE = Path(fanfold.__file__).parent

PROBE = """
import json, os, signal, sys, threading, logging
sys.dont_write_bytecode = True
before = {"handlers": [str(signal.getsignal(s)) for s in range(1, 32) if s not in (9, 19)], "hook": repr(sys.excepthook),
          "exit": repr(sys.exit), "log": len(logging.getLogger().handlers), "env": dict(os.environ), "files": sorted(os.listdir("."))}
modules = set(sys.modules)
import fanfold
after = {"handlers": [str(signal.getsignal(s)) for s in range(1, 32) if s not in (9, 19)], "hook": repr(sys.excepthook),
         "exit": repr(sys.exit), "log": len(logging.getLogger().handlers), "env": dict(os.environ), "files": sorted(os.listdir("."))}
print(json.dumps({"same": before == after, "threads": threading.active_count(), "handlers": len(logging.getLogger("fanfold").handlers),
                  "new": sorted(set(sys.modules) - modules)}))
"""


def test_importing_does_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    seen = json.loads(done.stdout)
    assert (seen["same"], seen["threads"], seen["handlers"]) == (True, 1, 0)
    assert [
        name for name in seen["new"] if name.split(".")[0] in ("numpy", "msgspec", "torch", "rich", "psutil", "sqlite3")
    ] == []


def test_the_writing_side_imports_nothing_heavy(tmp_path):
    code = """
import sys, fanfold
run = fanfold.init("p", dir=".", quiet=True, system=False)
run.log({"x": 1.0}); run.finish()
print(sorted(name for name in ("numpy", "torch", "rich", "pandas", "pyarrow", "PIL", "jax", "sqlite3") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_first_run_imports_only_what_it_needs(tmp_path):
    code = """
import sys, fanfold
run = fanfold.init("p", dir=".", quiet=True, system=False)
print(sorted(name for name in sys.argv[1:] if name in sys.modules))
"""
    later = ("journal.reader", "journal.walker", "journal.bodies", "journal.requests", "recording.control", "provenance.write")
    unneeded = ["hashlib", "json", "socket", "tempfile", "random", "difflib", "ctypes", *(f"fanfold.{name}" for name in later)]
    command = [sys.executable, "-S", "-c", code, *unneeded]
    paths = os.pathsep.join([str(SOURCE.parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_listing_known_runs_imports_only_what_it_needs(tmp_path):
    fanfold.init("p", dir=tmp_path, quiet=True, system=False).finish()
    code = """
import sys
from fanfold.cli import main
main(["ls", "-q"])
print(sorted(name for name in sys.argv[1:] if name in sys.modules), file=sys.stderr)
"""
    later = ("store.axes", "store.buckets", "store.changes", "store.filter", "store.segments", "journal.blocks", "journal.writer")
    unneeded = ["numpy", "socket", "tempfile", *(f"fanfold.{name}" for name in (*later, "process", "drawing.chart"))]
    for _ in range(2):  # the second time, the run is in the catalogue
        command = [sys.executable, "-c", code, *unneeded]
        env = {**os.environ, "FANFOLD_DIR": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]", done.stderr


def test_every_public_name_is_there():
    for name in fanfold.__all__:
        if name not in ("config", "summary", "run"):
            assert getattr(fanfold, name) is not None
    assert dir(fanfold) == sorted([*fanfold.__all__, "open"])


def test_importing_every_name_hides_no_builtin():
    names = {}
    exec("from fanfold import *", names)
    assert set(fanfold.__all__) <= set(names)
    assert not [name for name in fanfold.__all__ if hasattr(builtins, name)]
    assert callable(fanfold.open)


def test_a_run_shows_its_documented_names_and_nothing_else(tmp_path):
    page = (SOURCE.parents[1] / "docs" / "getting-started.md").read_text()
    table = page.partition("## What a run offers")[2].partition("\n## ")[0]
    documented = re.findall(r"`run\.(\w+)", table)
    run = fanfold.init("p", dir=tmp_path, quiet=True, system=False)
    shown = [name for name in dir(run) if not name.startswith("_")]
    run.finish()
    assert sorted(documented) == shown
    assert [name for name in shown if not hasattr(DisabledRun(None, None, None), name)] == []


# The layers of the house, from the ground up. A room may use every room named before it, in its own layer too, and none after it.
LAYERS = {
    "ground": ["_version", "atomic", "errors", "threads", "settings", "sources", "fold", "approvals", "process"],
    "values": ["media", "values", "plain"],
    "journal": ["journal"],
    "facts": ["facts", "probes", "blackbox"],
    "readers": [
        "drawing",
        "notebook",
        "store",
        "trackers",
        "provenance",
        "relay",
        "notify",
        "fleet",
        "clickhouse",
        "stores",
        "transfer",
        "tools",
        "server",
        "report",
        "publish",
    ],
    "recording": ["recording"],
    "training": ["callbacks", "frameworks", "compat", "testing", "train"],
    "commands": ["cli", "__main__"],
}


def drawn() -> str:
    """Draw the layers as docs/map.md shows them: the ground at the bottom."""
    width = max(map(len, LAYERS))
    return "\n".join(f"{name:<{width}}  {'  '.join(rooms)}" for name, rooms in reversed(LAYERS.items()))


def test_the_map_draws_the_layers():
    assert drawn() in (DOCS / "map.md").read_text(), f"docs/map.md should have:\n\n{drawn()}"


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Return which of our rooms a file imports from."""
    rooms = set()
    depth = len(path.relative_to(SOURCE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            rooms |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names} - {"__version__"}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fanfold."):
            rooms.add(node.module.split(".")[1])
    return rooms


def test_imports_point_one_way():
    rank = {room: at for at, room in enumerate(room for rooms in LAYERS.values() for room in rooms)}
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = _room(path)
        if room == "__init__":
            continue
        assert room in rank, f"{room} has no place in the order of rooms"
        wrong += [
            f"{path.relative_to(SOURCE)} imports {other}"
            for other in _imports(path)
            if other != room and rank[other] >= rank[room]
        ]
    assert wrong == []


def test_no_import_by_name_evades_the_order():
    """Names given to import_module are those of other libraries, or of modules in the same room."""
    wrong = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if not called.endswith(("import_module", "__import__")) or path == SOURCE / "__init__.py":
                continue
            texts = [
                part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            if any(text.startswith(("fanfold", "..")) for text in texts):
                wrong.append(f"{path.relative_to(SOURCE)}: {ast.unparse(node)}")
    assert wrong == []


def test_only_the_guard_catches_everything():
    broad = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
                if isinstance(node, ast.ExceptHandler) and node.type
                else set()
            )
            bare = isinstance(node, ast.ExceptHandler) and node.type is None
            if (bare or names & {"Exception", "BaseException"}) and path.name != "errors.py":
                broad.append(str(path.relative_to(SOURCE)))
    assert broad == ["recording/recorder.py"]  # log()'s fast path, which does the call again on the slow one, under the guard


def test_names_of_tests_are_short_enough_to_read():
    names = [
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [name for name in names if name.startswith("test_") and len(name) >= 80] == []
