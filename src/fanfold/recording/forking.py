"""init(fork="RUN@1200"): which run a new one continues, and from which step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import RunError, RunNotFound, SettingError, notices
from ..journal.directory import journal_files, last_step

if TYPE_CHECKING:
    from ..journal.bodies import Fork

EXPECTED = 'a run and a step, such as "RUN@1200"'
_WANDB = r"(?s)(?P<run>.+)\?_step=(?P<step>\d+)"
_OURS = r"(?s)(?P<run>.+)@(?P<step>\d+)"
LAST = (1 << 63) - 2  # the highest step that can be forked at


class ForkPoint(NamedTuple):
    """A run, by id, name or PROJECT/ID, and the last of its steps that the fork has, too."""

    run: str
    step: int


def fork_point(value: Any) -> ForkPoint:
    """Read `RUN@STEP`, or `RUN?_step=STEP` as wandb writes it."""
    found = (re.fullmatch(_WANDB, value) or re.fullmatch(_OURS, value)) if isinstance(value, str) else None
    if found is None or len(found["step"]) > 19 or int(found["step"]) > LAST:
        raise ValueError(EXPECTED)
    return ForkPoint(found["run"], int(found["step"]))


def parent_of(root: Path, project: str, run_id: str, point: ForkPoint) -> tuple[Fork, dict[str, Any]]:
    """Return what a new run's header says of its parent, and the parent's config; its own project is searched first."""
    from ..journal.bodies import Fork
    from ..store import query

    store, itself = query.LocalStore(root), (project, run_id)
    try:
        try:
            parent = query.find(store, point.run, project, besides=itself)
        except RunNotFound:
            parent = query.find(store, point.run, besides=itself)
    except RunError as error:
        said = str(error).replace("Nothing was read. ", "").replace("None was opened. ", "")
        raise SettingError(f'init(fork="{point.run}@{point.step}") cannot be used: {said} The run was not started.') from error
    steps = [step for file in journal_files(parent.path) if (step := last_step(file)) is not None]
    if parent.status != "running" and max(steps, default=-1) < point.step:
        notices.once(
            f"fork:{run_id}",
            f"run {parent.name} ({parent.id}) ends at step {max(steps, default=-1)}, and this run forks it at {point.step}. "
            "Its curves have a gap in between. Check the step in init(fork=…).",
        )
    return Fork(parent.project, parent.id, point.step), parent.config
