"""A loop's reports to a run: which run, the values of each step, and their means over an interval. loop.py decides when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..frameworks._session import TrainingSession
from .arguments import LoopArguments
from .meter import Meter


class Reporter:
    """The run of a loop, and the values logged since its last step and its last log."""

    def __init__(self, args: LoopArguments, run: Any) -> None:
        self.args = args
        self.session = None if run is False else TrainingSession(args.project, run, **self.run_options())
        self.meter = Meter()
        self.last_logged = 0  # the step of the last log

    def run_options(self) -> dict[str, Any]:
        """Return the options of a run that the loop opens."""
        return {"name": self.args.run_name}

    def facts(self) -> dict[str, Any]:
        """Return the facts for a run that the loop opens."""
        return {"config": self.args.to_dict()}

    def renamed(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values under their keys in the run."""
        return values

    def over_ranks(self, values: dict[str, Any], steps: int) -> dict[str, Any]:  # noqa: ARG002 - subclasses sum over steps
        """Return an interval's values for callbacks. The run keeps every rank's own; a loop calls no collective."""
        return values

    @property
    def run(self) -> Any:
        """The run that values go to, opened now if necessary; None with run=False."""
        if self.session is None:
            return None
        return self.session.run if self.session.run is not None else self.session.live(self.facts)

    def record(self, values: Mapping[str, Any], step: int) -> None:
        """Log values to the run."""
        if values and self.session is not None:
            self.session.live(self.facts).log(self.renamed(values), step)

    def end_step(self, step: int) -> None:
        """Record the values logged during a step."""
        self.record(self.meter.end_step(), step)

    def end_interval(self, step: int) -> dict[str, Any]:
        """Return the means since the last log, for callbacks."""
        values = self.over_ranks(self.meter.end_interval(), step - self.last_logged)
        self.last_logged = step
        return values

    def note(self) -> dict[str, Any]:
        """Return what a checkpoint stores, so that training resumed from it continues in the same run."""
        return self.session.note() if self.session is not None else {}
