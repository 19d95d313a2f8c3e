"""The relay and what does not pass by itself: mistakes in adapters, damaged files, kills and signals at the wrong moment."""
# ruff: noqa: F811 - a fixture of another file is imported, and then named by the tests

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_relay import play, tensorboard, until  # noqa: F401 - play is a fixture

import fanfold
import relay_trackers
from fanfold.relay import Cursor, deadline, settled
from fanfold.relay.attach import Attached
from fanfold.relay.deadline import within
from fanfold.relay.feed import Outgoing
from fanfold.relay.sender import ROUNDS, Sender
from fanfold.trackers.base import Point


def test_a_terminated_relay_keeps_its_cursor_until_its_library_has_flushed(play):
    path = play.folder / "points"
    code, _, _ = play.play(["late_flush"], """
        for i in range(50): run.log({"x": i}, step=i)
        while not os.path.exists("points.held"): time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    """, tracker_kwargs={"late_flush": {"path": str(path)}})  # fmt: skip
    assert code == -9
    relay = int((play.folder / "points.first").read_text())
    os.kill(relay, signal.SIGTERM)

    def delivered():
        code, done, err = play.sync("r", "--to", "relay_trackers:LateFlush")
        assert code in (0, 3), err  # 3: another process owns the delivery
        return done[0]["outcome"] != "owned"

    until(delivered)
    until(lambda: not Path(f"/proc/{relay}").exists())
    assert play.points(path) == [("x", i, i) for i in range(50)]


def test_mistakes_of_an_adapter_are_passed_over_and_everything_else_arrives(play):
    path = play.folder / "points"
    code, _, err = play.play(["clumsy"], """
        run.log({"x": 0, "text": "a"}, step=0)
        run.log({"text": "b"}, step=1)
        run.artifact(__import__("fanfold").__file__, name="file")
        for i in range(2, 50): run.log({"x": i, "y": -i}, step=i)
        run.finish(timeout=60)
    """, tracker_kwargs={"clumsy": {"path": str(path)}}, config={"lr": 1})  # fmt: skip
    assert (code, err) == (0, "")
    wanted = [("x", 0, 0)] + [(key, i, sign * i) for i in range(2, 50) for key, sign in (("x", 1), ("y", -1))]
    assert play.points(path) == wanted
    cursor = play.cursor("clumsy")
    assert (cursor.refused, cursor.closed, cursor.error) == (5, "finished", None)  # two texts, config, file, end
    log = (play.run / "relay" / "clumsy.log").read_text()
    assert log.count("clumsy does not take 'text': AttributeError: 'str' object has no attribute 'nonsense'") == 1
    assert "It is tried a few times more; then the values that fail are left out there" in log
    shown = subprocess.run([sys.executable, "-m", "fanfold", "show", str(play.run)], env=play.env, capture_output=True, text=True)
    assert "5 items left out there, because it does not take them" in shown.stdout


def test_damaged_and_missing_blobs_do_not_hold_up_a_tracker(play):
    code, _, err = play.play([], """
        import numpy as np
        for i in range(3): run.log({"image": fanfold.Image(np.full((4, 4, 3), i, np.uint8)), "x": i}, step=i)
        run.log({"x": 3}, step=3)
        run.finish()
    """)  # fmt: skip
    assert (code, err) == (0, "")
    first, second, _ = sorted(path for path in (play.run / "blobs").rglob("*") if path.is_file())
    first.write_bytes(b"damaged")
    second.unlink()
    code, done, err = play.sync("r", "--to", "relay_trackers:Lines")
    assert (code, done[0]["outcome"]) == (0, "delivered"), err
    assert [call["values"]["x"] for call in play.calls()] == [0, 1, 2, 3]
    assert sum("image" in call["values"] for call in play.calls()) == 1
    assert play.cursor("lines").refused == 2


def test_a_tracker_that_refuses_everything_is_retried_value_by_value(tmp_path):
    tracker = relay_trackers.Clumsy("x", str(tmp_path / "points"))
    tracker.broken = ("a", "b")
    tracker.open(None)
    sender = Sender(tmp_path, tracker, Cursor(tmp_path / "x.cursor"))
    sender.out = [Outgoing(Point({"a": i, "b": i}, i), []) for i in range(10)]
    refused = []
    for _ in range(ROUNDS + 2):
        with pytest.raises(AttributeError):
            sender.send()
        refused.append(sender.cursor.refused)
    assert refused == [0, 0, 1, 2, 3]
    tracker.broken = ()  # it was an outage after all
    sender.send()
    assert (sender.out, sender.cursor.refused, sender.delivered) == ([], 3, 17)
    tracker.file.close()
    found = [tuple(json.loads(line)) for line in (tmp_path / "points").read_text().splitlines()]
    assert sorted(found) == sorted({(key, i, i) for key in "ab" for i in range(10)} - {("a", 0, 0), ("b", 0, 0), ("a", 1, 1)})


def test_of_a_list_that_arrived_in_part_only_the_rest_is_sent(play):
    path = play.folder / "points"
    code, _, err = play.play(["sequences"], """
        import numpy as np
        for i in range(4):
            run.log({"p": [fanfold.Image(np.full((4, 4, 3), 10 * i + k, np.uint8)) for k in range(3)]}, step=i)
        run.finish(timeout=20)
    """, tracker_kwargs={"sequences": {"path": str(path)}})  # fmt: skip
    assert (code, "was killed by SIGKILL" in err) == (0, True), err  # after four pictures; it is started again
    until(lambda: len(play.points(path)) >= 12)
    assert play.points(path) == [("p", i, 10 * i + k) for i in range(4) for k in range(3)]


def test_a_run_without_a_config_makes_no_empty_one_at_the_tracker(play):
    code, _, err = play.play(["tensorboard"], "run.log({'x': 1.0}, step=0)\nrun.finish(timeout=60)")
    assert (code, err) == (0, "")
    assert tensorboard(play.run) == {"x": [(0, 1.0)]}
    assert [path for path in (play.run / "trackers").rglob("*") if path.is_file() and b"hparams" in path.read_bytes()] == []


@pytest.mark.parametrize("thread", ["main", "another"])
def test_an_adapter_that_hangs_in_start_delays_init_for_a_bounded_time(play, thread):
    code, out, err = play.play(None, f"""
        import threading
        from fanfold.relay import attach
        attach.START_SECONDS = 0.5
        def train():
            global other
            other = fanfold.init("p", id="s", trackers=["stuck"], relay="thread")
            other.log({{"x": 1.0}}, step=0)
        began = time.monotonic()
        if {thread!r} == "main":
            signal.signal(signal.SIGALRM, lambda *_: print("mine", flush=True)); signal.setitimer(signal.ITIMER_REAL, 5)
            train()
            signal.pause()
        else:
            one = threading.Thread(target=train); one.start(); one.join()
        other.finish(timeout=2)
        print(time.monotonic() - began < 20)
    """)  # fmt: skip
    assert (code, out.split()) == (0, ["mine", "True"] if thread == "main" else ["True"]), err
    assert err.count("the tracker stuck has not started within 0.5 s") == 1
    assert "stuck: 1 value is not delivered yet" in err
    assert "Deliver it with: fanfold sync s --to relay_trackers:Stuck" in err


def test_a_tracker_that_works_for_long_in_start_is_not_interrupted(play):
    """Interrupted in the middle of an import or of creating its tables, a library would never work again."""
    path = play.folder / "points"
    code, _, err = play.play(None, f"""
        from fanfold.relay import attach, deadline
        attach.START_SECONDS, deadline.PATIENCE = 0.1, 10_000
        other = fanfold.init("p", id="s", trackers=["heavy"], relay="thread", tracker_kwargs={{"heavy": {{"path": {str(path)!r}}}}})
        other.log({{"x": 1.0}}, step=0)
        other.finish(timeout=60)
    """)  # fmt: skip
    assert (code, err) == (0, "")
    assert play.points(path) == [("x", 0, 1.0)]


def test_an_import_is_not_interrupted_while_it_works_and_what_only_waits_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imports_slowly.py").write_text(
        "import time\nuntil = time.thread_time() + 1.5\nwhile time.thread_time() < until: pass"
    )
    (tmp_path / "waits_shortly.py").write_text("import time\ntime.sleep(3)")
    (tmp_path / "waits_for_ever.py").write_text("import time\ntime.sleep(1000)")
    within(0.1, lambda: importlib.import_module("imports_slowly"))
    with pytest.raises(TimeoutError, match=r"longer than 0\.1 s"):
        within(0.1, lambda: importlib.import_module("waits_for_ever"))
    with pytest.raises(TimeoutError, match=r"longer than 0\.1 s"):
        within(0.1, lambda: [None for _ in itertools.count()])  # works for ever, and imports nothing
    monkeypatch.setattr(deadline, "PATIENCE", 10_000)
    within(0.1, lambda: importlib.import_module("waits_shortly"))
    with pytest.raises(TimeoutError, match=r"longer than 0\.1 s"):
        within(0.1, lambda: time.sleep(1000))


def test_prune_waits_for_every_destination(play):
    code, _, _ = play.play(["raising", "lines"], """
        for i in range(20): run.log({"x": i}, step=i)
        run.finish(timeout=8)
    """)  # fmt: skip
    assert code == 0
    os.kill(play.cursor("raising").owner["pid"], signal.SIGKILL)
    (journal,) = fanfold.open(play.run).journals

    def kept():
        done = subprocess.run([sys.executable, "-m", "fanfold", "prune", "--json"], env=play.env, cwd=play.folder,
                              capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
        return json.loads(done.stdout)["kept"]

    assert settled(play.run)["lines"] == {journal.path.stem: journal.verified}
    assert settled(play.run)["raising"].get(journal.path.stem, 0) < journal.verified
    assert kept() == {"is not delivered to raising yet (fanfold sync)": 1}
    (play.folder / "lines.up").touch()
    assert play.sync("r", "--to", "relay_trackers:Raising")[0] == 0
    assert kept() == {"is too small to gain by packing": 1}


def test_finish_does_not_wait_for_a_long_journal_to_be_counted(tmp_path):
    counting = threading.Event()

    class Endless:
        def left(self, *, counted=True):
            return "counted" if counted and counting.wait(60) else "some values"

    attached = Attached(tmp_path, [], {}, {}, "process")
    assert attached._lines([Endless()], time.monotonic() + 0.05) == ["some values"]
    counting.set()
    assert attached._lines([], time.monotonic()) == []
