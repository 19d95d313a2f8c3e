"""log(time=): values measured earlier keep their time in every reader and tracker that has times."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import sqlite3
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import fanfold
from fanfold.cli import main
from fanfold.store.sql import query

MOMENT = 1_700_000_000.25
HOURS = dt.timezone(dt.timedelta(hours=5, minutes=30))


def close(moment: object) -> object:
    return pytest.approx(moment, rel=0, abs=1e-6)  # a float of seconds has no finer digits


def begin(tmp_path: Path, **options: object) -> fanfold.Run:
    return fanfold.init("p", dir=tmp_path, system=False, console=False, quiet=True, **options)  # type: ignore[arg-type]


def times(tmp_path: Path, key: str = "loss") -> list[float]:
    (run,) = fanfold.runs(dir=tmp_path)
    return run.series(key).times.tolist()


def test_numbers_texts_and_media_keep_the_time_given(tmp_path):
    with begin(tmp_path) as run:
        for step in range(5):  # the second call of a shape would take the fast path
            run.log({"loss": 1.0}, step=step, time=MOMENT + step)
        run.log({"note": "hello", "hist": fanfold.Histogram([1.0, 2.0])}, step=9, time=MOMENT + 9)
        fanfold.log({"other": 2}, time=MOMENT + 10)
    assert times(tmp_path) == close([MOMENT + step for step in range(5)])
    assert times(tmp_path, "other") == close([MOMENT + 10])
    (stored,) = fanfold.runs(dir=tmp_path)
    assert [point.time for point in stored.texts("note")] == close([MOMENT + 9])
    assert [point.time for point in stored.media("hist")] == close([MOMENT + 9])
    assert stored.series("other").steps.tolist() == [10]


@pytest.mark.parametrize(
    "moment",
    [
        MOMENT, np.float64(MOMENT), Fraction(MOMENT), Decimal(MOMENT),
        dt.datetime.fromtimestamp(MOMENT, dt.timezone.utc), dt.datetime.fromtimestamp(MOMENT, HOURS),
        dt.datetime.fromtimestamp(MOMENT),  # noqa: DTZ006 - local time, on purpose
    ],
    ids=lambda moment: f"{type(moment).__name__}-{getattr(moment, 'tzinfo', '')}",
)  # fmt: skip
def test_a_moment_may_be_any_number_or_datetime(tmp_path, moment, caplog):
    with begin(tmp_path) as run:
        run.log({"loss": 1.0}, step=1, time=moment)
    assert times(tmp_path) == close([MOMENT])
    assert not caplog.records


def test_whole_seconds_and_microseconds_are_exact(tmp_path):
    precise = dt.datetime(2024, 2, 29, 12, 0, 0, 123457, dt.timezone.utc)
    with begin(tmp_path) as run:
        run.log({"loss": 1.0}, step=1, time=1_700_000_001)
        run.log({"loss": 1.0}, step=2, time=precise)
    (journal,) = [one for one in fanfold.runs(dir=tmp_path)[0].journals if one.header.role == "main"]
    found = [row.time for row in journal.walk_rows(0)]
    assert found == [1_700_000_001 * 10**9, int(precise.timestamp()) * 10**9 + 123_457_000]


@pytest.mark.parametrize(
    "moment",
    ["yesterday", "1700000000", True, float("nan"), float("inf"), -1.0, MOMENT * 1000, 10**4000, dt.date(2024, 1, 1), [1]],
    ids=lambda moment: f"{type(moment).__name__}-{str(moment)[:12]}" if not isinstance(moment, int) else "big",
)
def test_a_bad_moment_warns_once_and_the_values_get_the_current_time(tmp_path, moment, caplog):
    before = time.time()
    with begin(tmp_path) as run:
        run.log({"loss": 1.0}, step=1, time=moment)
        run.log({"loss": 1.0}, step=2, time=moment)
    (warning,) = caplog.messages
    assert "log(time=" in warning
    assert "recorded with the current time" in warning
    assert all(before - 1 < one < time.time() + 1 for one in times(tmp_path))


def test_sql_and_exports_have_the_time_given(tmp_path, capsys):
    with begin(tmp_path, id="a") as run:
        run.log({"loss": 1.0}, step=1, time=MOMENT)
    assert query("select epoch_us(time) from points", dir=tmp_path).rows == [(int(MOMENT * 1e6),)]
    assert main(["export", "a", "--long", "--format", "jsonl", "--dir", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["time"] == close(MOMENT)


def test_trackers_that_have_times_get_the_time_given(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with begin(tmp_path, id="a") as run:
        for step in range(3):
            run.log({"loss": 1.0}, step=step, time=MOMENT + step)
    database = f"sqlite:///{tmp_path}/mlflow.db"
    for name, kwargs in (("tensorboard", {"logging_dir": str(tmp_path / "tb")}), ("mlflow", {"tracking_uri": database})):
        assert main(["sync", "a", "--to", name, "--dir", str(tmp_path), "--kwargs", json.dumps(kwargs)]) == 0
    events = [EventAccumulator(str(file)).Reload() for file in (tmp_path / "tb").rglob("*tfevents*")]
    (scalars,) = [one.Scalars("loss") for one in events if "loss" in one.Tags()["scalars"]]
    assert [one.wall_time for one in scalars] == close([MOMENT, MOMENT + 1, MOMENT + 2])
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        history = connection.execute("SELECT timestamp FROM metrics WHERE key = 'loss' ORDER BY step").fetchall()
    moments = [when / 1000 for (when,) in history]
    assert moments == pytest.approx([MOMENT, MOMENT + 1, MOMENT + 2], rel=0, abs=0.0011)  # MLflow has milliseconds
