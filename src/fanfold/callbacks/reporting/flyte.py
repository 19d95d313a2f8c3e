"""Flyte's reporting callback: the log history as a Deck, checkpoints with the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ...trackers.flyte import FlyteTracker, in_task
from ..model_info import checkpoint_of
from ..report import Target, TrackerReport
from ..tracking import TrackingCallback


class FlyteCallback(TrackingCallback):
    """Show the logs as a Deck of the running task, and save checkpoints with it, so that a retry can continue from them.

    Outside a task the same page is written to `deck.html` in `output_dir`, and checkpoints are not saved.
    """

    system: ClassVar[str] = "flyte"
    keeps_names: ClassVar[bool] = True
    ends_evaluations: ClassVar[bool] = True  # a Deck cannot change after its task

    def __init__(self, save_log_history: bool = True, sync_checkpoints: bool = True) -> None:
        super().__init__()
        self.save_log_history = save_log_history
        self.sync_checkpoints = sync_checkpoints

    def destination(self, args: Any, state: Any) -> Target:
        page = {} if in_task() else {"page": str(Path(args.output_dir, "deck.html").absolute())}
        return Target(FlyteTracker, {"run_name": self.name, **page})

    def names(self, args: Any, state: Any) -> dict[str, Any]:
        return {"name": Path(args.output_dir).name, **{key: value for key, value in super().names(args, state).items() if value}}

    def record(self, report: TrackerReport, values: dict[str, Any], state: Any) -> None:
        if self.save_log_history:
            super().record(report, values, state)

    def checkpoint_saved(self, args: Any, state: Any) -> None:
        wanted = self.sync_checkpoints and getattr(self.tracker, "deck", None) is not None
        if wanted and (folder := checkpoint_of(args, state)) is not None:
            self.tracker.sync_checkpoint(folder)  # immediately: a retry must find it
