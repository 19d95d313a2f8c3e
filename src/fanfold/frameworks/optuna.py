"""Optuna: a run per trial with the study as its group, and a pruner that reads the metric from the run's journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import FanfoldError, needed, notices
from ..recording import api
from ..store import StoredRun, open_run

with needed("optuna", "optuna", "fanfold.frameworks.optuna"):
    import optuna
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial, TrialState

RUN = "fanfold_run"  # the user attribute of a trial that has the folder of its run
BEST, PRUNED = "best", "pruned"


@contextmanager
def trial_run(trial: optuna.trial.Trial, project: str | None = None, **options: Any) -> Iterator[Any]:
    """Record a trial as a run: named after study and trial, in the group of the study, with the suggested parameters as config.

    `options` go to fanfold.init(). A pruned trial is a finished run whose reason says so.
    """
    study = trial.study.study_name
    given: Mapping[str, Any] = options.pop("config", None) or {}
    facts = {"name": f"{study}-{trial.number}", "group": study, **options}
    run = api.init(project, config={**given, **trial.params}, **facts)
    trial.set_user_attr(RUN, str(run.path))
    with run:
        try:
            yield run
        finally:
            run.config.update(trial.params)  # parameters that were suggested inside


class JournalPruner(BasePruner):  # type: ignore[misc]  # optuna may be installed without types
    """Report what a trial's run logs under `key` to Optuna, and let a pruner of Optuna decide (default: MedianPruner).

    The numbers are read from the journal, so a trial may train in other processes, and training code needs no trial.report().
    """

    def __init__(self, key: str, pruner: BasePruner | None = None, *, rank: int | None = None) -> None:
        self.key = key
        self.pruner = pruner if pruner is not None else optuna.pruners.MedianPruner()
        self.rank = rank
        self._runs: dict[str, StoredRun] = {}

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Decide with everything that the run has logged so far."""
        known = dict(trial.intermediate_values)
        new = {step: value for step, value in self._logged(trial).items() if step not in known}
        for step, value in new.items():
            # A pruner gets a copy of the trial, whose report() does not exist: this is what Trial.report() calls.
            study._storage.set_trial_intermediate_value(trial._trial_id, step, value)  # noqa: SLF001
        fresh = study._storage.get_trial(trial._trial_id) if new else trial  # noqa: SLF001
        return bool(fresh.intermediate_values) and bool(self.pruner.prune(study, fresh))

    def _logged(self, trial: FrozenTrial) -> dict[int, float]:
        """Return what the trial's run has logged, by step."""
        place = trial.user_attrs.get(RUN)
        if not place:
            notices.once("optuna:no run", "JournalPruner found a trial without a run, and never prunes it. Record it with "
                         "trial_run(), or set its user attribute fanfold_run to the folder of its run.")  # fmt: skip
            return {}
        try:
            run = self._runs[place] = self._runs[place].refresh() if place in self._runs else open_run(Path(place))
            series = run.series(self.key, rank=self.rank, own=True)
        except FanfoldError:  # nothing was logged yet
            return {}
        return dict(zip(series.steps.tolist(), series.values.astype(float).tolist(), strict=True))


class StudyCallback:
    """After each trial, tag its run: `best` (and no longer the one before), `pruned`; trials without a run get one.

    Pass it to study.optimize(callbacks=[…]). `options` go to fanfold.init() for the runs it makes.
    """

    def __init__(self, project: str | None = None, *, metric: str = "value", **options: Any) -> None:
        self.project = project
        self.metric = metric
        self.options = options
        self._runs: dict[int, str] = {}  # made here, by the number of their trial

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Record how a trial ended."""
        place = trial.user_attrs.get(RUN) or self._made(study, trial)
        with _noted(place):
            run = open_run(Path(place))
            if trial.state == TrialState.PRUNED:
                _add(run, PRUNED)
            best = _best(study)
            if trial.number in best:
                for other in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
                    self._no_longer_best(best, other)
                _add(run, BEST)

    def _no_longer_best(self, best: set[int], trial: FrozenTrial) -> None:
        place = trial.user_attrs.get(RUN) or self._runs.get(trial.number)
        if place and trial.number not in best:
            with _noted(place):
                run = open_run(Path(place))
                if BEST in run.tags:
                    run.tags = [tag for tag in run.tags if tag != BEST]

    def _made(self, study: optuna.Study, trial: FrozenTrial) -> str:
        """Make a run of a trial that has none: its parameters, what it reported, and its value."""
        name = f"{study.study_name}-{trial.number}"
        options = {"group": study.study_name, "name": name, "system": False, **self.options}
        run = api.init(self.project, config=dict(trial.params), **options)
        for step, value in sorted(trial.intermediate_values.items()):
            run.log({f"intermediate/{self.metric}": value}, step=step)
        values = trial.values or []
        names = study.metric_names or ([self.metric] if len(values) == 1 else [f"{self.metric}/{n}" for n in range(len(values))])
        run.summary.update(dict(zip(names, values, strict=False)))
        run.finish(status="failed" if trial.state == TrialState.FAIL else "finished")
        self._runs[trial.number] = str(run.path)  # a trial that has ended takes no more attributes
        return str(run.path)


def _best(study: optuna.Study) -> set[int]:
    """Return the numbers of the best trials: one, or a Pareto front."""
    try:
        return {one.number for one in study.best_trials}
    except (ValueError, RuntimeError):  # no trial is complete
        return set()


def _add(run: StoredRun, tag: str) -> None:
    if tag not in run.tags:
        run.tags = [*run.tags, tag]


@contextmanager
def _noted(place: str) -> Iterator[None]:
    """Warn once about a run that cannot be changed; the study continues."""
    try:
        yield
    except (FanfoldError, OSError) as error:
        notices.once(f"optuna:{place}", f"the run in {place} was not tagged: {error} The study continues.")
