"""A run before this process wrote to it: its facts when it is resumed, and earlier values that its summary includes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import guard, outcome
from .tallies import NO_STEP, Tally


class RunHistory:
    """The earlier attempts of a run; a directory that cannot be read counts as an empty history."""

    def __init__(self, path: Path, rank: int, attempt: str, *, resumed: bool) -> None:
        self._run: Any = None
        if resumed:
            from ..store.earlier import Earlier

            self._run = Earlier(path, rank, attempt)
        self._own: dict[str, dict[Path, int]] = {}  # by key: up to where in our own journals values were not counted
        self._known: dict[tuple[str, int | None], Tally] = {}

    def facts(self) -> dict[str, Any]:
        """Return config, name, tags and other facts at their latest values."""
        if self._run is None:
            return {}
        found: dict[str, Any] = {}
        with guard("read what earlier attempts of the run left"):
            found = {**self._run.info, "metrics": {key: dict(rule) for key, rule in self._run.metrics.items()}}
        return found  # noqa: RET504 - the guard may have caught an error

    @cached_property
    def latest(self) -> dict[str, Any]:
        """Return the last value of each key."""
        if self._run is None:
            return {}
        return outcome(lambda: dict(self._run.latest))[0] or {}

    def uncounted(self, key: str, marks: Mapping[Path, int]) -> None:
        """Remember that a key's values up to these offsets of our journals were written before its rule was defined."""
        self._own.setdefault(key, dict(marks))

    def tally(self, key: str, own: Tally) -> Tally:
        """Return the tally of values logged under a key before counting began; journals are read only once."""
        late = self._late(key)
        began = late.began if late.count else own.began if own.count else None
        found = self._known.get((key, began))
        if found is None:
            found, _ = outcome(self._earlier, key, began)
            found = self._known[key, began] = found or Tally()
        return found.plus(late)

    def _late(self, key: str) -> Tally:
        if key not in self._own:
            return Tally()
        found = self._known.get((key, NO_STEP))
        if found is None:
            found = Tally()
            for path, end in self._own[key].items():
                with guard("read the values that were logged before define_metric()"):
                    from ..journal import Journal

                    journal = Journal(path)
                    journal.refresh()
                    column = journal.column(key, until=end)
                    found = found.plus(Tally.of(column.steps, column.values))
            self._known[key, NO_STEP] = found
        return found

    def _earlier(self, key: str, began: int | None) -> Tally:
        """Return the tally of earlier attempts; steps from `began` on were logged again by this attempt and are left out."""
        if self._run is None:
            return Tally()
        series = self._run.series(key, own=True)
        keep = slice(None) if began is None or began == NO_STEP else series.steps < began
        return Tally.of(series.steps[keep], series.values[keep])
