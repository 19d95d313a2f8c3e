"""FANFOLD_MODE=disabled: a run whose every method works and records nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import Config, as_mapping
from .control import Control, Knob


class DisabledRun:
    """A stand-in for Run with the same attributes, but no files and no threads."""

    id = "disabled"
    status = "disabled"
    rank, world_size, attempt = 0, 1, 1
    path = Path("/nonexistent")
    is_main_process = True
    strict = False
    fork = None

    def __init__(self, project: str | None, name: str | None, config: Any) -> None:
        self.project = project or "default"
        self.name = name or "disabled"
        self.config = Config(as_mapping(config), lambda _config: None)
        self.summary: dict[str, Any] = {}
        self.tags: tuple[str, ...] = ()
        self.notes: str | None = None
        self.group: str | None = None
        self.trackers: list[str] = []
        self.control = Control()

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        """Accept any arguments and do nothing."""

    log = alert = artifact = define_metric = finish = _nothing

    def span(self, kind: str) -> Any:
        return contextlib.nullcontext()

    def knob(self, name: str, value: Any, min: float | None = None, max: float | None = None) -> Knob:
        return Knob(str(name), value, min, max)

    def ops(self) -> list[dict[str, Any]]:
        return []

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        from ..relay.attach import Silent

        return Silent()

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def __enter__(self) -> DisabledRun:
        return self

    def __exit__(self, *_error: object) -> None:
        """Do nothing; there is nothing to close."""
