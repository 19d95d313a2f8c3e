"""A fork continues another run from a step: its config and curves begin with the parent's, for every reader."""

import json
import shutil
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest

import clickhouse_server as real
import fanfold
from clickhouse_tools import Fleet
from fanfold.errors import MetricNotFound, SettingError
from fanfold.fleet.views import ProjectsView
from fanfold.journal import Writer
from fanfold.store import forks
from fanfold.store.query import LocalStore
from fanfold.store.sql import query


def start(runs_dir, id, project="p", **options):
    return fanfold.init(project, dir=runs_dir, id=id, quiet=True, system=False, **options)


def logged(runs_dir, id, steps, value, **options):
    with start(runs_dir, id, **options) as run:
        for step in steps:
            run.log({"loss": value + step / 1000}, step=step)
    return fanfold.open(run.path)


def pairs(series):
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_a_forks_curve_is_the_parents_up_to_the_step_then_its_own(runs_dir):
    parent = logged(runs_dir, "base", range(10), 1.0, config={"lr": 0.1, "model": {"layers": 2}})
    with start(runs_dir, "child", fork="base@4", config={"lr": 0.01}) as run:
        assert run.config == {"lr": 0.01, "model": {"layers": 2}}
        run.log({"loss": 5.0})  # without a step: counting continues after the fork
        run.log({"loss": 6.0, "acc": 0.5})
    child = fanfold.open(run.path)
    assert (child.fork.project, child.fork.run, child.fork.step) == ("p", "base", 4)
    assert child.parent.id == "base"
    assert pairs(child.series("loss")) == [*pairs(parent.series("loss"))[:5], (5, 5.0), (6, 6.0)]
    assert pairs(child.series("loss", own=True)) == [(5, 5.0), (6, 6.0)]
    assert child.config == {"lr": 0.01, "model": {"layers": 2}}
    frame = child.to_pandas()
    assert frame["loss"].tolist() == [1.0, 1.001, 1.002, 1.003, 1.004, 5.0, 6.0]
    store = LocalStore(runs_dir)
    curve = store.series(store.run("p", "child"), "loss")
    assert (curve.total, curve.forked) == (7, 5.0)
    row = store.runs("p", "id = child")[0]
    assert row.latest["loss"] == 6.0
    assert store.statistics(row, "loss")["count"] == 2  # statistics are those of the run itself
    assert pairs(parent.series("loss")) == pairs(fanfold.open(parent.path).series("loss"))


def test_sql_and_the_command_line_read_the_joined_curve(runs_dir):
    logged(runs_dir, "base", range(10), 1.0)
    logged(runs_dir, "child", range(5, 8), 2.0, fork="base@4")
    found = query("SELECT step, value FROM points WHERE run = 'child' AND key = 'loss' ORDER BY step", dir=runs_dir)
    assert found.rows == [(step, (1.0 if step <= 4 else 2.0) + step / 1000) for step in range(8)]
    told = subprocess.run(
        [sys.executable, "-m", "fanfold", "show", "child", "--dir", str(runs_dir)], capture_output=True, text=True, check=True
    )
    assert "forked from p/base at step 4" in told.stdout
    facts = subprocess.run(
        [sys.executable, "-m", "fanfold", "show", "child", "--json", "--dir", str(runs_dir)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(facts.stdout)["fork"] == {"project": "p", "run": "base", "step": 4}


def test_a_chain_of_forks_over_projects_is_joined(runs_dir):
    logged(runs_dir, "a", range(10), 1.0)
    logged(runs_dir, "b", range(6, 12), 2.0, project="other", fork="p/a@5")
    c = logged(runs_dir, "c", range(9, 12), 3.0, fork="b@8")
    expected = [(s, (1.0 if s <= 5 else 2.0 if s <= 8 else 3.0) + s / 1000) for s in range(12)]
    assert pairs(c.series("loss")) == expected
    early = logged(runs_dir, "d", range(4, 6), 4.0, fork="b@3")  # before b's own first point
    assert pairs(early.series("loss")) == [(s, (1.0 if s <= 3 else 4.0) + s / 1000) for s in range(6)]


def test_a_fork_hides_the_parents_points_from_its_own_first_step_on(runs_dir):
    logged(runs_dir, "base", range(10), 1.0)
    child = logged(runs_dir, "child", range(3, 5), 2.0, fork="base@8")
    assert [step for step, _ in pairs(child.series("loss"))] == [0, 1, 2, 3, 4]


def test_the_inherited_part_ends_where_the_own_begins_on_every_axis(runs_dir):
    with start(runs_dir, "base") as run:
        for step in range(6):
            run.log({"loss": 1.0, "tokens": step * 10}, step=step, time=1000.0 + step)
    with start(runs_dir, "child", fork="base@3") as run:
        began = time.time()
        for step in range(4, 6):
            run.log({"loss": 2.0, "tokens": step * 10}, step=step)
    store = LocalStore(runs_dir)
    child = store.run("p", "child")
    assert store.series(child, "loss", x="tokens").forked == 40.0
    by_time = store.series(child, "loss", x="time")
    assert by_time.x[:4].tolist() == [1000.0, 1001.0, 1002.0, 1003.0]
    assert by_time.forked >= began - 1
    relative = store.series(child, "loss", x="relative")
    assert relative.x[4] - relative.x[3] == pytest.approx(0, abs=1e-6)  # the days between the two runs are left out
    assert relative.forked == pytest.approx(relative.x[4])
    assert np.diff(relative.x[:4]).tolist() == pytest.approx([1, 1, 1])


def test_a_metric_the_fork_has_not_logged_yet_is_inherited(runs_dir):
    logged(runs_dir, "base", range(10), 1.0)
    with start(runs_dir, "child", fork="base@4"):
        pass
    store = LocalStore(runs_dir)
    child = store.run("p", "child")
    assert child.keys() == ["loss"]
    curve = store.series(child, "loss")
    assert (curve.x.tolist(), curve.forked) == ([0, 1, 2, 3, 4], 5.0)


def test_a_parent_that_is_gone_is_reported_and_the_own_part_reads(runs_dir, tmp_path):
    logged(runs_dir, "base", range(10), 1.0)
    child = logged(runs_dir, "child", range(5, 7), 2.0, fork="base@4")
    assert forks.missing(child) is None
    shutil.copytree(child.path, tmp_path / "p" / "child")
    alone = fanfold.open(tmp_path / "p" / "child")
    assert pairs(alone.series("loss")) == [(5, 2.005), (6, 2.006)]
    assert "p/base is not in this store" in forks.missing(alone)
    (runs_dir / "q").mkdir()
    shutil.move(runs_dir / "p" / "base", runs_dir / "q" / "base")
    assert len(fanfold.open(child.path).series("loss")) == 7  # moved to another project: found by its id
    shutil.rmtree(runs_dir / "q")
    gone = fanfold.open(child.path)
    assert (gone.parent, pairs(gone.series("loss"))) == (None, [(5, 2.005), (6, 2.006)])


def test_of_a_parent_moved_by_hand_only_a_run_that_began_in_its_project_is_found(runs_dir):
    logged(runs_dir, "base", range(10), 1.0)
    child = logged(runs_dir, "child", range(5, 7), 2.0, fork="base@4")
    logged(runs_dir, "base", range(10), 3.0, project="another")
    fanfold.open(f"{runs_dir}/p/base").move("q")
    again = fanfold.open(child.path)
    assert (again.parent.project, pairs(again.series("loss"))[0]) == ("q", (0, 1.0))
    shutil.rmtree(runs_dir / "q")
    assert fanfold.open(child.path).parent is None


def test_a_fork_of_a_live_run_follows_it_up_to_the_step(runs_dir):
    base = start(runs_dir, "base")
    base.log({"loss": 1.0}, step=0)
    store = LocalStore(runs_dir)
    with start(runs_dir, "child", fork="base@2") as child:
        child.log({"loss": 9.0}, step=3)
        assert len(store.run("p", "child").series("loss")) == 2
        for step in range(1, 5):
            base.log({"loss": 1.0}, step=step)
        assert pairs(fanfold.open(child.path).series("loss")) == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 9.0)]
    base.finish()


RANKED = """
import fanfold
run = fanfold.init("p", id="child", fork="base@2", dir={dir!r}, quiet=True, system=False, relay="thread")
for step in range(3, 5):
    run.log({{"loss": 10.0 * (run.rank + 1)}}, step=step)
run.finish()
"""


def test_ranks_are_folded_on_both_sides_of_the_fork(runs_dir):
    script = RANKED.format(dir=str(runs_dir))
    first = script.replace(', fork="base@2"', "").replace('"child"', '"base"').replace("range(3, 5)", "range(4)")
    for text in (first.replace("10.0", "1.0"), script):
        jobs = [
            subprocess.Popen([sys.executable, "-c", text], env={"PATH": "", "RANK": str(rank), "WORLD_SIZE": "2"})
            for rank in range(2)
        ]
        assert [job.wait(60) for job in jobs] == [0, 0]
    child = fanfold.open("child", dir=runs_dir)
    folded = child.series("loss", fold="mean")
    assert folded.values.tolist() == [1.5, 1.5, 1.5, 15.0, 15.0]
    assert folded.max_rank.tolist() == [1] * 5
    assert child.series("loss", rank=1).values.tolist() == [2.0, 2.0, 2.0, 20.0, 20.0]


def test_a_resumed_fork_stays_a_fork(runs_dir, caplog):
    logged(runs_dir, "base", range(10), 1.0)
    logged(runs_dir, "child", range(5, 7), 2.0, fork="base@4")
    with start(runs_dir, "child", fork="base@4") as run:  # the same script again
        run.log({"loss": 3.0})
        assert run.fork.step == 4
    child = fanfold.open(run.path)
    assert [step for step, _ in pairs(child.series("loss"))] == [0, 1, 2, 3, 4, 5, 6, 7]
    with start(runs_dir, "base", fork="child@3"):
        pass
    assert "was not forked" in caplog.text
    assert fanfold.open("base", dir=runs_dir).fork is None


@pytest.mark.parametrize(
    "fork", ["base", "base@", "base@-3", "base@x", "@3", 7, "base@99999999999999999999", "nobody@3", "self@3"]
)
def test_a_fork_that_cannot_be_is_an_error_before_anything_is_written(runs_dir, fork):
    logged(runs_dir, "base", range(3), 1.0)
    with pytest.raises(SettingError, match="not started"):
        start(runs_dir, "self", fork=fork)
    assert not (runs_dir / "p" / "self").exists()


def test_wandbs_way_of_writing_it_works(runs_dir):
    logged(runs_dir, "base", range(10), 1.0)
    with start(runs_dir, "child", fork_from="base?_step=4") as run:
        assert (run.fork.run, run.fork.step) == ("base", 4)


def forged(runs_dir, id, fork):
    folder = runs_dir / "p" / id / "journal"
    folder.mkdir(parents=True)
    header = {"format": [1, 0], "run": id, "project": "p", "role": "main", "rank": 0, "attempt": "a", "ordinal": 1, "fork": fork}
    writer = Writer(folder, header)
    writer.close({"status": "finished"})
    return fanfold.open(runs_dir / "p" / id)


def test_forged_headers_cost_little_and_hide_nothing(runs_dir):
    itself = forged(runs_dir, "itself", ["p", "itself", 5])
    assert forks.ancestors(itself) == []
    assert "circle" in forks.missing(itself)
    for place in range(3):
        forged(runs_dir, f"ring{place}", ["p", f"ring{(place + 1) % 3}", 5])
    assert len(forks.ancestors(fanfold.open(runs_dir / "p" / "ring0"))) == 2
    for place in range(forks.MOST + 10):
        forged(runs_dir, f"chain{place}", ["p", f"chain{place + 1}", 5])
    assert len(forks.ancestors(fanfold.open(runs_dir / "p" / "chain0"))) == forks.MOST
    for id, fork in {"up": ["..", "..", 3], "slash": ["p/../..", "/etc", 3], "low": ["p", "itself", -(1 << 63)]}.items():
        run = forged(runs_dir, id, fork)
        assert forks.ancestors(run) == [] or id == "low"
        with pytest.raises(MetricNotFound):
            run.series("loss")
    odd = forged(runs_dir, "odd", "nonsense")
    assert odd.fork is None


def test_a_fork_shows_nothing_of_a_project_that_the_reader_may_not_see(runs_dir):
    logged(runs_dir, "base", range(10), 1.0, project="secret")
    logged(runs_dir, "child", range(5, 7), 2.0, fork="secret/base@4")
    whole = LocalStore(runs_dir)
    view = ProjectsView(whole, lambda project: project == "p", whole.changes)
    for run in (
        view.run("p", "child"),
        view.several("p", ["child"])["child"],
        view.listed("p")[0],
        view.listed("p")[0].reopened(),
    ):
        assert run.parent is None
        assert pairs(run.series("loss")) == [(5, 2.005), (6, 2.006)]
    assert view.series(view.run("p", "child"), "loss").total == 2
    assert whole.series(whole.run("p", "child"), "loss").total == 7  # and the other way round, from the same open run
    both = ProjectsView(whole, lambda _: True, whole.changes)
    assert both.series(both.run("p", "child"), "loss").total == 7


def test_readers_in_threads_do_not_wait_for_each_other(runs_dir):
    logged(runs_dir, "base", range(10), 1.0)
    for n in range(4):
        logged(runs_dir, f"child{n}", range(5, 7), 2.0, fork="base@4")
    store, totals = LocalStore(runs_dir), []

    def read(n):
        for _ in range(20):
            total = store.series(store.run("p", f"child{n}"), "loss").total
            totals.append(total)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert totals == [7] * 80


def test_trackers_get_the_parent_in_the_config(runs_dir, tmp_path):
    logged(runs_dir, "base", range(10), 1.0)
    with start(runs_dir, "child", fork="base@4", config={"lr": 0.1}, trackers=["dvclive"]) as run:
        run.log({"loss": 5.0}, step=5)
    found = "\n".join(file.read_text() for file in run.path.glob("trackers/dvclive/**/params.yaml"))
    assert "forked_from: p/base@4" in found


def test_wandb_is_asked_to_fork_where_it_can(runs_dir, monkeypatch):
    from fanfold.journal.bodies import Fork
    from fanfold.trackers.base import Identity
    from fanfold.trackers.wandb import Wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    identity = Identity("child", "child", "p", None, runs_dir, fork=Fork("p", "a/b", 1200))
    assert Wandb("p")._fork_from(identity) == "a-b?_step=1200"
    assert Wandb("p")._fork_from(identity._replace(project="other")) is None
    assert Wandb("p")._fork_from(identity._replace(fork=None)) is None
    assert Wandb("p", mode="offline")._fork_from(identity) is None


def test_a_database_joins_the_curves_too(runs_dir, clickhouse_server):
    logged(runs_dir, "base", range(10), 1.0)
    logged(runs_dir, "child", range(5, 7), 2.0, fork="base@4")
    logged(runs_dir, "grandchild", range(7, 9), 3.0, fork="child@5")
    fleet = Fleet(real.Database([clickhouse_server], f"t{uuid.uuid4().hex[:12]}"))
    try:
        fleet.ship(runs_dir)
        store, local = fleet.store(), LocalStore(runs_dir)
        for id in ("base", "child", "grandchild"):
            there, here = store.run("p", id), local.run("p", id)
            assert pairs(there.series("loss")) == pairs(here.series("loss"))
            one, two = store.series(there, "loss"), local.series(here, "loss")
            assert (one.x.tolist(), one.last.tolist(), one.forked) == (two.x.tolist(), two.last.tolist(), two.forked)
        assert len(store.series(store.run("p", "grandchild"), "loss")) == 8
        view = ProjectsView(store, lambda project: project == "p", store.changes)
        assert len(view.series(view.run("p", "child"), "loss")) == 7
    finally:
        fleet.close()
