"""A run is moved to another project of a gateway: by the command line, Python, an agent or the dashboard, over either store."""

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest

import fanfold
from clickhouse_tools import Fleet
from fanfold.errors import FanfoldError, Forbidden, RunError, outcome
from fanfold.fleet.audit import MOVE, AuditFile
from fanfold.fleet.changes import ChangeTargets
from fanfold.fleet.client import Client
from fanfold.fleet.grants import Anybody
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.views import ProjectsView
from fanfold.fleet.wire import Conflict, Gone, Piece, Rejected
from fanfold.store import forks
from fanfold.store.changes import as_journal, edit_frame
from fanfold.store.query import LocalStore
from fleet_tools import Forwarder, Gateway, pieces_of, until, write_run

BOTH = pytest.mark.parametrize("kind", ["directory", "clickhouse"])


def cli(*words, token="", code=0):
    env = {**os.environ, "FANFOLD_SERVER_TOKEN": token}
    command = [sys.executable, "-m", "fanfold", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def token_for(store, name, *projects):
    given = [word for project in projects for word in ("--for", project)]
    scopes = ("--scope", "read", "--scope", "write")
    return cli("server", "token", "create", name, "--store", str(store), *given, *scopes, "-q").split()[-1]


def post(url, path, body, token):
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def recorded(node, id, *, status="finished"):
    run = fanfold.init("llm", dir=node, id=id, name=f"run-{id}", config={"lr": 0.1}, system=False, quiet=True)
    for step in range(100):
        run.log({"loss": 1 / (step + 1), "count": step}, step=step)
    picture = fanfold.Image(np.full((8, 8, 3), 7, np.uint8))
    run.log({"noise": fanfold.Histogram(np.arange(1000.0)), "seen": picture, "say": "hello"}, step=99)
    run.tags = ["kept"]
    run.finish(status=status)
    return run


@pytest.fixture
def places(tmp_path, ends, request):
    """The store of a gateway of either kind, and a function that opens it."""

    def made(kind):
        if kind == "directory":
            return tmp_path / "store", lambda: LocalStore(tmp_path / "store")
        fleet = ends(Fleet(request.getfixturevalue("clickhouse")))
        return fleet.url, fleet.store

    return made


@BOTH
def test_runs_at_a_gateway_are_moved_from_everywhere(tmp_path, ends, places, kind):
    store, opened = places(kind)
    node = tmp_path / "node"
    both, other = token_for(store, "ann", "llm", "base"), token_for(store, "bob", "llm")
    gateway = ends(Gateway(store, "--allow-delete", log=tmp_path / "gateway.log"))
    for id in ("a", "b", "c", "d"):
        recorded(node, id)
    cli("server", "forward", "--dir", str(node), "--to", gateway.url, "--once", token=both)

    refused = cli("mv", "a", "--project", "base", "--dir", gateway.url, token=other, code=2)
    assert "you may not" in refused and "base" in refused
    assert "moved 1 run to base." in cli("mv", "run-a", "--project", "base", "--dir", gateway.url, token=both)
    moved = json.loads(cli("mv", "llm/b", "--project", "base", "--dir", gateway.url, "--json", token=both))
    assert [(one["id"], one["project"]) for one in moved] == [("b", "base")]
    assert post(gateway.url, "/ui/api/move", {"project": "llm", "ids": ["c"], "to": "base"}, both) == {"moved": 1}
    (one,) = Client(gateway.url, both).tool("move", {"runs": ["d"], "project": "base"})
    assert (one["project"], one["tags"]) == ("base", ["kept"])
    with pytest.raises(urllib.error.HTTPError, match="40"):
        post(gateway.url, "/ui/api/move", {"project": "base", "ids": ["c"], "to": ""}, both)

    there = opened()
    assert {row.id for row in there.runs("base")} == {"a", "b", "c", "d"} and not there.runs("llm")
    for id in ("a", "b", "c", "d"):
        here, run = fanfold.open(f"llm/{id}", dir=node), there.run("base", id)
        for key in ("loss", "count"):
            assert run.series(key).steps.tolist() == here.series(key).steps.tolist() == list(range(100))
            assert run.series(key).values.tolist() == here.series(key).values.tolist()
        assert (run.project, run.name, run.status, run.tags, run.config) == (
            "base",
            f"run-{id}",
            "finished",
            ["kept"],
            {"lr": 0.1},
        )
        assert run.media("noise")[0].load().counts.tolist() == here.media("noise")[0].load().counts.tolist()
        assert run.blob(run.media("seen")[0].entry["blob"]) == here.blob(here.media("seen")[0].entry["blob"])

    # Its node still has it in the old project, and does not bring it back.
    again = fanfold.init("llm", dir=node, id="a", resume="allow", system=False, quiet=True)
    again.log({"loss": 0.0}, step=100)
    again.finish()
    cli("server", "forward", "--dir", str(node), "--to", gateway.url, "--once", token=both, code=1)
    assert not opened().runs("llm") and len(opened().run("base", "a").series("loss")) == 100
    entries = map(json.loads, cli("server", "audit", "--store", str(store), "--json").splitlines())
    assert sorted(one["run"] for one in entries if one["action"] == MOVE) == ["a", "b", "c", "d"]


@BOTH
def test_python_moves_a_run_at_a_gateway(tmp_path, ends, places, kind, monkeypatch):
    store, opened = places(kind)
    token = token_for(store, "ann", "llm", "base")
    gateway = ends(Gateway(store, "--allow-delete", log=tmp_path / "gateway.log"))
    recorded(tmp_path / "node", "a")
    cli("server", "forward", "--dir", str(tmp_path / "node"), "--to", gateway.url, "--once", token=token)
    monkeypatch.setenv("FANFOLD_SERVER_TOKEN", token)
    run = fanfold.open("a", dir=gateway.url)
    run.move("base")
    assert (run.project, run.name, run.tags) == ("base", "run-a", ["kept"])
    run.tags = ["kept", "new"]
    assert opened().run("base", "a").tags == ["kept", "new"]


@BOTH
def test_a_live_run_and_one_whose_id_is_taken_stay_where_they_are(tmp_path, ends, places, kind):
    store, opened = places(kind)
    token = token_for(store, "ann", "llm", "base")
    gateway = ends(Gateway(store, "--allow-delete", log=tmp_path / "gateway.log"))
    live = fanfold.init("llm", dir=tmp_path / "node", id="live", system=False, quiet=True)
    live.log({"loss": 1.0}, step=0)
    recorded(tmp_path / "node", "a")
    taken = fanfold.init("base", dir=tmp_path / "node", id="a", system=False, quiet=True)
    taken.log({"other": 2.0}, step=0)
    taken.finish()
    ends(Forwarder(tmp_path / "node", gateway.url, FANFOLD_SERVER_TOKEN=token))
    assert until(lambda: len(opened().runs()) == 3)
    for word, why in (("live", "may still be written"), ("llm/a", "has another run a already")):
        assert why in cli("mv", word, "--project", "base", "--dir", gateway.url, token=token, code=2)
    assert {(row.project, row.id) for row in opened().runs()} == {("llm", "live"), ("llm", "a"), ("base", "a")}
    assert opened().run("base", "a").keys() == ["other"]
    live.finish()


@pytest.fixture(params=["directory", "clickhouse"])
def store(request, tmp_path, ends):
    """An intake of either kind, and a function that opens its store."""
    if request.param == "directory":
        return DirectoryIntake(tmp_path / "store", power=False), lambda: LocalStore(tmp_path / "store")
    fleet = ends(Fleet(request.getfixturevalue("clickhouse")))
    return fleet.intake, fleet.store


def test_moves_of_one_run_at_the_same_time_lose_nothing(tmp_path, store):
    intake, opened = store
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    intake.append("llm", whole)
    results = []

    def moves():
        results.append(outcome(lambda: intake.move("llm", "r1", "base", "ann"))[1])

    threads = [threading.Thread(target=moves) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count(None) == 1 and all(isinstance(one, FanfoldError) for one in results if one is not None)
    assert [(row.project, row.id) for row in opened().runs()] == [("base", "r1")]
    found = opened().run("base", "r1").series("loss")
    assert found.steps.tolist() == list(range(200)) and len(found.values) == 200


def test_what_was_moved_continues_only_in_its_new_project(tmp_path, store):
    intake, opened = store
    file = write_run(tmp_path / "node")
    (whole,) = pieces_of(file)
    intake.append("llm", whole)
    name, data = as_journal(opened().run("llm", "r1"), edit_frame({"notes": "later"}))
    edit = Piece("r1", name, 0, 0, data)  # such as a forwarder still has
    intake.move("llm", "r1", "base", "ann")
    for call in (lambda: intake.append("llm", edit), lambda: intake.move("llm", "r1", "base", "ann")):
        with pytest.raises(Gone, match="deleted at this gateway, or moved"):
            call()
    with pytest.raises(Conflict):
        intake.append("base", whole)
    assert intake.append("base", edit) == len(data)
    assert opened().run("base", "r1").notes == "later"
    intake.move("base", "r1", "third", "ann")
    found = opened().run("third", "r1")
    assert (found.notes, found.series("loss").steps.tolist()) == ("later", list(range(200)))


def test_a_project_whose_name_cannot_be_stored_is_refused(tmp_path, store):
    intake, opened = store
    (whole,) = pieces_of(write_run(tmp_path / "node", 5))
    intake.append("llm", whole)
    for odd in ("", " ", "a\0", "b\udce9", "x" * 2000):
        for call in (lambda odd=odd: intake.append(odd, whole), lambda odd=odd: intake.move("llm", "r1", odd, "ann")):
            with pytest.raises(Rejected, match="is not a name"):
                call()
    assert [(row.project, row.id) for row in opened().runs()] == [("llm", "r1")]


def forked(node):
    """Record a run of 50 steps, and a fork of it from its step 29."""
    for id, steps, fork in (("parent", range(50), None), ("child", range(30, 60), "parent@29")):
        run = fanfold.init("llm", id=id, fork=fork, dir=node, system=False, quiet=True)
        for step in steps:
            run.log({"loss": float(step)}, step=step)
        run.finish()


def sent(intake, node, project="llm"):
    for folder in sorted((node / project).iterdir()):
        for file in (folder / "journal").glob("*.ffj"):
            (whole,) = pieces_of(file, run=folder.name)
            intake.append(project, whole)


def test_a_fork_is_whole_for_who_sees_the_project_that_its_parent_is_in_now(tmp_path, store):
    intake, opened = store
    forked(tmp_path / "node")
    sent(intake, tmp_path / "node")
    view = ProjectsView(opened(), lambda project: project == "base", opened().changes)
    intake.move("llm", "child", "base", "ann")
    run = view.run("base", "child")
    assert run.parent is None and len(run.series("loss")) == 30
    assert "not open to you" in forks.missing(run) and "llm" not in forks.missing(run)
    intake.move("llm", "parent", "base", "ann")
    run = view.run("base", "child")
    assert (run.parent.project, run.parent.id, len(run.series("loss"))) == ("base", "parent", 60)
    assert forks.missing(run) is None


def test_no_other_run_of_its_id_is_taken_for_the_parent_of_a_fork(tmp_path, store):
    intake, opened = store
    forked(tmp_path / "node")
    sent(intake, tmp_path / "node")
    write_run(tmp_path / "other", 40, id="parent", project="vision")
    sent(intake, tmp_path / "other", "vision")
    for old, new in (("llm", "base"), ("base", "third"), ("third", "base")):
        intake.move(old, "parent", new, "ann")
        run = opened().run("llm", "child")
        assert (run.parent.project, len(run.series("loss"))) == (new, 60)
    intake.delete("base", "parent", "ann")
    run = opened().run("llm", "child")
    run.forget_parents()  # they are kept for a second
    assert (run.parent, len(run.series("loss"))) == (None, 30)
    assert "llm/parent is not in this store" in forks.missing(run)


def test_a_move_asks_for_both_projects_and_is_audited(tmp_path):
    class OnlyFrom(Anybody):
        def allows(self, scope, project):
            return project == "llm"

    intake = DirectoryIntake(tmp_path / "store", power=False)
    (whole,) = pieces_of(write_run(tmp_path / "node"))
    intake.append("llm", whole)
    audit = AuditFile(tmp_path / "audit")
    targets, run = ChangeTargets(intake, audit, allow_delete=True), LocalStore(tmp_path / "store").run("llm", "r1")
    with pytest.raises(Forbidden, match="--allow-delete"):
        ChangeTargets(intake, audit).by(Anybody("ann"), "here").move([run], "base")
    with pytest.raises(Forbidden, match="'base'"):
        targets.by(OnlyFrom("bob"), "here").move([run], "base")
    for odd in ("", "  ", "x" * 400):
        with pytest.raises((RunError, Rejected)):
            targets.by(Anybody("ann"), "here").move([run], odd)
    targets.by(Anybody("ann"), "here").move([run], "base")
    assert [(one.action, one.by) for one in audit.read()][-1] == (MOVE, "ann")
    assert [row.project for row in LocalStore(tmp_path / "store").runs()] == ["base"]
