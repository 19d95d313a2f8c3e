"""Weights & Biases. Its steps must never decrease and its finish() does not wait for the data: both are worked around here.

Every row carries our step as `fanfold/step`, which all metrics use as their x axis; wandb's own `_step` is the same number until
a step is repeated or late, and then the next free one. Arrived points are read from wandb's own log.
"""

from __future__ import annotations

import math
import netrc
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from ..media import Media
from ..plain import plain
from ._wandb_log import WandbLog, logs_of
from .base import Alert, Identity, Point, Refusal, Refused
from .destination import SETTLE_SECONDS, Destination, Item
from .face import Tracker
from .tools import mapped, plain_name, until

STEP = "fanfold/step"
OWN_KEYS = frozenset({"_step", "_runtime", "_timestamp", STEP})
EXIT_CODES = {"finished": 0, "failed": 1, "killed": 137, "preempted": 143}
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
QUIET_SECONDS = 2.0  # wandb's own process outlives a killed one by 1.3 s, and may write until then
MAX_BINS = 512
LONGEST_TITLE = 64  # of an alert
# The relay's machine facts, console and code are not the run's; the log is flushed often so that settle() is quick.
SETTINGS: dict[str, Any] = {
    "x_transaction_log_flush_interval": 0.2, "x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True,
    "x_save_requirements": False, "disable_git": True, "disable_code": True, "console": "off", "silent": True,
}  # fmt: skip


class Wandb(Destination):
    """Log to the project `run_name`; other arguments go to `wandb.init`."""

    name = "wandb"
    own_media = frozenset({"Image", "Table"})
    main_process_only = False
    points_replace_summary = True
    delivery = "readable"
    delivery_online = "at least once"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.axis: str = self.init_kwargs.pop("axis", STEP)  # the key of our step in a row
        self._logs: Sequence[WandbLog] = ()  # of all starts

    @classmethod
    def unusable(cls) -> str | None:
        if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
            return None
        base = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
        try:
            known = netrc.netrc(os.environ.get("NETRC") or str(Path("~/.netrc").expanduser())).hosts
        except (OSError, netrc.NetrcParseError):
            known = {}
        if any(host in known for host in ((base,) if base else HOSTS)):
            return None
        return "no key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        super().open(identity, remote)
        self._own_log = self.run.log
        self._sent: Counter[str] = Counter()  # expected records of the log, by kind
        self._summary: set[str] = set()
        self._open: tuple[int | None, set[str]] | None = None  # our step and the keys of the row still open
        self._stamp: dict[str, Any] = {}
        self._step: int | None = None  # our step of the last row
        settings = self.run.settings
        self._log = None if self.run.disabled or settings.x_skip_transaction_log else WandbLog(Path(settings.sync_file))
        if identity is not None:
            self._take_up()

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        arguments = self._arguments(identity)
        if remote is not None:
            arguments = {"resume": "allow", **arguments, "id": remote}
        if identity is not None:
            self.run_name = re.sub(r"[/\\#?%:]", "-", self.run_name)[:128]  # wandb refuses these characters
            if folder := arguments.get("dir") or os.environ.get("WANDB_DIR"):
                Path(folder).mkdir(parents=True, exist_ok=True)
                _await_silence(Path(folder) / "wandb", str(arguments.get("id")))
        fork = self._fork_from(identity) if remote is None and "fork_from" not in arguments else None
        if fork is not None:
            forked = {name: value for name, value in arguments.items() if name != "resume"}  # wandb takes one of the two
            try:
                return self.library.init(project=self.run_name, **forked, fork_from=fork)
            except self.library.Error as error:
                self.warn(
                    "fork",
                    f"wandb could not fork {fork}: {error}. The run there has its own points only, and its parent in its config. "
                    "A fork needs its parent in the same project of a wandb server that supports forks.",
                )
        return self.library.init(project=self.run_name, **arguments)

    def _fork_from(self, identity: Identity | None) -> str | None:
        """Return wandb's name for the point a run was forked at: online, if wandb has the parent in the same project."""
        if identity is None or identity.fork is None or identity.fork.project != identity.project:
            return None
        offline = self.init_kwargs.get("mode") or os.environ.get("WANDB_MODE") or "online"
        return f"{_run_id(identity.fork.run)}?_step={identity.fork.step}" if offline == "online" else None

    def _arguments(self, identity: Identity | None) -> dict[str, Any]:
        """Return the arguments of `wandb.init`: for our runs with id, name and folder unless the user gave them."""
        if identity is None:
            return dict(self.init_kwargs)
        free = getattr(sys.modules.get("wandb"), "run", None) is None  # a user's run stays open
        own = {
            "id": ("WANDB_RUN_ID", _run_id(identity.run_id)),
            "name": ("WANDB_NAME", identity.name),
            "group": ("WANDB_RUN_GROUP", identity.group),
            "dir": ("WANDB_DIR", str(identity.directory)),
            "resume": ("WANDB_RESUME", "allow"),
            "reinit": ("WANDB_REINIT", None if identity.live and free else "create_new"),
        }
        found = {key: value for key, (variable, value) in own.items() if value is not None and not os.environ.get(variable)}
        found |= self.init_kwargs
        settings: Any = found.get("settings") or {}
        return found | ({"settings": {**SETTINGS, **settings}} if isinstance(settings, Mapping) else {})

    def _take_up(self) -> None:
        """Find the last step of earlier starts, and make users' calls place rows as the relay does."""
        logs = logs_of(Path(self.run.settings.sync_dir).parent, self.run.id)
        log = self._log
        self._logs = logs if log is None else [*(one for one in logs if one.path != log.path), log]
        self._last: int = max([one.refresh().last_step for one in self._logs] + [self.run.step - 1])  # wandb's, of the last row
        self.run.define_metric(self.axis, hidden=self.axis == STEP)
        self.run.define_metric("*", step_metric=self.axis, step_sync=self.axis != STEP)  # each row has a hidden axis anyway
        self.run.log = self._log_as_wandb  # wandb drops a row whose step is below the last one
        if self.library.run is self.run:
            self.library.log = self._log_as_wandb

    def _log_as_wandb(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        del commit  # a row is complete when another step begins, or when it is settled
        with self.users_turn():
            self.warn_refused(self.record(data, step, {}))

    def close(self, status: str) -> None:
        self.settle()
        if status == "preempted":
            self.run.mark_preempting()
        self.finish(exit_code=EXIT_CODES.get(status, 1))

    def finish(self, **kwargs: Any) -> None:
        """End the run, and wait for the exit record: offline, wandb returns before its log is complete."""
        self.run.finish(**kwargs)
        log = self._log
        if log is not None and not until(lambda: log.refresh().exit is not None, SETTLE_SECONDS):
            self.warn(
                "exit",
                f"wandb's log {log.path} has no end after {SETTLE_SECONDS:g} s. Its rows are there, its final status may not be. "
                "Look into debug-internal.log beside it.",
            )

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        rows, refused = self.converted(points)
        for point, row in zip(points, rows, strict=True):
            if row:
                self._log_row(point._replace(values=row))
        return refused

    def _log_row(self, point: Point) -> None:
        place = self._place(point)
        self._stamp = {} if point.time is None else {"_timestamp": point.time}
        step = {} if point.step is None else {self.axis: point.step}
        self._own_log({**point.values, **step, **self._stamp}, step=place, commit=False)
        if self._open is not None and place == self._last:
            self._open[1].update(point.values)
        else:
            self._sent["history"] += self._open is not None  # a new step commits the row before it
            self._open = (point.step, set(point.values))
        self._last, self._step = place, point.step

    def _place(self, point: Point) -> int:
        """Return wandb's step for a point: the open row's if it has the same step and none of the keys, else a new one."""
        same = self._open is not None and self._open[0] == point.step and self._open[1].isdisjoint(point.values)
        if same and self.axis == STEP:  # a visible axis needs a value in each row
            return self._last
        return max(self._last + 1, point.step if point.step is not None else 0)

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        """Log as wandb does, with its own rules for steps; next to a relay, with the relay's rules, which drop nothing."""
        if self.identity is not None:
            return self.write([Point(dict(values), self._step if step is None else step)])
        rows, refused = self.converted([Point(dict(values), step)])
        self.run.log(rows[0], step=step, **kwargs)
        return refused

    def settle(self) -> None:
        """Commit the open row and wait until wandb's log on disk has every row and every artifact that was sent."""
        if self._open is not None:
            self._own_log(self._stamp, step=self._last, commit=True)  # every call sets the row's time, including this one
            self._open = None
            self._sent["history"] += 1
        log = self._log
        if log is not None:
            # Config and summary are written with the rest, and sent again if not.
            until(lambda: log.refresh().seen["config"] >= self._sent["config"] and self._summary <= log.summary, 2.0)
            self.wait_until(lambda: self._sent - Counter(config=self._sent["config"]) <= log.refresh().seen, "written its log")

    def counts(self) -> dict[str, int] | None:
        """Count the rows of each key in this run's logs, over all attempts: each has its own folder.

        None online: rows in the log may not have been uploaded when the uploading process was killed.
        """
        if not self.run.offline:
            return None
        found: Counter[str] = Counter()
        for log in self._logs:
            found.update(log.refresh().keys)
        return {key: count for key, count in found.items() if key not in OWN_KEYS and key != self.axis}

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config; values may change later. NaN becomes text, since wandb would turn it into null."""
        self.run.config.update(mapped(plain(values), _no_nan), allow_val_change=True)
        self._sent["config"] += 1

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        del group  # set at wandb.init, and fixed from then on
        if name and name != self.run.name:
            self.run.name = name
        if notes and notes != self.run.notes:
            self.run.notes = notes
        fitting = tuple(tag for tag in tags if 1 <= len(tag) <= 64)
        for tag in set(tags) - set(fitting):
            self.cannot("hold a tag of more than 64 characters", "tags", tag)
        if fitting and fitting != tuple(self.run.tags or ()):
            self.run.tags = fitting

    def set_summary(self, values: Mapping[str, Any]) -> None:
        changed = mapped(plain(values), _no_nan)
        self.run.summary.update(changed)
        self._summary |= changed.keys()

    def define_metric(self, key: str, *, x: str | None, summary: str | None) -> None:
        """Define a metric in wandb, without step_sync, which would add rows of the x metric that were never logged."""
        if "*" in key[:-1]:
            self.cannot("define metrics by a pattern with `*` before its end", key, key)
            return
        if summary in ("sum", "count"):
            self.cannot(f"summarise by {summary}", key, summary)
            summary = None
        self.run.define_metric(key, step_metric=x or self.axis, step_sync=False, summary=summary, overwrite=True)

    def alert(self, alert: Alert) -> None:
        level = {"info": "INFO", "warning": "WARN", "error": "ERROR"}[alert.level]
        at = "" if alert.step is None else f" (step {alert.step})"
        self.run.alert(title=alert.title[:LONGEST_TITLE], text=f"{alert.text}{at}".strip() or alert.title, level=level)
        self._sent["alert"] += 1

    def artifact(self, path: Path, name: str) -> None:
        found = self.library.Artifact(plain_name(name)[:128], type="file")
        found.add_file(str(path), name=Path(name).name, policy="immutable", skip_cache=True)  # blobs never change: no copy
        self.run.log_artifact(found)
        self._sent["artifact"] += 1

    def convert(self, key: str, value: Any, point: Point) -> Any:
        if key in OWN_KEYS and self.identity is not None:
            raise Refused(f"the key {key!r} is wandb's own")
        return super().convert(key, value, point)

    def take_text(self, item: Item) -> str:
        return item.text

    def take_image(self, item: Item) -> Any:
        return self.library.Image(item.value.pil(), caption=item.caption)

    def take_audio(self, item: Item) -> Any:
        return self.library.Audio(str(self.file_of(item)), sample_rate=item.value.sample_rate, caption=item.caption)

    def take_video(self, item: Item) -> Any:
        path = self.file_of(item)
        return self.library.Video(str(path), caption=item.caption, format=path.suffix[1:])

    def take_histogram(self, item: Item) -> Any:
        edges, counts = item.value.edges, item.value.counts
        if len(counts) > MAX_BINS:
            raise Refused(f"a histogram of {len(counts)} bins; wandb takes {MAX_BINS}")
        return self.library.Histogram(np_histogram=(counts.astype(float).tolist(), edges.astype(float).tolist()))

    def take_table(self, item: Item) -> Any:
        rows = [[self.nested(cell, item) if isinstance(cell, Media) else cell for cell in row] for row in item.value.rows]
        return self.library.Table(columns=list(item.value.columns), data=rows, allow_mixed_types=True)

    def take_plotly(self, item: Item) -> Any:
        import plotly.io

        return self.library.Plotly(plotly.io.from_json(item.value.json, skip_invalid=True))

    def take_html(self, item: Item) -> Any:
        return self.library.Html(item.value.html, inject=False, data_is_not_path=True)


class WandBTracker(Tracker):
    destination_class = Wandb


def _await_silence(folder: Path, run_id: str) -> None:
    """Wait until no process is writing an unfinished log of this run, so that everything a killed process left is complete."""
    for log in logs_of(folder, run_id):
        if log.refresh().exit is None:
            until(lambda path=log.path: time.time() - path.stat().st_mtime > QUIET_SECONDS, 30.0)  # type: ignore[misc]


def _run_id(id: str) -> str:
    """Return our run's id as wandb takes it."""
    return re.sub("[:;,#?/']", "-", id)


def _no_nan(value: Any) -> Any:
    return "nan" if isinstance(value, float) and math.isnan(value) else value
