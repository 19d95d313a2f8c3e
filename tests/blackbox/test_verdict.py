"""Whether a job hangs, decided from the pulses of its ranks; times are given, so nothing waits."""

import sys
import threading
import time

import pytest

from fanfold.blackbox import activity, position
from fanfold.blackbox.pulse import Collective, Pulse, Spot
from fanfold.blackbox.verdict import PATIENCE, WORKING, Standing, judge, own_line, standing
from fanfold.blackbox.watch import TrainingThread

NOW, LIMIT = 10_000.0, 60.0
REDUCE = {"group": "0", "group_name": "default_pg", "name": "nccl:all_reduce", "seq": 7, "sizes": [[8]], "dtypes": ["Float"]}


def rank(number, **facts):
    """Return a pulse: by default of a rank that works."""
    where = [Spot("/home/me/train.py", 10 + number, "train", "x")]
    return Pulse(rank=number, world=4, time=NOW, where=where, same_since=NOW, **facts)


def waits(number, seconds, *, spins=False, **more):
    idle = 0.0 if spins else NOW - seconds
    collective = Collective(**{**REDUCE, "since": NOW - seconds, **more})
    pulse = rank(number, idle_since=idle, waiting=[collective], enqueued={"0": collective.seq})
    pulse.same_since = NOW - seconds
    return pulse


def still(number, seconds, **more):
    pulse = rank(number, idle_since=NOW - seconds, **more)
    pulse.same_since = NOW - seconds
    return pulse


def verdict(*pulses, gone=()):
    ranks = [standing(pulse, NOW, LIMIT) for pulse in pulses]
    return judge([*ranks, *(Standing(rank=one, state="gone", why="was killed") for one in gone)], 4, LIMIT)


def test_a_rank_that_stands_still_is_to_blame():
    found = verdict(waits(0, 61), waits(1, 61), still(2, 61), waits(3, 61))
    assert (found.culprits, found.missing, found.collective.seq) == ([2], [2], 7)
    assert "rank 2 stands still for 61 s at train.py:12 in train: x" in found.text


def test_a_thread_that_spins_in_a_collective_waits_as_well():
    found = verdict(waits(0, 61, spins=True), waits(1, 61, spins=True), still(2, 61), waits(3, 61, spins=True))
    assert found.culprits == [2]
    slow = [waits(number, 61, spins=True, name="gloo:all_reduce") for number in range(4)]
    assert verdict(*slow) is None  # gloo uses no CPU to wait: these compute, beside a collective


def test_a_rank_in_another_collective_is_to_blame():
    found = verdict(waits(0, 61), waits(1, 61), waits(2, 61), waits(3, 61, name="nccl:broadcast"))
    assert (found.culprits, found.missing) == ([3], [3])
    assert "rank 3 waits in broadcast number 7" in found.text


def test_all_in_the_same_collective_name_a_line_and_nobody():
    found = verdict(*(waits(number, 61) for number in range(4)))
    assert (found.culprits, found.missing) == ([], [])
    assert "rank 0 is at train.py:10" in found.text


def test_a_dead_rank_is_to_blame():
    found = verdict(waits(0, 61), waits(1, 61), waits(2, 61), gone=[3])
    assert (found.culprits, found.missing) == ([3], [3])
    assert "rank 3 was killed" in found.text


def test_a_rank_that_works_keeps_the_others_waiting_without_a_hang():
    assert verdict(rank(0), waits(1, 599), waits(2, 599), waits(3, 599)) is None
    assert verdict(rank(0), still(1, 599), still(2, 599), still(3, 599)) is None  # they poll for a file, for example
    pausing = still(0, 30)  # an evaluation that asks a server, again and again
    assert verdict(pausing, waits(1, 900), waits(2, 900), waits(3, 900)) is None
    assert verdict(still(0, 900, busy="idle"), waits(1, 900), waits(2, 900), waits(3, 900)) is not None
    found = verdict(rank(0), *(waits(number, WORKING * LIMIT) for number in (1, 2, 3)))
    assert found.culprits == [0]


@pytest.mark.parametrize("activity", ["saving", "compiling", "evaluating", "waiting for a disk"])
def test_slow_activities_get_more_time(activity):
    others = [waits(number, 599) for number in (1, 2, 3)]
    assert verdict(still(0, 599, busy=activity), *others) is None
    assert verdict(still(0, PATIENCE * LIMIT, busy=activity), *others).culprits == [0]


def test_an_idle_prompt_or_event_loop_is_no_hang():
    assert verdict(still(0, 1e6, busy="idle")) is None


def test_slow_steps_get_more_time():
    assert verdict(still(0, 200, usual=30.0)) is None
    assert verdict(still(0, 301, usual=30.0)).culprits == [0]


def test_ranks_of_other_nodes_that_are_not_seen_get_more_time():
    assert verdict(waits(0, 599), waits(1, 599)) is None
    assert verdict(waits(0, 601), waits(1, 601)) is not None


def test_a_rank_whose_pulse_stopped_is_stuck_in_native_code():
    found = judge([standing(rank(0), NOW, LIMIT, frozen_since=NOW - 61)], 1, LIMIT)
    assert "rank 0 is stuck in native code for 61 s" in found.text
    assert judge([standing(rank(0), NOW, LIMIT, frozen_since=NOW - 59)], 1, LIMIT) is None


def test_ranks_on_the_same_line_wait_for_the_one_that_is_elsewhere():
    """A rendezvous, a store, a file: the flight recorder knows none of them."""
    same = [Spot("/home/me/train.py", 7, "main", "dist.init_process_group()")]
    pulses = [still(number, 61) for number in range(4)]
    for number in (0, 1, 3):
        pulses[number].where = same
    found = verdict(*pulses)
    assert found.culprits == [2]
    assert found.text.startswith(
        "3 of 4 ranks wait at train.py:7 in main: dist.init_process_group(); rank 2 stands still for 61 s"
    )
    pulses[2].where = same
    assert verdict(*pulses).culprits == [0, 1, 2, 3]


def test_a_rank_gets_more_time_if_others_of_its_node_have_no_pulse():
    """Many programs call init() on rank 0 only: what it waits for may work."""
    alone = [standing(still(0, 599), NOW, LIMIT)]
    assert judge(alone, 4, LIMIT, unseen=True) is None
    assert judge([standing(still(0, 601), NOW, LIMIT)], 4, LIMIT, unseen=True).culprits == [0]
    assert judge(alone, 4, LIMIT).culprits == [0]  # the others are on other nodes, with watchers of their own


def test_a_child_that_ends_is_a_sign_of_life(monkeypatch):
    """A compiler starts one program after another: with each, its CPU time goes."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    time.sleep(0.5)  # it is on its line
    training, idle = TrainingThread(thread.ident, thread.native_id), []
    for second, cpu in enumerate([5.0, 5.0, 5.0, 5.0, 5.0, 25.0, 5.0, 5.0, 5.0]):
        monkeypatch.setattr(activity, "cpu_of_all", lambda _, cpu=cpu: cpu)
        training.look(100.0 + second, moved=False)
        idle.append(training.idle_since)
    done.set()
    thread.join()
    assert idle == [0, 0, 0, 103, 103, 0, 0, 106, 106]


def test_the_line_of_the_program_is_known_however_deep_libraries_call_each_other():
    """A rank may be in the middle of an import, which takes several frames for each package inside a package."""
    code = "def call(depth):\n    return call(depth - 1) if depth else seen()\n"
    library = {"seen": lambda: sys._getframe(1)}
    exec(compile(code, "/usr/lib/python3/library.py", "exec"), library)
    for depth in (0, 10, 100):
        found = position.spots(library["call"](depth), most=24)
        assert len(found) <= 24
        assert found[0]["file"] == "/usr/lib/python3/library.py"
        assert own_line([Spot(**one) for one in found]).file == __file__
    assert position.spots(sys._getframe())[0]["file"] == __file__
