"""scikit-learn: the candidates of a finished search (GridSearchCV and its relatives) as runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import guard
from ..recording import api

__all__ = ["record_search"]


def record_search(search: Any, project: str | None = None, *, name: str | None = None, **options: Any) -> list[str]:
    """Record each candidate of a fitted search as a run, and return the ids of the runs.

    The runs have the candidate's parameters as config, the score of each split as `score` (or its name, with several), the mean,
    spread and times in the summary, and the search as their group; the best one has the tag `best`. `options` go to
    fanfold.init().

    Args:
        search: A fitted GridSearchCV, RandomizedSearchCV or a halving search.
        project: The project of the runs.
        name: The group of the runs, and how their names begin. Default: the class of the estimator.
        **options: More options of `fanfold.init`.

    Returns:
        The ids of the runs, in the order of `cv_results_`.
    """
    results: Mapping[str, Any] = search.cv_results_
    group = name or type(search.estimator).__name__
    options = {"group": group, "system": False, **options}
    tags = tuple(options.pop("tags", ()))
    ids = []
    for place, parameters in enumerate(results["params"]):
        best = ("best",) if place == getattr(search, "best_index_", None) else ()
        run = api.init(project, name=f"{group}-{place}", tags=(*tags, *best), config=dict(parameters), **options)
        ids.append(run.id)
        with run, guard(f"record candidate {place} of a search"):
            _log(run, {key: column[place] for key, column in results.items() if key != "params"})
    return ids


def _log(run: Any, row: Mapping[str, Any]) -> None:
    """Log the scores of the splits as steps, and the rest as the summary."""
    splits: dict[int, dict[str, float]] = {}
    for key, value in row.items():
        word, _, metric = key.partition("_")
        if word.startswith("split") and word[5:].isdecimal():
            splits.setdefault(int(word[5:]), {})[_name(metric)] = float(value)
        elif not key.startswith("param_"):
            run.summary[_name(key)] = float(value)
    for split, scores in sorted(splits.items()):
        run.log(scores, step=split)


def _name(key: str) -> str:
    return key.replace("test_score", "score").replace("train_score", "score/train").replace("test_", "").replace("_", " ")
