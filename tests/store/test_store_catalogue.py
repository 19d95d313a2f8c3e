"""The catalogue: its tables, statistics that follow the run, and making it anew."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import fanfold
from fanfold.journal import format as fmt
from fanfold.store import StoredRun, catalogue
from fanfold.store.query import LocalStore
from store_data import Call, write_run


def database() -> Path:
    return Path(os.environ["FANFOLD_CACHE_DIR"]) / f"catalogue-{catalogue.VERSION}.db"


def made(root, count=3, **options):
    return write_run(root, [Call(0, 0, i, 10**6, {"a": float(i)}) for i in range(count)], **options)


def test_a_catalogue_without_tables_gets_them(tmp_path):
    made(tmp_path)
    database().parent.mkdir()
    sqlite3.connect(database()).close()
    (row,) = LocalStore(tmp_path).runs()
    assert (row["id"], row["latest"]) == ("r", {"a": 2.0})
    with sqlite3.connect(database()) as now:
        assert now.execute("SELECT path FROM runs").fetchall() == [(str(tmp_path / "p" / "r"),)]


def test_a_newer_catalogue_is_used_and_not_set_back(tmp_path):
    made(tmp_path)
    LocalStore(tmp_path).runs()
    with sqlite3.connect(database()) as newer:
        newer.execute("ALTER TABLE runs ADD COLUMN future TEXT")
    assert [row["id"] for row in LocalStore(tmp_path).runs()] == ["r"]
    made(tmp_path, id="second")
    assert len(LocalStore(tmp_path).runs()) == 2
    with sqlite3.connect(database()) as newer:
        assert newer.execute("SELECT count(*), count(future) FROM runs").fetchone() == (2, 0)


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
    monkeypatch.setattr("fanfold.store.points.points", lambda *_: pytest.fail("the journal was read again"))
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


def test_listing_drops_the_rows_of_runs_whose_folders_are_gone(tmp_path):
    made(tmp_path, id="stays")
    gone, other = made(tmp_path, id="goes"), made(tmp_path / "elsewhere", id="other")
    LocalStore(tmp_path).runs()
    LocalStore(tmp_path / "elsewhere").runs()
    shutil.rmtree(gone)
    shutil.rmtree(other)
    assert [row.id for row in LocalStore(tmp_path).runs()] == ["stays"]
    with sqlite3.connect(database()) as now:
        kept = {Path(path).name for (path,) in now.execute("SELECT path FROM runs")}
    assert "stays" in kept and "goes" not in kept


def test_a_deleted_catalogue_comes_back_under_a_store_that_stays(tmp_path):
    made(tmp_path)
    store = LocalStore(tmp_path)
    first = store.runs(stats=["a"])
    shutil.rmtree(database().parent)
    assert store.runs(stats=["a"]) == first
    assert LocalStore(tmp_path).runs(stats=["a"]) == first


def test_the_longest_unused_runs_are_closed_when_many_journals_are_open(tmp_path, monkeypatch):
    for place in range(8):
        made(tmp_path, id=f"r{place}")
    monkeypatch.setattr(catalogue, "MOST_OPEN", 3)
    store = LocalStore(tmp_path)
    runs = [store.run("p", f"r{place}") for place in range(8)]
    assert len(store._shelf.opened) == 3
    assert [store.series(run, "a").total for run in runs] == [3] * 8


# Runs that cannot be read


def newer_format(root: Path, id: str) -> Path:
    """Write a run in a format of the future."""
    folder = made(root, id=id)
    (file,) = (folder / "journal").glob("*.ffj")
    file.write_bytes(fmt.frame(fmt.Kind.HEADER, fmt.pack({"format": [fmt.MAJOR + 1, 0], "rank": 0}), 0))
    return folder


def said_by(*words: str, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fanfold", *words, "--dir", root], capture_output=True, text=True, timeout=120)


def test_runs_that_cannot_be_read_are_named_with_the_reason(tmp_path, caplog):
    made(tmp_path, id="good")
    bad = newer_format(tmp_path, "bad")
    rows = LocalStore(tmp_path).runs()
    assert [row["id"] for row in rows] == ["good"]
    ((path, reason),) = [(one["path"], one["reason"]) for one in rows.unreadable]
    assert path == str(bad) and "Upgrade fanfold" in reason
    listed = said_by("ls", "--json", root=tmp_path)
    assert [row["id"] for row in json.loads(listed.stdout)] == ["good"]
    assert listed.returncode == 1
    assert "1 run could not be read" in listed.stderr and str(bad) in listed.stderr and "Upgrade fanfold" in listed.stderr
    asked = said_by("query", "SELECT id FROM runs", root=tmp_path)
    assert "good" in asked.stdout and "1 run could not be read" in asked.stderr and asked.returncode == 1
    for _ in range(2):
        found = fanfold.runs(dir=tmp_path)
        assert [run.id for run in found] == ["good"]
        assert found.unreadable == rows.unreadable
    assert [record.message for record in caplog.records if "could not be read" in record.message] == [
        f"fanfold: {catalogue.unreadable_text(rows.unreadable)}"
    ]
    shutil.rmtree(bad)
    assert LocalStore(tmp_path).runs().unreadable == []


FEW_FILES = """
import os, sys
from fanfold.store.query import LocalStore
store = LocalStore(sys.argv[1])
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for fd in taken[:int(sys.argv[2])]:
    os.close(fd)
rows = store.runs()
print(len(rows), rows.unreadable)
"""


def test_a_process_without_descriptors_says_which_runs_it_could_not_read(tmp_path):
    for number in range(3):
        made(tmp_path, id=f"r{number}")
    limit = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash"]
    child = [*limit, sys.executable, "-c", FEW_FILES, str(tmp_path)]
    starved = subprocess.run([*child, "0"], capture_output=True, text=True, timeout=120, check=True).stdout
    assert starved.startswith("0 ") and "Too many open files" in starved
    assert subprocess.run([*child, "20"], capture_output=True, text=True, timeout=120, check=True).stdout == "3 []\n"


def test_one_run_that_breaks_its_reader_does_not_hide_the_others(tmp_path, monkeypatch):
    made(tmp_path, id="good")
    made(tmp_path, id="odd")
    row = StoredRun.row

    def breaks(run):
        return row(run) if run.path.name == "good" else {}["nothing"]

    monkeypatch.setattr(StoredRun, "row", breaks)
    rows = catalogue.listed(tmp_path)
    assert [run.id for run in rows] == ["good"]
    assert [one["reason"] for one in rows.unreadable] == ["KeyError: 'nothing'"]


def test_a_row_damaged_in_the_catalogue_is_read_again_from_the_journal(runs_dir):
    run = fanfold.init("p", id="r", system=False)
    run.log({"loss": 0.25}, step=3)
    run.finish()
    assert LocalStore(runs_dir).runs("p")[0]["latest"] == {"loss": 0.25}
    with contextlib.closing(sqlite3.connect(database())) as connection, connection:
        (row,) = connection.execute("SELECT row FROM runs").fetchone()
        forged = row.replace(struct.pack(">d", 0.25), struct.pack(">d", 0.75))
        assert forged != row
        connection.execute("UPDATE runs SET row = ?", (forged,))
    assert LocalStore(runs_dir).runs("p")[0]["latest"] == {"loss": 0.25}
