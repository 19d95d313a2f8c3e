"""The public contract suite on a tracker of the kind the docs show: a plain GeneralTracker, found by an entry point."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fanfold.testing import Seen, TrackerContract
from fanfold.trackers.registry import LOGGER_TYPE_TO_CLASS

PACKAGE = Path(__file__).parent / "data" / "lines_tracker"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the package installed, as pip would: importable, with its entry point."""
    monkeypatch.syspath_prepend(PACKAGE)
    importlib.invalidate_caches()
    yield
    dict.pop(LOGGER_TYPE_TO_CLASS, "lines-of-json", None)
    sys.modules.pop("lines_tracker", None)


class TestLines(TrackerContract):
    name = "lines-of-json"
    holds = frozenset({"nan", "inf", "late", "repeat", "text", "config", "resume"})

    def environment(self, folder: Path) -> dict[str, str]:
        del folder
        return {"PYTHONPATH": os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])}

    def kwargs(self, folder: Path) -> dict[str, Any]:
        return {"path": str(folder / "lines.jsonl")}

    @staticmethod
    def read(folder: Path) -> Seen:
        seen = Seen(config={})
        for line in (folder / "lines.jsonl").read_text().splitlines():
            record = json.loads(line)
            seen.config |= record.get("config", {})
            for key, value in record.get("values", {}).items():
                if isinstance(value, str):
                    seen.texts.setdefault(key, []).append(value)
                else:
                    seen.scalars.setdefault(key, []).append((record["step"], float(value)))
        return seen
