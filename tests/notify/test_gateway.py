"""Notifications of a gateway: about all runs it takes in, whatever its store, each event once, over its restarts."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fanfold
from clickhouse_tools import Fleet
from fanfold.notify.options import NotifyOptions
from fanfold.notify.project_rules import change_rule, project_rules
from fanfold.notify.watch import DirectoryState, StoreWatch
from fanfold.store import open_run
from fanfold.store.changes import DirectoryViews
from fanfold.store.query import LocalStore
from fanfold.stores import open_store
from fleet_tools import Forwarder, Gateway
from receivers import keeper, receiving

TRAIN = """
import os, sys, time, fanfold
run = fanfold.init("llm", id=sys.argv[1], dir=sys.argv[2], system=False, quiet=True)
run.log({"loss": 1.0}); run.alert("look")
for _ in range(3): run.log({"loss": 9.0})
print("ready", flush=True)
exec(sys.argv[3])
"""


@pytest.fixture
def receiver():
    with receiving() as found:
        yield found


@pytest.fixture(params=["directory", "clickhouse"])
def store(request, tmp_path):
    """Return the address of an empty store of each kind."""
    if request.param == "directory":
        (tmp_path / "store").mkdir()
        yield str(tmp_path / "store")
        return
    fleet = Fleet(request.getfixturevalue("clickhouse"))
    yield fleet.url
    fleet.close()


def settings(tmp_path: Path, receiver, **more: object) -> str:
    """Write the gateway's file of addresses."""
    file = tmp_path / "notify.toml"
    lines = [f'to = ["{receiver.url}"]', *(f"{name} = {value!r}" for name, value in more.items())]
    file.write_text("[notify]\n" + "\n".join(lines) + "\n")
    return str(file)


def train(node: Path, id: str, body: str, **env: str) -> subprocess.Popen:
    words = [sys.executable, "-c", TRAIN, id, str(node), body]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "FANFOLD_NODE": "far-away", **env})
    assert child.stdout.readline() == "ready\n"
    return child


def start(ends, tmp_path, store, *words) -> Gateway:
    return ends(Gateway(store, *words, log=tmp_path / "gateway.log"))


def test_each_event_of_each_run_is_told_once_over_restarts_of_the_gateway(tmp_path, store, receiver, ends):
    node, file = tmp_path / "node", settings(tmp_path, receiver, rules=["loss > 5 for 3"])
    gateway = start(ends, tmp_path, store, "--notify", file)
    train(node, "a", "raise ValueError('the cause')").wait(60)
    ends(Forwarder(node, gateway.url))
    receiver.wait(lambda: "failed" in receiver.told(), 60)
    assert sorted(receiver.told()) == ["failed", "look", "loss > 5 for 3"]
    gateway.kill()
    gateway = start(ends, tmp_path, store, "--notify", file)
    train(node, "b", "run.finish()").wait(60)
    ends(Forwarder(node, gateway.url))
    receiver.wait(lambda: "finished" in receiver.told(), 90)
    told = [(event["title"], message["run"]["id"]) for message in receiver.messages for event in message["events"]]
    assert sorted(told) == [
        ("failed", "a"), ("finished", "b"), ("look", "a"), ("look", "b"), ("loss > 5 for 3", "a"), ("loss > 5 for 3", "b"),
    ]  # fmt: skip
    assert "ValueError: the cause" in str(receiver.messages)
    alerts = [alert.get("rule") for alert in open_store(store).run("llm", "a").alerts]
    assert alerts == [None, "loss > 5 for 3"]  # a rule of the gateway is an alert of the run


def test_a_run_whose_machine_is_gone_is_told_as_lost(tmp_path, receiver, ends):
    node, store = tmp_path / "node", tmp_path / "store"
    gateway = ends(Gateway(store, "--notify", settings(tmp_path, receiver)))
    forwarder = ends(Forwarder(node, gateway.url)) if node.mkdir() is None else None
    child = train(node, "a", "time.sleep(600)")
    receiver.wait(lambda: receiver.told() == ["look"], 60)
    forwarder.kill()  # the machine loses its power: nothing more is sent, nobody says goodbye
    child.kill()
    child.wait()
    receiver.wait(lambda: "lost" in receiver.told(), 120)
    assert receiver.told() == ["look", "lost"]
    time.sleep(5)
    assert receiver.told() == ["look", "lost"]


def test_old_runs_are_not_told_when_notifications_begin(tmp_path, store, receiver, ends):
    node = tmp_path / "node"
    gateway = start(ends, tmp_path, store)
    train(node, "a", "run.finish()").wait(60)
    forwarder = ends(Forwarder(node, gateway.url, "--once"))
    forwarder.wait()
    gateway.kill()
    time.sleep(1.5)
    gateway = start(ends, tmp_path, store, "--notify", settings(tmp_path, receiver))
    time.sleep(8)  # in a database, a gateway waits for others before it sends
    train(node, "b", "run.finish()").wait(60)
    ends(Forwarder(node, gateway.url))
    receiver.wait(lambda: "finished" in receiver.told(), 60)
    assert {message["run"]["id"] for message in receiver.messages} == {"b"}


def test_one_of_two_gateways_sends(tmp_path, store, receiver, ends):
    node, file = tmp_path / "node", settings(tmp_path, receiver)
    first = start(ends, tmp_path, store, "--notify", file)
    start(ends, tmp_path, store, "--notify", file)
    train(node, "a", "run.finish()").wait(60)
    ends(Forwarder(node, first.url))
    receiver.wait(lambda: "finished" in receiver.told(), 60)
    time.sleep(12)
    assert receiver.told() == ["look", "finished"]


def test_a_gateway_that_sends_nothing_keeps_no_other_from_sending(tmp_path, store, receiver, ends):
    node = tmp_path / "node"
    run = fanfold.init("llm", dir=node, id="first", system=False, quiet=True)
    run.finish()
    first = start(ends, tmp_path, store)
    ends(Forwarder(node, first.url, "--once")).wait()
    change_rule(open_store(store).changes.views, "llm", "loss > 5 for 3")
    time.sleep(18)  # it applies the rules of projects now, and looks again within 15 s
    start(ends, tmp_path, store, "--notify", settings(tmp_path, receiver))
    time.sleep(8)  # in a database, a gateway waits for others before it sends
    train(node, "a", "run.finish()").wait(60)
    ends(Forwarder(node, first.url))
    receiver.wait(lambda: "finished" in receiver.told(), 60)
    time.sleep(5)
    assert sorted(receiver.told()) == ["finished", "look", "loss > 5 for 3"]
    assert [alert.get("rule") for alert in open_store(store).run("llm", "a").alerts] == [None, "loss > 5 for 3"]


def test_without_an_address_the_gateway_does_not_start(tmp_path):
    command = [sys.executable, "-m", "fanfold", "server", "start", "--store", str(tmp_path / "store"), "--notify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "there is no address" in done.stderr


def test_rules_of_a_project_are_kept_with_its_views(tmp_path, store):
    fanfold.init("llm", dir=tmp_path / "store", system=False, quiet=True).finish()
    views = open_store(store).changes.views
    views.save("llm", "a view", "log=1")
    assert list(change_rule(views, "llm", " loss is nan ")) == ["loss is nan"]
    assert views.all("llm") == {"a view": "log=1"}
    with pytest.raises(fanfold.FanfoldError, match="mistake at column 6"):
        change_rule(views, "llm", "loss grows")
    assert change_rule(views, "llm", "loss is nan", remove=True) == {}
    assert views.all("llm") == {"a view": "log=1"}


def test_a_gateway_reads_only_the_projects_that_have_rules_when_nobody_is_told(tmp_path):
    """A busy gateway without notifications must not list thousands of runs for nothing."""
    for project in ("llm", "vision"):
        run = fanfold.init(project, id="a", dir=tmp_path, system=False, quiet=True)
        run.log({"loss": float("nan")})
        run.finish()
    listed = []

    class Watched(LocalStore):
        def runs(self, project=None, *words, **options):
            listed.append(project)
            return super().runs(project, *words, **options)

    def looked() -> list[str | None]:
        listed.clear()
        store = Watched(tmp_path)
        state = DirectoryState(tmp_path)
        StoreWatch(store, NotifyOptions(), state).look()
        state.close()
        return list(listed)

    assert looked() == []
    change_rule(DirectoryViews(tmp_path), "vision", "loss is nan")
    assert looked() == ["vision"]


def test_the_local_dashboard_applies_rules_and_sends_what_is_left(tmp_path, receiver, ends):
    """A run without a notifier of its own: the rule was added in the dashboard."""
    from fleet_tools import Process

    address, kept = keeper(tmp_path)
    runs = tmp_path / "runs"
    child = train(runs, "a", "time.sleep(600)")
    change_rule(DirectoryViews(runs), "llm", "loss > 5")
    assert project_rules(DirectoryViews(runs), "llm")
    change = DirectoryViews(runs)
    change.save("llm", "loss > 5", "0", "rule")  # as if it had been there from the start
    ends(Process("ui", "--dir", str(runs), "--port", "0", "--write", "--json", log=tmp_path / "ui.log", FANFOLD_NOTIFY=address))
    try:
        for _ in range(600):
            if open_run(runs / "llm" / "a").alerts[1:]:
                break
            time.sleep(0.05)
        titles = [alert["title"] for alert in open_run(runs / "llm" / "a").alerts]
        assert titles == ["look", "loss > 5"]
        for _ in range(200):
            if kept.exists() and "loss > 5" in kept.read_text():
                break
            time.sleep(0.05)
        assert "loss > 5" in kept.read_text()
    finally:
        child.kill()
        child.wait()
