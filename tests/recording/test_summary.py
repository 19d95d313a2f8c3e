"""run.summary: what the store says of the finished run, known to the live run without reading its journals."""

import logging
import random
from pathlib import Path

import pytest

import fanfold
from fanfold.recording.tallies import RULES


def start(runs_dir, **options):
    return fanfold.init("p", dir=runs_dir, quiet=True, system=False, **options)


def same(live, stored):
    assert live.keys() == stored.keys()
    for key, value in stored.items():
        if isinstance(value, float):
            assert live[key] == pytest.approx(value, rel=1e-12, nan_ok=True), key
        else:
            assert live[key] == value, key
        assert type(live[key]) is type(value), key


def log_at_random(run, dice, calls, first=0):
    for step in range(first, first + calls):
        values = {"a": dice.random(), "b": dice.randint(-5, 5), "c": dice.random() < 0.5}
        if dice.random() < 0.3:
            values["nan"] = dice.choice([1.0, float("nan"), float("inf")])
        if dice.random() < 0.2:
            values["mixed"] = dice.choice([1, 2.5, True])
        if dice.random() < 0.2:
            values["text"] = f"t{step}"
        if dice.random() < 0.1:
            values = {"deep": values, "late": step}
        run.log(values, step=dice.choice([step, step, step, 2**40 + step]) if dice.random() < 0.1 else step)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_live_summary_is_that_of_the_finished_run(runs_dir, rule, seed):
    run, dice = start(runs_dir), random.Random(f"{seed}{rule}")
    run.define_metric("*", summary=rule)
    run.define_metric("b", summary="sum")
    log_at_random(run, dice, 200)
    run.summary["best"] = {"at": 3}
    live = dict(run.summary)
    run.finish()
    same(live, fanfold.open(run.path).summary)
    same(dict(run.summary), live)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_comes_late_counts_what_was_logged_before(runs_dir, rule):
    run, dice = start(runs_dir), random.Random(rule)
    log_at_random(run, dice, 100)
    run.define_metric("*", summary=rule)
    log_at_random(run, dice, 100, 100)
    live = dict(run.summary)
    run.define_metric("a", summary="mean")
    log_at_random(run, dice, 50, 200)
    again = dict(run.summary)
    run.finish()
    assert live.keys() <= again.keys() | live.keys()
    same(again, fanfold.open(run.path).summary)


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_counts_its_earlier_attempts(runs_dir, rule):
    dice = random.Random(rule)
    run = start(runs_dir, id="again")
    run.define_metric("*", summary=rule)
    run.summary["kept"] = 1
    log_at_random(run, dice, 100)
    run.log({"only_first": 4.0}, step=50)
    run.finish()
    for first in (70, 120):  # the second attempt logs steps again, and hides the old ones
        run = start(runs_dir, id="again")
        same(dict(run.summary), fanfold.open(run.path).summary)
        log_at_random(run, dice, 40, first)
        run.summary[f"from {first}"] = first
        live = dict(run.summary)
        run.finish()
        same(live, fanfold.open(run.path).summary)
    assert fanfold.open(run.path).assigned == {"kept": 1, "from 70": 70, "from 120": 120}


def test_a_summary_reads_no_more_after_many_calls_than_after_few(runs_dir):
    def read():
        return int(Path("/proc/self/io").read_text().split()[1])

    run = start(runs_dir)
    run.define_metric("n", summary="max")
    costs = []
    for calls in (10, 100_000):
        for step in range(calls):
            run.log({"loss": 1.0 / (step + 1), "n": step})
        before = read()
        assert run.summary["n"] == calls - 1 and run.summary["loss"] == 1.0 / calls
        costs.append(read() - before)
    run.finish()
    assert costs[1] <= costs[0] + 1000


def test_device_values_and_late_rows_are_in_the_summary(runs_dir):
    import torch

    run = start(runs_dir)
    run.define_metric("loss", summary="min")
    for step in range(20):
        run.log({"loss": torch.tensor(abs(step - 5.0)), "lr": torch.tensor(step, dtype=torch.float64), "n": step}, step=step)
    run.flush()
    live = dict(run.summary)
    run.finish()
    assert live["loss"] == 0.0 and live["lr"] == 19.0
    same(live, fanfold.open(run.path).summary)


def test_many_shapes_and_keys_do_not_lose_a_last_value(runs_dir, monkeypatch):
    monkeypatch.setattr("fanfold.journal.writer.MAX_SHAPES", 8)
    run = start(runs_dir)
    for step in range(100):
        run.log({f"k{step % 20}": step, "common": -step}, step=step)
    live = dict(run.summary)
    run.finish()
    assert live["k3"] == 83 and live["common"] == -99
    same(live, fanfold.open(run.path).summary)


def test_a_summary_on_another_rank_is_that_of_the_rank(runs_dir, monkeypatch):
    monkeypatch.setenv("FANFOLD_WORLD_SIZE", "2")
    runs = []
    for rank in ("0", "1"):
        monkeypatch.setenv("FANFOLD_RANK", rank)
        runs.append(start(runs_dir, id="two"))
    for rank, run in enumerate(runs):
        run.log({"loss": 1.0 + rank})
    assert [run.summary["loss"] for run in runs] == [1.0, 2.0]
    for run in runs:
        run.finish()


def test_patterns_that_readers_ignore_are_warned_about_once(runs_dir, caplog):
    run = start(runs_dir)
    with caplog.at_level(logging.WARNING, "fanfold"):
        for number in range(256):
            run.define_metric(f"old{number}/*", summary="max")
        assert caplog.records == []
        run.define_metric("new/*", summary="max")
        run.define_metric("newer/*", summary="max")
        run.define_metric("key without stars" * 20, summary="max")
        run.define_metric("long" * 100 + "*", summary="max")
    assert ["newest 256" in record.message for record in caplog.records] == [True, False]
    assert "401 characters" in caplog.records[1].message
    run.log({"old0/a": 2.0, "new/a": 2.0})
    run.log({"old0/a": 1.0, "new/a": 1.0})
    run.finish()
    stored = fanfold.open("-", dir=runs_dir)
    assert (stored.summary["old0/a"], stored.summary["new/a"]) == (1.0, 2.0)
