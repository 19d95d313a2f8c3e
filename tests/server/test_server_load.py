"""A reader who asks for much keeps nobody else waiting, and what one request may cost is bounded."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.parse
from pathlib import Path

import pytest

from answers import asked, serving
from fanfold.errors import FanfoldError
from fanfold.journal import Writer
from fanfold.journal import format as fmt
from fanfold.store import axes, deadline
from fanfold.store.query import LocalStore
from store_data import START, Call, write_run

LARGE = 5 << 20  # bytes of a journal; from 4 MB on its index is looked for in the cache


def large_run(root: Path) -> str:
    """Write a run whose journal is large; return the journal's id."""
    id = f"{7:016x}"
    seed, shape = fmt.seed_of(id), fmt.Shape(1, 0, "d", ("loss",))
    header = {"format": [fmt.MAJOR, fmt.MINOR], "journal": id, "run": "large", "project": "slow", "attempt": "a", "role": "main",
              "rank": 0, "ordinal": 1, "started": START}  # fmt: skip
    frames = [fmt.frame(fmt.Kind.HEADER, fmt.pack(header), 0), fmt.frame(fmt.Kind.SHAPE, shape.body(), seed)]
    row = len(fmt.frame(fmt.Kind.ROW, bytes(shape.size), seed))
    for step in range(LARGE // row):
        body = fmt.struct.pack(shape.codes, 1, START + step, step, float(step))
        frames.append(fmt.frame(fmt.Kind.ROW, body, seed))
    frames.append(fmt.frame(fmt.Kind.END, fmt.pack({"t": START, "status": "finished"}), seed))
    folder = root / "slow" / "large" / "journal"
    folder.mkdir(parents=True)
    (folder / f"0-{id}{fmt.SUFFIX}").write_bytes(b"".join(frames))
    return id


def test_others_are_answered_while_one_request_is_stuck(tmp_path):
    root, cache = tmp_path / "runs", tmp_path / "cache"
    write_run(root, [Call(0, 0, step, 1, {"loss": float(step)}) for step in range(5)], project="quick", id="small")
    stuck = cache / "index" / f"{large_run(root)}.idx"
    stuck.parent.mkdir(parents=True)
    os.mkfifo(stuck)  # reading the large run does not end until somebody writes here
    answers = {}
    with serving(root, cache) as address:
        slow = threading.Thread(target=lambda: answers.update(slow=asked(f"{address}/api/runs?project=slow")))
        slow.start()
        with stuck.open("wb"):  # opens once the request has come to this point, and holds it there
            listed = json.loads(asked(f"{address}/api/runs?project=quick"))
            assert [run["id"] for run in listed["runs"]] == ["small"]
            query = {"project": "quick", "runs": ["small"], "keys": ["loss"]}
            assert len(asked(f"{address}/api/series", query)) > 100
            assert json.loads(asked(f"{address}/api/passing?project=quick&filter=loss.max%3E3"))["ids"] == ["small"]
            assert "slow" not in answers
        slow.join(300)
    assert [run["id"] for run in json.loads(answers["slow"])["runs"]] == ["large"]


def test_a_filter_of_thirty_stars_is_answered(tmp_path):
    root = tmp_path / "runs"
    for number in range(50):
        write_run(root, [Call(0, 0, 0, 1, {"loss": 1.0})], id="a" * 60 + str(number))
    with serving(root, tmp_path / "cache") as address:
        stars = urllib.parse.quote("*".join("a" * 31) + "b")
        assert json.loads(asked(f"{address}/api/passing?project=p&filter={stars}"))["ids"] == []


def test_requests_that_ask_for_too_much_are_refused(tmp_path):
    write_run(tmp_path / "runs", [Call(0, 0, 0, 1, {"loss": 1.0})])
    with serving(tmp_path / "runs", tmp_path / "cache") as address:
        for query, reason in (
            ({"project": "p", "runs": [str(n) for n in range(20_001)], "keys": []}, "more than 20000 runs"),
            ({"project": "p", "runs": ["r"] * 300, "keys": ["k"] * 300}, "more than 50000 series"),
            ({"project": "p", "runs": ["r" * (4 << 20)], "keys": []}, "longer than 4194304 bytes"),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                asked(f"{address}/api/series", query)
            assert refused.value.code == 400
            assert reason in refused.value.read().decode()


def test_work_stops_when_its_time_is_over(tmp_path):
    write_run(tmp_path, [Call(0, rank, 0, 1, {"loss": 1.0}) for rank in range(3)])
    store = LocalStore(tmp_path)
    run = store.run("p", "r")
    row = run.row()
    with deadline.within(-1.0):
        for ask in (
            lambda: store.runs("p"),
            lambda: LocalStore(tmp_path).projects(),
            lambda: LocalStore(tmp_path).run("p", "r"),
            lambda: store.series(run, "loss", fold="mean"),
            lambda: store.series_many([(run, "loss")]),
            lambda: store.statistics(row, "loss"),
        ):
            with pytest.raises(deadline.TookTooLong, match="Ask for less"):
                ask()
    assert len(store.runs("p")) == 1


def test_a_fold_of_too_many_points_is_refused(tmp_path, monkeypatch):
    write_run(tmp_path, [Call(0, rank, step, 1, {"loss": 1.0}) for step in range(2) for rank in range(3)])
    store = LocalStore(tmp_path)
    run = store.run("p", "r")
    monkeypatch.setattr(axes, "MOST_FOLDED", 5)
    with pytest.raises(FanfoldError, match="6 points on 3 ranks, and at most 5"):
        store.series(run, "loss", fold="mean")
    assert store.series(run, "loss").total == 2


def test_a_run_may_be_read_by_many_threads_while_it_grows(tmp_path):
    header = {
        "format": [fmt.MAJOR, fmt.MINOR],
        "rank": 0,
        "role": "main",
        "attempt": "a",
        "run": "r",
        "project": "p",
        "ordinal": 1,
    }
    writer = Writer(tmp_path / "p" / "r" / "journal", header)
    store, done, wrong = LocalStore(tmp_path), threading.Event(), []

    def write() -> None:
        for step in range(1, 20_000):
            writer.row({"loss": float(step), f"key{step % 50}": 1.0}, "dd", time_ns=START + step, step=step)
        done.set()

    def read() -> None:
        while not done.is_set():
            store.runs("p")
            run = store.run("p", "r")
            series = run.series("loss")
            if series.values.tolist() != series.steps.tolist() or series.steps.tolist() != list(range(len(series))):
                wrong.append(series)

    writer.row({"loss": 0.0, "key0": 1.0}, "dd", time_ns=START, step=0)
    threads = [threading.Thread(target=write), *(threading.Thread(target=read) for _ in range(4))]
    failures = []
    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    finally:
        threading.excepthook = hook
    writer.close({"t": START, "status": "finished"})
    assert [str(failure.exc_value) for failure in failures] == []
    assert wrong == []
