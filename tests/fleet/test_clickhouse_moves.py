"""A run in ClickHouse keeps its number when it is moved: nothing is copied, whatever other gateways and readers do meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import fanfold
from clickhouse_tools import Fleet
from fanfold.clickhouse.database import Database
from fanfold.clickhouse.gateway_tables import ViewTable
from fanfold.clickhouse.intake import ClickHouseIntake
from fanfold.clickhouse.rebuild import rebuild
from fanfold.clickhouse.store import ClickHouseStore
from fanfold.errors import RunError, outcome
from fanfold.fleet.views import ProjectsView
from fanfold.fleet.wire import Conflict, Gone, Piece
from fanfold.store.changes import as_journal, edit_frame
from fleet_tools import pieces_of, write_run


@pytest.fixture
def fleet(clickhouse, ends):
    return ends(Fleet(clickhouse))


@pytest.fixture
def other(fleet, ends):
    """Another gateway's intake over the same database."""
    database = Database(fleet.database.address)
    intake = ClickHouseIntake(database, gather=0.0)

    class End:
        def close(self):
            intake.close()
            database.close()

    ends(End())
    return intake


def names(store: Any) -> list[tuple[str, str]]:
    return sorted((row.project, row.id) for row in store.runs())


def edit(fleet, project: str, **facts: Any) -> Piece:
    name, data = as_journal(fleet.store().run(project, "r1"), edit_frame(facts))
    return Piece("r1", name, 0, 0, data)


def test_what_another_gateway_accepts_during_a_move_is_in_the_moved_run(tmp_path, fleet, other):
    first, second, third = pieces_of(write_run(tmp_path / "node"), 100, 150)
    other.append("llm", first)  # it knows the run under this name
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


def test_a_run_may_come_back_but_takes_no_other_runs_name(tmp_path, fleet):
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


@pytest.mark.parametrize("table", ["pieces", "runs", "keys", "commits"])
def test_of_a_move_and_a_first_upload_to_one_name_one_is_refused(tmp_path, fleet, other, monkeypatch, table):
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    fleet.intake.append("llm", whole)
    (another,) = pieces_of(write_run(tmp_path / "another", rows=10, project="base"))
    insert, moved, begun = other.database.insert, [], fleet.intake._begun
    if table == "keys":  # the move looked just before the other gateway wrote the first of its run
        looks = iter([False])
        monkeypatch.setattr(fleet.intake, "_begun", lambda run: next(looks, begun(run)))

    def hooked(name: str, *words: Any, **options: Any) -> None:
        if name == table and not moved:
            moved.append(outcome(lambda: fleet.intake.move("llm", "r1", "base", "ann"))[1])
        insert(name, *words, **options)

    monkeypatch.setattr(other.database, "insert", hooked)
    _, refused = outcome(lambda: other.append("base", another))
    assert (moved[0] is None) != (refused is None), (moved, refused)
    if moved[0] is None:
        assert names(fleet.store()) == [("base", "r1")]
        other.append("base", another)  # the forwarder tries again: from now on it belongs to the run of that name
        assert len(fleet.store().run("base", "r1").journals) == 2
    else:
        assert "has another run r1 already" in str(moved[0])
        assert names(fleet.store()) == [("base", "r1"), ("llm", "r1")]
        assert fleet.store().run("base", "r1").series("loss").steps.tolist() == list(range(10))
