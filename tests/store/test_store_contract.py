"""One contract, two stores: whatever a store over a directory of runs answers, the one over ClickHouse answers the same."""

from __future__ import annotations

import json
import math
import os
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as some

import fanfold
from clickhouse_tools import Fleet
from fanfold.cli import main
from fanfold.clickhouse.address import parse
from fanfold.errors import RunNotFound
from fanfold.journal import Writer
from fanfold.journal import format as fmt
from fanfold.server import edit
from fanfold.store.query import LocalStore, Store
from fanfold.stores import open_store
from store_data import Call, beat, end, thinned, visible, write_journal, write_run


class Place:
    """A store of a kind, and how runs get into it."""

    def __init__(self, kind: str, root: Path, fleet: Fleet | None) -> None:
        self.kind, self.root, self.fleet = kind, root, fleet
        self.local = LocalStore(root)

    @property
    def dir(self) -> str:
        return str(self.root) if self.fleet is None else self.fleet.url

    def take_in(self) -> Store:
        """Bring what lies in the directory into the store, in pieces of all sizes, and return the store."""
        if self.fleet is None:
            return self.local
        self.fleet.ship(self.root)
        return self.fleet.store()


@pytest.fixture(params=["directory", "clickhouse"])
def place(request, tmp_path) -> Iterator[Place]:
    fleet = Fleet(request.getfixturevalue("clickhouse")) if request.param == "clickhouse" else None
    yield Place(request.param, tmp_path / "runs", fleet)
    if fleet is not None:
        fleet.close()


def training(root: Path, **options: Any) -> fanfold.Run:
    return fanfold.init("p", dir=root, system=False, quiet=True, **options)


# Runs


def test_runs_are_listed_filtered_and_sorted(place):
    for lr, tag in ((0.1, "a"), (0.01, "b"), (0.001, "b")):
        with training(place.root, config={"lr": lr, "model": {"dim": 8}}, tags=[tag], name=f"run {lr}") as run:
            for step in range(20):
                run.log({"loss": lr * (20 - step)}, step=step)
    store = place.take_in()
    assert [project["name"] for project in store.projects()] == ["p"]
    assert store.projects()[0]["runs"] == 3
    rows = store.runs("p")
    assert [row["name"] for row in rows] == ["run 0.001", "run 0.01", "run 0.1"]
    assert {row["status"] for row in rows} == {"finished"}
    assert rows[0]["config"] == {"lr": 0.001, "model": {"dim": 8}}
    assert rows[0]["latest"] == {"loss": pytest.approx(0.001)}
    assert [row["name"] for row in store.runs("p", "tag:b and loss.min<0.005")] == ["run 0.001"]
    assert [row["name"] for row in store.runs("p", sort="-lr")] == ["run 0.1", "run 0.01", "run 0.001"]
    stats = store.runs("p", "lr=0.1", stats=["loss"])[0]["stats"]["loss"]
    assert (stats["count"], stats["first"], stats["last"]) == (20, pytest.approx(2.0), pytest.approx(0.1))
    assert store.runs("nothing") == []
    with pytest.raises(RunNotFound):
        store.run("p", "no-such-run")


def test_times_come_from_the_frames_of_the_journals(place):
    now = time.time_ns()
    began, second = now - 10_000 * 10**9, 10**9
    folder = place.root / "p" / "twice"
    write_journal(folder, 1, beat(began + 100 * second), started=began, attempt="first")
    console = (fmt.Kind.CONSOLE, {"t": began + 5040 * second, "stream": "stdout", "b": b"bye"})
    write_journal(folder, 2, console, started=began + 5000 * second, attempt="second", ordinal=2)
    ended = place.root / "p" / "ended"
    write_journal(ended, 3, beat(began + 8 * second), end(began + 9 * second), started=began)
    store = place.take_in()
    for tags in (["x"], ["y"]):
        edit.edit(store, edit.Edit("p", ["ended"], tags=tags))
    place.take_in()
    rows = {row["id"]: row for row in store.runs("p")}
    assert (rows["ended"]["seen"], rows["ended"]["duration"]) == (pytest.approx(began / 1e9 + 9), pytest.approx(9))
    run = store.run("p", "twice")
    assert (run.seen, run.started) == (pytest.approx(began / 1e9 + 5040), pytest.approx(began / 1e9))
    assert [attempt.seen for attempt in run.attempts] == [began + 100 * second, began + 5040 * second]
    if rows["twice"]["status"] != "running":  # the database has just been told of it, and waits a minute
        assert rows["twice"]["duration"] == run.duration == pytest.approx(140)


def test_numbers_of_32_bits_read_as_the_same_numbers_in_64(place):
    single = np.random.default_rng(0).normal(size=60).astype(np.float32)
    with training(place.root, id="single") as run:
        for step, value in enumerate(single):
            if step < 20:
                run.log({"alone": value, "two": -value}, step=step)
            elif step < 40:
                run.log({"alone": value, "two": -float(value)}, step=step)
            else:
                run.log({"alone": float(value), "two": -value, "n": step, "ok": True}, step=step)
    stored = place.take_in().run("p", "single")
    for key, values in (("alone", single), ("two", -single)):
        series = stored.series(key)
        assert series.values.dtype == np.float64
        assert series.values.tolist() == values.tolist()
        stats = place.take_in().runs("p", stats=[key])[0]["stats"][key]
        assert (stats["min"], stats["max"], stats["last"]) == (min(values.tolist()), max(values.tolist()), values[-1].item())
    assert stored.series("n").values.tolist() == list(range(40, 60))
    assert stored.series("ok").values.tolist() == [True] * 20


def test_values_logged_for_an_earlier_time_keep_it(place):
    moments = [1_700_000_000.5, 1_600_000_000.25, 1_650_000_000.0]  # in any order
    with training(place.root, id="old") as run:
        for step, moment in enumerate(moments):
            run.log({"loss": float(step)}, step=step, time=moment)
        run.log({"note": "x"}, step=9, time=moments[0])
    stored = place.take_in().run("p", "old")
    assert stored.series("loss").times.tolist() == pytest.approx(moments, rel=0, abs=1e-6)
    assert [point.time for point in stored.texts("note")] == moments[:1]
    by_time = place.take_in().series(stored, "loss", x="time")
    assert by_time.x_last.tolist() == pytest.approx(sorted(moments), rel=0, abs=1e-6)
    assert by_time.last.tolist() == [1.0, 2.0, 0.0]


def test_names_may_be_anything(place):
    for name in ("<img onerror=x>", "../../etc/passwd", "日本語 🦆", ".hidden"):
        run = fanfold.init(name, dir=place.root, id=name, system=False, quiet=True)
        run.log({name: 1.0, "a\nb": 2}, step=0)
        run.finish()
    store = place.take_in()
    assert {project["name"] for project in store.projects()} >= {"<img onerror=x>", "../../etc/passwd", "日本語 🦆"}
    for name in ("<img onerror=x>", "../../etc/passwd", "日本語 🦆"):
        assert store.run(name, name).latest == {name: 1.0, "a\nb": 2}


def test_everything_a_run_holds_is_read_back(place, capfd):
    run = training(place.root, config={"a": 1, "secret_token": "q7Rk29xLmZ04bTv8"}, console=True, notes="a note", group="g")
    run.define_metric("acc", summary="max")
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    for step in range(30):
        run.log({"acc": math.sin(step), "n": step, "ok": step % 2 == 0, "big": (1 << 60) + step, "text": f"t{step}"}, step=step)
    run.log({"img": fanfold.Image(picture), "tab": fanfold.Table(["a"], [[1], [2]]), "h": fanfold.Histogram([1, 2, 3])}, step=3)
    run.log({"bad": math.nan}, step=1)
    run.log({"bad": math.inf}, step=2)
    os.write(1, b"printed by the process\n")
    run.alert("hot", "it is hot")
    run.summary["best"] = 7
    (place.root / "model.bin").write_bytes(b"weights" * 1000)
    run.artifact(place.root / "model.bin", name="model")
    run.finish()
    capfd.readouterr()
    store = place.take_in()
    (row,) = store.runs("p")
    found = store.run("p", row["id"])
    assert (found.status, found.notes, found.group, found.ranks) == ("finished", "a note", "g", [0])
    assert found.config["a"] == 1
    assert "q7Rk29xLmZ04bTv8" not in found.config["secret_token"]
    assert set(found.keys()) == {"acc", "n", "ok", "big", "bad"}
    assert set(found.keys("text")) == {"text"}
    assert set(found.keys("media")) == {"img", "tab", "h"}
    assert found.series("n").values.dtype == np.int64
    assert found.series("ok").values.dtype == bool
    assert found.series("big").values.tolist() == [(1 << 60) + step for step in range(30)]
    assert found.latest["big"] == (1 << 60) + 29
    assert found.latest["ok"] is False
    assert str(found.series("bad").values.tolist()) == "[nan, inf]"
    assert [point.text for point in found.texts("text")] == [f"t{step}" for step in range(30)]
    assert isinstance(found.media("img")[0].load(), fanfold.Image)
    assert found.table("tab").rows == [[1], [2]]
    assert b"printed by the process" in found.console()
    assert [alert["title"] for alert in found.alerts] == ["hot"]
    assert found.summary["best"] == 7
    assert found.summary["acc"] == pytest.approx(max(math.sin(step) for step in range(30)))
    (artifact,) = found.artifacts
    assert found.artifact_file(artifact["files"][0]["blob"]).read_bytes() == b"weights" * 1000
    assert found.damaged == found.dropped == 0
    assert found.to_pandas(["acc", "n"]).shape == (30, 3)


def test_a_listed_run_reads_its_points_and_media(place):
    with training(place.root, id="r", config={"lr": 0.1}) as run:
        run.log({"loss": 2.0, "table": fanfold.Table(["a"], [[1]])}, step=0)
        run.log({"loss": 1.0}, step=1)
    place.take_in()
    (listed,) = fanfold.runs("p", dir=place.dir, filter="lr=0.1")
    assert (listed.status, listed.summary["loss"], listed.latest["loss"]) == ("finished", 1.0, 1.0)
    assert listed.series("loss").values.tolist() == [2.0, 1.0]
    assert listed.table("table").rows == [[1]]
    assert open_store(listed.store).run("p", "r").series("loss").values.tolist() == [2.0, 1.0]
    assert fanfold.open("r", dir=place.dir).status == "finished"


def test_the_address_of_a_database_opens_it_again():
    for text in ("clickhouses://me:p%40ss%2F@db:9000/runs?cluster=all&replicated=1&ttl_days=3", "clickhouse://[::1]/x"):
        address = parse(text)
        assert parse(address.text) == address
        assert "p%40ss" not in address.shown


def test_runs_are_renamed_and_views_saved_from_the_page(place):
    with training(place.root, name="before", tags=["a"]) as run:
        run.log({"loss": 1.0}, step=0)
    store = place.take_in()
    edit.edit(store, edit.Edit(project="p", ids=[run.id], name="after", tags=["b", "c"], notes="why", archived=True))
    (row,) = store.runs("p")
    assert (row["name"], row["tags"], row["notes"], row["archived"]) == ("after", ["b", "c"], "why", True)
    assert store.run("p", run.id).status == "finished"
    changes = store.changes
    changes.views.save("p", "mine", "#page=charts")
    changes.views.save("p", "other", "#page=table")
    changes.views.save("p", "other", None)
    for text in ("q=first", "q=second"):
        changes.views.keep_workspace("p", text, "user a/../b")
    changes.views.keep_workspace("p", "q=other", "user b")  # as a gateway over this store names its callers
    assert [changes.views.workspace("p", user) for user in ("user a/../b", "user b", "user c")] == ["q=second", "q=other", ""]
    assert changes.views.all("p") == {"mine": "#page=charts"}
    edit.delete(store, edit.Delete(project="p", ids=[run.id]))
    assert store.runs("p") == []


# Points

COLUMNS = ("x", "x_last", "x_min", "x_max", "min", "max", "first", "last", "count")
VALUES = some.one_of(
    some.floats(width=32),
    some.integers(-(1 << 62), 1 << 62),
    some.booleans(),
    some.sampled_from([math.nan, math.inf, -math.inf, 0.5]),
)
CALLS = some.lists(
    some.builds(
        Call, some.integers(0, 2), some.integers(0, 2), some.one_of(some.none(), some.integers(-5, 300)), some.integers(1, 10**9),
        some.dictionaries(some.sampled_from(["a", "b", "long/key"]), VALUES, min_size=1, max_size=3),
    ), min_size=1, max_size=60,
).map(lambda calls: sorted(calls, key=lambda call: call.attempt))  # fmt: skip


def test_assigning_to_a_stored_run_changes_the_store(place):
    run = training(place.root, tags=["old"])
    run.finish()
    place.take_in()
    stored = fanfold.open(run.id, dir=place.dir)
    stored.tags, stored.notes, stored.name, stored.group, stored.archived = ["a", "b"], "seen", "best", "study", True
    for one in (stored, fanfold.open(run.id, dir=place.dir), fanfold.runs(dir=place.dir)[0]):
        assert (one.tags, one.notes, one.name, one.group, one.archived) == (["a", "b"], "seen", "best", "study", True)
    for name, value in {"name": " ", "tags": "one", "notes": 3, "archived": "yes", "group": b""}.items():
        with pytest.raises(fanfold.errors.SettingError, match="Nothing was changed"):
            setattr(stored, name, value)
    assert (stored.name, stored.tags) == ("best", ["a", "b"])


def same(found: Any, wanted: Any) -> bool:
    return np.array_equal(np.asarray(found, np.float64), np.asarray(wanted, np.float64), equal_nan=True)


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    calls=CALLS,
    buckets=some.sampled_from([1, 4, 40]),
    lo=some.none() | some.floats(-10, 310),
    hi=some.none() | some.floats(-10, 310),
)
def test_any_history_reads_as_it_was_written(place, calls, buckets, lo, hi):
    id = uuid.uuid4().hex
    write_run(place.root, calls, id=id)
    store = place.take_in()
    run = store.run("p", id)
    pairs = {(key, call.rank) for call in calls for key in call.values}
    for key, rank in sorted(pairs):
        points, _ = visible(calls, key, rank)
        found = run.series(key, rank=rank)
        assert found.steps.tolist() == [-1 if point.step == -(1 << 63) else point.step for point in points]
        assert found.times.tolist() == [point.time for point in points]
        assert same(found.values, [point.value for point in points])
        stepped = [(float(point.step), float(point.value)) for point in points if point.step != -(1 << 63)]
        if not stepped or (lo is not None and hi is not None and lo > hi):
            continue
        thin = store.series(run, key, rank=rank, buckets=buckets, lo=lo, hi=hi)
        wanted = thinned(stepped, buckets, lo, hi)
        for name in COLUMNS:
            assert same(getattr(thin, name), [one[name] for one in wanted]), name
        assert thin.total == sum(one["count"] for one in wanted)


def test_folds_and_other_axes_are_the_same_in_both_stores(tmp_path, clickhouse):
    calls = [
        Call(attempt, rank, step, 1000 * (rank + 1), {"loss": math.sin(step * (rank + 1)), "tokens": float(step * 512)})
        for attempt, start in ((0, 0), (1, 40))
        for step in range(start, start + 80)
        for rank in range(3)
    ]
    write_run(tmp_path, calls)
    fleet = Fleet(clickhouse)
    fleet.ship(tmp_path)
    stores: list[Any] = [LocalStore(tmp_path), fleet.store()]
    asked: list[dict[str, Any]] = [
        {"fold": "mean"}, {"fold": "max", "buckets": 10}, {"fold": "std", "x": "time"}, {"x": "tokens", "buckets": 13}, {"x": "relative"},
        {"rank": 2, "buckets": 7}, {"rank": 1, "lo": 12.5, "hi": 99.0, "buckets": 9}, {"lo": 30.0, "hi": 34.0},
    ]  # fmt: skip
    for how in asked:
        one, two = (store.series(store.run("p", "r"), "loss", **how) for store in stores)
        for name in (*COLUMNS, "low", "high", "low_rank", "high_rank"):
            left, right = getattr(one, name), getattr(two, name)
            assert (left is None) == (right is None)
            assert left is None or same(left, right), (how, name)
        for name in ("total", "raw", "restarts", "axis", "before", "after"):
            assert getattr(one, name) == getattr(two, name), (how, name)
    many = stores[1].series_many([(stores[1].run("p", "r"), key) for key in ("loss", "none", "tokens")], buckets=20)
    assert [one is None for one in many] == [False, True, False]
    fleet.close()


def test_up_to_so_many_points_are_returned_as_they_are(place):
    values = np.random.default_rng(2).normal(size=6000)
    write_long(place.root, "long", values)
    store = place.take_in()
    run = store.run("p", "long")
    whole = store.series(run, "loss", buckets=1500, whole=6000)
    assert whole.raw and len(whole) == 6000 and same(whole.last, values)
    thin = store.series(run, "loss", buckets=1500, whole=5999)
    assert not thin.raw and len(thin) <= 1502


def test_no_extreme_of_a_long_series_is_lost(place):
    generator = np.random.default_rng(1)
    steps = 400_000
    values = generator.normal(size=steps)
    write_long(place.root, "long", values)
    store = place.take_in()
    run = store.run("p", "long")
    thin = store.series(run, "loss", buckets=330)
    assert (thin.total, int(thin.count.sum())) == (steps, steps)
    assert 160 < len(thin) <= 331
    assert (thin.min.min(), thin.max.max()) == (values.min(), values.max())
    assert (thin.first[0], thin.last[-1]) == (values[0], values[-1])
    edges = np.searchsorted(np.arange(steps), thin.x)
    assert same(thin.min, np.minimum.reduceat(values, edges))
    assert same(thin.max, np.maximum.reduceat(values, edges))
    zoom = store.series(run, "loss", buckets=330, lo=1000, hi=1200)
    assert zoom.raw
    assert same(zoom.last, values[1000:1201])
    assert (zoom.before, zoom.after) == ((999.0, values[999]), (1201.0, values[1201]))


def write_long(root: Path, run: str, values: np.ndarray, *, attempt: int = 1, first: int = 0, every: int = 1) -> None:
    started = 10**18 + attempt * 10**12
    header = {"format": [1, 0], "rank": 0, "role": "main", "attempt": f"a{attempt}", "run": run, "project": "p",
              "ordinal": attempt, "mono": 0, "t": started}  # fmt: skip
    writer = Writer(root / "p" / run / "journal", header)
    for i, value in enumerate(values.tolist()):
        writer.row({"loss": value}, "d", time_ns=started + i, step=first + i * every)
    writer.close({"status": "finished", "t": started + len(values)})


def assert_true_points(thin: Any, local: Store, run: str) -> None:
    """Compare each bucket with what the directory store finds between its first and its last step."""
    stored = local.run("p", run)
    for i in range(len(thin)):
        one = local.series(stored, "loss", buckets=1, lo=thin.x[i], hi=thin.x_last[i])
        for name in ("x", "x_last", "first", "last", "min", "max", "x_min", "x_max", "count"):
            assert getattr(thin, name)[i] == getattr(one, name)[0], (run, i, name)


WALKS = {
    "normal": lambda some: some.normal(size=30_000),
    "flat": lambda some: np.round(some.normal(size=30_000)),  # equal extremes: the first of them counts
    "zeros": lambda some: np.where(some.random(30_000) < 0.5, -0.0, 0.0),
    "tiny": lambda some: some.normal(size=30_000) * 1e-310,
    "falling": lambda some: np.linspace(1e300, -1e300, 30_000),
}


@pytest.mark.parametrize("buckets", [40, 330])  # many cells to the bucket, grouped in the database; few, grouped here
def test_buckets_of_a_long_series_name_the_steps_of_their_extremes(place, buckets):
    for name, values in WALKS.items():
        write_long(place.root, name, values(np.random.default_rng(1)), first=-1000, every=3)
    write_long(place.root, "resumed", WALKS["normal"](np.random.default_rng(2)))
    write_long(place.root, "resumed", WALKS["normal"](np.random.default_rng(3)), attempt=2, first=30_000)
    store = place.take_in()
    for name in [*WALKS, "resumed"]:
        thin = store.series(store.run("p", name), "loss", buckets=buckets)
        assert not thin.raw and buckets / 2 - 1 <= len(thin) <= buckets + 2
        assert_true_points(thin, place.local, name)


ZOOMS = [
    (15_000.5, 15_050),
    (0, 10),
    (59_000, None),
    (None, 40),
    (14_990, 15_010),
    (20_001, 20_001),
    (-50, 10**7),
    (10_000, 50_000),
]


def test_zooms_into_a_long_series_are_the_same_in_both_stores(tmp_path, clickhouse):
    place = Place("clickhouse", tmp_path / "runs", Fleet(clickhouse))
    write_long(place.root, "r", np.random.default_rng(1).normal(size=20_000), every=2)
    write_long(place.root, "r", np.random.default_rng(2).normal(size=20_000), attempt=2, first=15_001, every=3)
    store, local = place.take_in(), place.local
    for lo, hi in ZOOMS:
        for buckets in (1, 100, 1_000_000):  # the last brings every point, as an export does
            how = {"buckets": buckets, "lo": lo, "hi": hi}
            one, two = local.series(local.run("p", "r"), "loss", **how), store.series(store.run("p", "r"), "loss", **how)
            for name in ("x", "x_last", "first", "last", "min", "max", "x_min", "x_max", "count"):
                assert same(getattr(one, name), getattr(two, name)), (how, name)
            for name in ("total", "raw", "restarts", "before", "after"):
                assert getattr(one, name) == getattr(two, name), (how, name)
    place.fleet.close()


def test_a_zoom_reads_the_points_of_its_range_and_not_the_whole_series(tmp_path, clickhouse):
    fleet = Fleet(clickhouse)
    write_long(tmp_path / "runs", "r", np.random.default_rng(1).normal(size=50_000))
    fleet.ship(tmp_path / "runs")
    store, brought = fleet.store(), []
    run, ask = store.run("p", "r"), store.database.ask

    def counted(sql: str, **parameters: Any) -> dict[str, Any]:
        found = ask(sql, **parameters)
        brought.append(max(map(len, found.values()), default=0))
        return found

    store.database.ask = counted
    for buckets in (500, 1_000_000):
        brought.clear()
        assert store.series(run, "loss", buckets=buckets, lo=20_000, hi=20_199).total == 200
        assert max(brought) <= 200 + 4 * 32
    fleet.close()


# Live


def test_what_is_logged_now_is_read_now(place):
    run = training(place.root, id="live")
    run.log({"loss": 1.0}, step=0)
    store = place.take_in()
    assert store.runs("p")[0]["status"] == "running"
    token, _ = store.changed(0)
    run.log({"loss": 0.5, "new": 3}, step=1)
    store = place.take_in()
    later, changed = until_changed(store, token)
    assert changed == [("p", "live")]
    assert store.changed(later)[1] == []
    assert store.run("p", "live").series("loss").values.tolist() == [1.0, 0.5]
    assert store.run("p", "live").latest == {"loss": 0.5, "new": 3}
    run.finish()
    store = place.take_in()
    assert store.runs("p")[0]["status"] == "finished"
    until_changed(store, later)


def until_changed(store: Any, token: int) -> tuple[int, list[Any]]:
    import time

    for _ in range(200):
        later, changed = store.changed(token)
        if changed:
            return later, changed
        time.sleep(0.05)
    raise AssertionError("no change was told")


# The command line

COMMANDS: list[list[str]] = [
    ["ls", "--json"],
    ["ls", "--json", "--sort", "loss.min", "--columns", "id,loss.min,acc.max"],
    ["points", "RUN", "loss", "--buckets", "7", "--json"],
    ["points", "RUN", "nokey"],
    ["compare", "RUN", "RUN", "--json"],
    ["diagnose", "RUN", "--json"],
    ["wait", "RUN", "--json"],
    ["show", "RUN", "--json"],
    ["tail", "RUN", "--json", "-n", "5"],
    ["export", "RUN", "--format", "jsonl", "-o", "-"],
    ["query", "SELECT key, count(*) AS n, min(value) AS low FROM points GROUP BY key ORDER BY key", "--json"],
    ["query", "SELECT id, status FROM runs", "--json"],
    ["usage", "--json"],
    ["ops", "RUN", "--json"],
    ["top", "--once", "--json"],
]


def printed(capsys, words: list[str]) -> tuple[int, str]:
    code = main(words)
    said = capsys.readouterr()
    return code, said.out or said.err


VARYING = ("path", "seen", "duration", "last", "age", "files", "silent", "now")


def facts(text: str) -> Any:
    """Read what a command printed, without what differs by where a run lies and when it arrived."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: clean(one) for name, one in value.items() if name not in VARYING}
        return [clean(one) for one in value] if isinstance(value, list) else value

    try:
        return clean(json.loads(text))
    except json.JSONDecodeError:
        return [clean(json.loads(line)) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_every_command_says_the_same_of_both(words, both, capsys):
    directory, address, id = both
    asked = [id if word == "RUN" else word for word in words]
    first = printed(capsys, [*asked, "--dir", directory])
    second = printed(capsys, [*asked, "--dir", address])
    assert first[0] == second[0]
    if first[1].lstrip()[:1] in ("[", "{"):
        assert facts(second[1]) == facts(first[1])
    else:
        assert second[1].replace(address, directory) == first[1]


@pytest.fixture
def both(tmp_path, clickhouse):
    run = training(tmp_path / "runs", config={"lr": 0.1}, tags=["t"], name="one")
    for step in range(50):
        run.log({"loss": 1 / (step + 1), "acc": step / 50}, step=step)
    run.alert("hot", "x")
    run.finish()
    fleet = Fleet(clickhouse)
    fleet.ship(tmp_path / "runs")
    yield str(tmp_path / "runs"), fleet.url, run.id
    fleet.close()


def test_a_run_is_replayed_from_clickhouse_into_a_tracker(both, tmp_path, capsys):
    _, address, id = both
    code, _ = printed(
        capsys,
        ["sync", id, "--to", "tensorboard", "--kwargs", json.dumps({"logging_dir": str(tmp_path / "tb")}), "--dir", address],
    )
    assert code == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loaded = [EventAccumulator(str(folder)).Reload() for folder in {path.parent for path in (tmp_path / "tb").rglob("events.*")}]
    (one,) = [events for events in loaded if "loss" in events.Tags()["scalars"]]
    assert [event.step for event in one.Scalars("loss")] == list(range(50))


def test_deleting_a_run_from_the_command_line_is_for_good_and_written_down(both, capsys):
    _, address, id = both
    assert printed(capsys, ["rm", id, "--yes", "--dir", address])[0] == 0
    assert json.loads(printed(capsys, ["ls", "--json", "--dir", address])[1] or "[]") == []
    said = printed(capsys, ["audit", "--store", address, "--json"])[1]
    assert id in said
    assert "run deleted" in said


def test_commands_that_work_on_files_say_so(both, capsys):
    _, address, _ = both
    for command in ("prune", "merge", "reindex"):
        code, said = printed(capsys, [command, "--dir", address])
        assert code == 2
        assert "works on a directory of runs" in said


def test_training_never_writes_to_a_server(both, monkeypatch):
    monkeypatch.setenv("FANFOLD_DIR", both[1])
    with pytest.raises(fanfold.FanfoldError, match="FANFOLD_SERVER"):
        fanfold.init("p")


def test_pieces_come_in_any_size(tmp_path, clickhouse):
    random.seed(3)
    write_run(tmp_path, [Call(0, rank, step, 10, {"a": float(step), "b": step}) for step in range(200) for rank in range(2)])
    fleet = Fleet(clickhouse)
    assert fleet.ship(tmp_path, most=300) > 40
    run = fleet.store().run("p", "r")
    for rank in range(2):
        assert run.series("a", rank=rank).values.tolist() == list(range(200))
    assert not any(journal.twice for journal in run.journals)
    fleet.close()
