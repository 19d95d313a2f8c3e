"""The summary of a live run, and the dict a user sees of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import guard, notices, verb
from ..journal import Writer
from ..plain import plain
from ..values import text_of
from .history import RunHistory
from .recorder import Recorder
from .tallies import MetricRule, warn_about_patterns


class RunSummary:
    """The summary of a run: computed from the logged values, plus entries that the user assigned."""

    def __init__(self, writer: Writer, recorder: Recorder, history: RunHistory, known: Mapping[str, Any]) -> None:
        self.strict = recorder.strict
        self.assigned: dict[str, Any] = dict(known.get("summary") or {})
        self._writer = writer
        self._recorder = recorder
        self._history = history
        self._tallies = recorder.tallies
        self._tallies.metrics = known.get("metrics") or {}

    def define(self, metric: MetricRule) -> None:
        """Set how keys are summarised from now on; their earlier values are counted when needed."""
        pattern = text_of(metric.key)
        before = self._tallies.metrics.get(pattern, {})  # a second call for a key adds to the first, as in W&B
        metric = MetricRule(pattern, metric.x or before.get("x"), metric.summary or before.get("summary"))
        self._recorder.event("metric", {"key": pattern, **metric.as_dict()})
        needed = {known for known in self._writer.latest() if self._tallies.needs(known)}
        self._tallies.metrics = {**self._tallies.metrics, pattern: metric.as_dict()}
        warn_about_patterns(self._tallies.metrics, pattern)
        marks = self._writer.recount()
        for known in self._writer.latest():
            if known not in needed and self._tallies.needs(known):
                self._history.uncounted(known, marks)

    @verb("compute the summary", dict)
    def computed(self) -> dict[str, Any]:
        latest = {**self._history.latest, **self._writer.latest(), **self._recorder.texts}
        return self._tallies.summarise(latest.items(), self._history.tally)

    @verb("add to the summary", dict)
    def assign(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        new: dict[str, Any] = plain(dict(*args, **kwargs))
        self.assigned.update(new)
        self._recorder.info({"summary": dict(self.assigned)})
        return new

    @verb("remove from the summary")
    def remove(self, keys: Sequence[str]) -> None:
        """Remove entries the user assigned. Summaries of logged metrics are computed, and stay."""
        for key in keys:
            self.assigned.pop(key, None)
        self._recorder.info({"summary": dict(self.assigned)})
        if any(key in self.computed() for key in keys):
            notices.once(
                f"summary:{self._recorder.member.run_id}",
                "the summary of a logged metric cannot be removed. To leave it out: define_metric(…, summary='none').",
            )


class SummaryView(dict[str, Any]):
    """A snapshot of a run's summary: the computed summary of each key, plus what the user assigned."""

    def __init__(self, source: RunSummary) -> None:
        self._source = source
        super().__init__({**source.computed(), **source.assigned})

    def __setitem__(self, key: str, value: Any) -> None:
        with guard("add to the summary", strict=self._source.strict):
            self.update({key: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(self._source.assign(*args, **kwargs))

    def __delitem__(self, key: str) -> None:
        with guard("remove from the summary", strict=self._source.strict):
            self._source.remove([key])
            super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        value = super().get(key, *default)
        if key in self:
            del self[key]
        return value

    def clear(self) -> None:
        with guard("clear the summary", strict=self._source.strict):
            self._source.remove(list(self))
            super().clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy does not belong to the run
