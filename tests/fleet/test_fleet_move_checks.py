"""Moves at a gateway: all of the runs or none, true answers, and a record that a kill or a full disk leaves complete."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import fanfold
from clickhouse_tools import Fleet
from fanfold.errors import FanfoldError, Forbidden, RunError, RunNotFound, SettingError
from fanfold.fleet.audit import DELETE, DELETE_FAILED, MOVE, MOVE_REFUSED, AuditFile
from fanfold.fleet.changes import ChangeTargets
from fanfold.fleet.grants import Anybody
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.views import ProjectsView
from fanfold.fleet.wire import Gone, Rejected
from fanfold.store.move import found
from fanfold.store.query import LocalStore, find
from fleet_tools import Gateway, pieces_of, write_run


@pytest.fixture(params=["directory", "clickhouse"])
def store(request, tmp_path, ends):
    """An intake of either kind, and a function that opens its store."""
    if request.param == "directory":
        return DirectoryIntake(tmp_path / "store", power=False), lambda: LocalStore(tmp_path / "store")
    fleet = ends(Fleet(request.getfixturevalue("clickhouse")))
    return fleet.intake, fleet.store


def sent(intake, folder, id, project="llm"):
    """Record a run on a node and send it; return its first piece."""
    (whole,) = pieces_of(write_run(folder, 20, id=id, project=project), run=id)
    intake.append(project, whole)
    return whole


def changes(intake, tmp_path, **how):
    return ChangeTargets(intake, AuditFile(tmp_path / "audit"), **{"allow_delete": True, **how}).by(Anybody("ann"), "here")


def names(opened):
    return sorted((row.project, row.id) for row in opened().runs())


def test_several_runs_are_moved_together_or_not_at_all(tmp_path, store):
    intake, opened = store
    for id in ("a", "b", "c"):
        sent(intake, tmp_path / "node", id)
    sent(intake, tmp_path / "other", "b", "base")
    before, move = names(opened), changes(intake, tmp_path).move
    runs = [opened().run("llm", id) for id in ("a", "b", "c")]
    with pytest.raises(FanfoldError, match=r"has another run b already. Nothing was moved") as refused:
        move(runs, "base")
    assert names(opened) == before and "fanfold rm" not in str(refused.value)
    assert move(runs, "third") == 3
    assert names(opened) == [("base", "b"), ("third", "a"), ("third", "b"), ("third", "c")]


def test_runs_of_one_id_are_refused_and_a_run_named_twice_counts_once(tmp_path, store):
    intake, opened = store
    for project in ("llm", "vision"):
        sent(intake, tmp_path / project, "same", project)
    sent(intake, tmp_path / "node", "b")
    move = changes(intake, tmp_path).move
    same = [opened().run(project, "same") for project in ("llm", "vision")]
    with pytest.raises(RunError, match=r"several of the runs have the id same. Nothing was moved"):
        move(same, "base")
    assert names(opened) == [("llm", "b"), ("llm", "same"), ("vision", "same")]
    assert move([opened().run("llm", "b") for _ in range(2)], "base") == 1
    assert move([opened().run("base", "b")], "base") == 0


def test_a_run_comes_back_to_a_project_that_it_left(tmp_path):
    intake = DirectoryIntake(tmp_path / "store")
    first = sent(intake, tmp_path / "node", "r1")
    for old, new in (("llm", "base"), ("base", "third"), ("third", "llm"), ("llm", "base"), ("base", "llm")):
        intake.move(old, "r1", new, "ann")
        with pytest.raises(Gone):
            intake.append(old, first)
        assert intake.offset(new, "r1", first.journal) == len(first.data)
    assert names(lambda: LocalStore(tmp_path / "store")) == [("llm", "r1")]
    sent(intake, tmp_path / "other", "r1", "vision")
    with pytest.raises(RunError, match=r"Nothing was moved"):  # it is another run than the one that was there
        intake.move("vision", "r1", "base", "ann")
    intake.delete("llm", "r1", "ann")
    with pytest.raises(Gone):
        intake.append("llm", first)
    with pytest.raises(RunError, match=r"deleted in project llm"):
        intake.move("vision", "r1", "llm", "ann")


def test_a_deletion_that_does_not_know_of_a_move_says_so_and_closes_nothing(tmp_path):
    intake, other = (DirectoryIntake(tmp_path / "store", power=False) for _ in range(2))
    sent(intake, tmp_path / "node", "r1")
    change, run = changes(other, tmp_path), LocalStore(tmp_path / "store").run("llm", "r1")
    change.check_deletable(run)
    intake.move("llm", "r1", "base", "ann")
    with pytest.raises(Rejected, match=r"run r1 is not in project llm any more.* not deleted"):
        change.delete(run)
    assert [one.action for one in AuditFile(tmp_path / "audit").read()] == [DELETE, DELETE_FAILED]
    intake.move("base", "r1", "llm", "ann")
    assert names(lambda: LocalStore(tmp_path / "store")) == [("llm", "r1")]
    change.delete(run)
    assert names(lambda: LocalStore(tmp_path / "store")) == [] and other.deleted("llm", "r1")
    change.delete(run)  # again, as after an interruption


class Killed(BaseException):
    """Stands for the end of the process: nothing that would run after it runs."""


@contextlib.contextmanager
def failing(monkeypatch, after, error, *, forever):
    """Let writing fail after so many calls: once, or from then on, as a full disk does."""
    calls = 0

    def wrapped(real):
        def call(*words, **options):
            nonlocal calls
            calls += 1
            if calls == after or (forever and calls > after):
                raise error
            return real(*words, **options)

        return call

    with monkeypatch.context() as broken:
        for name in ("pwrite", "fsync", "ftruncate"):
            broken.setattr(os, name, wrapped(getattr(os, name)))
        for name in ("rename", "replace", "mkdir", "unlink"):
            broken.setattr(Path, name, wrapped(getattr(Path, name)))
        yield lambda: calls < after


@pytest.mark.parametrize("full", [False, True], ids=["killed", "disk full"])
@pytest.mark.parametrize("returns", [False, True], ids=["goes", "returns"])
def test_a_move_that_stops_anywhere_is_completed_by_the_same_command(tmp_path, monkeypatch, full, returns):
    (first,) = pieces_of(write_run(tmp_path / "node", 20))
    for after in range(1, 100):
        root = tmp_path / str(after)
        intake = DirectoryIntake(root / "store")
        intake.append("llm", first)
        if returns:
            intake.move("llm", "r1", "base", "ann")
        old, new = ("base", "llm") if returns else ("llm", "base")
        opened = partial(LocalStore, root / "store")
        move, run = changes(intake, root).move, opened().run(old, "r1")
        error = OSError(errno.ENOSPC, "No space left on device") if full else Killed()
        with failing(monkeypatch, after, error, forever=full) as complete:
            try:
                answer = move([run], new)
            except (Killed, FanfoldError) as stopped:
                answer = stopped
        (at,) = names(opened)
        if isinstance(answer, FanfoldError):
            assert at == (old, "r1")
            assert any(text in str(answer) for text in ("whole, in", "was not moved", "Nothing was changed"))
        move([opened().run(*at)], new)
        assert names(opened) == [(new, "r1")]
        with pytest.raises(Gone):  # the forwarder of its node does not bring it back
            intake.append(old, first)
        assert intake.offset(new, "r1", first.journal) == len(first.data)
        assert opened().run(new, "r1").series("loss").steps.tolist() == list(range(20))
        if complete():
            break
    assert answer == 1 and 5 < after < 99


def test_a_failed_move_says_why_though_the_audit_log_cannot_be_written(tmp_path):
    class FullDisk(AuditFile):
        def write(self, entry):
            if entry.action != MOVE:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(entry)

    class Broken(DirectoryIntake):
        def move(self, project, run, target, by):
            raise OSError(errno.EIO, "Input/output error")

    intake = Broken(tmp_path / "store", power=False)
    sent(intake, tmp_path / "node", "r1")
    targets = ChangeTargets(intake, FullDisk(tmp_path / "audit"), allow_delete=True)
    with pytest.raises(SettingError, match=r"run r1 could not be moved: .*Input/output error.*is whole, in llm or in base"):
        targets.by(Anybody("ann"), "here").move([LocalStore(tmp_path / "store").run("llm", "r1")], "base")


def test_a_move_that_fails_after_others_says_which_moved(tmp_path):
    class Second(DirectoryIntake):
        def move(self, project, run, target, by):
            if run == "b":
                raise RunError("project base has another run b already. Nothing was moved. Choose another project.")
            super().move(project, run, target, by)

    intake = Second(tmp_path / "store", power=False)
    for id in ("a", "b"):
        sent(intake, tmp_path / "node", id)
    runs = [LocalStore(tmp_path / "store").run("llm", id) for id in ("a", "b")]
    with pytest.raises(SettingError, match=r"It was not moved.* 1 other run went to base"):
        changes(intake, tmp_path).move(runs, "base")


def test_a_refused_move_is_in_the_audit_log(tmp_path):
    class OnlyFrom(Anybody):
        def allows(self, scope, project):
            return project == "llm"

    intake = DirectoryIntake(tmp_path / "store", power=False)
    sent(intake, tmp_path / "node", "r1")
    audit = AuditFile(tmp_path / "audit")
    with pytest.raises(Forbidden):
        ChangeTargets(intake, audit, allow_delete=True).by(OnlyFrom("bob"), "here").move(
            [LocalStore(tmp_path / "store").run("llm", "r1")], "base"
        )
    (entry,) = audit.read()
    assert (entry.action, entry.by, entry.run, entry.detail["to"]) == (MOVE_REFUSED, "bob", "r1", "base")


def command(*words, code=0):
    line = [sys.executable, "-m", "fanfold", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_a_forwarder_does_not_call_delivered_what_its_gateway_has_moved(tmp_path, ends):
    node, store = tmp_path / "node", tmp_path / "store"
    gateway = ends(Gateway(store, "--allow-delete", log=tmp_path / "gateway.log"))
    forward = ("server", "forward", "--dir", node, "--to", gateway.url, "--once")
    write_run(node, 20)
    assert "all runs are delivered" in command(*forward)
    assert "moved 1 run to base." in command("mv", "r1", "--project", "base", "--dir", gateway.url)
    assert "all runs are delivered" in command(*forward)  # there is nothing that the gateway does not have
    run = fanfold.init("llm", dir=node, id="r1", resume="allow", system=False, quiet=True)
    run.log({"loss": 0.5}, step=20)
    run.finish()
    for _ in range(2):
        said = command(*forward, code=1)
        assert "exists only here" in said and "fanfold mv llm/r1 --project NAME" in said and "fanfold rm llm/r1" in said
        assert "not delivered" in said and "llm/r1" in said and "all runs are" not in said and ".." not in said
    command("mv", "llm/r1", "--project", "base", "--dir", node)
    assert "all runs are delivered" in command(*forward)
    assert LocalStore(store).run("base", "r1").series("loss").steps.tolist() == list(range(21))


def test_an_interrupted_move_is_repeated_with_the_same_words(tmp_path, ends):
    gateway = ends(Gateway(tmp_path / "store", "--allow-delete", log=tmp_path / "gateway.log"))
    write_run(tmp_path / "node", 20, id="a")
    write_run(tmp_path / "node", 20, id="b")
    command("server", "forward", "--dir", tmp_path / "node", "--to", gateway.url, "--once")
    for place in (gateway.url, tmp_path / "node"):
        assert "moved 1 run to base." in command("mv", "llm/a", "--project", "base", "--dir", place)
        assert "moved 1 run to base; 1 there already." in command("mv", "llm/a", "llm/b", "--project", "base", "--dir", place)
        assert "no run 'llm/c'" in command("mv", "llm/c", "--project", "base", "--dir", place, code=1)
    assert str(tmp_path) not in command("mv", "llm/c", "--project", "base", "--dir", gateway.url, code=1)


def test_only_the_run_that_was_moved_is_there_already(tmp_path, store):
    intake, opened = store
    sent(intake, tmp_path / "node", "a", "team/llm")
    sent(intake, tmp_path / "node", "other", "base")
    open_one, there = partial(find, opened()), opened()
    intake.move("team/llm", "a", "base", "ann")
    for word in ("nonsense/other", "nonsense/a", "llm/a", "team/other"):
        with pytest.raises(RunNotFound):
            found(open_one, word, "base", there)
    assert found(open_one, "team/llm/a", "base", there).id == "a"
    intake.move("base", "a", "third", "ann")
    for word in ("team/llm/a", "base/a"):
        assert found(open_one, word, "third", there).project == "third"
    limited = ProjectsView(there, lambda project: project != "base", there.changes)
    with pytest.raises(RunNotFound):
        found(partial(find, limited), "base/a", "third", limited)


def test_a_move_in_a_directory_is_repeated_for_the_run_itself_alone(tmp_path):
    node = tmp_path / "node"
    write_run(node, 5, id="s", project="team/llm")
    write_run(node, 5, id="zz", project="base")
    assert "moved 1 run to base." in command("mv", "team/llm/s", "--project", "base", "--dir", node)
    assert "moved 0 runs to base; 1 there already." in command("mv", "team/llm/s", "--project", "base", "--dir", node)
    assert "no run 'nonsense/zz'" in command("mv", "nonsense/zz", "--project", "base", "--dir", node, code=1)


def test_runs_in_a_database_are_moved_by_its_address(clickhouse, tmp_path, ends):
    fleet = ends(Fleet(clickhouse))
    sent(fleet.intake, tmp_path / "node", "a")
    sent(fleet.intake, tmp_path / "node", "b")
    assert "moved 1 run to base." in command("mv", "a", "--project", "base", "--dir", fleet.url)
    (moved,) = json.loads(command("mv", "llm/b", "--project", "base", "--dir", fleet.url, "--json"))
    assert (moved["id"], moved["project"]) == ("b", "base") and moved["path"].endswith("/base/b")
    assert names(fleet.store) == [("base", "a"), ("base", "b")]
    run = fanfold.open("a", dir=fleet.url)
    assert run.project == "base"
    run.move("third")
    assert run.project == "third"


def test_the_help_of_a_copy_says_where_it_goes():
    assert "the project to copy the runs to" in command("cp", "--help")
