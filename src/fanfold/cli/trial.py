"""The child process of `doctor --deploy`: imports modules one after another and reports each result.

A line is written after each module, so a module that ends the process is the one without a line.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import outcome


def main() -> None:
    """Follow the order on stdin (JSON): put `root` first on the path, import `modules`, write a line for each to stdout.

    `away` is a folder to remove from the path, `beside` are folders to append; `sources` is a zip for the source loader.
    """
    order: dict[str, Any] = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever the modules print
    away = os.path.realpath(order["away"])
    kept = [place for place in sys.path if os.path.realpath(place or ".") != away]
    sys.path[:] = [order["root"], *kept, *order["beside"]]
    if order["sources"]:
        from ..sources import install

        install(order["sources"])
    for name in order["modules"]:
        report.write(json.dumps({"module": name, **_try(name, order["root"])}) + "\n")
        report.flush()


def _try(name: str, root: str) -> dict[str, Any]:
    """Import one module; return where it was loaded from, or the error and its place in the tree."""
    module, error = outcome(_leaving(lambda: importlib.import_module(name)))
    if error is None:
        return {"file": getattr(module, "__file__", None)}
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    inside = [place for place in places if place[0].startswith(root + os.sep)]
    file, line = inside[-1] if inside else (None, 0)
    lines = str(error).strip().splitlines()
    words = re.sub(r" at 0x[0-9a-f]+", "", lines[0][:200]) if lines else ""  # addresses differ each time
    return {"error": f"{type(error).__name__}: {words}", "at": file, "line": line}


def _leaving(action: Callable[[], Any]) -> Callable[[], Any]:
    """Turn a module's sys.exit() into an ordinary error."""

    def run() -> Any:
        try:
            return action()
        except SystemExit as leave:
            raise RuntimeError(f"it called sys.exit({leave.code!r})").with_traceback(leave.__traceback__) from None

    return run
