"""The catalogue: migrations, statistics that follow the run, and making it anew."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import fanfold
from fanfold.journal import format as fmt
from fanfold.store import catalogue
from fanfold.store.query import LocalStore
from store_data import Call, write_run


def database() -> Path:
    return Path(os.environ["FANFOLD_CACHE_DIR"]) / f"catalogue-{catalogue.VERSION}.db"


def made(root, count=3, **options):
    return write_run(root, [Call(0, 0, i, 10**6, {"a": float(i)}) for i in range(count)], **options)


def test_an_older_catalogue_is_brought_up_to_date(tmp_path):
    folder = made(tmp_path)
    database().parent.mkdir()
    with sqlite3.connect(database()) as old:
        old.execute("CREATE TABLE runs (path TEXT PRIMARY KEY, signature TEXT NOT NULL, row BLOB NOT NULL) WITHOUT ROWID")
        old.execute(
            "INSERT INTO runs VALUES (?, ?, ?)", (str(folder), catalogue.signature(folder), fmt.pack({"id": "from an old time"}))
        )
    (row,) = LocalStore(tmp_path).runs()
    assert (row["id"], row["latest"]) == ("r", {"a": 2.0})
    with sqlite3.connect(database()) as now:
        assert now.execute("PRAGMA user_version").fetchone() == (len(catalogue.MIGRATIONS),)


def test_a_newer_catalogue_is_used_and_not_set_back(tmp_path):
    made(tmp_path)
    LocalStore(tmp_path).runs()
    with sqlite3.connect(database()) as newer:
        newer.execute("ALTER TABLE runs ADD COLUMN future TEXT")
        newer.execute("PRAGMA user_version = 999")
    assert [row["id"] for row in LocalStore(tmp_path).runs()] == ["r"]
    made(tmp_path, id="second")
    assert len(LocalStore(tmp_path).runs()) == 2
    with sqlite3.connect(database()) as newer:
        assert newer.execute("PRAGMA user_version").fetchone() == (999,)
        assert newer.execute("SELECT count(*) FROM runs").fetchone() == (2,)


def test_many_processes_may_make_the_catalogue_at_once(tmp_path):
    for place in range(5):
        made(tmp_path, id=f"r{place}")
    code = "import sys; from fanfold.store.query import LocalStore; print(len(LocalStore(sys.argv[1]).runs()))"
    children = [subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [child.communicate(timeout=60)[0].strip() for child in children] == ["5"] * 4


def test_statistics_are_kept_and_follow_the_run(tmp_path, monkeypatch):
    run = fanfold.init("p", id="x", dir=tmp_path, quiet=True, system=False)
    run.log({"loss": 3.0}, step=0)
    run.log({"loss": 1.0}, step=1)
    store = LocalStore(tmp_path)
    assert [row["id"] for row in store.runs(filter="loss.min<2")] == ["x"]
    run.log({"loss": 0.5}, step=2)
    run.finish()
    (row,) = store.runs(stats=["loss"])
    assert (row["stats"]["loss"]["min"], row["stats"]["loss"]["count"]) == (0.5, 3)
    monkeypatch.setattr(catalogue, "points", lambda *_: pytest.fail("the journal was read again"))
    assert LocalStore(tmp_path).runs(filter="loss.mean>1")[0]["id"] == "x"


def test_a_row_tells_summary_from_latest_values_though_it_keeps_each_once(tmp_path):
    run = fanfold.init("p", id="x", dir=tmp_path, quiet=True, system=False)
    run.define_metric("loss", summary="min")
    run.define_metric("secret*", summary="none")
    run.log({"loss": 1.0, "acc": math.nan, "secret/a": 5.0, "words": "so"}, step=0)
    run.log({"loss": 2.0, "system/load": 3.0}, step=1)
    run.summary["best"] = 7
    run.finish()
    made(tmp_path, id="plain")
    expected = {"loss": 1.0, "acc": math.nan, "words": "so", "best": 7}
    for _ in range(2):  # read from journals, then from the catalogue
        row, plain = sorted(LocalStore(tmp_path).runs("p"), key=lambda row: row["id"], reverse=True)
        assert repr(row["summary"]) == repr(expected)
        assert row["latest"].keys() == {"loss", "acc", "secret/a", "words", "system/load"} and row["latest"]["loss"] == 2.0
        assert plain["summary"] == {"a": 2.0}


def test_reindex_makes_every_row_anew_and_forgets_what_is_gone(tmp_path):
    made(tmp_path, id="stays")
    gone = made(tmp_path, id="goes")
    LocalStore(tmp_path).runs()
    with sqlite3.connect(database()) as wrong:
        wrong.execute("UPDATE runs SET row = ?", (fmt.pack({"nonsense": True}),))
    shutil.rmtree(gone)
    done = subprocess.run(
        [sys.executable, "-m", "fanfold", "reindex", "--dir", tmp_path, "--json"], capture_output=True, text=True, timeout=60
    )
    assert '"runs": 1,' in done.stdout, done.stderr
    assert '"gone": 1' in done.stdout
    assert [row["id"] for row in LocalStore(tmp_path).runs()] == ["stays"]


def test_a_deleted_catalogue_comes_back_under_a_store_that_stays(tmp_path):
    made(tmp_path)
    store = LocalStore(tmp_path)
    first = store.runs(stats=["a"])
    shutil.rmtree(database().parent)
    assert store.runs(stats=["a"]) == first
    assert LocalStore(tmp_path).runs(stats=["a"]) == first


def test_more_runs_than_file_descriptors_can_be_open(tmp_path, monkeypatch):
    for place in range(8):
        made(tmp_path, id=f"r{place}")
    monkeypatch.setattr(catalogue, "_room_for_files", lambda: 3)
    store = LocalStore(tmp_path)
    runs = [store.run("p", f"r{place}") for place in range(8)]
    assert len(store._shelf.opened) == 3
    assert [store.series(run, "a").total for run in runs] == [3] * 8
