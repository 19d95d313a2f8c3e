"""Trackio's reporting callback: rows by `global_step`, including the training summary, and Spaces for pushed models."""

from __future__ import annotations

import re
import secrets
from typing import Any, ClassVar

from ...errors import guard
from ...trackers.trackio import TrackioTracker
from ..model_info import parameter_count, rewrite_logs
from ..report import Target
from ..tracking import PROJECT, TrackingCallback
from .model_card import add_to_model_card

AXIS = "train/global_step"
_USUAL = {"auto_log_gpu": None, "auto_log_cpu": None, "embed": True}  # the defaults of trackio.init()
SPACE = "https://huggingface.co/spaces/{}"


class TrackioCallback(TrackingCallback):
    """Log to the Trackio project `project` of the training arguments.

    `trackio_space_id`, `trackio_bucket_id`, `trackio_static_space_id` and `hub_private_repo` select where it is shown.
    """

    system: ClassVar[str] = "trackio"

    def __init__(self) -> None:
        super().__init__()
        import trackio

        self._trackio = trackio
        self._space_id: str | None = None
        self._static_space_id: str | None = None

    def destination(self, args: Any, state: Any) -> Target:
        known = {"space_id": "trackio_space_id", "private": "hub_private_repo", "bucket_id": "trackio_bucket_id"}
        found = {key: value for key, name in known.items() if (value := getattr(args, name, None)) is not None}
        arguments = {"run_name": getattr(args, "project", None) or PROJECT, "resume": "allow", **found}
        return Target(TrackioTracker, arguments, _USUAL)

    def current(self) -> Target | None:
        run = self._trackio.context_vars.current_run.get()
        if run is None:
            return None
        arguments = {"run_name": run.project, "name": run.name}
        return Target(TrackioTracker, arguments, joined=True, name=run.name, given=run)

    def config(self, args: Any, model: Any) -> dict[str, Any]:
        count = parameter_count(model)
        return {**super().config(args, model), **({} if count is None else {"model/num_parameters": count})}

    def opened(self, args: Any, state: Any, model: Any) -> None:
        self._space_id = self._trackio.context_vars.current_space_id.get()

    def rewrite(self, logs: Any, state: Any) -> dict[str, Any]:
        return {**rewrite_logs(logs), AXIS: state.global_step}

    def leave(self) -> None:
        if self._trackio.context_vars.current_run.get() is self.tracker.run:
            self._trackio.context_vars.current_run.set(None)

    # Spaces

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trained = self._training and state.is_world_process_zero
        super().on_train_end(args, state, control, **kwargs)
        if trained and self._space_id and getattr(args, "trackio_static_space_id", None) is not False:
            with guard("freeze the Trackio Space after training"):
                self._static_space_id = self._trackio.freeze(
                    space_id=self._space_id,
                    project=args.project,
                    new_space_id=self._static_name(args),
                    private=args.hub_private_repo,
                )
                self._show_on_model(kwargs.get("model"))

    def on_push_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or self.tracker is None:
            return
        if self._space_id or getattr(args, "trackio_static_space_id", None) is False:
            return  # a live Space is frozen when training ends
        if self.report is not None:
            self.report.catch_up()
        with guard("copy the Trackio project to a static Space"):
            self._static_space_id = self._trackio.sync(
                project=self.tracker.run_name,
                sdk="static",
                space_id=self._static_name(args),
                private=args.hub_private_repo,
                bucket_id=getattr(args, "trackio_bucket_id", None),
                force=True,
            )
            self._show_on_model(model)

    def _static_name(self, args: Any) -> str:
        return self._static_space_id or getattr(args, "trackio_static_space_id", None) or space_name(args.project)

    def _show_on_model(self, model: Any) -> None:
        """Tag the model and link its card to the metrics."""
        space = SPACE.format(self._static_space_id or self._space_id)
        kept = [tag for tag in getattr(model, "model_tags", None) or [] if not str(tag).startswith("trackio")]
        model.model_tags = [*kept, "trackio", f"trackio:{space}"]
        add_to_model_card(f"[Trackio]({space})")


def space_name(project: str) -> str:
    """Return a name for a project's Space that the Hub accepts and that is not in use."""
    plain = re.sub(r"[^a-z0-9._]+", "-", project.lower()).strip("-_.")[:80] or "trackio-project"
    return f"{plain}-static-{secrets.token_hex(3)}"
