"""Neptune's attributes become events: `sys/…` are facts, single values the config, series points, texts and media."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import outcome
from ..media import Histogram
from .events import Artifact, End, Event, Facts, Start, Values
from .reading import MOST_MEDIA, Account, media_of, nanoseconds, read_document

STEP_KEY = "neptune/step"  # the exact value of steps that are not whole numbers
MONITORING = "monitoring/"
_ABOUT = ("sys/", MONITORING, "source_code/")  # about the run and its machine, not its config


class Attributes:
    """The single values of a run, gathered until all are known."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    @property
    def ours(self) -> bool:
        """Whether fanfold sent the run."""
        return "fanfold/status" in self.values or any(path.startswith("fanfold/names/") for path in self.values)

    def names(self) -> dict[str, str]:
        """Return the key of each path that fanfold had to rename."""
        found = {}
        for path, value in self.values.items():
            if path.startswith("fanfold/names/") and isinstance(value, str):
                entry, _ = outcome(json.loads, value)
                if isinstance(entry, list) and len(entry) == 3 and all(isinstance(word, str) for word in entry):
                    found[entry[2]] = entry[0]
        return found

    def began(self) -> list[Event]:
        """Return the run's start and facts."""
        sys = {path.removeprefix("sys/"): value for path, value in self.values.items() if path.startswith("sys/")}
        groups = sys.get("group_tags")
        config, summary = self._values()
        tags = sys.get("tags")
        about = {path.removeprefix("sys/"): _plain(value) for path, value in self.values.items() if path.startswith(_ABOUT)}
        facts: dict[str, Any] = {"neptune": about}
        facts |= {name: _plain(sys[key]) for name, key in (("user", "owner"),) if sys.get(key)}
        facts |= {"node": {"hostname": sys["hostname"]}} if sys.get("hostname") else {}
        return [
            Start(time_ns=nanoseconds(sys.get("creation_time"))),
            Facts(
                name=_text(sys.get("name") or sys.get("experiment/name")), notes=_text(sys.get("description")),
                group=", ".join(sorted(groups)) if isinstance(groups, list) and groups else _text(sys.get("forking/parent")),
                tags=sorted(tags) if isinstance(tags, list) and tags else None, config=config, summary=summary or None,
                archived=True if sys.get("trashed") or sys.get("archived") else None, facts=facts,
            ),
        ]  # fmt: skip

    def _values(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return config and summary; fanfold writes them into folders of their own."""
        config: dict[str, Any] = {}
        summary: dict[str, Any] = {}
        names = self.names() if self.ours else {}
        for path, value in self.values.items():
            key = names.get(path, path)
            if path.startswith(_ABOUT) or (self.ours and path.startswith("fanfold/")):
                continue
            if self.ours and key.startswith("parameters/"):
                config[key.removeprefix("parameters/")] = _plain(value)
            elif self.ours and key.startswith("summary/"):
                summary[key.removeprefix("summary/")] = _plain(value)
            else:
                config[path] = _plain(value)
        return config, summary

    def ended(self, last: int | None) -> list[Event]:
        """Return the run's end, as far as Neptune knows it."""
        status = self.values.get("fanfold/status")
        time_ns = nanoseconds(self.values.get("sys/modification_time")) or last
        if status in ("finished", "failed", "killed"):
            return [End(status=status, time_ns=last or time_ns)]
        if self.values.get("sys/failed") is True:
            return [End(status="failed", time_ns=time_ns)]
        state = str(self.values.get("sys/state", "")).lower()
        return [] if state in ("active", "running") else [End(status="finished", time_ns=time_ns)]


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _text(value: Any) -> str | None:
    return str(value) if value else None


def histogram(key: str, value: Mapping[str, Any], account: Account) -> Histogram | None:
    """Return a histogram of a series."""
    made, error = outcome(lambda: Histogram(np_histogram=(value["values"], value["edges"])))
    if made is None:
        account.leave("histograms", f"cannot be read: {error}", key)
    return made


def file_event(key: str, place: Path, step: int | None, time_ns: int | None) -> Event:
    """Return a file of a series: an image, a sound or a video as a value, anything else as an artifact."""
    made = None
    if place.stat().st_size <= MOST_MEDIA:
        made, _ = outcome(lambda: media_of(read_document(place), place.suffix))
    if made is not None and place.suffix.lower() not in (".txt", ".md", ".html", ".htm"):
        return Values(step=step, time_ns=time_ns, values={key: made})
    return Artifact(name=key, files=[(place.name, place)], step=step, time_ns=time_ns)
