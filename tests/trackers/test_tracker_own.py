"""The public contract suite on both kinds of tracker the docs show, a Destination and a GeneralTracker, found by entry points."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fanfold
from fanfold.testing import ALL, Seen, TrackerContract
from fanfold.trackers import GeneralTracker, register_tracker_class
from fanfold.trackers.registry import LOGGER_TYPE_TO_CLASS
from fanfold.trackers.tensorboard import TensorBoardTracker
from paths import DATA

PACKAGE = DATA / "lines_tracker"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the package installed, as pip would: importable, with its entry point."""
    monkeypatch.syspath_prepend(PACKAGE)
    importlib.invalidate_caches()
    yield
    for name in ("lines-of-json", "rows-of-json"):
        LOGGER_TYPE_TO_CLASS.pop(name, None)
    for name in ("lines_tracker", "rows_destination"):
        sys.modules.pop(name, None)


class Own(TrackerContract):
    def environment(self, folder: Path) -> dict[str, str]:
        del folder
        return {"PYTHONPATH": os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])}


class TestLines(Own):
    name = "lines-of-json"
    holds = frozenset({"nan", "inf", "late", "repeat", "text", "config", "resume"})

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


class TestRows(Own):
    name = "rows-of-json"
    holds = ALL - {"artifact", "summary", "metric", "alert"}

    def kwargs(self, folder: Path) -> dict[str, Any]:
        return {"path": str(folder / "rows.jsonl")}

    @staticmethod
    def read(folder: Path) -> Seen:
        seen = Seen()
        for row in map(json.loads, (folder / "rows.jsonl").read_text().splitlines()):
            seen.config = row.get("config", seen.config)
            seen.tags = row.get("tags", seen.tags)
            seen.status = row.get("status", seen.status)
            if "value" in row:
                seen.scalars.setdefault(row["key"], []).append((row["step"], float(row["value"])))
            elif "text" in row:
                seen.texts.setdefault(row["key"], []).append(row["text"])
            elif "file" in row and (folder / row["file"]).exists():
                seen.media[row["key"]] = seen.media.get(row["key"], 0) + 1
        return seen


@pytest.mark.parametrize("how", ["an object", "a registered name"])
def test_a_destination_has_all_that_users_of_accelerate_call(how: str, tmp_path: Path, runs_dir: Path) -> None:
    """Handed over as an object, or registered: either way it is a tracker with log, log_images, log_table and finish."""
    import numpy as np
    from rows_destination import Rows

    if how == "a registered name":
        register_tracker_class(Rows)
    chosen = Rows("own", path=tmp_path / "rows.jsonl") if how == "an object" else "rows-of-json"
    kwargs = {} if how == "an object" else {"rows-of-json": {"path": str(tmp_path / "rows.jsonl")}}
    run = fanfold.init("own", dir=runs_dir, trackers=[chosen], tracker_kwargs=kwargs, relay="thread", system=False)
    run.log({"loss": 0.5}, step=0)
    tracker = run.get_tracker("rows-of-json")
    tracker.log({"mine": 1.0}, step=1)
    tracker.log_images({"pictures": [np.zeros((4, 4, 3), np.uint8)] * 2}, step=2)
    tracker.log_table("table", columns=["a"], data=[[1]], step=3)
    assert (isinstance(tracker, GeneralTracker), tracker.tracker.name) == (True, str(tmp_path / "rows.jsonl"))
    run.finish()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["key"] for row in rows if "key" in row] == ["loss", "mine", "pictures", "pictures", "table"]
    assert rows[-1] == {"status": "finished"}
    assert (tmp_path / "pictures-2-1.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_subclass_of_a_built_in_tracker_changes_is_what_the_relay_calls(tmp_path: Path, runs_dir: Path) -> None:
    calls: list[str] = []

    class Mine(TensorBoardTracker):
        def start(self) -> None:
            calls.append("start")
            super().start()

        def settle(self) -> None:
            calls.append("settle")
            self.destination.settle()

    run = fanfold.init("own", dir=runs_dir, trackers=[Mine("own", tmp_path)], system=False)
    run.log({"loss": 0.5}, step=0)
    run.finish()
    assert calls[0] == "start"
    assert "settle" in calls
    assert list(tmp_path.rglob("events.out.*"))


class _Raises(TestLines):
    """A contract whose tracker never delivers anything."""

    __test__ = False

    def delivered(self, folder: Path, body: str) -> Seen:
        del folder, body
        raise AssertionError("the tracker raised an error")


def test_a_difference_names_the_point_and_both_values() -> None:
    contract = TestLines()
    assert contract._same([[1, float("nan")], [0, 2.0]], [(0, 2.0), (1, float("nan"))])
    with pytest.raises(AssertionError, match=r"step 3: -0\.0, and not step 3: 0\.0; see TrackerContract\.stored"):
        contract._same([[3, 0.0]], [(3, -0.0)])
    with pytest.raises(AssertionError, match="1 points arrived, not 2"):
        contract._same([[3, 0.0]], [(3, 0.0), (4, 1.0)])


def test_a_run_that_failed_once_is_not_played_again_by_the_next_test(tmp_path: Path) -> None:
    """Each attempt waits minutes for a tracker that raises."""
    for words in ("^the tracker raised an error", "^the run that logs everything failed in an earlier test: the tracker raised"):
        with pytest.raises(AssertionError, match=words):
            _Raises().everything(tmp_path)
