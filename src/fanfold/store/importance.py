"""How much each config value matters for a metric: rank correlation, and permutation importance in a small forest.

Needs numpy only. Runs are resampled: a forest is fitted to each resample and judged by the runs left out of it, so that every
number comes with its spread. Values are replaced by their ranks, so the result is the same on a linear and a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import deadline

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LEAST_RUNS = 8  # with fewer, nothing can be told from chance
MOST_RUNS = 1_000  # of more, a sample is used
MOST_FIELDS = 40
MOST_CLASSES = 12  # of a text; the rest count as one
RESAMPLES, TREES, DEPTH, LEAF, CUTS = 16, 16, 7, 2, 3


class Field(NamedTuple):
    """A config value over all runs: its columns for the forest, and its numbers if it has an order."""

    name: str
    columns: Floats  # runs x columns: ranks, or one column per text
    numbers: Floats | None


def importance(config: Sequence[Mapping[str, Any]], target: Sequence[Any]) -> dict[str, Any]:
    """Return the importance of each config value that differs between runs, most important first.

    `config` has the flat config of each run, `target` its metric. Per field: `correlation` (Spearman; None for texts) with its
    95% interval, `importance` (the share of the metric's variance that is due to the field, alone and together with others: half
    of the squared error that shuffling it adds) with the 5th and 95th percentile over resamples, `values` (how many differ) and
    `runs` (how many have it). `score` is the share of the variance that the forest predicts for runs it has not seen: if it is
    near 0, the importances mean nothing.
    """
    import numpy as np

    known = [place for place, value in enumerate(target) if _is_number(value) and math.isfinite(value)]
    chance = np.random.default_rng(0)
    if len(known) > MOST_RUNS:
        known = sorted(chance.choice(known, MOST_RUNS, replace=False).tolist())
    metric = np.array([float(target[place]) for place in known])
    fields = _fields([config[place] for place in known])
    found: dict[str, Any] = {"runs": len(known), "fields": [], "score": None, "score_low": None, "score_high": None}
    if len(known) < LEAST_RUNS or not fields or len(set(metric.tolist())) < 2:
        return found
    losses, scores = _forests(fields, _ranks(metric), chance)
    found |= {"score": _plain(np.median(scores)), **_interval("score", scores)}
    for place, field in enumerate(fields):
        found["fields"].append({
            "name": field.name, "values": _distinct(field), "runs": _count(field), **_correlation(field, metric, chance),
            "importance": _plain(losses[:, place].mean()), **_interval("importance", losses[:, place]),
        })  # fmt: skip
    found["fields"].sort(key=lambda one: -one["importance"])
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fields(config: Sequence[Mapping[str, Any]]) -> list[Field]:
    """Return the config values that differ between runs: those with the most different values first, if there are too many."""
    names = dict.fromkeys(name for one in config for name in one)
    spread = {name: len({repr(one.get(name)) for one in config}) for name in names}
    differing = sorted((name for name in names if spread[name] > 1), key=lambda name: -spread[name])
    return [_field(name, [one.get(name) for one in config]) for name in sorted(differing[:MOST_FIELDS])]


def _field(name: str, cells: Sequence[Any]) -> Field:
    import numpy as np

    values = [float(cell) if isinstance(cell, bool) else cell for cell in cells]
    if all(cell is None or _is_number(cell) for cell in values):
        numbers = np.array([math.nan if cell is None else float(cell) for cell in values])
        numbers[~np.isfinite(numbers)] = math.nan
        return Field(name, np.nan_to_num(_ranks(numbers), nan=-0.5)[:, None], numbers)  # without a value: below all others
    texts = [repr(cell) for cell in cells]
    common = sorted(dict.fromkeys(texts), key=lambda text: -texts.count(text))[:MOST_CLASSES]
    return Field(name, np.array([[float(text == one) for one in common] for text in texts]), None)


def _ranks(values: Floats) -> Floats:
    """Return the ranks of values, from 0 to 1; equal values share their mean rank, NaN stays NaN."""
    import numpy as np

    ranks = np.full(len(values), math.nan)
    there = ~np.isnan(values)
    _, place, count = np.unique(values[there], return_inverse=True, return_counts=True)
    ends = np.cumsum(count)
    middle = ends - (count + 1) / 2
    ranks[there] = middle[place] / max(1, int(there.sum()) - 1)
    return ranks


def _distinct(field: Field) -> int:
    import numpy as np

    return len(np.unique(field.columns, axis=0))


def _count(field: Field) -> int:
    import numpy as np

    return len(field.columns) if field.numbers is None else int((~np.isnan(field.numbers)).sum())


def _correlation(field: Field, metric: Floats, chance: np.random.Generator) -> dict[str, Any]:
    """Return Spearman's rank correlation and its 95% interval, by resampling the runs."""
    import numpy as np

    none = {"correlation": None, "correlation_low": None, "correlation_high": None}
    if field.numbers is None:
        return none
    there = ~np.isnan(field.numbers)
    x, y = field.numbers[there], metric[there]
    if len(x) < LEAST_RUNS:
        return none
    value = _spearman(x, y)
    picks = chance.integers(0, len(x), (200, len(x)))
    spread = [one for pick in picks if not math.isnan(one := _spearman(x[pick], y[pick]))]
    if math.isnan(value) or not spread:
        return none
    low, high = np.percentile(spread, [2.5, 97.5])
    return {"correlation": _plain(value), "correlation_low": _plain(low), "correlation_high": _plain(high)}


def _spearman(x: Floats, y: Floats) -> float:
    import numpy as np

    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(np.clip(a @ b / size, -1, 1)) if size > 1e-12 else math.nan


def _forests(fields: Sequence[Field], metric: Floats, chance: np.random.Generator) -> tuple[Floats, Floats]:
    """Fit a forest to each resample of the runs; return what shuffling each field costs, and what the forest predicts."""
    import numpy as np

    data = np.concatenate([field.columns for field in fields], axis=1)
    ends = np.cumsum([field.columns.shape[1] for field in fields])
    groups = [range(end - field.columns.shape[1], end) for field, end in zip(fields, ends.tolist(), strict=True)]
    losses, scores = [], []
    variance = float(metric.var())
    for _ in range(RESAMPLES):
        deadline.check()
        inside = chance.integers(0, len(metric), len(metric))
        outside = np.setdiff1d(np.arange(len(metric)), inside)
        if not len(outside):
            continue
        trees = [_tree(data, metric, inside, chance) for _ in range(TREES)]
        held, true = data[outside], metric[outside]
        base = float(((_predict(trees, held) - true) ** 2).mean())
        scores.append(1 - base / variance)
        lost = []
        for group in groups:
            shuffled = held.copy()
            shuffled[:, list(group)] = held[chance.permutation(len(held))][:, list(group)]
            added = float(((_predict(trees, shuffled) - true) ** 2).mean()) - base
            lost.append(added / variance / 2)  # shuffling counts a share twice: in the true value and in the wrong one
        losses.append(lost)
    return np.array(losses).reshape(-1, len(fields)), np.array(scores)


Tree = tuple["NDArray[Any]", "NDArray[Any]", "NDArray[Any]", "NDArray[Any]"]  # feature (-1: leaf), threshold, first child, value


def _tree(data: Floats, metric: Floats, rows: NDArray[Any], chance: np.random.Generator) -> Tree:
    """Grow a tree whose splits are the best of a few random thresholds per column."""
    import numpy as np

    feature, threshold, child, value = [-1], [0.0], [0], [float(metric[rows].mean())]
    todo = [(0, rows, 0)]
    while todo:
        node, here, depth = todo.pop()
        split = _split(data[here], metric[here], chance) if depth < DEPTH and len(here) >= 2 * LEAF else None
        if split is None:
            continue
        feature[node], threshold[node] = split
        child[node] = len(feature)
        left = data[here, split[0]] <= split[1]
        for side in (here[left], here[~left]):
            todo.append((len(feature), side, depth + 1))
            feature.append(-1)
            threshold.append(0.0)
            child.append(0)
            value.append(float(metric[side].mean()))
    return np.array(feature), np.array(threshold), np.array(child), np.array(value)


def _split(data: Floats, metric: Floats, chance: np.random.Generator) -> tuple[int, float] | None:
    import numpy as np

    low, high = data.min(axis=0), data.max(axis=0)
    cuts = low + (high - low) * chance.random((CUTS, len(low))) * 0.999
    left = data <= cuts[:, None, :]  # cut x run x column
    count = left.sum(axis=1)
    fits = (count >= LEAF) & (count <= len(metric) - LEAF) & (high > low)
    if not fits.any():
        return None
    sums, total = metric @ left, metric.sum()
    gain = np.where(fits, sums**2 / np.maximum(count, 1) + (total - sums) ** 2 / np.maximum(len(metric) - count, 1), -math.inf)
    best = np.unravel_index(int(gain.argmax()), gain.shape)
    return (int(best[1]), float(cuts[best])) if gain[best] > total**2 / len(metric) + 1e-12 else None


def _predict(trees: Sequence[Tree], data: Floats) -> Floats:
    import numpy as np

    found = np.zeros(len(data))
    rows = np.arange(len(data))
    for feature, threshold, child, value in trees:
        at = np.zeros(len(data), np.int64)
        for _ in range(DEPTH):
            inner = feature[at] >= 0
            right = data[rows, np.maximum(feature[at], 0)] > threshold[at]
            at = np.where(inner, child[at] + right, at)
        found += value[at]
    return found / len(trees)


def _interval(name: str, values: Floats) -> dict[str, float]:
    import numpy as np

    low, high = np.percentile(values, [5, 95]) if len(values) else (0.0, 0.0)
    return {f"{name}_low": _plain(low), f"{name}_high": _plain(high)}


def _plain(value: Any) -> float:
    return round(float(value), 6)
