"""Flyte's reporting callback: the log history as a Deck, checkpoints with the task."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ...trackers.flyte import FlyteTracker, in_task
from ..subjects import checkpoint_of
from ..tracking import TrackingCallback


class FlyteCallback(TrackingCallback):
    """Show the logs as a Deck of the running task, and save checkpoints with it, so that a retry can go on from them.

    Outside a task the same page is `deck.html` in `output_dir`, and there is nothing to save checkpoints to.
    """

    system: ClassVar[str] = "flyte"

    def __init__(self, save_log_history: bool = True, sync_checkpoints: bool = True) -> None:
        super().__init__()
        self.save_log_history = save_log_history
        self.sync_checkpoints = sync_checkpoints

    def make(self, args: Any, state: Any) -> Any:
        del state
        self._context = contextvars.copy_context()
        name = getattr(args, "run_name", None) or Path(args.output_dir).name
        return FlyteTracker(name, directory=None if in_task() else args.output_dir)

    def rewrite(self, logs: Mapping[str, Any], state: Any) -> dict[str, Any]:
        del state
        return dict(logs)

    def deliver(self, values: dict[str, Any], step: int, epoch: float | None) -> None:
        if self.save_log_history:
            super().deliver(values, step, epoch)

    def end(self, status: str) -> None:
        over = self.tracker.deck is not None and not self._context.run(in_task)  # a Deck cannot change after its task
        if self.save_log_history and not over:
            super().end(status)

    def reopen(self) -> None:
        """Do nothing: the page is drawn anew each time it is published, with all rows."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del control, kwargs
        wanted = self.sync_checkpoints and state.is_world_process_zero and getattr(self.tracker, "deck", None) is not None
        if wanted and (folder := checkpoint_of(args, state)) is not None:
            self.tracker.sync_checkpoint(folder)  # here and now: a retry must find it
