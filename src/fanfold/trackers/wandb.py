"""Weights & Biases. Its rows never go back in step and its finish() is no barrier: both are worked around here.

Every row carries our step as `fanfold/step`, which all metrics use as their x axis; wandb's own `_step` is the same
number until a step comes twice or late, and then the next free one. What has arrived is read from wandb's own log.
"""

from __future__ import annotations

import netrc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlparse

from ..errors import notices
from ..media import Media
from ._wandb_log import WandbLog, logs_of
from .base import Adapter, Alert, Identity, Point, Refusal, Refused, clean_config, on_main_process, prepared
from .tools import file_of, mapped, plain_name, until

STEP = "fanfold/step"
OWN_KEYS = frozenset({"_step", "_runtime", "_timestamp", STEP})
EXIT_CODES = {"finished": 0, "failed": 1, "killed": 137, "preempted": 143}
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
SETTLE_SECONDS = 60.0
QUIET_SECONDS = 2.0  # wandb's own process outlives a killed one by 1.3 s, and may write until then
MAX_BINS = 512
LONGEST_TITLE = 64  # of an alert
# The relay's own machine facts, console and code are not the run's; the log is flushed often so that settle() is quick.
SETTINGS: dict[str, Any] = {
    "x_transaction_log_flush_interval": 0.2, "x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True,
    "x_save_requirements": False, "disable_git": True, "disable_code": True, "console": "off", "silent": True,
}  # fmt: skip


class WandBTracker(Adapter):
    """Log to the project `run_name`; other arguments go to `wandb.init`."""

    name: ClassVar[str] = "wandb"
    main_process_only = False
    delivery: ClassVar[str] = "readable"
    delivery_online: ClassVar[str | None] = "at least once"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._adopted = False
        self._logs: list[WandbLog] = []
        self._rows = 0  # committed since start(), which the log must show
        self._artifacts = 0
        self._configs = 0
        self._alerts = 0
        self._summary: set[str] = set()
        self._last = -1  # wandb's own step of the last row
        self._open: tuple[int | None, set[str]] | None = None  # our step and the keys of the row still open
        self._stamp: dict[str, Any] = {}
        self._step: int | None = None  # our step of the last row

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

    def adopt(self, identity: Identity) -> None:
        self._adopted = True
        given = {
            "id": ("WANDB_RUN_ID", _without(identity.run_id, ":;,#?/'")),
            "name": ("WANDB_NAME", identity.name),
            "group": ("WANDB_RUN_GROUP", identity.group),
            "dir": ("WANDB_DIR", str(identity.directory)),
            "resume": ("WANDB_RESUME", "allow"),
            "reinit": ("WANDB_REINIT", None if identity.live and _no_run() else "create_new"),  # a run of the user's stays
        }
        for key, (variable, value) in given.items():
            if value is not None and not os.environ.get(variable):
                self.init_kwargs.setdefault(key, value)
        settings = self.init_kwargs.get("settings") or {}
        if isinstance(settings, Mapping):
            self.init_kwargs["settings"] = {**SETTINGS, **settings}
        self.run_name = _without(self.run_name, "/\\#?%:")[:128]

    def resume(self, remote: str) -> None:
        self.init_kwargs["id"] = remote
        self.init_kwargs.setdefault("resume", "allow")

    @on_main_process
    def start(self) -> None:
        import wandb

        if self._adopted and (folder := self.init_kwargs.get("dir") or os.environ.get("WANDB_DIR")):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._await_silence(Path(folder) / "wandb")
        self.run = wandb.init(project=self.run_name, **self.init_kwargs)
        self._own_log = self.run.log
        self._rows, self._artifacts, self._configs, self._alerts, self._open = 0, 0, 0, 0, None
        self._log = WandbLog(Path(self.run.settings.sync_file)) if self._keeps_log() else None
        if self._adopted:
            folders = Path(self.run.settings.sync_dir).parent
            self._logs = [log for log in logs_of(folders, self.run.id) if self._log is None or log.path != self._log.path]
            self._logs += [self._log] if self._log is not None else []
            steps = [log.refresh().last_step for log in self._logs]
            self._last = max([*steps, self.run.step - 1])
            self.run.define_metric(STEP, hidden=True)
            self.run.define_metric("*", step_metric=STEP)
            self._share_steps(wandb)

    def _share_steps(self, wandb: Any) -> None:
        """Have `run.log` and `wandb.log` place rows as the relay does: wandb drops a row whose step is below the last one."""
        self.run.log = self._log_as_wandb
        if wandb.run is self.run:
            wandb.log = self._log_as_wandb

    def _log_as_wandb(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        del commit  # a row is complete when another step begins, or when it is settled
        self.log(data, step)

    def _keeps_log(self) -> bool:
        settings = self.run.settings
        return not (self.run.disabled or settings.x_skip_transaction_log)

    def _await_silence(self, folder: Path) -> None:
        """Wait until nobody writes an unfinished log of this run: what a killed process left behind is then all there."""
        for log in logs_of(folder, str(self.init_kwargs.get("id"))):
            if log.refresh().exit is None:
                until(lambda path=log.path: time.time() - path.stat().st_mtime > QUIET_SECONDS, 30.0)  # type: ignore[misc]

    @property
    def tracker(self) -> Any:
        return self.run

    @property
    def remote(self) -> str | None:
        run = getattr(self, "run", None)
        return None if run is None else str(run.id)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration; a value may change later. NaN becomes a text, which wandb would make null."""
        self.run.config.update(mapped(clean_config(values), _no_nan), allow_val_change=True)
        self._configs += 1

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        del group  # given at wandb.init, and fixed from then on
        if name and name != self.run.name:
            self.run.name = name
        if notes and notes != self.run.notes:
            self.run.notes = notes
        fitting = tuple(tag for tag in tags if 1 <= len(tag) <= 64)
        for tag in set(tags) - set(fitting):
            self._cannot("hold a tag of more than 64 characters", "tags", tag)
        if fitting and fitting != tuple(self.run.tags or ()):
            self.run.tags = fitting

    # What the relay calls

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        with tempfile.TemporaryDirectory(prefix="fanfold-wandb-") as folder:
            rows, refused = prepared(points, lambda _point, key, value: _checked(key, value, Path(folder)))
            for point, row in zip(points, rows, strict=True):
                if row:
                    self._log_row(point._replace(values=row))
        return refused

    def _log_row(self, point: Point) -> None:
        place = self._place(point)
        self._stamp = {} if point.time is None else {"_timestamp": point.time}
        step = {} if point.step is None else {STEP: point.step}
        self._own_log({**point.values, **step, **self._stamp}, step=place, commit=False)
        self._note(point, place)

    def _place(self, point: Point) -> int:
        """Return wandb's step for a point: the open row's if it is of the same step and has none of the keys, else a new one."""
        if self._open is not None and self._open[0] == point.step and self._open[1].isdisjoint(point.values):
            return self._last
        return max(self._last + 1, point.step if point.step is not None else 0)

    def _note(self, point: Point, place: int) -> None:
        if self._open is not None and place == self._last:
            self._open[1].update(point.values)
        else:
            self._rows += self._open is not None  # a new step commits the row before it
            self._open = (point.step, set(point.values))
        self._last, self._step = place, point.step

    def settle(self) -> None:
        """Commit the open row and wait until wandb's log on disk has every row and every artifact that was sent."""
        if self._open is not None:
            self._own_log(self._stamp, step=self._last, commit=True)  # every call sets the row's time, this one too
            self._open = None
            self._rows += 1
        log = self._log
        if log is None:
            return
        # Written with the rest, and said again if not.
        until(lambda: log.refresh().configs >= self._configs and self._summary <= log.summary, 2.0)
        if not until(lambda: self._arrived(log), SETTLE_SECONDS):
            raise TimeoutError(
                f"wandb's log {log.path} has {log.rows} of {self._rows} rows after {SETTLE_SECONDS:g} s. Nothing is lost; "
                "it is looked at again. Look into debug-internal.log beside it if this stays."
            )

    def _arrived(self, log: WandbLog) -> bool:
        log.refresh()
        return log.rows >= self._rows and log.artifacts >= self._artifacts and log.alerts >= self._alerts

    def counts(self) -> dict[str, int] | None:
        """Count the rows of each key in the logs of this run, of every attempt: each has a folder of its own.

        None online: what is in the log may not have been uploaded when the process that did it was killed.
        """
        if not self.run.offline:
            return None
        found: dict[str, int] = {}
        for log in self._logs:
            for key, count in log.refresh().keys.items():
                found[key] = found.get(key, 0) + count
        return {key: count for key, count in found.items() if key not in OWN_KEYS}

    def set_summary(self, values: Mapping[str, Any]) -> None:
        changed = mapped(clean_config(values), _no_nan)
        self.run.summary.update(changed)
        self._summary |= changed.keys()

    def define_metric(self, key: str, *, x: str | None, summary: str | None) -> None:
        """Define a metric in wandb. Without step_sync, which would add rows of the x metric that nobody logged."""
        if "*" in key[:-1]:
            self._cannot("define metrics by a pattern with `*` before its end", key, key)
            return
        if summary in ("sum", "count"):
            self._cannot(f"summarise by {summary}", key, summary)
            summary = None
        self.run.define_metric(key, step_metric=x or STEP, step_sync=False, summary=summary, overwrite=True)

    def alert(self, alert: Alert) -> None:
        level = {"info": "INFO", "warning": "WARN", "error": "ERROR"}[alert.level]
        at = "" if alert.step is None else f" (step {alert.step})"
        self.run.alert(title=alert.title[:LONGEST_TITLE], text=f"{alert.text}{at}".strip() or alert.title, level=level)
        self._alerts += 1

    def artifact(self, path: Path, name: str) -> None:
        import wandb

        found = wandb.Artifact(plain_name(name)[:128], type="file")
        found.add_file(str(path), name=Path(name).name, policy="immutable", skip_cache=True)  # blobs never change: no copy
        self.run.log_artifact(found)
        self._artifacts += 1

    def close(self, status: str) -> None:
        self.settle()
        if status == "preempted":
            self.run.mark_preempting()
        self._end(exit_code=EXIT_CODES.get(status, 1))

    # What Accelerate and users call

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log as wandb does, with its own rules for steps; beside a relay, with the relay's, which drop nothing."""
        if self._adopted:
            self.warn_refused(self.write([Point(dict(values), self._step if step is None else step)]))
            return
        with tempfile.TemporaryDirectory(prefix="fanfold-wandb-") as folder:
            ready = {key: _native(value, Path(folder)) for key, value in values.items()}
            self.run.log(ready, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of images under each key."""
        import wandb

        for key, images in values.items():
            self.log({key: [wandb.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str] | None = None, data: list[list[Any]] | None = None, dataframe: Any = None,
        step: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Log a table of columns and rows, or a data frame."""
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self._end()

    def _end(self, **kwargs: Any) -> None:
        """Finish, and wait for the exit record: offline, finish() comes back before the log is whole."""
        self.run.finish(**kwargs)
        log = self._log
        if log is not None and not until(lambda: log.refresh().exit is not None, SETTLE_SECONDS):
            notices.once(
                "wandb:exit",
                f"wandb's log {log.path} has no end after {SETTLE_SECONDS:g} s. Its rows are there, its final status may not be. "
                "Look into debug-internal.log beside it.",
            )


def _no_run() -> bool:
    """Return whether `wandb.run` is free to be ours."""
    return getattr(sys.modules.get("wandb"), "run", None) is None


def _without(text: str, signs: str) -> str:
    """Return text with characters that wandb refuses in an id or a project as dashes."""
    return "".join("-" if sign in signs else sign for sign in text)


def _checked(key: str, value: Any, folder: Path) -> Any:
    """Return a value as wandb takes it, or refuse it."""
    if key in OWN_KEYS:
        raise Refused(f"the key {key!r} is wandb's own")
    try:
        return _native(value, folder)
    except (TypeError, ValueError) as error:
        raise Refused(f"wandb's own classes do not take it: {error}") from error


def _no_nan(value: Any) -> Any:
    return "nan" if isinstance(value, float) and value != value else value  # noqa: PLR0124 - NaN is what differs from itself


# Media


def _native(value: Any, folder: Path) -> Any:
    """Return wandb's object for one of ours, and anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(item, Media) for item in value):
        return [_native(item, folder) for item in value]
    return _MEDIA[value.kind](value, folder) if isinstance(value, Media) else value


def _image(value: Any, folder: Path) -> Any:
    import wandb

    del folder
    return wandb.Image(value.pil(), caption=value.caption)


def _audio(value: Any, folder: Path) -> Any:
    import wandb

    return wandb.Audio(file_of(value, folder), sample_rate=value.sample_rate, caption=value.caption)


def _video(value: Any, folder: Path) -> Any:
    import wandb

    path = file_of(value, folder)
    return wandb.Video(path, caption=value.caption, format=path.rpartition(".")[2])


def _histogram(value: Any, folder: Path) -> Any:
    import numpy as np
    import wandb

    del folder
    edges, counts = np.asarray(value.edges, float), np.asarray(value.counts, float)
    if len(counts) > MAX_BINS:
        raise Refused(f"a histogram of {len(counts)} bins; wandb takes {MAX_BINS}")
    return wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))


def _table(value: Any, folder: Path) -> Any:
    import wandb

    rows = [[_native(cell, folder) for cell in row] for row in value.rows]
    return wandb.Table(columns=list(value.columns), data=rows, allow_mixed_types=True)


def _figure(value: Any, folder: Path) -> Any:
    import wandb

    if value.png is not None:
        from ..media import Image

        return _image(Image(value.png, caption=value.caption), folder)
    import plotly.io

    return wandb.Plotly(plotly.io.from_json(value.json, skip_invalid=True))


def _html(value: Any, folder: Path) -> Any:
    import wandb

    del folder
    return wandb.Html(value.html, inject=False, data_is_not_path=True)


def _text(value: Any, folder: Path) -> str:
    del folder
    return str(value.text)


_MEDIA: dict[str, Callable[[Any, Path], Any]] = {
    "image": _image,
    "audio": _audio,
    "video": _video,
    "histogram": _histogram,
    "table": _table,
    "figure": _figure,
    "html": _html,
    "text": _text,
}
