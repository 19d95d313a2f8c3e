"""ClearML: tasks on a server, or offline sessions to import later. A kill loses nothing; online it may repeat points.

By default, ClearML seeds every random generator, forks a reporter that can hang, takes over signals and stores NaN as 0.0. All of
that is prevented here.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plain import plain
from . import _clearml_session as session
from .base import NO_STEP, Identity, Point, Refused, flat_config, on_main_process
from .destination import Destination, Item
from .face import Tracker
from .tools import cell_of, named, text_of, truthy

SECTION = "config"  # of the hyperparameters
STATUS, RUN = "fanfold_status", "fanfold_run"
_ours: set[str] = set()  # tasks opened in this process for our runs
LISTED = re.compile(r"(.*) \[(\d+)/(\d+)\]", re.DOTALL)
_FRAMEWORKS = (
    "matplotlib tensorflow tensorboard pytorch xgboost scikit fastai lightgbm hydra detect_repository tfdefines joblib "
    "megengine catboost gradio"
).split()
_QUIET: dict[str, Any] = {
    "auto_connect_frameworks": dict.fromkeys(_FRAMEWORKS, False), "auto_connect_arg_parser": False,
    "auto_connect_streams": False, "auto_resource_monitoring": False,
}  # fmt: skip


class ClearML(Destination):
    """Log to a ClearML task: the open one, or a new one; arguments go to `Task.init`.

    `CLEARML_PROJECT` and `CLEARML_TASK` take precedence over `run_name`.
    """

    name = "clearml"
    own_name = "task"
    delivery = "readable"
    delivery_online = "at least once"
    layouts = ("fanfold", "accelerate")

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.user_provided_run_name = run_name
        self._users = self._tried = False  # whether the task belongs to the user; whether we have tried to create one
        self._summary: dict[str, Any] = {}

    @classmethod
    def unusable(cls) -> str | None:
        known = ("CLEARML_API_ACCESS_KEY", "CLEARML_AUTH_TOKEN")
        if truthy(os.environ.get("CLEARML_OFFLINE_MODE")) or any(os.environ.get(name) for name in known):
            return None
        places = (os.environ.get("CLEARML_CONFIG_FILE") or "~/clearml.conf", "~/trains.conf")
        if any(Path(place).expanduser().exists() for place in places):
            return None
        return "no credentials: run `clearml-init`, set CLEARML_API_ACCESS_KEY, or set CLEARML_OFFLINE_MODE=1"

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        self._layout = "accelerate" if identity is None else identity.layout  # how titles, series and config are named
        super().open(identity, remote)
        folder = self.run.get_offline_mode_folder()
        self._events = session.Events(None if folder is None else Path(str(folder)) / session.METRICS)
        self._sent = self._events.refresh()  # events sent since the start, plus those already there

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        from clearml import Task

        current = Task.current_task()
        if current and self._tried:
            current.close()  # left half-created by a failed start
        elif current and current.id in _ours and identity is not None:
            raise BlockingIOError(
                "ClearML holds one task per process, and that of another run is open here. This run is delivered when that one "
                "has finished. Use relay='process', the default, to have both at once."
            )
        elif current:
            self._users = True
            return current
        Task.set_random_seed(None)  # otherwise Task.init seeds Python, numpy and torch
        Task._report_subprocess_enabled = False  # noqa: SLF001 - only switch outside a config file; the reporter's fork can hang
        arguments = {
            "project_name": os.environ.get("CLEARML_PROJECT") or self.run_name,
            "task_name": os.environ.get("CLEARML_TASK") or (identity.name if identity else self.run_name),
            **self.init_kwargs,
        }
        return Task.init(**arguments) if identity is None else self._begin_ours(identity, remote, Task, arguments)

    def _begin_ours(self, identity: Identity, known: str | None, task: Any, arguments: dict[str, Any]) -> Any:
        tag = f"{session.TAG}{identity.run_id}"  # finds a task whose relay was killed before it knew the id
        if task.is_offline():
            session.place_in(identity.directory)
            known = session.prepared(known or f"offline-{identity.digest(32)}", arguments)
        elif known is None:
            known = next(map(str, task.query_tasks(project_name=arguments["project_name"], tags=[tag])), None)
        if known is not None:
            arguments |= {"reuse_last_task_id": known, "continue_last_task": 0}  # 0: steps are kept unchanged
        else:
            arguments |= {"reuse_last_task_id": False, "tags": [*arguments.get("tags", ()), tag]}
        self._tried = True
        with session.hooks_kept():
            made = task.init(**{**_QUIET, **arguments})
        _ours.add(str(made.id))
        return made

    @property
    def _offline(self) -> bool:
        return bool(self.run.is_offline())

    def close(self, status: str) -> None:
        """End the task: completed, failed, or stopped for killed and preempted. Offline the status is a property of the task."""
        self._set_properties({STATUS: status})
        ended, offline = self.run.id, self._offline
        self.finish()
        if status == "finished" or offline or self._users:
            return
        from clearml import Task

        again = Task.get_task(task_id=ended)  # close() has marked it completed
        if status == "failed":
            again.mark_failed(status_reason=status, force=True)
        else:
            again.mark_stopped(status_message=status, force=True)

    def finish(self) -> None:
        if self.run and not self._users:
            self.run.close()

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config: as Accelerate does if used directly, else as JSON and as flat hyperparameters."""
        if self.identity is None:
            self.run.connect_configuration(values)
            return
        if self._layout == "accelerate":
            self.run.connect_configuration(plain(values))
        else:
            text = json.dumps(plain(values), indent=1, ensure_ascii=False)
            self.run.set_configuration_object(name=SECTION, config_text=text, config_type="json")
        self.run.set_parameters({f"{SECTION}/{key}": value for key, value in flat_config(values).items()})
        self._set_properties({})  # setting parameters removes them

    def _set_properties(self, properties: dict[str, str]) -> None:
        """Set properties of the task; that of an offline session says which run it is, so that an import recognises it."""
        ours = {RUN: self.identity.run_id} if self.identity is not None and self._offline else {}
        if ours or properties:
            self.run.set_user_properties(**ours, **properties)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Report numbers as single values, and anything else as user properties."""
        for key, value in flat_config(values).items():
            if self._summary.get(key, self) == value:
                continue
            if isinstance(value, (bool, int, float)):
                self._allow(value)
                self.run.get_logger().report_single_value(name=key, value=float(value))
                self._sent += 1
            else:
                self.run.set_user_properties(**{f"summary.{key}": text_of(value)})
            self._summary[key] = value

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        if name and "task_name" not in self.init_kwargs and not os.environ.get("CLEARML_TASK"):
            self.run.set_name(name)
        if tags:
            self.run.add_tags(list(tags))
        if notes:
            self.run.set_comment(notes)
        if group:
            self.run.set_user_properties(group=group)

    def artifact(self, path: Path, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = named(path, Path(folder), Path(name).name)  # its name on the server; the blob's name is a hash
            if not self.run.upload_artifact(name, artifact_object=file, wait_on_upload=True):
                raise ConnectionError(f"ClearML did not take the file {name!r}")

    def number(self, key: str, value: float, point: Point) -> None:
        self._allow(value)
        arguments = {name: argument for name, argument in point.kwargs.items() if name != NO_STEP}
        logger = self.run.get_logger()
        if point.step is None or NO_STEP in point.kwargs:
            logger.report_single_value(name=key, value=value, **arguments)
        else:
            title, series = _PLACES[self._layout](key)
            logger.report_scalar(title=title, series=series, value=value, iteration=point.step, **arguments)
        self._sent += 1

    def _allow(self, value: float) -> None:
        """Make ClearML store the next NaN or infinity unchanged: a session's file can hold it, ClearML's server cannot."""
        if math.isfinite(value):
            return
        if self._offline and math.isnan(value):
            self.run.get_logger().set_reporting_nan_value(value)
        elif self._offline:
            self.run.get_logger().set_reporting_inf_value(value)  # read when the event is created, so each keeps its sign
        elif self.identity is not None:
            raise Refused(f"ClearML's server has no {value}")  # https://github.com/clearml/clearml/issues/604

    def take(self, item: Item) -> None:
        super().take(item)
        self._sent += 1

    def _where(self, item: Item) -> dict[str, Any]:
        title, series = _PLACES[self._layout](item.key)
        one = f"{series} [{item.at + 1}/{item.of}]" if item.of > 1 else series  # in one series and step, only one would show
        return {"title": title, "series": one, "iteration": item.step}

    def take_file(self, item: Item) -> None:
        """Report a file unchanged: `report_image` would convert it to JPEG."""
        from clearml.backend_interface.metrics.events import UploadEvent

        data, ext = item.content
        where = self._where(item)
        # Files are numbered from 0 in each process, so those of a resumed run would overwrite the first ones.
        numbers = getattr(UploadEvent, "_metric_counters", {})
        numbers.setdefault(f"{where['title']}_{where['series']}", time.time_ns() // 1_000_000)
        self.run.get_logger().report_media(**where, stream=io.BytesIO(data), file_extension=f".{ext}", max_history=-1)

    def take_histogram(self, item: Item) -> None:
        middles = (item.value.edges[:-1] + item.value.edges[1:]) / 2
        names = [f"{middle:.6g}" for middle in middles]
        self.run.get_logger().report_histogram(values=item.value.counts.tolist(), xlabels=names, **self._where(item))

    def take_table(self, item: Item) -> None:
        rows = [[cell_of(cell) for cell in row] for row in item.value.rows]
        self.run.get_logger().report_table(table_plot=[list(item.value.columns), *rows], **self._where(item))

    def take_plotly(self, item: Item) -> None:
        self.run.get_logger().report_plotly(figure=json.loads(item.value.json), **self._where(item))

    def settle(self) -> None:
        """Wait until everything is sent; offline, until the session's file holds as many events as were sent."""
        self.wait_until(self._flushed, "written its events")

    def _flushed(self) -> bool:
        self.run.flush(wait_for_uploads=True)
        return not self._offline or self.identity is None or self._events.refresh() >= self._sent

    def counts(self) -> dict[str, int] | None:
        if self._layout == "accelerate" or self._users or not self._offline:
            return None  # in Accelerate's naming, `loss` and `train_loss` are one series
        self._events.refresh()
        key_at = _key_in_transformers if self._layout == "transformers" else key_of
        keys = ((key_at(*place), n) for place, n in self._events.found.items())
        return {key: n for key, n in keys if key is not None}


class ClearMLTracker(Tracker):
    destination_class = ClearML

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add an image under each key; arguments go to `report_image`."""
        for key, value in values.items():
            title, series = in_accelerate(key)
            self.run.get_logger().report_image(title=title, series=series, iteration=step, image=value, **kwargs)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str] | None = None, data: list[list[Any]] | None = None, dataframe: Any = None,
        step: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Add a table: a DataFrame, or rows with or without columns; arguments go to `report_table`."""
        if dataframe is None:
            if data is None:
                raise ValueError("`ClearMLTracker.log_table` requires that `data` to be supplied if `dataframe` is `None`")
            dataframe = [columns, *data] if columns else data
        title, series = in_accelerate(table_name)
        self.run.get_logger().report_table(title=title, series=series, table_plot=dataframe, iteration=step, **kwargs)


def place_of(key: str) -> tuple[str, str]:
    """Return title and series of a key: `val/loss` is series `val` of `loss`, a one-to-one mapping."""
    series, _, title = key.rpartition("/")
    return (key, key) if not series or not title or series == title or LISTED.fullmatch(series) else (title, series)


def key_of(title: str, series: str) -> str | None:
    """Return the key for a title and series from `place_of`, or None if more items of the same list follow."""
    listed = LISTED.fullmatch(series)
    if listed and title != series:
        series, at, items = listed.groups()
        if at != items:
            return None
    return title if title == series else f"{series}/{title}"


def in_accelerate(key: str) -> tuple[str, str]:
    """Return title and series as Accelerate names them: `eval_loss` is series `eval` of `loss`."""
    for prefix in ("eval", "test", "train"):
        if key.startswith(f"{prefix}_"):
            return key[len(prefix) + 1 :], prefix
    return key, "train"


def in_transformers(key: str) -> tuple[str, str]:
    """Return title and series as Transformers names them: `eval/loss` is series `loss` under the title `eval`."""
    title, _, series = key.partition("/")
    return (title, series) if series else ("train", key)


def _key_in_transformers(title: str, series: str) -> str:
    return series if title == "Summary" else f"{title}/{series}"  # ClearML's own title for single values


_PLACES = {"fanfold": place_of, "accelerate": in_accelerate, "transformers": in_transformers}
