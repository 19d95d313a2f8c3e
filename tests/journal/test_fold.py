"""Folding ranks: exact results, the ranks that hold the extremes, and what a NaN does."""

import math

import numpy as np
import pytest

from fanfold.errors import SettingError
from fanfold.fold import FOLDS, fold


def folded(how, points):
    ranks, steps, times, values = (np.array(column) for column in zip(*points, strict=True))
    return fold(how, ranks.astype(np.int64), steps.astype(np.int64), times.astype(np.int64), values)


POINTS = [(0, 0, 10, 1.0), (1, 0, 12, 3.0), (2, 0, 11, 2.0), (0, 1, 20, -1.0), (1, 1, 21, 5.0)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [("mean", [2.0, 2.0]), ("min", [1.0, -1.0]), ("max", [3.0, 5.0]), ("sum", [6.0, 4.0]), ("last", [3.0, 5.0]),
     ("std", [math.sqrt(2 / 3), 3.0])],
)  # fmt: skip
def test_each_fold_is_exact_and_names_the_extreme_ranks(how, expected):
    result = folded(how, POINTS)
    assert result.values.tolist() == expected
    assert result.steps.tolist() == [0, 1]
    assert (result.min.tolist(), result.max.tolist()) == ([1.0, -1.0], [3.0, 5.0])
    assert (result.min_rank.tolist(), result.max_rank.tolist()) == ([0, 0], [1, 1])
    assert result.count.tolist() == [3, 2]


def test_a_rank_that_logged_twice_counts_once_with_its_last_value():
    result = folded("sum", [(0, 0, 1, 5.0), (0, 0, 2, 7.0), (1, 0, 1, 1.0)])
    assert (result.values.tolist(), result.count.tolist()) == ([8.0], [2])


def test_a_nan_reaches_the_mean_but_not_the_extremes():
    points = [(0, 0, 1, math.nan), (1, 0, 1, 4.0), (2, 0, 1, 2.0)]
    assert math.isnan(folded("mean", points).values[0])
    result = folded("max", points)
    assert (result.values[0], result.max_rank[0], result.min_rank[0]) == (4.0, 1, 2)
    alone = folded("min", [(3, 0, 1, math.nan)])
    assert math.isnan(alone.values[0])
    assert alone.min_rank[0] == 3


@pytest.mark.parametrize("how", FOLDS)
def test_ranks_with_the_same_steps_fold_to_the_same_bits_in_any_order(how):
    rng = np.random.default_rng(7)
    ranks, steps = np.repeat(np.arange(37), 50), np.tile(np.arange(0, 500, 10), 37)
    times, values = rng.integers(0, 1000, ranks.size), rng.normal(size=ranks.size).astype(np.float32)
    values[rng.integers(0, values.size, 9)] = np.nan
    order = rng.permutation(ranks.size)
    ordered, mixed = (fold(how, ranks[o], steps[o], times[o], values[o]) for o in (np.arange(ranks.size), order))
    for name in ("steps", "times", "values", "min", "max", "min_rank", "max_rank", "count"):
        one, two = getattr(ordered, name), getattr(mixed, name)
        assert one.tobytes() == two.tobytes(), name
    assert ordered.count.tolist() == [37] * 50


def test_infinities_do_not_warn():
    assert math.isnan(folded("sum", [(0, 0, 1, math.inf), (1, 0, 1, -math.inf)]).values[0])


def test_no_points_give_no_points():
    empty = np.empty(0, np.int64)
    for how in FOLDS:
        assert len(fold(how, empty, empty, empty, empty).steps) == 0


def test_an_unknown_fold_lists_the_known_ones():
    with pytest.raises(SettingError, match="mean, min, max, sum, std, last"):
        folded("median", POINTS)


def test_a_random_fold_agrees_with_the_slow_way():
    rng = np.random.default_rng(0)
    points = [
        (int(r), int(s), i, float(v))
        for i, (r, s, v) in enumerate(zip(rng.integers(0, 8, 500), rng.integers(0, 40, 500), rng.normal(size=500), strict=True))
    ]
    table = {}
    for rank, step, _, value in points:
        table.setdefault(step, {})[rank] = value
    result = folded("mean", points)
    for i, step in enumerate(result.steps.tolist()):
        values = table[step]
        assert result.values[i] == pytest.approx(sum(values.values()) / len(values), rel=1e-15)
        assert result.min_rank[i] == min(values, key=values.get)
        assert result.max_rank[i] == max(values, key=values.get)
