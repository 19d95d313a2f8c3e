"""The relay: real processes, real TensorBoard, and trackers that raise, hang, crawl and die."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanfold
import fault_table
from fanfold.cli import main
from fanfold.errors import SettingError
from fanfold.journal.format import Layout
from fanfold.relay import Cursor, Owned, cursors
from fanfold.relay import feed as feeding
from fanfold.relay.feed import Feed
from fanfold.relay.process import OWNED, remaining
from fanfold.trackers.registry import TABLE
from paths import HELPERS, SRC


class Play:
    """Runs scripts whose runs go to trackers, and knows where everything is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.run = self.runs / "p" / "r"
        self.lines = folder / "lines"
        self.env = {
            **os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{HELPERS}", "FANFOLD_DIR": str(self.runs), "FANFOLD_QUIET": "1",
            "FANFOLD_SYSTEM": "0", "LINES": str(self.lines),
        }  # fmt: skip

    def script(self, trackers: Any, body: str, **options: Any) -> str:
        given = {"id": "r", "trackers": trackers, **options}
        head = f"import fanfold, os, signal, sys, time\nimport relay_trackers\nrun = fanfold.init('p', **{given!r})\n"
        return head + textwrap.dedent(body)

    def start(self, trackers: Any, body: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", self.script(trackers, body, **options)], env={**self.env, **(env or {})}, cwd=self.folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def play(self, trackers: Any, body: str, env: dict[str, str] | None = None, **options: Any) -> tuple[int, str, str]:
        process = self.start(trackers, body, env, **options)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err

    def sync(self, *words: str) -> tuple[int, Any, str]:
        done = subprocess.run([sys.executable, "-m", "fanfold", "sync", *words, "--json"], env=self.env, cwd=self.folder,
                              capture_output=True, text=True, timeout=100)  # fmt: skip
        return done.returncode, json.loads(done.stdout or "null"), done.stderr

    def cursor(self, name: str) -> Cursor:
        return next(cursor for cursor in cursors(self.run) if cursor.tracker == name)

    def calls(self, path: Path | None = None) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, (path or self.lines).read_text().splitlines()) if line["event"] == "log"]

    def points(self, path: Path) -> list[tuple[str, int, float]]:
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    player = Play(tmp_path)
    yield player
    for cursor in cursors(player.run):
        if cursor.owner is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(cursor.owner["pid"], signal.SIGKILL)


def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for something another process does."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


def count_delivered(what: str, points: list[Any], wanted: int) -> None:
    """Enter a delivery into the fault table: every point once."""
    unique = len(set(points))
    fault_table.record(what, points=wanted, lost=wanted - unique, doubled=len(points) - unique)


def at_work(cursor: Cursor) -> bool:
    return cursor.owner is not None and Path(f"/proc/{cursor.owner['pid']}").exists()


def tensorboard(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (path for path in (run / "trackers" / "tensorboard").iterdir() if path.is_dir())
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


# Trouble


def test_trackers_that_raise_hang_or_crawl_touch_neither_the_loop_nor_each_other(play):
    code, out, err = play.play(["tensorboard", "raising", "hanging", "slow"], """
        times = []
        for i in range(2000):
            began = time.perf_counter()
            run.log({"loss": i / 2}, step=i)
            times.append(time.perf_counter() - began)
            time.sleep(0.001)
        began = time.monotonic()
        run.finish(timeout=15)
        print(sorted(times)[1000], time.monotonic() - began)
    """)  # fmt: skip
    assert code == 0, err
    median, finish = map(float, out.split())
    assert median < 0.001
    assert finish < 15.5  # of 15: the rest is for a busy machine
    assert tensorboard(play.run)["loss"] == [(i, i / 2) for i in range(2000)]
    assert "raising: 2,000 values are not delivered yet (ConnectionError: the server is on holiday)" in err
    assert "fanfold sync r --to relay_trackers:Raising" in err
    assert re.search(r"hanging: 2,000 values are not delivered yet.*fanfold sync r --to relay_trackers:Hanging", err)
    assert re.search(r"slow: [\d,]+ values", err)
    assert "tensorboard:" not in err


def take_a_tracker_down(play, count, seconds):
    code, _, err = play.play(["raising"], f"""
        for i in range({count}):
            run.log({{"x": i}}, step=i)
        time.sleep({seconds})
        open(os.environ["LINES"] + ".up", "w").close()
        run.finish(timeout=60)
    """)  # fmt: skip
    assert (code, err) == (0, "")
    count_delivered("a tracker that is down for a while", [call["step"] for call in play.calls()], count)
    assert [call["step"] for call in play.calls()] == list(range(count))


def test_what_a_tracker_missed_while_it_was_down_arrives_by_itself(play):
    take_a_tracker_down(play, 50, 1)


@pytest.mark.faults
@pytest.mark.parametrize("turn", range(6))
def test_every_point_of_an_outage_of_any_length_arrives_once(play, turn):
    take_a_tracker_down(play, 500, turn)


def test_a_call_that_failed_half_way_through_a_batch_repeats_nothing(play):
    code, _, err = play.play(["flaky"], "for i in range(6): run.log({'x': i}, step=i)\nrun.finish(timeout=60)")
    assert (code, err) == (0, "")
    assert [call["step"] for call in play.calls()] == list(range(6))


def test_what_a_trackers_code_cannot_take_is_left_out_and_the_rest_goes_on(play):
    code, _, err = play.play(["picky"], """
        run.log({"x": 1, "text": "a"}, step=0)
        run.log({"x": 2}, step=1)
        run.finish(timeout=60)
    """)  # fmt: skip
    assert (code, err) == (0, "")
    assert [(call["step"], call["values"]) for call in play.calls()] == [(0, {"x": 1}), (1, {"x": 2})]
    assert play.cursor("picky").refused == 1


def test_a_start_that_hangs_does_not_delay_the_first_step(play):
    began = time.monotonic()
    code, _, err = play.play(["hanging_start"], "run.log({'x': 1.0}, step=0)\nrun.finish(timeout=2)")
    assert code == 0, err
    assert time.monotonic() - began < 20
    assert "hanging_start: 1 value is not delivered yet" in err


def test_finish_is_prompt_when_the_tracker_is(play):
    code, out, err = play.play(["lines"], """
        run.log({"x": 1.0}, step=0)
        while "log" not in (open(os.environ["LINES"]).read() if os.path.exists(os.environ["LINES"]) else ""): time.sleep(0.05)
        time.sleep(2)  # the relay has slowed its looking by now
        began = time.monotonic(); run.finish(); print(time.monotonic() - began)
    """)  # fmt: skip
    assert (code, err) == (0, "")
    assert float(out) < 5


# Kills


def kill_a_relay(play, seed):
    path = play.folder / "points"
    training = play.start(["readable"], """
        for i in range(1500):
            run.log({"a": i, "b": -i}, step=i)
            time.sleep(0.001)
        run.finish(timeout=0.1)
    """, tracker_kwargs={"readable": {"path": str(path)}})  # fmt: skip
    wanted = random.Random(seed).randrange(10, 2000)
    until(lambda: path.exists() and path.read_bytes().count(b"\n") >= wanted)
    os.kill(play.cursor("readable").owner["pid"], signal.SIGKILL)
    _, err = training.communicate(timeout=60)
    until(lambda: not at_work(play.cursor("readable")))
    answers: list[Any] = []
    # The relay started in its place, if training still went on, may have just begun: as long as it works, sync leaves it to it.
    until(lambda: answers.append(play.sync("r", "--to", "relay_trackers:Readable")) or answers[-1][0] != OWNED)
    code, _, err = answers[-1]
    assert code == 0, err
    count_delivered("a relay killed by `kill -9` in the middle of a run", play.points(path), 3000)
    assert sorted(play.points(path)) == sorted([("a", i, i) for i in range(1500)] + [("b", i, -i) for i in range(1500)])
    assert play.sync("r", "--to", "relay_trackers:Readable")[1][0]["outcome"] == "nothing new"
    assert len(play.points(path)) == 3000


@pytest.mark.parametrize("seed", range(3))
def test_a_relay_killed_at_any_moment_loses_and_repeats_nothing(play, seed):
    kill_a_relay(play, seed)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(3, 18))
def test_a_relay_killed_at_more_moments_loses_and_repeats_nothing(play, seed):
    kill_a_relay(play, seed)


def test_a_relay_killed_during_the_run_is_started_again_with_one_warning(play):
    path = play.folder / "points"
    training = play.start(["readable"], """
        for i in range(200):
            run.log({"x": i}, step=i)
        print("logged", flush=True)
        sys.stdin.readline()
        for i in range(200, 400):
            run.log({"x": i}, step=i)
        run.finish()
    """, tracker_kwargs={"readable": {"path": str(path)}})  # fmt: skip
    training.stdout.readline()
    for deaths in (1, 2):
        owner = until(lambda: play.cursor("readable").owner)
        os.kill(owner["pid"], signal.SIGKILL)
        until(lambda deaths=deaths: play.cursor("readable").restarts == deaths)
        assert not Path(f"/proc/{owner['pid']}").exists()  # and no zombie is left
    _, err = training.communicate("\n", timeout=60)
    assert training.returncode == 0
    assert play.points(path) == [("x", i, i) for i in range(400)]
    assert (play.folder / "points.status").read_text() == "finished"
    assert err.count("the relay to readable was killed by SIGKILL during the run. It was started again") == 1
    assert "fanfold: the relay to readable died during the run and was started again 2 times." in err
    shown = subprocess.run(
        [sys.executable, "-m", "fanfold", "show", "r"], env=play.env, capture_output=True, text=True, timeout=60
    )
    assert "its relay died and was restarted 2 times" in shown.stdout


def test_the_end_of_a_run_does_not_leave_out_a_relay_that_was_to_be_restarted_later(play):
    path = play.folder / "points"
    code, _, err = play.play(["readable"], """
        from fanfold.relay import process
        process.RESTART_SECONDS = 1000.0
        relay, killed = run._delivery.attached.relays[0], None
        for deaths in (1, 2):
            while relay.pid == killed or (relay.cursor().owner or {}).get("pid") != relay.pid: time.sleep(0.05)
            run.log({"x": deaths}, step=deaths)
            os.kill(killed := relay.pid, signal.SIGKILL)
            while relay.pid == killed if deaths == 1 else relay._due <= time.monotonic(): time.sleep(0.05)
        run.finish()
    """, tracker_kwargs={"readable": {"path": str(path)}})  # fmt: skip
    assert code == 0, err
    assert play.points(path) == [("x", 1, 1), ("x", 2, 2)]
    assert "started again 2 times." in err
    assert "not delivered yet" not in err


def test_a_relay_that_keeps_dying_is_given_up_and_the_rest_is_for_sync(play, tmp_path):
    path, broken = play.folder / "points", tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\nif 'fanfold.relay' in sys.orig_argv:\n    open(os.environ['BORN'], 'a').write('x')\n    os._exit(9)\n"
    )
    births = tmp_path / "births"
    env = {"BORN": str(births), "PYTHONPATH": f"{broken}{os.pathsep}{play.env['PYTHONPATH']}"}
    code, _, err = play.play(["readable"], """
        from fanfold.relay import process
        process.RESTART_SECONDS = 0.0
        run.log({"x": 1}, step=0)
        deadline = time.monotonic() + 60
        while not run._delivery.attached.relays[0]._gave_up and time.monotonic() < deadline:
            time.sleep(0.1)
        run.finish(timeout=2)
    """, env, tracker_kwargs={"readable": {"path": str(path)}})  # fmt: skip
    assert code == 0, err
    assert births.read_text() == "x" * 6
    assert "It died 5 times in a row and is not started again" in err
    code, done, err = play.sync("r", "--to", "relay_trackers:Readable")
    assert (code, done[0]["outcome"]) == (0, "delivered"), err
    assert play.points(path) == [("x", 0, 1)]


def test_the_relay_outlives_a_killed_training_delivers_all_and_says_killed(play):
    path = play.folder / "points"
    code, _, _ = play.play(["readable"], """
        for i in range(3000):
            run.log({"x": i}, step=i)
        os.kill(os.getpid(), signal.SIGKILL)
    """, tracker_kwargs={"readable": {"path": str(path)}})  # fmt: skip
    assert code == -9
    until(lambda: (play.folder / "points.status").exists() and play.cursor("readable").owner is None)
    assert play.points(path) == [("x", i, i) for i in range(3000)]
    assert (play.folder / "points.status").read_text() == "killed"


def test_when_training_and_relay_are_both_killed_sync_delivers(play):
    path = play.folder / "points"
    training = play.start(["readable"], """
        for i in range(100_000):
            run.log({"x": i}, step=i)
            if i == 1000: print("there", flush=True)
            time.sleep(0.0005)
    """, tracker_kwargs={"readable": {"path": str(path)}})  # fmt: skip
    training.stdout.readline()
    until(lambda: path.exists() and path.read_bytes().count(b"\n") > 100)
    training.kill()
    os.kill(play.cursor("readable").owner["pid"], signal.SIGKILL)
    training.communicate()
    code, done, err = play.sync("r", "--to", "relay_trackers:Readable")
    assert code == 0, err
    logged = fanfold.open(play.run).series("x").steps.tolist()
    assert len(logged) > 1000
    assert [step for _, step, _ in play.points(path)] == logged
    assert (play.folder / "points.status").read_text() == done[0]["status"] == "killed"


def test_a_remote_run_that_has_everything_but_its_end_is_ended_by_sync(play):
    path = play.folder / "points"
    play.play(
        ["readable"], "run.log({'x': 1.0}, step=0)\nos.kill(os.getpid(), 9)", tracker_kwargs={"readable": {"path": str(path)}}
    )
    cursor = until(lambda: (found := play.cursor("readable")).closed and not at_work(found) and found)
    cursor.closed = None  # as if the relay had been killed just before
    cursor.save()
    (play.folder / "points.status").unlink()
    code, done, err = play.sync("r", "--to", "relay_trackers:Readable")
    assert (code, [one["status"] for one in done]) == (0, ["killed"]), err
    assert (play.folder / "points.status").read_text() == "killed"


def test_a_run_killed_before_its_relay_began_is_known_to_sync(play):
    play.play(["tensorboard"], """
        run._delivery.attached.relays[0]._process.kill()
        run.log({"x": 1.0}, step=0)
        os.kill(os.getpid(), signal.SIGKILL)
    """)  # fmt: skip
    code, done, err = play.sync()
    assert (code, done[0]["outcome"], done[0]["values"]) == (0, "delivered", 1), err
    assert tensorboard(play.run) == {"x": [(0, 1.0)]}
    assert play.sync()[1] == []


def test_a_relay_whose_run_is_deleted_ends(play):
    code, _, err = play.play(["raising"], "run.log({'x': 1}, step=0)\nrun.finish(timeout=2)")
    assert (code, "1 value is not delivered yet" in err) == (0, True)
    pid = until(lambda: play.cursor("raising").error and play.cursor("raising").owner)["pid"]
    play.run.rename(play.folder / "deleted")
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert not play.run.exists()


def test_a_run_is_not_moved_under_its_relay_and_its_remote_run_stays_where_it_is(play, capsys):
    training = play.start(["lines"], "run.log({'x': 0}, step=0)\ntime.sleep(60)")
    until(lambda: play.lines.exists() and play.calls())
    owner = until(lambda: play.cursor("lines").owner)
    os.kill(owner["pid"], signal.SIGSTOP)  # so that it is at work for as long as we need
    training.kill()
    training.communicate()
    move = ["mv", "r", "--project", "q", "--dir", str(play.runs)]
    assert main(move) == 2
    assert "is still being delivered (lines)" in capsys.readouterr().err
    os.kill(owner["pid"], signal.SIGKILL)
    assert until(lambda: main(move) == 0)
    code, done, err = play.sync("r", "--to", "relay_trackers:Lines")
    assert (code, done[0]["outcome"]) == (0, "delivered"), err
    started = [line["project"] for line in map(json.loads, play.lines.read_text().splitlines()) if line["event"] == "start"]
    assert (len(started), set(started)) == (2, {"p"})


# One relay for a cursor


def test_a_cursor_has_one_owner_at_a_time_also_within_a_process(tmp_path):
    first, second = (Cursor.load(tmp_path / "relay" / "x.cursor") for _ in range(2))
    first.acquire()
    with pytest.raises(Owned, match="is being delivered by"):
        second.acquire()
    first.delivered = 7
    first.release()
    second.acquire()
    assert second.delivered == 7  # what the first did after the second had looked
    second.release()


def test_sync_leaves_a_relay_at_work_alone_and_says_so(play):
    training = play.start(["slow"], "for i in range(150): run.log({'x': i}, step=i)\nrun.finish(timeout=60)")
    until(play.lines.exists)
    code, done, err = play.sync("r", "--to", "relay_trackers:Slow")
    assert (code, done[0]["outcome"]) == (3, "owned"), err
    assert training.communicate(timeout=60)[1] == ""
    assert [call["step"] for call in play.calls()] == list(range(150))


def test_sync_exits_with_1_while_a_destination_is_behind(play):
    play.play(None, "run.log({'x': 1}); run.finish()")
    renamed = (
        play.run / "relay" / "tensorboard-renamed.cursor"
    )  # a relay never writes to this one, so its values stay undelivered
    renamed.parent.mkdir()
    renamed.write_text(json.dumps({"tracker": "tensorboard", "kwargs": {}}))
    code, done, err = play.sync("r")
    assert (code, done[0]["outcome"], done[0]["left"]) == (1, "behind", 1), err


def test_an_owner_on_another_node_keeps_its_cursor_until_it_stands_still(tmp_path):
    cursor = Cursor.load(tmp_path / "relay" / "x.cursor")
    cursor.acquire()
    cursor.release()
    known = json.loads(cursor.path.read_text())
    cursor.path.write_text(json.dumps({**known, "owner": {"node": "far", "boot": "other", "pid": 1, "beat": 0}}))
    with pytest.raises(Owned, match="process 1 on far"):
        Cursor.load(cursor.path).acquire()
    old = cursor.path.stat().st_mtime - 61
    os.utime(cursor.path, (old, old))
    taken = Cursor.load(cursor.path)
    taken.acquire()
    taken.release()


def test_the_owner_renews_its_record(tmp_path, monkeypatch):
    monkeypatch.setattr("fanfold.relay.cursor.OWNER_SECONDS", 0.02)
    cursor = Cursor.load(tmp_path / "relay" / "x.cursor")
    cursor.acquire()
    first = Cursor.load(cursor.path).owner["beat"]
    until(lambda: Cursor.load(cursor.path).owner["beat"] > first)
    cursor.release()
    assert Cursor.load(cursor.path).owner is None


# What is handed out, and when


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rank(number: int, world: int, monkeypatch: pytest.MonkeyPatch, attempt: int = 0, **options: Any) -> Any:
    """Start one rank of a run in this process; ranks of one attempt are those whose n-th init it is."""
    monkeypatch.setattr("fanfold.recording.join._inits", itertools.count(attempt))
    monkeypatch.setenv("FANFOLD_RANK", str(number))
    monkeypatch.setenv("FANFOLD_WORLD_SIZE", str(world))
    return fanfold.init("p", id="r", system=False, **options)


def handed(feed: Feed) -> list[tuple[int | None, dict[str, Any]]]:
    """Poll, acknowledge, and return what came."""
    out = feed.poll()
    for item in out:
        for frame in item.frames:
            frame.left -= 1
    return [(item.point.step, item.point.values) for item in out]


def test_a_call_waits_for_its_late_part_and_holds_back_those_after_it(runs_dir, monkeypatch):
    run, clock = rank(0, 1, monkeypatch), Clock()
    feed = Feed(run.path, name="x", clock=clock, hold=10)
    run._writer.row({"a": 1.0}, "d", time_ns=5, step=0, layout=Layout.PENDING, call=(1, 1))
    run.log({"a": 2.0}, step=1)
    assert handed(feed) == []
    run._writer.rows([(Layout.LATE, ("late",), "d", 5, 0, (1,), (0.5,))])
    assert handed(feed) == [(0, {"a": 1.0, "late": 0.5}), (1, {"a": 2.0})]
    run.finish()


def test_a_late_part_that_does_not_come_in_time_goes_out_alone(runs_dir, monkeypatch):
    run, clock = rank(0, 1, monkeypatch), Clock()
    feed = Feed(run.path, name="x", clock=clock, hold=10)
    run._writer.row({"a": 1.0}, "d", time_ns=5, step=0, layout=Layout.PENDING, call=(1, 1))
    assert handed(feed) == []
    clock.now = 10.5
    assert handed(feed) == [(0, {"a": 1.0})]
    run._writer.rows([(Layout.LATE, ("late",), "d", 5, 0, (1,), (0.5,))])
    assert handed(feed) == [(0, {"late": 0.5})]
    run.finish()
    assert handed(feed) == []
    assert feed.finished()


def test_device_values_and_media_are_one_point_with_their_call(play):
    code, _, err = play.play(["lines"], """
        import jax.numpy as jnp, numpy as np
        for i in range(20):
            run.log({"loss": jnp.float32(i), "lr": 0.5, "image": fanfold.Image(np.zeros((4, 4, 3), np.uint8)), "note": "hi"}, step=i)
        run.finish(timeout=60)
    """)  # fmt: skip
    assert (code, err) == (0, "")
    assert [call["step"] for call in play.calls()] == list(range(20))
    assert all(set(call["values"]) == {"loss", "lr", "image", "note"} for call in play.calls())
    assert [call["values"]["loss"] for call in play.calls()] == list(range(20))


def test_what_was_delivered_beyond_the_mark_is_remembered_over_restarts(runs_dir, monkeypatch):
    first, second, clock = rank(0, 2, monkeypatch), rank(1, 2, monkeypatch), Clock()
    second.log({"n": 8.0}, step=5)  # held until rank 0 has passed it
    second.log({"n": 4.0}, step=2)
    first.log({"n": 0.0}, step=2)
    first.log({"other": 0.0}, step=3)
    feed = Feed(first.path, name="x", fold={"n": "mean"}, clock=clock)
    assert handed(feed) == [(2, {"n": 2.0}), (3, {"other": 0.0})]
    marks = feed.marks()
    assert [len(ahead) for name, (_, ahead) in marks.items() if name.startswith("1-")] == [1]
    for _ in range(3):  # each restart reads on from the marks of the one before
        feed = Feed(first.path, name="x", fold={"n": "mean"}, marks=marks, clock=clock)
        assert handed(feed) == []
        again = feed.marks()
        assert again == marks
        marks = again
    first.finish()
    second.finish()
    assert handed(feed) == [(5, {"n": 8.0})]


def test_a_long_run_is_read_piece_by_piece(runs_dir, monkeypatch):
    monkeypatch.setattr(feeding, "CHUNK", 100)
    run = rank(0, 1, monkeypatch)
    for i in range(1050):
        run.log({"x": i}, step=i)
    run.finish()
    feed, steps = Feed(run.path, name="x"), []
    while feed.behind() or not steps:
        out = handed(feed)
        assert len(out) <= 100
        steps += [step for step, _ in out]
        feed.marks()
        assert len(next(iter(feed.tracks.values())).frames) == 0
    assert steps == list(range(1050))
    assert all(not rows.runs for track in feed.tracks.values() for rows in track.journal.rows.values())


def test_attempts_are_replayed_in_their_order_whatever_their_journals_are_called(runs_dir, monkeypatch):
    for attempt in range(4):
        run = rank(0, 1, monkeypatch, attempt)
        for i in range(3):
            run.log({"x": attempt * 10 + i}, step=attempt * 10 + i)
        run.finish()
    assert [step for step, _ in handed(Feed(run.path, name="x"))] == [a * 10 + i for a in range(4) for i in range(3)]


def test_facts_before_the_mark_are_still_known(runs_dir, monkeypatch):
    run = rank(0, 1, monkeypatch, name="first name", config={"lr": 1}, tags=["a"])
    run.log({"x": 1.0}, step=0)
    run.finish()
    feed = Feed(run.path, name="x")
    handed(feed)
    again = Feed(run.path, name="x", marks=feed.marks())
    assert handed(again) == []
    assert (again.info["name"], again.info["config"], again.info["tags"]) == ("first name", {"lr": 1}, ["a"])
    assert again.finished()


def test_a_run_without_a_journal_yet_is_not_over(tmp_path):
    (tmp_path / "journal").mkdir()
    feed = Feed(tmp_path, name="x")
    assert (feed.poll(), feed.finished()) == ([], False)


# Folds


def test_a_step_goes_out_when_every_rank_has_passed_it(runs_dir, monkeypatch):
    ranks, clock = [rank(i, 3, monkeypatch) for i in range(3)], Clock()
    feed = Feed(ranks[0].path, name="x", fold={"loss": "mean", "tokens": "sum", "worst*": "max"}, clock=clock)
    for i, run in enumerate(ranks):
        run.log({"loss": i + 0.5, "tokens": 10 * (i + 1), "worst/x": -i, "own": i}, step=0)
        assert handed(feed) == []
    for i, run in enumerate(ranks):
        assert handed(feed) == []
        run.log({"loss": 1.0 * i}, step=1)
    assert handed(feed) == [(0, {"own": 0, "loss": 1.5, "tokens": 60.0, "worst/x": 0.0})]
    for run in ranks:
        run.finish()
    assert handed(feed) == [(1, {"loss": 1.0})]
    assert feed.finished()


def test_a_rank_awaiting_a_device_value_has_not_passed_its_step(runs_dir, monkeypatch):
    ranks, clock = [rank(i, 2, monkeypatch) for i in range(2)], Clock()
    feed = Feed(ranks[0].path, name="x", fold={"*": "mean"}, clock=clock)
    ranks[0].log({"loss": 1.0}, step=0)
    ranks[1]._writer.row({}, "", time_ns=5, step=0, layout=Layout.PENDING, call=(1, 1))
    for run in ranks:
        run.log({"loss": 9.0}, step=1)
    assert handed(feed) == []
    ranks[1]._writer.rows([(Layout.LATE, ("loss",), "d", 5, 0, (1,), (3.0,))])
    assert handed(feed) == [(0, {"loss": 2.0})]
    for run in ranks:
        run.finish()


def test_at_the_deadline_a_fold_is_sent_with_the_ranks_it_has(runs_dir, monkeypatch, caplog):
    ranks, clock = [rank(i, 2, monkeypatch) for i in range(2)], Clock()
    feed = Feed(ranks[0].path, name="x", fold={"*": "mean"}, clock=clock, hold=10)
    for step in range(3):
        ranks[0].log({"loss": 2.0}, step=step)
    handed(feed)
    clock.now = 11
    out = feed.poll()
    assert [(item.point.step, item.point.values, item.partial[1]) for item in out] == [(i, {"loss": 2.0}, i) for i in range(3)]
    assert "step 0 was folded with 1 rank(s)" in caplog.text
    for step in range(3):
        ranks[1].log({"loss": 4.0}, step=step)
    assert handed(feed) == []
    assert feed.late == 3
    assert caplog.text.count("after its fold had gone to the tracker") == 1
    for run in ranks:
        run.log({"loss": 6.0}, step=3)
        run.finish()
    assert handed(feed) == [(3, {"loss": 6.0})]


def test_the_second_attempt_is_folded_for_itself(runs_dir, monkeypatch):
    for attempt in range(2):
        ranks = [rank(i, 2, monkeypatch, attempt) for i in range(2)]
        for i, run in enumerate(ranks):
            run.log({"loss": float(i)}, step=0)
        if attempt == 0:
            for run in ranks:
                run.finish()
    feed = Feed(ranks[0].path, name="x", fold={"*": "mean"}, clock=Clock())
    assert handed(feed) == [(0, {"loss": 0.5})]  # of the first; the second's ranks have not passed it
    for run in ranks:
        run.finish()
    assert handed(feed) == [(0, {"loss": 0.5})]


def test_following_a_run_waits_for_a_rank_that_begins_late(runs_dir, monkeypatch):
    first, clock = rank(0, 2, monkeypatch), Clock()
    first.log({"loss": 1.0}, step=0)
    first.finish()
    feed = Feed(first.path, name="x", fold={"*": "mean"}, clock=clock, hold=10)
    assert (handed(feed), feed.finished()) == ([], False)
    assert handed(Feed(first.path, name="x", fold={"*": "mean"}, clock=clock, patient=False)) == [(0, {"loss": 1.0})]
    second = rank(1, 2, monkeypatch)
    second.log({"loss": 3.0}, step=0)
    second.finish()
    assert handed(feed) == [(0, {"loss": 2.0})]
    assert feed.finished()


def test_torchrun_ranks_fold_to_one_exact_point_per_step_in_tensorboard(play):
    body = """
        rank = run.rank
        for i in range(100):
            run.log({"loss": i + rank * 0.5, "tokens": 8 + rank, "mine": float(rank)}, step=i)
        run.finish(timeout=60)
    """
    script = play.folder / "train.py"
    script.write_text(play.script(["tensorboard"], body, fold={"loss": "mean", "tokens": "sum"}))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d",
         "--rdzv-endpoint=localhost:0", str(script)],
        env=play.env, cwd=play.folder, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = tensorboard(play.run)
    assert seen["loss"] == [(i, i + 0.25) for i in range(100)]
    assert seen["tokens"] == [(i, 17.0) for i in range(100)]
    assert seen["mine"] == [(i, 0.0) for i in range(100)]
    assert play.cursor("tensorboard").partial == 0


def test_eight_short_lived_processes_fold_exactly(play):
    body = """
        for i in range(20):
            run.log({"loss": 2.0 ** run.rank + i, "own": run.rank}, step=i)
        run.finish(timeout=90)
    """
    env = [{"FANFOLD_RANK": str(i), "FANFOLD_WORLD_SIZE": "8"} for i in range(8)]
    processes = [play.start(["lines"], body, env=one, fold={"loss": "mean"}) for one in env]
    assert [process.communicate(timeout=110)[1] for process in processes] == [""] * 8
    assert [(call["step"], call["values"]) for call in play.calls()] == [(i, {"own": 0, "loss": 255 / 8 + i}) for i in range(20)]
    assert play.cursor("lines").partial == 0


def test_a_missing_rank_is_waited_for_until_the_deadline_and_counted(play):
    code, _, err = play.play(["lines"], """
        for i in range(5): run.log({"loss": 1.0 * i}, step=i)
        while "log" not in open(os.environ["LINES"]).read() if os.path.exists(os.environ["LINES"]) else True: time.sleep(0.05)
        run.finish(timeout=60)
    """, env={"FANFOLD_RANK": "0", "FANFOLD_WORLD_SIZE": "2", "FANFOLD_HOLD": "0.5"}, fold="mean")  # fmt: skip
    assert (code, err) == (0, "")
    assert [call["values"] for call in play.calls()] == [{"loss": 1.0 * i} for i in range(5)]
    assert play.cursor("lines").partial == 5


def test_rank_0_does_not_wait_for_the_others_to_end(play):
    ready = play.folder / "go on"
    other = play.start(["lines"], f"while not os.path.exists({str(ready)!r}): time.sleep(0.05)\nrun.finish()",
                       env={"FANFOLD_RANK": "1", "FANFOLD_WORLD_SIZE": "2"})  # fmt: skip
    until(lambda: list(play.run.glob("journal/1-*.ffj")))
    code, out, err = play.play(["lines"], """
        for i in range(50): run.log({"x": i}, step=i)
        began = time.monotonic(); run.finish(timeout=50); print(time.monotonic() - began)
    """, env={"FANFOLD_RANK": "0", "FANFOLD_WORLD_SIZE": "2"})  # fmt: skip
    assert (code, err) == (0, "")
    assert float(out) < 30
    assert [call["step"] for call in play.calls()] == list(range(50))
    assert play.cursor("lines").closed is None
    ready.touch()
    assert other.communicate(timeout=30)[1] == ""
    until(lambda: play.cursor("lines").closed == "finished")


# Settings, secrets, errors


def test_arguments_that_cannot_travel_are_an_error_before_anything_is_written(runs_dir):
    with pytest.raises(SettingError, match=r"tracker_kwargs\['tensorboard'\] holds what cannot travel .* relay='thread'"):
        fanfold.init("p", trackers=["tensorboard"], tracker_kwargs={"tensorboard": {"x": object()}})
    assert not runs_dir.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"trackers": ["wandbb"]},
            r"^there is no tracker 'wandbb'\. The run was not started\. Did you mean wandb\? Known: [^']*, all\.$",
        ),
        ({"trackers": [42]}, "neither a name nor a GeneralTracker"),
        ({"trackers": ["tensorboard"], "tracker_kwargs": {"wandb": {}}}, "tracker_kwargs names wandb"),
        ({"trackers": ["tensorboard"], "relay": "pigeon"}, "Known: process, thread"),
        ({"relay": "proces"}, r"Did you mean process\? Known: process, thread"),
        ({"trackers": ["tensorboard"], "fold": "median"}, "Known: mean, min"),
        ({"fold": "median"}, "Known: mean, min"),
    ],
)
def test_mistakes_are_errors_that_say_what_is_known(runs_dir, options, message):
    with pytest.raises(ValueError, match=message):
        fanfold.init("p", **options)
    assert not runs_dir.exists()


def test_all_says_when_nothing_is_installed(runs_dir, monkeypatch, caplog):
    for library in (library.split()[0] for row in TABLE for library in row.libraries):
        monkeypatch.setitem(sys.modules, library, None)  # Python's own way to say that there is no such module
    with caplog.at_level(logging.WARNING, "fanfold"):
        fanfold.init("p", trackers="all", system=False, quiet=True).finish()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "fanfold: trackers='all' was requested, but no tracker's library is installed. The run is kept on this machine"
    )
    assert "tensorboard" in said.partition("pip install")[2]


def test_a_missing_library_names_its_extra(play):
    code, _, err = play.play([], """
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name == "wandb": raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Absent()); sys.modules.pop("wandb", None)
        fanfold.init("p", trackers=["wandb"])
    """)  # fmt: skip
    assert code == 1
    assert "needs wandb, which is not installed. Run: pip install 'fanfold[wandb]'" in err


def test_tensorboard_alone_cannot_write_event_files_and_says_so_at_once(play):
    """The package `tensorboard` reads them; torch or tensorboardX writes them."""
    code, _, err = play.play([], """
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name in ("torch", "tensorboardX"): raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Absent())
        for name in ("torch", "tensorboardX"): sys.modules.pop(name, None)
        fanfold.init("p", trackers=["tensorboard"])
    """)  # fmt: skip
    assert code == 1
    assert "needs tensorboardX, which is not installed. Run: pip install 'fanfold[tensorboard]'" in err


def test_a_class_of_the_script_itself_is_refused_for_a_process(play):
    code, _, err = play.play([], """
        from fanfold.trackers import register_tracker_class
        class Mine(relay_trackers.Lines): name = "mine"
        register_tracker_class(Mine)
        fanfold.init("p", trackers=["mine"])
    """)  # fmt: skip
    assert code == 1
    assert "Put the class into a module of its own, or pass relay='thread'" in err


def test_secrets_are_neither_on_disk_nor_in_an_argument(play):
    secret = "hunter2-very-secret"
    kwargs = {"lines": {"api_key": secret, "settings": {"password": secret, "mode": "x"}, "url": f"https://u:{secret}@h/"}}
    training = play.start(["lines"], "run.log({'x': 1}, step=0)\nsys.stdin.read()", tracker_kwargs=kwargs)
    until(play.lines.exists)
    cursor = play.cursor("lines")
    assert cursor.kwargs == {"settings": {"mode": "x"}}
    assert secret.encode() not in Path(f"/proc/{cursor.owner['pid']}/cmdline").read_bytes()
    assert secret.encode() not in Path(f"/proc/{cursor.owner['pid']}/environ").read_bytes()
    training.kill()
    training.communicate()
    until(lambda: play.cursor("lines").owner is None)
    files = [path for path in play.runs.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_the_relay_is_no_member_of_the_job(play):
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    code, _, err = play.play(["lines"], "run.log({'x': 1}, step=0)\nrun.finish()", env=env)
    assert (code, err) == (0, "")
    start = json.loads(play.lines.read_text().splitlines()[0])
    assert (start["rank"], start["gpus"]) == (None, "")


# Attempts


def test_a_second_attempt_goes_on_with_the_same_cursor(play):
    for first in (0, 10):
        body = f"for i in range({first}, {first + 10}): run.log({{'x': i}}, step=i)\nrun.finish(timeout=60)"
        code, _, err = play.play(["lines"], body)
        assert (code, err) == (0, "")
    assert len(cursors(play.run)) == 1
    assert [call["step"] for call in play.calls()] == list(range(20))
    assert play.cursor("lines").delivered == 20


def test_a_second_attempt_waits_for_the_relay_of_the_first(play):
    code, _, _ = play.play(["slow"], "for i in range(60): run.log({'x': i}, step=i)\nos.kill(os.getpid(), 9)")
    assert code == -9
    code, _, err = play.play(["slow"], "for i in range(60, 80): run.log({'x': i}, step=i)\nrun.finish(timeout=60)")
    assert (code, err) == (0, "")
    assert [call["step"] for call in play.calls()] == list(range(80))
    assert play.cursor("slow").closed == "finished"


# In this process


def test_a_tracker_object_is_served_from_a_thread_in_the_callers_context(runs_dir, tmp_path):
    import relay_trackers

    tracker = relay_trackers.Lines("mine", path=str(tmp_path / "lines"))
    token = relay_trackers.WHO.set("the caller")
    run = fanfold.init("p", trackers=[tracker], config={"lr": 1}, system=False)
    relay_trackers.WHO.reset(token)
    for i in range(50):
        run.log({"x": i}, step=i, log_kwargs={"lines": {"extra": i}})
    assert run.get_tracker("lines") is tracker
    assert run.get_tracker("lines", unwrap=True) is tracker.file
    run.finish()
    events = list(map(json.loads, (tmp_path / "lines").read_text().splitlines()))
    assert [event["event"] for event in events] == ["start", "config"] + ["log"] * 50 + ["finish"]
    assert {event["who"] for event in events if "who" in event} == {"the caller"}
    assert [event["kwargs"] for event in events[2:-1]] == [{"extra": i} for i in range(50)]


def test_a_tracker_object_gets_long_texts_as_strings(tmp_path):
    import relay_trackers

    run = fanfold.init("p", dir=tmp_path, trackers=[relay_trackers.Lines("mine", path=str(tmp_path / "lines"))], system=False)
    run.log({"essay": "many words " * 7000}, step=0)
    run.finish()
    events = list(map(json.loads, (tmp_path / "lines").read_text().splitlines()))
    assert [event["values"] for event in events if event["event"] == "log"] == [{"essay": "many words " * 7000}]


def test_a_hanging_tracker_object_holds_up_neither_the_loop_nor_finish(play):
    code, out, err = play.play(None, """
        other = fanfold.init("p", id="s", trackers=[relay_trackers.Hanging("x")])
        for i in range(1000): other.log({"x": i}, step=i)
        began = time.monotonic(); other.finish(timeout=2); print(time.monotonic() - began)
    """)  # fmt: skip
    assert code == 0, err
    assert float(out) < 3
    assert "hanging: 1,000 values are not delivered yet" in err


def test_get_tracker_in_a_process_and_on_other_ranks(runs_dir, monkeypatch):
    first = rank(0, 2, monkeypatch, trackers=["tensorboard"])
    second = rank(1, 2, monkeypatch, trackers=["tensorboard"])
    assert first.trackers == second.trackers == ["tensorboard"]
    assert first.get_tracker("tensorboard").name == "tensorboard"
    with pytest.raises(SettingError, match="relay='thread'"):
        first.get_tracker("tensorboard", unwrap=True)
    with pytest.raises(ValueError, match=r"wandb is not an available tracker.*Known: tensorboard"):
        first.get_tracker("wandb")
    from fanfold.trackers import TensorBoardTracker

    twin = second.get_tracker("tensorboard")
    assert isinstance(twin, TensorBoardTracker)
    assert twin.log({"x": 1}, step=0) is None
    second.get_tracker("tensorboard", unwrap=True).add_scalar("x", 1)
    assert not (first.path / "trackers").exists() or "1" not in os.listdir(first.path / "trackers")
    second.finish()
    first.finish(timeout=60)


def test_thread_mode_gives_the_librarys_own_object(runs_dir):
    from torch.utils.tensorboard import SummaryWriter

    run = fanfold.init("p", trackers=["tensorboard"], relay="thread", system=False)
    writer = run.get_tracker("tensorboard", unwrap=True)
    assert isinstance(writer, SummaryWriter)
    writer.add_scalar("by hand", 0.5, 3)
    run.log({"x": 1.0}, step=1)
    run.finish(timeout=60)
    assert tensorboard(run.path) == {"by hand": [(3, 0.5)], "x": [(1, 1.0)]}


def test_a_direct_call_of_a_tracker_comes_after_media_logged_before(runs_dir):
    import numpy
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    run = fanfold.init("p", trackers=["tensorboard"], relay="thread", system=False)
    noise = numpy.random.default_rng(0).integers(0, 255, (512, 512, 3), numpy.uint8)  # takes a while to encode
    for step in range(5):
        run.log({"image": fanfold.Image(noise)}, step=step)
        run.get_tracker("tensorboard").log({"by hand": 1.0}, step=step)
    run.finish(timeout=60)
    (path,) = (run.path / "trackers").rglob("*tfevents*")
    found = [(value.tag, event.step) for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    assert found == [(tag, step) for step in range(5) for tag in ("image", "by hand")]


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_starting_trackers_changes_no_random_state_hook_handler_or_stream(play, mode):
    code, out, err = play.play([], f"""
        import random, numpy, torch, json
        def state():
            return [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), sys.excepthook,
                    sys.stdout, sys.stderr]
        run.finish()
        random.seed(5); numpy.random.seed(5); torch.manual_seed(5)
        before, handlers = state(), [signal.getsignal(n) for n in signal.valid_signals()]
        other = fanfold.init("p", id="s", trackers=["meddler", "tensorboard"], relay={mode!r})
        other.log({{"x": 1.0}}, step=0)
        other.finish(timeout=60)
        assert state() == before
        assert [signal.getsignal(n) for n in signal.valid_signals()] == handlers
        print("same")
    """)  # fmt: skip
    assert (code, out.strip()) == (0, "same"), err


def test_weights_are_bit_identical_with_trackers_and_without(play):
    body = """
        import torch, hashlib
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i in range(50):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            run.log({"loss": loss.detach()}, step=i)
        run.finish(timeout=8)
        print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
    """
    found = [play.play(trackers, body, id=f"r{i}") for i, trackers in enumerate([[], ["tensorboard", "meddler", "raising"]])]
    assert [code for code, _, _ in found] == [0, 0]
    assert found[0][1] == found[1][1]
    os.kill(next(c for c in cursors(play.runs / "p" / "r1") if c.tracker == "raising").owner["pid"], signal.SIGKILL)


# fanfold sync


def test_sync_replays_a_finished_run_into_a_tracker_that_was_not_there(play):
    code, _, err = play.play([], """
        for i in range(100): run.log({"loss": i / 4}, step=i)
        run.log({"note": "done"}, step=100)
        run.finish()
    """)  # fmt: skip
    assert (code, err) == (0, "")
    assert play.sync()[:2] == (0, [])
    code, done, err = play.sync("r", "--to", "tensorboard")
    assert (code, done[0]["outcome"], done[0]["values"], done[0]["left"], done[0]["status"]) == (
        0,
        "delivered",
        101,
        0,
        "finished",
    ), err
    assert tensorboard(play.run)["loss"] == [(i, i / 4) for i in range(100)]
    assert play.sync("r", "--to", "tensorboard")[1][0]["outcome"] == "nothing new"
    assert play.sync()[1] == []
    elsewhere = {"logging_dir": str(play.folder / "shared")}
    assert play.sync("r", "--to", "tensorboard", "--kwargs", json.dumps(elsewhere))[1][0]["values"] == 101
    assert len(cursors(play.run)) == 2


def test_sync_uses_the_folds_of_the_run(play):
    body = "for i in range(5): run.log({'loss': float(run.rank)}, step=i)\nrun.finish()"
    env = [{"FANFOLD_RANK": str(i), "FANFOLD_WORLD_SIZE": "2"} for i in range(2)]
    processes = [play.start(["lines"], body, env=one, fold={"loss": "sum"}) for one in env]
    assert [process.communicate(timeout=60)[1] for process in processes] == ["", ""]
    code, _, err = play.sync("r", "--to", "tensorboard")
    assert code == 0, err
    assert tensorboard(play.run)["loss"] == [(i, 1.0) for i in range(5)]


def test_sync_says_what_could_not_be_delivered_and_why(play):
    play.play([], "run.log({'x': 1}, step=0)\nrun.finish()")
    code, done, _ = play.sync("r", "--to", "relay_trackers:Raising")
    assert (code, done[0]["outcome"], done[0]["left"]) == (1, "failed", 1)
    assert done[0]["error"] == "ConnectionError: the server is on holiday"
    code, done, _ = play.sync("r")  # its class is not named there, and names in a run's files are not imported
    assert (code, done[0]["outcome"]) == (1, "failed")
    assert "--to module:Class" in done[0]["error"]
    (play.folder / "lines.up").touch()
    assert play.sync("r", "--to", "relay_trackers:Raising")[:1] == (0,)
    assert [call["step"] for call in play.calls()] == [0]


def test_sync_gives_up_on_a_hanging_tracker_in_time(play):
    play.play([], "run.log({'x': 1}, step=0)\nrun.finish()")
    code, done, _ = play.sync("r", "--to", "relay_trackers:Hanging", "--timeout", "5")
    assert (code, done[0]["outcome"], done[0]["error"]) == (1, "failed", "it took longer than --timeout")


def test_sync_follows_a_live_run_to_its_end(play):
    training = play.start([], """
        for i in range(300):
            run.log({"x": i}, step=i); time.sleep(0.01)
        run.finish()
    """)  # fmt: skip
    until(lambda: play.run.exists() and list((play.run / "journal").glob("*.ffj")))
    code, done, err = play.sync("r", "--to", "relay_trackers:Lines", "--follow")
    assert (code, done[0]["values"], done[0]["status"]) == (0, 300, "finished"), err
    training.communicate()
    assert [call["step"] for call in play.calls()] == list(range(300))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "tensorboard"], "Name the runs"),
        (["r", "--kwargs", "{}"], "Name it with --to"),
        (["r", "--to", "tensorboard", "--kwargs", "[1]"], "not a JSON object"),
        (["r", "--to", "tensorboard", "--kwargs", "{"], "not JSON"),
        (["r", "--to", "tensorbored"], "tensorbored.*tensorboard"),
        (["r", "--to", "nowhere:Class"], "there is no tracker at nowhere:Class"),
    ],
)
def test_sync_refuses_what_it_cannot_understand(play, words, message):
    play.play([], "run.log({'x': 1}, step=0)\nrun.finish()")
    code, _, err = play.sync(*words)
    assert code == 2
    assert re.search(message, err)


def test_what_is_left_is_counted_exactly(runs_dir, monkeypatch):
    run = rank(0, 1, monkeypatch)
    for i in range(10):
        run.log({"a": 1.0, "b": 2}, step=i)
    run.log({"text": "x"}, step=10)
    cursor = Cursor(run.path / "relay" / "x.cursor")
    assert remaining(run.path, cursor) == 21
    feed = Feed(run.path, name="x")
    out = feed.poll()
    for item in out[:4]:
        for frame in item.frames:
            frame.left -= 1
    cursor.settled = feed.marks()
    assert remaining(run.path, cursor) == 13
    run.finish()


def test_a_list_of_pictures_is_not_taken_for_later_points_after_a_kill(play):
    body = """
        import numpy as np
        pictures = [fanfold.Image(np.full((4, 4, 3), i, np.uint8)) for i in range(3)]
        for i in range(4): run.log({"pictures": pictures}, step=i)
        run.finish(timeout=60)
    """
    code, _, err = play.play(["tensorboard"], body)
    assert (code, err) == (0, "")
    code, _, err = play.play(["tensorboard"], body.replace("range(4)", "range(4, 8)"))
    assert (code, err) == (0, "")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (play.run / "trackers" / "tensorboard").iterdir()
    reader = EventAccumulator(str(folder), size_guidance={"images": 0}, purge_orphaned_data=False).Reload()
    assert [event.step for event in reader.Images("pictures")] == list(np.repeat(range(8), 3))
