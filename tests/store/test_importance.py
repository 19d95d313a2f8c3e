"""Which config values matter: rank correlation against SciPy's, and a forest that must find what the metric is made of."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fanfold.store.importance import importance


def made(runs: int, seed: int = 0) -> tuple[list[dict], list[float]]:
    """Runs whose metric depends on lr (not monotonically) and on the optimizer, and neither on the seed nor on the noise."""
    chance = np.random.default_rng(seed)
    config = [
        {"lr": float(10 ** chance.uniform(-4, -1)), "opt": str(chance.choice(["adam", "sgd", "lion"])), "seed": run,
         "noise": float(chance.random()), "same": 1}
        for run in range(runs)
    ]  # fmt: skip
    loss = [
        abs(math.log10(one["lr"]) + 2.5) + 0.5 * (one["opt"] == "sgd") + 0.02 * float(chance.standard_normal()) for one in config
    ]
    return config, loss


def test_the_forest_finds_what_the_metric_depends_on_and_how_sure_that_is():
    found = importance(*made(150))
    names = [one["name"] for one in found["fields"]]
    assert names[:2] == ["lr", "opt"] and set(names) == {"lr", "opt", "seed", "noise"}  # not what is the same in all runs
    by_name = {one["name"]: one for one in found["fields"]}
    for name in ("lr", "opt"):
        assert 0 < by_name[name]["importance_low"] <= by_name[name]["importance"] <= by_name[name]["importance_high"]
    for name in ("seed", "noise"):
        assert by_name[name]["importance_low"] <= 0.01 and by_name[name]["importance"] < by_name["opt"]["importance"] / 4
    assert found["runs"] == 150 and found["score"] > 0.7
    assert found["score_low"] <= found["score"] <= found["score_high"]


def test_shares_of_values_that_add_up_are_those_of_the_variance():
    chance = np.random.default_rng(1)
    config = [{"a": float(chance.random()), "b": float(chance.random()), "c": float(chance.random())} for _ in range(600)]
    loss = [2 * one["a"] + one["b"] for one in config]  # 4 parts of 5, and 1 of 5
    shares = {one["name"]: one["importance"] for one in importance(config, loss)["fields"]}
    assert shares == pytest.approx({"a": 0.8, "b": 0.2, "c": 0.0}, abs=0.08)


def test_rank_correlation_is_that_of_scipy_and_lies_in_its_interval():
    stats = pytest.importorskip("scipy.stats")
    config, loss = made(60)
    tied = [round(value, 1) for value in loss]
    for one in importance(config, tied)["fields"]:
        if one["name"] == "opt":
            assert one["correlation"] is None  # texts have no order
            continue
        expected = stats.spearmanr([run[one["name"]] for run in config], tied).statistic
        assert one["correlation"] == pytest.approx(expected, abs=1e-6)
        assert one["correlation_low"] <= one["correlation"] <= one["correlation_high"]


def test_the_result_does_not_depend_on_the_scale_of_a_value():
    config, loss = made(80)
    scaled = [{**one, "lr": math.log10(one["lr"])} for one in config]
    assert importance(config, loss) == importance(scaled, loss)


def test_noise_predicts_nothing():
    chance = np.random.default_rng(3)
    config = [{"a": float(chance.random()), "b": int(chance.integers(5))} for _ in range(60)]
    found = importance(config, chance.random(60).tolist())
    assert found["score"] < 0.2
    assert all(one["importance_low"] <= 0.05 for one in found["fields"])


@pytest.mark.parametrize(
    ("config", "target"),
    [
        ([], []),
        ([{"a": 1}] * 20, list(range(20))),
        ([{"a": i} for i in range(20)], [1.0] * 20),
        ([{"a": i} for i in range(5)], list(range(5))),
        ([{"a": i} for i in range(20)], [math.nan] * 10 + [None] * 5 + ["x"] * 5),
    ],
)
def test_too_little_to_compare_is_said_and_not_guessed(config, target):
    found = importance(config, target)
    assert found["score"] is None and found["fields"] == []


def test_odd_values_are_taken_as_they_come():
    config = [{"a": None if i % 3 == 0 else float("inf") if i % 7 == 0 else i, "b": i % 2 == 0, "c": [i % 2], "d": "x" if i % 2 else 3}
              for i in range(40)]  # fmt: skip
    found = importance(config, [float(i % 2) for i in range(40)])
    assert {one["name"] for one in found["fields"]} == {"a", "b", "c", "d"}
    assert next(one for one in found["fields"] if one["name"] == "a")["runs"] < 40
    assert all(math.isfinite(one["importance"]) for one in found["fields"])
