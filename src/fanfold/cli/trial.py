"""Import modules one after another, in a process of its own, and write down how each went: the child of `doctor --deploy`.

Each line is written before the next module begins, so one that ends the process is known by having no line.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from ..errors import outcome


def main(order: str) -> None:
    """Do what the order (a JSON file) says: put `root` first on the path, import `modules`, write lines to `report`.

    `away` is a folder that must not be found, `beside` are some that may; `sources` is a zip for the source loader.
    """
    with open(order, encoding="utf-8") as file:  # noqa: PTH123 - what the tree calls pathlib comes later
        told: dict[str, Any] = json.load(file)
    away = os.path.realpath(told["away"])
    kept = [place for place in sys.path if os.path.realpath(place or ".") != away]
    sys.path[:] = [told["root"], *kept, *told["beside"]]
    if told["sources"]:
        from ..sources import install

        install(told["sources"])
    with open(told["report"], "a", encoding="utf-8") as report:  # noqa: PTH123 - as above
        for name in told["modules"]:
            report.write(json.dumps({"module": name, **_try(name, told["root"])}) + "\n")
            report.flush()


def _try(name: str, root: str) -> dict[str, Any]:
    """Import one module; return the error and the place in the tree that it comes from, or where it was loaded from."""
    module, error = outcome(_leaving(lambda: importlib.import_module(name)))
    if error is None:
        return {"file": getattr(module, "__file__", None)}
    places = []
    trace = error.__traceback__
    while trace is not None:
        places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    inside = [place for place in places if place[0].startswith(root + os.sep)]
    file, line = inside[-1] if inside else (None, 0)
    said = str(error).strip().splitlines()
    words = re.sub(r" at 0x[0-9a-f]+", "", said[0][:200]) if said else ""  # an address would differ each time
    return {"error": f"{type(error).__name__}: {words}", "at": file, "line": line}


def _leaving(action: Callable[[], Any]) -> Callable[[], Any]:
    """Turn a module's sys.exit() into an error like any other."""

    def run() -> Any:
        try:
            return action()
        except SystemExit as leave:
            raise RuntimeError(f"it called sys.exit({leave.code!r})").with_traceback(leave.__traceback__) from None

    return run
