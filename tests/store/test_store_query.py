"""Series in buckets: exact for any data, axis, zoom and rank, from journals and from segments alike."""

from __future__ import annotations

import contextlib
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fanfold
from fanfold import fold as folding
from fanfold.errors import FanfoldError, RunNotFound
from fanfold.store import merge, open_run, points, segments
from fanfold.store.query import LocalStore
from store_data import NO_STEP, START, Call, thinned, visible, write_run

COLUMNS = ("x", "x_last", "x_min", "x_max", "min", "max", "first", "last", "count")
numbers = st.one_of(
    st.floats(width=32),
    st.floats(-1e9, 1e9),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.1, -0.0, 1e300]),
)
values = st.fixed_dictionaries(
    {}, optional={"a": numbers, "b": st.one_of(st.integers(-(2**53), 2**53), numbers), "c": st.booleans(), "d": st.just(2.5)}
).filter(bool)
steps = st.one_of(st.integers(-2, 12), st.integers(-3, 40), st.sampled_from([2**40, -(2**35)]), st.none())
waits = st.one_of(st.integers(0, 10**7), st.integers(-(10**6), 10**12))
call = st.builds(Call, st.integers(0, 2), st.integers(0, 1), steps, waits, values)
regular = st.integers(1, 60).map(lambda n: [Call(0, 0, i * 3, 1000, {"a": float(i), "b": i}) for i in range(n)])
histories = st.one_of(
    st.lists(call, min_size=1, max_size=60).map(lambda calls: sorted(calls, key=lambda c: c.attempt)),
    st.tuples(regular, st.lists(call, max_size=8)).map(lambda two: sorted([*two[0], *two[1]], key=lambda c: c.attempt)),
)
# Journals and folders of an example are made anew inside of it.
quick = settings(
    max_examples=50,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@contextlib.contextmanager
def stored(calls: list[Call]) -> Iterator[tuple[LocalStore, fanfold.StoredRun]]:
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), calls)
        store = LocalStore(folder)
        yield store, store.run("p", "r")


def same(one, two) -> bool:
    return np.array_equal(np.asarray(one, np.float64), np.asarray(two, np.float64), equal_nan=True)


def pairs_over(calls, key, rank, x) -> tuple[str, list[tuple[float, float]]]:
    """Return the axis in use and the points over it, in order; of time, before anything is taken off."""
    points, _ = visible(calls, key, rank)
    if x == "step":
        stepped = [(float(p.step), float(p.value)) for p in points if p.step != NO_STEP]
        if stepped:
            return x, stepped
        x = "relative"
    if x in ("time", "relative"):
        return x, sorted(((p.time, float(p.value)) for p in points), key=lambda pair: pair[0])
    others, _ = visible(calls, x, rank)
    found = []
    for point in points:
        earlier = [float(o.value) for o in others if o.step <= point.step]
        if point.step != NO_STEP and earlier and math.isfinite(earlier[-1]):
            found.append((earlier[-1], float(point.value)))
    return x, sorted(found, key=lambda pair: pair[0])


@quick
@given(histories, st.sampled_from(["a", "b", "c"]), st.integers(0, 1), st.sampled_from(["step", "time", "relative", "b"]),
       st.integers(1, 12), st.one_of(st.none(), st.floats(-5, 45)), st.one_of(st.none(), st.floats(-5, 45)))  # fmt: skip
def test_buckets_are_what_a_look_at_every_point_gives(calls, key, rank, x, buckets, lo, hi):
    if not visible(calls, key, rank)[0] or (x == "b" and not visible(calls, "b", rank)[0]):
        return
    with stored(calls) as (store, run):
        axis, pairs = pairs_over(calls, key, rank, x)
        zero = run.started if axis == "relative" else 0.0
        base = START / 1e9 - zero if axis in ("time", "relative") else 0.0
        lo, hi = (None if end is None else end + base for end in (lo, hi))
        got = store.series(run, key, rank=rank, x=x, buckets=buckets, lo=lo, hi=hi)
        lo, hi = (None if end is None else end + zero for end in (lo, hi))
        expected = thinned(pairs, buckets, lo, hi)
        assert got.axis == axis
        for column in COLUMNS:
            off = zero if column.startswith("x") else 0.0
            assert same(getattr(got, column), [bucket[column] - off for bucket in expected]), column
        inside = [value for at, value in pairs if (lo is None or at >= lo) and (hi is None or at <= hi)]
        finite = [value for value in inside if math.isfinite(value)]
        assert (got.total, got.marked, got.raw) == (len(inside), len(inside) - len(finite), len(inside) <= buckets)
        if finite and not got.raw:
            assert (np.nanmin(got.min), np.nanmax(got.max)) == (min(finite), max(finite))


def everything(store, run) -> dict:
    """Ask all there is to ask, as plain comparable data."""
    found = {}
    for key in run.keys():  # noqa: SIM118 - a run is no mapping
        for raw in (False, True):
            for how in ({"rank": 0}, {"rank": 1}, {"fold": "mean"}, {"fold": "max"}):
                with contextlib.suppress(FanfoldError):
                    s = run.series(key, raw=raw, **how)
                    found[(key, raw, str(how))] = (
                        s.values.dtype.str,
                        s.steps.dtype.str,
                        *(c.tobytes() for c in (s.steps, s.times, s.values)),
                    )
        for x in ("step", "time", "relative", "b"):
            for how in ({}, {"rank": 1}, {"fold": "mean"}, {"lo": 3, "hi": 20}):
                with contextlib.suppress(FanfoldError):
                    b = store.series(run, key, x=x, buckets=7, **how)
                    found[(key, x, str(how))] = [
                        repr(column.tolist()) if isinstance(column, np.ndarray) else repr(column) for column in vars(b).values()
                    ]
    return found


@quick
@given(calls=histories, size=st.sampled_from([200, 700, 5000]))
def test_segments_and_journals_give_the_same_to_the_last_bit(calls, size, monkeypatch):
    monkeypatch.setattr(merge, "RANGE_BYTES", size)
    monkeypatch.setattr(segments, "WORTH_BYTES", 1 << 40)
    with stored(calls) as (store, run):
        before = everything(store, run)
        monkeypatch.setattr(segments, "WORTH_BYTES", 64)
        made = [one for journal in run.journals for one in merge.merge(journal.path)]
        anew = LocalStore(store.root)
        again = anew.run("p", "r")
        after = everything(anew, again)
        assert made
        assert any(segments.chain_of(journal).end > 0 for journal in again.journals)
    assert after == before


def ladder(root, count=1000, **options):
    return write_run(root, [Call(0, 0, i, 10**6, {"a": float(i), "b": float(i // 100)}) for i in range(count)], **options)


def test_zooming_in_reaches_the_points_and_names_the_neighbours(tmp_path):
    ladder(tmp_path)
    store = LocalStore(tmp_path)
    run = store.run("p", "r")
    wide, near = store.series(run, "a", buckets=10), store.series(run, "a", buckets=10, lo=500, hi=505)
    assert (len(wide), wide.raw, wide.total, wide.before, wide.after) == (10, False, 1000, None, None)
    assert (near.raw, near.first.tolist()) == (True, [500.0, 501.0, 502.0, 503.0, 504.0, 505.0])
    assert (near.before, near.after) == ((499.0, 499.0), (506.0, 506.0))
    nothing = store.series(run, "a", lo=2000, hi=3000)
    assert (len(nothing), nothing.total, nothing.before) == (0, 0, (999.0, 999.0))


def test_nan_and_infinity_are_marked_once_per_pixel_and_counted(tmp_path):
    odd = {300: math.nan, 301: math.nan, 302: math.inf, 900: -math.inf}
    write_run(tmp_path, [Call(0, 0, i, 1, {"a": odd.get(i, 1.0 + i % 7)}) for i in range(1000)])
    store = LocalStore(tmp_path)
    got = store.series(store.run("p", "r"), "a", buckets=10)
    assert got.marks == [(300.0, "nan"), (302.0, "inf"), (900.0, "-inf")]
    assert got.marked == 4
    assert (got.min.tolist(), got.max.tolist()) == ([1.0] * 10, [7.0] * 10)


def test_a_bucket_of_nothing_but_nan_is_nan(tmp_path):
    write_run(tmp_path, [Call(0, 0, i, 1, {"a": math.nan if i >= 50 else 1.0}) for i in range(100)])
    store = LocalStore(tmp_path)
    got = store.series(store.run("p", "r"), "a", buckets=4)
    assert same(got.min, [1.0, 1.0, math.nan, math.nan])
    assert same(got.last, [1.0, 1.0, math.nan, math.nan])


def test_many_attempts_are_each_looked_at_a_few_times(tmp_path, monkeypatch):
    calls = [Call(n, 0, 3 * n + step, 10**6, {"a": float(n)}) for n in range(60) for step in range(4)]
    run = open_run(write_run(tmp_path, calls))
    looks = []
    before = points.before
    monkeypatch.setattr(points, "before", lambda chunk, step: looks.append(step) or before(chunk, step))
    assert run.series("a").values.tolist() == [float(n) for n in range(60) for _ in range(3)] + [59.0]
    assert len(looks) == 59


def test_attempts_that_each_hide_a_little_of_all_before_them_are_looked_at_once(tmp_path, monkeypatch):
    """Each attempt cuts one point off the first one, and leaves a low one behind: what is kept grows, and is always in question."""
    count = 60
    steps = [list(range(count)), *([count - n, -n] for n in range(1, count))]
    calls = [Call(n, 0, step, 10**6, {"a": float(n)}) for n, some in enumerate(steps) for step in some]
    run = open_run(write_run(tmp_path, calls))
    looks = []
    before = points.before
    monkeypatch.setattr(points, "before", lambda chunk, step: looks.append(step) or before(chunk, step))
    series = run.series("a")
    assert series.steps.tolist() == [*range(-count + 1, 0), 0, 1]
    assert series.values.tolist() == [*map(float, range(count - 1, 0, -1)), 0.0, float(count - 1)]
    assert len(looks) < 2 * count


@pytest.mark.parametrize("seed", range(5))
def test_a_point_is_visible_if_no_later_attempt_began_at_or_before_its_step(tmp_path, seed):
    chance = random.Random(seed)
    lives = [[chance.randrange(30) for _ in range(chance.randrange(1, 6))] for _ in range(20)]
    calls = [Call(n, 0, step, 10**6, {"a": n * 10.0 + place}) for n, some in enumerate(lives) for place, step in enumerate(some)]
    expected = [
        (step, n * 10.0 + place)
        for n, some in enumerate(lives)
        for place, step in enumerate(some)
        if all(step < later[0] for later in lives[n + 1 :])
    ]
    got = open_run(write_run(tmp_path, calls)).series("a")
    assert list(zip(got.steps.tolist(), got.values.tolist(), strict=True)) == sorted(expected, key=lambda one: one[0])


def test_restarts_stand_where_later_attempts_set_in(tmp_path):
    write_run(
        tmp_path,
        [
            Call(attempt, 0, start + i, 10**9, {"a": float(attempt)})
            for attempt, start in ((0, 0), (1, 6), (2, 9))
            for i in range(10)
        ],
    )
    store = LocalStore(tmp_path)
    run = store.run("p", "r")
    got = store.series(run, "a")
    assert got.restarts == [6.0, 9.0]
    assert got.first.tolist() == [0.0] * 6 + [1.0] * 3 + [2.0] * 10
    assert store.series(run, "a", x="relative").restarts == pytest.approx([START / 1e9 + i - run.started for i in (11, 21)])


def test_a_fold_names_the_lowest_and_highest_rank_of_each_bucket(tmp_path):
    write_run(
        tmp_path,
        [
            Call(0, rank, i, 1, {"a": float(rank * 100 + i) if (rank, i) != (2, 7) else -5.0})
            for i in range(20)
            for rank in range(3)
        ],
    )
    store = LocalStore(tmp_path)
    run = store.run("p", "r")
    got = store.series(run, "a", fold="mean", buckets=4)
    assert got.low.tolist() == [0.0, -5.0, 10.0, 15.0]
    assert got.low_rank.tolist() == [0, 2, 0, 0]
    assert got.high.tolist() == [204.0, 209.0, 214.0, 219.0]
    assert got.high_rank.tolist() == [2, 2, 2, 2]
    whole = run.series("a", fold="mean")
    assert (got.min.min(), got.max.max()) == (whole.values.min(), whole.values.max())
    assert set(folding.FOLDS) == {"mean", "min", "max", "sum", "std", "last"}


def test_what_has_no_steps_is_drawn_over_time(tmp_path):
    write_run(tmp_path, [Call(0, 0, None, 10**9, {"system/cpu": float(i)}) for i in range(5)])
    store = LocalStore(tmp_path)
    run = store.run("p", "r")
    got = store.series(run, "system/cpu")
    assert got.axis == "relative"
    assert got.x.tolist() == pytest.approx([START / 1e9 + i - run.started for i in range(1, 6)], abs=1e-6)


def test_many_series_come_in_the_order_asked_and_a_missing_one_is_none(tmp_path):
    ladder(tmp_path, id="one")
    ladder(tmp_path, id="two", count=10)
    store = LocalStore(tmp_path)
    one, two = store.run("p", "one"), store.run("p", "two")
    found = store.series_many([(two, "a"), (one, "nope"), (one, "b")], buckets=5)
    assert [None if b is None else (b.key, b.total) for b in found] == [("a", 10), None, ("b", 1000)]
    with pytest.raises(FanfoldError, match=r"no numbers under 'nope'.*a, b"):
        store.series(one, "nope")
    with pytest.raises(FanfoldError, match="no numbers under 'a'"):
        store.series(one, "a", rank=7)


def test_rows_hold_facts_latest_values_and_statistics(runs_dir):
    for lr in (0.1, 0.2):
        run = fanfold.init("p", config={"lr": lr}, tags=("t",), system=False, name=f"n{lr}")
        for step, loss in enumerate((5.0, lr, 3.0)):
            run.log({"loss": loss, "word": "hi"}, step=step)
        run.finish()
    store = LocalStore()
    rows = store.runs(sort="-loss.min", stats=["loss"])
    assert [row["name"] for row in rows] == ["n0.2", "n0.1"]
    first = rows[0]
    assert (first["status"], first["config"], first["tags"], first["latest"]) == (
        "finished",
        {"lr": 0.2},
        ["t"],
        {"loss": 3.0, "word": "hi"},
    )
    assert first["stats"]["loss"] == {
        "min": 0.2,
        "max": 5.0,
        "mean": pytest.approx(8.2 / 3),
        "first": 5.0,
        "last": 3.0,
        "count": 3,
        "min_step": 1,
        "max_step": 0,
    }
    assert [row["name"] for row in store.runs(filter="lr<0.15")] == ["n0.1"]
    assert len(store.runs(limit=1)) == 1
    assert [(p["name"], p["runs"]) for p in store.projects()] == [("p", 2)]


def test_changed_tells_what_is_new_grew_ended_or_went_away(runs_dir):
    store = LocalStore()
    assert store.changed() == (0, [])
    run = fanfold.init("p", id="x", system=False)
    run.log({"a": 1})
    token, names = store.changed(0)
    assert names == [("p", "x")]
    assert store.changed(token) == (token, [])
    run.log({"a": 2})
    token, names = store.changed(token)
    assert names == [("p", "x")]
    assert store.runs()[0]["status"] == "running"
    token, _ = store.changed(token)
    run.finish()
    token, names = store.changed(token)
    assert names == [("p", "x")]
    assert store.runs()[0]["status"] == "finished"
    assert store.changed(token) == (token, [])
    run.path.rename(run.path.with_name(".gone"))
    token, names = store.changed(token)
    assert names == [("p", "x")]
    with pytest.raises(RunNotFound):
        store.run("p", "x")


LIFE = """
import sys, threading, fanfold, fanfold.recording.keeper
fanfold.recording.keeper.BEAT_SECONDS = 1e9  # a heartbeat is a change too, and nobody knows when it comes
run = fanfold.init("p", id="x", system=False, quiet=True)
for thread in threading.enumerate():  # so are the facts about the machine, which come when they are found
    if thread.name == "fanfold-facts": thread.join()
for line in sys.stdin:
    run.log({"a": float(line)})
    print("done", flush=True)
"""


def test_one_change_is_told_once_however_often_the_run_is_listed_and_read(runs_dir):
    child = subprocess.Popen([sys.executable, "-c", LIFE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    store, token = LocalStore(), 0

    def look() -> int:
        """Look as a page does: hear the notice, list and draw, look again; return how often there was news."""
        nonlocal token
        told = 0
        for _ in range(3):
            token, names = store.changed(token)
            told += len(names)
            store.runs("p")
            store.series(store.run("p", "x"), "a")
        return told

    def say(line: str) -> None:
        child.stdin.write(f"{line}\n")
        child.stdin.flush()
        child.stdout.readline()

    say("1")
    assert look() == 1
    assert store.runs()[0]["status"] == "running"
    for value in ("2", "3"):
        say(value)
        assert look() == 1
    assert look() == 0
    child.kill()  # nothing is written, and yet it is news
    child.wait()
    assert look() == 1
    assert store.runs()[0]["status"] == "killed"
    assert look() == 0
    child.stdin.close()
    child.stdout.close()
