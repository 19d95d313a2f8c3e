"""A run in ClickHouse keeps its number when it is moved: nothing is copied, whatever other gateways and readers do meanwhile."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

import fanfold
from clickhouse_tools import Fleet
from fanfold.clickhouse.database import Database, DatabaseUnavailable
from fanfold.clickhouse.decode import run_number
from fanfold.clickhouse.gateway_tables import ViewTable
from fanfold.clickhouse.intake import ClickHouseIntake
from fanfold.clickhouse.names import CURRENT, GRACE_SECONDS, MADE, look_up, owners
from fanfold.clickhouse.rebuild import rebuild
from fanfold.clickhouse.store import ClickHouseStore
from fanfold.errors import FanfoldError, RunError, outcome
from fanfold.fleet.audit import AuditFile
from fanfold.fleet.changes import ChangeTargets
from fanfold.fleet.grants import Anybody
from fanfold.fleet.views import ProjectsView
from fanfold.fleet.wire import Conflict, Gone, Piece
from fanfold.store.changes import as_journal, edit_frame
from fleet_tools import Gateway, pieces_of, write_run


@pytest.fixture
def fleet(clickhouse, ends):
    return ends(Fleet(clickhouse))


@pytest.fixture
def other(fleet, ends):
    """Another gateway's intake over the same database."""
    return another_intake(fleet, ends)


def another_intake(fleet, ends):
    database = Database(fleet.database.address)
    intake = ClickHouseIntake(database, gather=0.0)

    class End:
        def close(self):
            intake.close()
            database.close()

    ends(End())
    return intake


def at_insert(monkeypatch: Any, intake: Any, table: str, *, before: Any = None, after: Any = None) -> None:
    """Do something once when an intake writes to a table (the first one, without a name): before the rows are there, and after."""
    insert, done = intake.database.insert, []

    def hooked(name: str, *words: Any, **options: Any) -> None:
        now = table in (name, "") and not done
        if now:
            done.append(name)
        if now and before is not None:
            before()
        insert(name, *words, **options)
        if now and after is not None:
            after()

    monkeypatch.setattr(intake.database, "insert", hooked)


def fail(why: str) -> None:
    raise ConnectionError(why)


def move(fleet, project: str, target: str) -> None:
    fleet.intake.move(project, "r1", target, "ann")


def asked_to_move(url: str, project: str, id: str) -> int:
    """Ask a gateway to move a run to `base`, and return the HTTP status."""
    body = json.dumps({"project": project, "ids": [id], "to": "base"}).encode()
    request = urllib.request.Request(f"{url}/ui/api/move", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        assert "base has another run" in error.read().decode()
        return error.code


def points(fleet) -> dict[str, int]:
    """Return how many points the run r1 of each project has, as a reader sees it that has just started."""
    reader = ClickHouseStore(Database(fleet.database.address))
    try:
        return {row.project: len(reader.run(row.project, row.id).series("loss")) for row in reader.runs()}
    finally:
        reader.database.close()


def names(store: Any) -> list[tuple[str, str]]:
    return sorted((row.project, row.id) for row in store.runs())


def edit(fleet, project: str, **facts: Any) -> Piece:
    name, data = as_journal(fleet.store().run(project, "r1"), edit_frame(facts))
    return Piece("r1", name, 0, 0, data)


def test_what_another_gateway_accepts_during_a_move_is_in_the_moved_run(tmp_path, fleet, other, monkeypatch):
    first, second, third = pieces_of(write_run(tmp_path / "node"), 100, 150)
    other.append("llm", first)  # it knows the run under this name
    monkeypatch.setattr(fleet.intake, "_going_on", lambda runs: {})  # the job goes on just after the look
    fleet.intake.move("llm", "r1", "base", "ann")
    end = other.append("llm", second)  # it may not know of the move for two seconds
    assert end == second.offset + len(second.data)
    with pytest.raises(Conflict) as conflict:
        fleet.intake.append("base", second)
    assert conflict.value.offset == end
    other.names.renew(now=True)
    with pytest.raises(Gone, match="moved to another project"):
        other.append("llm", third)
    other.append("base", third)
    assert names(fleet.store()) == [("base", "r1")]
    assert fleet.store().run("base", "r1").series("loss").steps.tolist() == list(range(200))


def test_a_gateway_that_does_not_know_of_a_move_finds_the_run_under_its_new_name(tmp_path, fleet, other):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    other.append("llm", whole)
    fleet.intake.move("llm", "r1", "base", "ann")
    other.append("base", edit(fleet, "base", notes="by the other"))
    assert names(fleet.store()) == [("base", "r1")], "no second run with the new name"
    assert fleet.store().run("base", "r1").notes == "by the other"


def test_moves_at_two_gateways_at_once_leave_the_run_in_one_project(tmp_path, fleet, other):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    start = threading.Barrier(2)

    def moves(intake, target):
        start.wait()
        outcome(lambda: intake.move("llm", "r1", target, "ann"))

    for left, right in (("x1", "x2"), ("y", "y")):
        threads = [threading.Thread(target=moves, args=pair) for pair in ((fleet.intake, left), (other, right))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ((project, _),) = names(fleet.store())
        assert project in (left, right)
        run = fleet.store().run(project, "r1")
        assert (len(run.series("loss")), fleet.store().series(run, "acc", buckets=10).total) == (200, 200)
        fleet.intake.move(project, "r1", "llm", "ann")


def test_a_reader_that_looks_during_moves_always_sees_the_whole_run(tmp_path, fleet, other):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    fleet.intake.append("llm", edit(fleet, "llm", tags=["big", "keep"]))
    reader = ClickHouseStore(Database(fleet.database.address))
    done, seen = threading.Event(), []

    def looks():
        while not done.is_set():
            seen.extend((row.name, row.tags, row.status, sorted(row.summary)) for row in reader.runs())

    looking = threading.Thread(target=looks)
    looking.start()
    for target in ("a", "b", "c", "llm"):
        before = names(fleet.store())[0][0]
        other.move(before, "r1", target, "ann")
    done.set()
    looking.join()
    whole_row = (reader.run("llm", "r1").name, ["big", "keep"], "finished", sorted(reader.run("llm", "r1").summary))
    assert seen and all(row == whole_row for row in seen), seen[:3]
    assert names(reader) == [("llm", "r1")] and reader.run("llm", "r1").tags == ["big", "keep"]
    reader.database.close()


def test_a_run_may_come_back_but_takes_no_other_runs_name(tmp_path, fleet, monkeypatch):
    monkeypatch.setattr(fleet.intake, "_going_on", lambda runs: {})  # half of its journal comes later
    file = write_run(tmp_path / "node")
    first, second = pieces_of(file, 100)
    fleet.intake.append("llm", first)
    for project, target in (("llm", "base"), ("base", "third")):
        fleet.intake.move(project, "r1", target, "ann")
    for left in ("llm", "base"):
        with pytest.raises(Gone):
            fleet.intake.append(left, second)
        with pytest.raises(fanfold.RunNotFound):
            fleet.store().run(left, "r1")
    fleet.intake.move("third", "r1", "llm", "ann")
    fleet.intake.append("llm", second)
    assert names(fleet.store()) == [("llm", "r1")]
    assert fleet.store().run("llm", "r1").series("loss").steps.tolist() == list(range(200))

    (another,) = pieces_of(write_run(tmp_path / "another", rows=10, project="taken"))
    fleet.intake.append("taken", another)
    (copied,) = pieces_of(file)
    fleet.intake.append("copy", copied)  # the same journal in another project
    for target in ("taken", "copy"):
        for call in (fleet.intake.movable, lambda *words: fleet.intake.move(*words, "ann")):
            with pytest.raises(RunError, match=f"project {target} has another run r1 already. Nothing was moved"):
                call("llm", "r1", target)
    with pytest.raises(RunError, match="project base had another run r1"):
        fleet.intake.move("taken", "r1", "base", "ann")
    fleet.intake.delete("copy", "r1", "ann")
    with pytest.raises(RunError, match="project copy had another run r1"):
        fleet.intake.move("llm", "r1", "copy", "ann")
    assert names(fleet.store()) == [("llm", "r1"), ("taken", "r1")]
    fleet.intake.movable("llm", "r1", "base")


def test_a_moved_run_that_is_deleted_does_not_come_back_under_any_of_its_names(tmp_path, fleet, other):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    fleet.intake.move("llm", "r1", "base", "ann")
    fleet.intake.move("base", "r1", "third", "ann")
    fleet.intake.delete("third", "r1", "ann")
    assert names(fleet.store()) == []
    other.names.renew(now=True)
    for project in ("llm", "base", "third"):
        assert other.deleted(project, "r1")
        with pytest.raises(Gone):
            other.append(project, whole)


def test_a_fork_keeps_the_curve_of_a_parent_that_was_moved(tmp_path, fleet):
    parent = fanfold.init("llm", id="base-run", dir=tmp_path / "node", system=False, quiet=True)
    for step in range(50):
        parent.log({"loss": float(step)}, step=step)
    parent.finish()
    child = fanfold.init("llm", id="child", fork="base-run@29", dir=tmp_path / "node", system=False, quiet=True)
    for step in range(30, 60):
        child.log({"loss": float(step)}, step=step)
    child.finish()
    fleet.ship(tmp_path / "node")
    assert fleet.store().run("llm", "child").series("loss").steps.tolist() == list(range(60))
    fleet.intake.move("llm", "base-run", "elsewhere", "ann")
    again = ClickHouseStore(Database(fleet.database.address))
    found = again.run("llm", "child")
    assert found.series("loss").steps.tolist() == list(range(60))
    assert (found.parent.project, found.parent.id) == ("elsewhere", "base-run")
    again.database.close()


def test_a_run_in_a_project_with_a_long_name_belongs_to_exactly_that_project(tmp_path, fleet):
    (whole,) = pieces_of(write_run(tmp_path / "node", 20))
    fleet.intake.append("llm", whole)
    long = "проект-обучения-больших-языковых-моделей"  # too long for the name of a folder
    fleet.intake.move("llm", "r1", long, "ann")
    again = ClickHouseStore(Database(fleet.database.address))
    assert names(again) == [(long, "r1")]
    view = ProjectsView(again, lambda project: project == long, again.changes)
    run = view.run(long, "r1")
    assert (run.project, run.id, len(run.series("loss"))) == (long, "r1", 20)
    assert [row.project for row in view.runs()] == [long]
    run.move(f"{long}-b")
    assert (run.project, run.reopened().project, len(run.series("loss"))) == (f"{long}-b", f"{long}-b", 20)
    run.move("llm")
    assert (run.project, names(again)) == ("llm", [("llm", "r1")])
    again.database.close()


def test_a_moved_run_is_rebuilt_under_its_new_name(tmp_path, fleet):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    fleet.intake.move("llm", "r1", "base", "ann")
    assert rebuild(fleet.database, "base", "r1") == 400
    assert fleet.store().run("base", "r1").series("loss").steps.tolist() == list(range(200))


def test_a_run_goes_back_and_forth_as_often_as_somebody_likes(tmp_path, fleet, other):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    for turn in range(6):
        intake, pair = (fleet.intake, other)[turn % 2], (("llm", "base"), ("base", "llm"))[turn % 2]
        intake.names.renew(now=True)
        intake.move(pair[0], "r1", pair[1], "ann")
        assert names(fleet.store()) == [(pair[1], "r1")]


def test_equal_rows_without_a_token_are_all_stored(fleet):
    views = ViewTable(fleet.database)
    for text in ("a", "b", "a", None, "a"):
        views.save("llm", "mine", text)
        assert views.all("llm") == ({} if text is None else {"mine": text})


def test_a_run_that_is_rebuilt_again_and_again_keeps_its_cells(tmp_path, fleet):
    (whole,) = pieces_of(write_run(tmp_path / "node", rows=6000))
    fleet.intake.append("llm", whole)
    for _ in range(3):
        assert rebuild(fleet.database, "llm", "r1") == 12_000
        found = fleet.database.one(
            "SELECT (SELECT sum(count) FROM cells FINAL) AS n, (SELECT count() FROM rolled FINAL) AS rolled"
        )
        assert (found["n"], found["rolled"]) == (12_000, 1)


def test_a_run_that_was_just_moved_by_another_gateway_is_deleted(tmp_path, fleet, other):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    other.append("llm", whole)
    assert other.offset("base", "r1", whole.journal) == 0, "it asked for the name before"
    fleet.intake.move("llm", "r1", "base", "ann")
    with pytest.raises(Gone):
        other.delete("llm", "r1", "ann")
    other.delete("base", "r1", "ann")
    assert names(fleet.store()) == []
    assert fleet.database.one("SELECT count() AS n FROM points")["n"] == 0


@pytest.mark.parametrize("table", ["moved", "pieces", "runs", "keys", "commits"])
def test_of_a_move_and_a_first_upload_to_one_name_one_is_refused(tmp_path, fleet, other, monkeypatch, table):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    (another,) = pieces_of(write_run(tmp_path / "another", rows=10, project="base"))
    moved: list[Any] = []
    at_insert(monkeypatch, other, table, before=lambda: moved.append(outcome(lambda: move(fleet, "llm", "base"))[1]))
    _, refused = outcome(lambda: other.append("base", another))
    assert (moved[0] is None) != (refused is None), (moved, refused)
    if moved[0] is None:
        assert names(fleet.store()) == [("base", "r1")]
        other.append("base", another)  # the forwarder tries again: from now on it belongs to the run of that name
        assert len(fleet.store().run("base", "r1").journals) == 2
    else:
        assert "has another run r1 already" in str(moved[0])
        assert points(fleet) == {"base": 10, "llm": 200}


def test_of_two_runs_moved_to_one_name_at_two_gateways_one_stays(tmp_path, fleet, other, monkeypatch):
    for intake, project, rows in ((fleet.intake, "llm", 200), (other, "vision", 10)):
        intake.append(project, *pieces_of(write_run(tmp_path / project, rows=rows, project=project)))
    both = threading.Barrier(2)  # each looks before the other writes
    for intake in (fleet.intake, other):
        at_insert(monkeypatch, intake, "moved", before=lambda: both.wait(20))
    with ThreadPoolExecutor(2) as pool:
        tried = {
            project: pool.submit(outcome, functools.partial(intake.move, project, "r1", "base", "ann"))
            for intake, project in ((fleet.intake, "llm"), (other, "vision"))
        }
    refused = {project: done.result()[1] for project, done in tried.items() if done.result()[1] is not None}
    ((project, error),) = refused.items()
    assert "project base has another run r1 already. Nothing was moved" in str(error)
    rows = {"llm": 200, "vision": 10}
    assert points(fleet) == {project: rows.pop(project), "base": rows.popitem()[1]}


def test_of_two_runs_moved_to_one_name_by_two_gateway_processes_one_stays(tmp_path, fleet, ends):
    rows = {"llm": 20, "vision": 10}
    for id in ("a", "b", "c"):
        for project, count in rows.items():
            file = write_run(tmp_path / f"{project}-{id}", rows=count, project=project, id=id)
            fleet.intake.append(project, *pieces_of(file, run=id))
    gateways = [ends(Gateway(fleet.url, "--allow-delete", log=tmp_path / f"{turn}.log")) for turn in range(2)]
    with ThreadPoolExecutor(6) as pool:
        tried = {
            (project, id): pool.submit(asked_to_move, gateway.url, project, id)
            for id in ("a", "b", "c")
            for gateway, project in zip(gateways, rows, strict=True)
        }
    moved = {name for name, done in tried.items() if done.result() == 200}
    assert sorted(id for _, id in moved) == ["a", "b", "c"], {name: done.result() for name, done in tried.items()}
    for project, id in tried:
        there = "base" if (project, id) in moved else project
        assert len(fleet.store().run(there, id).series("loss")) == rows[project]
    assert len(names(fleet.store())) == 6


def test_a_move_whose_gateway_dies_has_happened_for_everybody(tmp_path, fleet, other, monkeypatch):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    (another,) = pieces_of(write_run(tmp_path / "another", rows=10, project="base"))
    at_insert(monkeypatch, fleet.intake, "moved", after=lambda: fail("the gateway is killed"))
    with pytest.raises(ConnectionError):
        move(fleet, "llm", "base")
    with pytest.raises(DatabaseUnavailable, match="just moved to this name"):
        other.append("base", another)
    time.sleep(2 * GRACE_SECONDS)
    assert points(fleet) == {"base": 200}
    other.names.renew(now=True)
    other.append("base", another)  # the forwarder tries again
    assert len(fleet.store().run("base", "r1").journals) == 2


def test_a_move_whose_gateway_dies_hides_no_upload_that_came_first(tmp_path, fleet, other, monkeypatch):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    (another,) = pieces_of(write_run(tmp_path / "another", rows=10, project="base"))
    came = functools.partial(other.append, "base", another)
    at_insert(monkeypatch, fleet.intake, "moved", before=came, after=lambda: fail("the gateway is killed"))
    with pytest.raises(ConnectionError):
        move(fleet, "llm", "base")
    time.sleep(2 * GRACE_SECONDS)
    assert points(fleet) == {"base": 10, "llm": 200}
    other.names.renew(now=True)
    assert other.offset("base", "r1", another.journal) == len(another.data)
    with pytest.raises(RunError, match="project base has another run r1 already"):
        other.move("llm", "r1", "base", "ann")


def test_what_is_stored_while_a_move_fails_is_in_the_run_it_was_sent_for(tmp_path, fleet, other, ends, monkeypatch):
    third = another_intake(fleet, ends)
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    (rank0,), (rank1,) = (pieces_of(write_run(tmp_path / f"n{rows}", rows=rows, project="base")) for rows in (10, 30))
    begins, goes_on = (functools.partial(intake.append, "base", one) for intake, one in ((other, rank0), (third, rank1)))
    at_insert(monkeypatch, fleet.intake, "moved", before=begins, after=goes_on)
    with pytest.raises(RunError, match="project base has another run r1 already"):
        move(fleet, "llm", "base")
    found = {project: fleet.store().run(project, "r1") for project in ("llm", "base")}
    assert {project: len(run.journals) for project, run in found.items()} == {"llm": 1, "base": 2}
    assert {one.name: one.runs for one in fleet.store().projects()} == {"llm": 1, "base": 1}
    assert names(fleet.store()) == [("base", "r1"), ("llm", "r1")]


def test_a_refused_upload_takes_nothing_from_a_run_that_was_in_a_project_before(tmp_path, fleet, other, monkeypatch):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    (another,) = pieces_of(write_run(tmp_path / "another", rows=10, project="base"))
    at_insert(monkeypatch, other, "", before=lambda: move(fleet, "llm", "base"))  # the first of all inserts
    with pytest.raises(DatabaseUnavailable, match="just moved to this name"):
        other.append("base", another)
    for project, target in (("base", "llm"), ("llm", "base"), ("base", "llm")):
        move(fleet, project, target)
        assert names(fleet.store()) == [(target, "r1")]
    other.names.renew(now=True)
    with pytest.raises(Gone):
        other.append("base", another)
    assert points(fleet) == {"llm": 200}


def test_a_blob_that_is_acknowledged_stays_with_its_name(tmp_path, fleet, other):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    data = b"x" * 100
    blob = hashlib.sha256(data).hexdigest()
    assert other.missing("base", "r1", [blob]) == {blob: 0}, "it asked for the name before"
    move(fleet, "llm", "base")
    with pytest.raises(DatabaseUnavailable, match="just moved to this name"):
        other.blob("base", "r1", blob, offset=0, total=100, data=data)
    assert other.blob("base", "r1", blob, offset=0, total=100, data=data) == 100
    assert fleet.intake.missing("base", "r1", [blob]) == {}

    assert other.blob("third", "r1", blob, offset=0, total=100, data=data) == 100
    with pytest.raises(RunError, match="project third has another run r1 already"):
        move(fleet, "base", "third")
    other.names.renew(now=True)
    assert other.missing("third", "r1", [blob]) == {}


def test_a_run_that_goes_on_after_the_callers_look_is_not_moved(tmp_path, fleet, other):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    fleet.intake.append("llm", *pieces_of(write_run(tmp_path / "first", id="a"), run="a"))
    changes = ChangeTargets(fleet.intake, AuditFile(tmp_path / "audit"), allow_delete=True).by(Anybody("ann"), "here")
    seen = [fleet.store().run("llm", id) for id in ("a", "r1")]
    assert [run.status for run in seen] == ["finished", "finished"]
    resumed, _ = pieces_of(write_run(tmp_path / "again"), 100)
    other.append("llm", resumed)
    with pytest.raises(FanfoldError, match=r"may still be written. Nothing was moved"):
        changes.move(seen, "base")
    assert names(fleet.store()) == [("llm", "a"), ("llm", "r1")]


def test_of_runs_that_move_together_one_may_find_its_name_taken(tmp_path, fleet, other, monkeypatch):
    for id in ("a", "r1"):
        fleet.intake.append("llm", *pieces_of(write_run(tmp_path / id, id=id), run=id))
    (another,) = pieces_of(write_run(tmp_path / "another", rows=10, project="base"))
    at_insert(monkeypatch, fleet.intake, "moved", before=lambda: other.append("base", another))
    changes = ChangeTargets(fleet.intake, AuditFile(tmp_path / "audit"), allow_delete=True).by(Anybody("ann"), "here")
    with pytest.raises(FanfoldError, match=r"base has another run r1 already. It was not moved.* 1 other run went to base"):
        changes.move([fleet.store().run("llm", id) for id in ("a", "r1")], "base")
    assert names(fleet.store()) == [("base", "a"), ("base", "r1"), ("llm", "r1")]


def test_of_a_move_and_a_deletion_at_once_one_is_refused(tmp_path, fleet, other, monkeypatch):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    at_insert(monkeypatch, other, "deleted", before=lambda: move(fleet, "llm", "base"))
    with pytest.raises(Gone):
        other.delete("llm", "r1", "bob")
    assert points(fleet) == {"base": 200}
    fleet.intake.names.renew(now=True)
    assert not fleet.intake.deleted("base", "r1")

    at_insert(monkeypatch, fleet.intake, "moved", before=lambda: other.delete("base", "r1", "bob"))
    with pytest.raises(Gone):
        move(fleet, "base", "third")
    assert names(fleet.store()) == []


def test_a_name_belongs_to_its_first_claim_however_the_rows_come(fleet):
    """What the database says is what a few lines say that go through the claims one by one."""
    random = Random(7)
    projects = [f"p{number}" for number in range(5)]
    numbers = {run_number(project, "r1"): project for project in projects}
    now = fleet.database.one("SELECT toUnixTimestamp64Micro(now64(6)) AS now")["now"]
    insert = "INSERT INTO moved VALUES ({}, {}, '{}', 'r1', '{}', fromUnixTimestamp64Micro({}))"
    for _ in range(25):
        for table in ("moved", "runs"):
            fleet.database.run(f"TRUNCATE TABLE {table}")
        claims = []
        for run, project in numbers.items():
            fleet.database.run(f"INSERT INTO runs (run, project, id) VALUES ({run}, '{project}', 'r1')")
        for _ in range(random.randrange(1, 10)):
            run, name = random.choices(list(numbers), k=2)
            own = run == name and random.random() < 0.7
            base = now + random.choice([-60, 600]) * 1_000_000  # settled for long, or not for long: the test takes a while
            at = base + 100_000 * random.randrange(12)
            claims.append((at, run, name, "" if own else "ann"))
        for at, run, name, who in random.sample(claims, len(claims)):
            fleet.database.run(insert.format(run, name, numbers[name], who, at))
        owner, current, made = model(claims, fleet.database)
        assert owners(fleet.database, list(numbers)) == owner
        asked = [(project, "r1") for project in projects]
        found = fleet.database.ask(f"SELECT run, project FROM {CURRENT}")
        shown = {run: project.decode() for run, project in zip(found["run"].tolist(), found["project"], strict=True)}
        assert shown == {run: numbers[current.get(run, run)] for run in numbers}, claims
        for (project, _), name in look_up(fleet.database, asked, moves=MADE).items():
            assert made.get(name.run, name.run) == run_number(name.project, "r1"), (project, claims)


def model(claims: list[Any], database: Database) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Return who owns each name, and which name each run has: when moves are in effect, and as soon as they are made."""
    grace = int(GRACE_SECONDS * 1e6)
    owner: dict[int, int] = {}
    for _, run, name in sorted((at + (grace if who else 0), run, name) for at, run, name, who in claims):
        owner.setdefault(name, run)
    now = database.one("SELECT toUnixTimestamp64Micro(now64(6)) AS now")["now"]
    current, made = {}, {}
    for at, name, run in sorted((at, name, run) for at, run, name, who in claims if who and owner[name] == run):
        made[run] = name
        if at <= now - 2 * grace:
            current[run] = name
    return owner, current, made
