"""The order of rows when calls have values on a device: a stand-in for the pinned ring lets each copy land when the test says."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import fanfold
from fanfold.journal import Journal, Kind
from fanfold.journal.walker import RowSpan
from fanfold.recording.deferred import Flight, NoRoom
from fanfold.recording.recorder import DevicePlan
from fanfold.values import split


class Copy(Flight):
    """A copy that has landed once its ring says so."""

    __slots__ = ("_ring", "_values")

    def __init__(self, ring: Ring, values: list[float]) -> None:
        self._ring, self._values = ring, values

    def landed(self) -> bool:
        return self._ring.lands.is_set()

    def read(self) -> list[float]:
        return self._values


class Ring:
    """Takes tensors of the CPU as those of a device."""

    def __init__(self) -> None:
        self.lands = threading.Event()
        self.full = False

    def capturing(self) -> bool:
        return False

    def launch(self, tensors, _dtype) -> Copy:
        if self.full:
            raise NoRoom("no room in this test")
        return Copy(self, [float(tensor) for tensor in tensors])


@pytest.fixture
def ring():
    return Ring()


@pytest.fixture
def run(runs_dir, ring):
    made = fanfold.init("p", dir=runs_dir, quiet=True, system=False)
    recorder = made._recorder
    recorder._deferred._rings[torch.ones(()).get_device()] = ring
    for values in ({"x": torch.ones(())}, {"x": torch.ones(()), "n": 1.0}):
        parts = split({key: value for key, value in values.items() if key == "n"})
        parts.device["x"] = values["x"]
        recorder._plans[(*values, *map(type, values.values()))] = DevicePlan(parts)
    yield made
    ring.lands.set()
    made.finish()


def device(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(value)}


def journal_of(run) -> Journal:
    (path,) = (run.path / "journal").glob("*.ffj")
    journal = Journal(path)
    journal.refresh()
    return journal


def rows(run) -> list[tuple[int, tuple[str, ...], bool, bool]]:
    """Return step, keys, whether late parts follow, and whether it is one, of every row with a step."""
    found = journal_of(run).walk_rows(0)
    return [(row.step, tuple(row.values), bool(row.parts), row.late) for row in found if row.step is not None]


def test_values_that_land_soon_are_ordinary_rows(run, ring):
    ring.lands.set()
    for step in range(50):
        run.log(device(step), step=step)
    assert run.flush(20)
    assert rows(run) == [(step, ("x",), False, False) for step in range(50)]
    run.finish()
    assert fanfold.open(run.path).series("x").values.tolist() == list(range(50))


def test_a_later_row_never_comes_first(run, ring):
    run.log({"host": 0.0}, step=0)
    for step in range(1, 21, 2):
        run.log(device(step), step=step)
        run.log({"host": float(step)}, step=step + 1)
    assert [step for step, *_ in rows(run)] == list(range(21))
    assert all(pending == (keys == ()) for _, keys, pending, _ in rows(run))
    ring.lands.set()
    assert run.flush(20)
    late = [(step, keys) for step, keys, _, late in rows(run) if late]
    assert late == [(step, ("x",)) for step in range(1, 21, 2)]
    run.finish()
    stored = fanfold.open(run.path)
    assert stored.series("x").steps.tolist() == list(range(1, 21, 2))
    assert len(stored.series("host")) == 11
    assert not stored.lost_values


def test_texts_facts_numbers_beside_a_device_value_and_unknown_steps_keep_the_order(run, ring):
    run.log(device(1.0))
    run.log({"text": "hello"})
    run.log(device(2.0))
    run.log({"x": torch.tensor(3.0), "n": 3.0})
    run.log(device(4.0), step="5")
    run.log({"nested": {"a": 1.0}})
    assert [(step, keys) for step, keys, *_ in rows(run)] == [(0, ()), (2, ()), (3, ("n",)), (5, ()), (6, ("nested/a",))]
    ring.lands.set()
    run.finish()
    stored = fanfold.open(run.path)
    assert stored.series("x").steps.tolist() == [0, 2, 3, 5]
    assert stored.series("x").values.tolist() == [1, 2, 3, 4]


def test_a_heartbeat_comes_after_the_rows_of_its_step(run):
    run.log(device(1.0), step=7)
    run._ending.beat()
    found = ["row" if isinstance(frame, RowSpan) else frame.kind for frame in journal_of(run).walk(0)]
    assert found[-2:] == ["row", Kind.BEAT]


def test_a_lost_value_is_marked_after_its_row(run, ring, caplog):
    run.log(device(1.0), step=0)
    ring.full = True
    run.log(device(2.0), step=1)
    run.log({"host": 1.0}, step=2)
    ring.lands.set()
    run.finish()
    stored = fanfold.open(run.path)
    assert [lost["keys"] for lost in stored.lost_values] == [["x"]]
    assert stored.series("x").values.tolist() == [1]
    assert "no room in this test" in caplog.text


def test_values_that_never_land_are_marked_as_lost(runs_dir, run, ring):
    run.log(device(1.0), step=0)
    run.finish(timeout=1)
    stored = fanfold.open(run.path)
    assert [lost["keys"] for lost in stored.lost_values] == [["x"]]
    assert [step for step, *_ in rows(run)] == [0]


def test_threads_with_and_without_device_values_lose_nothing(run, ring):
    ring.lands.set()
    count, stop = 3_000, threading.Event()

    def beats() -> None:
        while not stop.is_set():
            run._ending.beat()
            time.sleep(0.0005)

    def hosts(key: str) -> None:
        for step in range(count):
            run.log({key: float(step)}, step=step)

    def devices() -> None:
        for step in range(count):
            run.log(device(step), step=step)

    threads = [
        threading.Thread(target=hosts, args=("a",)),
        threading.Thread(target=hosts, args=("b",)),
        threading.Thread(target=devices),
    ]
    busy = threading.Thread(target=beats)
    for thread in (busy, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    busy.join()
    assert run.flush(30)
    run.finish()
    stored = fanfold.open(run.path)
    for key in ("a", "b", "x"):
        assert stored.series(key).steps.tolist() == list(range(count)), key
        assert stored.series(key).values.tolist() == list(range(count)), key
    assert not stored.lost_values
    assert stored.dropped == 0


def test_calls_after_finish_are_dropped_with_a_warning(run, ring, caplog):
    ring.lands.set()
    run.log(device(1.0), step=0)
    run.finish()
    run.log(device(2.0), step=1)
    assert "had finished" in caplog.text
    assert fanfold.open(run.path).series("x").steps.tolist() == [0]
