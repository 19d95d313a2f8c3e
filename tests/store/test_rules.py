"""Alert rules: what each one means, when it fires, when it fires again, and what a mistake says."""

import math

import pytest

import fanfold
from fanfold.errors import SettingError
from fanfold.recording.probes import write_row
from fanfold.store import open_run
from fanfold.store.rules import RuleError, first_of_each, parse

NAN, INF = math.nan, math.inf


def logged(tmp_path, **series):
    """Record series of equal length and return the run as read back."""
    run = fanfold.init("p", dir=tmp_path / "runs", system=False, quiet=True)
    for row in zip(*series.values(), strict=True):
        run.log(dict(zip((key.replace("__", "/") for key in series), row, strict=True)))
    run.finish()
    return open_run(run.path)


def steps(run, rule):
    return [one.step for one in parse(rule).crossings(run, now=0.0)]


@pytest.mark.parametrize(
    ("rule", "values", "fired"),
    [
        ("loss is nan", [1, NAN, NAN, 1, NAN], [1, 4]),
        ("loss is inf", [1, INF, NAN, -INF], [1, 3]),
        ("loss is not finite", [1, INF, NAN, 1, -INF], [1, 4]),
        ("loss > 2", [1, 3, 3, 1, 3], [1, 4]),
        ("loss >= 3", [1, 3, 2], [1]),
        ("loss < 1", [1, NAN, 0.5], [2]),
        ("loss != 1", [1, 1, 2], [2]),
        ("loss = 1", [2, 1, 1], [1]),
        ("loss > 2 for 3", [3, 3, 1, 3, 3, 3, 3], [5]),
        # Two points below are not enough to arm it again, three are.
        ("loss > 2 for 3", [3, 3, 3, 1, 1, 3, 3, 3, 1, 1, 1, 3, 3, 3], [2, 13]),
        ("loss > 1e1", [10, 11], [1]),
        ('"loss" > 2', [3], [0]),
        ("l* > 2", [3], [0]),
        ("nothing > 2", [3], []),
    ],
)
def test_a_rule_fires_at_these_steps(tmp_path, rule, values, fired):
    assert steps(logged(tmp_path, loss=[float(value) for value in values]), rule) == fired


def test_a_rise_compares_the_halves_of_its_window(tmp_path):
    flat = [1.0 + 0.05 * (-1) ** n for n in range(1000)]  # noise of 5 % never fires a rule of 10 %
    risen = [value * (1.2 if n > 600 else 1.0) for n, value in enumerate(flat)]
    run = logged(tmp_path, flat=flat, risen=risen, fallen=[-value for value in risen])
    assert steps(run, "flat rises 10 % in 500 steps") == []
    (at,) = steps(run, "risen rises 10 % in 500 steps")
    assert 600 < at < 850
    assert steps(run, "risen rises 30 % in 500 steps") == []
    assert steps(run, "fallen falls 10% in 500 steps") == [at]
    assert len(steps(run, "risen rises 0.1 in 500 steps")) == 1
    assert steps(run, "risen rises 10 % in 5000 steps") == []  # the window is longer than the run


def test_every_gpu_and_every_rank_is_watched(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setenv("FANFOLD_RANK", str(rank))
        monkeypatch.setenv("FANFOLD_WORLD_SIZE", "2")
        monkeypatch.setenv("FANFOLD_RUN_ID", "r")
        run = fanfold.init("p", dir=tmp_path / "runs", system=False, quiet=True)
        write_row(run._writer, {"system/gpu/0/memory": 50.0, "system/gpu/1/memory": 97.0 if rank else 1.0}, None, "system")
        run.log({"loss": NAN if rank else 1.0})
        run.finish()
    found = list(parse("gpu.memory > 95 %").crossings(open_run(run.path), now=0.0))
    assert [(one.key, one.rank, one.step) for one in found] == [("system/gpu/1/memory", 1, None)]
    assert [one.rank for one in parse("loss is nan").crossings(open_run(run.path), now=0.0)] == [1]


@pytest.mark.parametrize(
    ("rule", "column", "what"),
    [
        ("", 1, "there is no rule here"),
        ("loss", 5, "a condition is missing"),
        ("loss >", 7, "needs a number"),
        ("loss >> 2", 7, "needs a number"),
        ("loss > two", 8, "is not a number"),
        ("loss > nan", 8, "is not a number"),
        ("loss is bad", 9, "nan, inf or not finite"),
        ("loss grows 10 %", 6, "is not a condition"),
        ("loss > 2 for", 13, "after `for`"),
        ("loss > 2 for 0", 14, "at least 1"),
        ("loss > 2 for ever", 14, "after `for`"),
        ("loss rises 10 %", 16, "a window"),
        ("loss rises 10 % in a while", 20, "is not a window"),
        ("stalled", 8, "needs a time"),
        ("stalled soon", 9, "needs a time"),
        ("loss > 2 and acc < 1", 10, "the rule is complete before this"),
        ('"loss > 2', 1, "never closed"),
        ("> 2", 1, "begins with the name"),
    ],
)
def test_a_mistake_names_its_column(rule, column, what):
    with pytest.raises(RuleError, match=what) as caught:
        parse(rule)
    assert caught.value.column == column
    assert isinstance(caught.value, SettingError)
    assert str(caught.value).startswith("the rule has a mistake")


def test_a_time_instead_of_a_number_of_points(tmp_path):
    import numpy as np

    holds = np.array([True, True, True, False, True, True])
    times = np.array([0.0, 30.0, 61.0, 62.0, 63.0, 70.0])
    assert first_of_each(holds, times, 1, 60.0) == [2]
    assert parse("loss > 2 for 10m").seconds == 600
    assert parse("loss > 2 for 3 points").points == 3


def test_a_hidden_point_does_not_fire_again_after_a_resume(tmp_path):
    for values, first in (([1.0, NAN, 1.0], 0), ([1.0, 1.0, NAN], 1)):
        run = fanfold.init("p", id="r", dir=tmp_path / "runs", system=False, quiet=True)
        for n, value in enumerate(values):
            run.log({"loss": value}, step=first + n)
        run.finish()
    assert steps(open_run(run.path), "loss is nan") == [3]
