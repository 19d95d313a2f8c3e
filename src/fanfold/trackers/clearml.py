"""ClearML: tasks on a server, or offline as sessions to import later. A kill loses nothing; online it may repeat points.

Started as it comes, ClearML seeds every random generator, forks a reporter that can hang, takes over signals and stores NaN as
0.0. None of that happens here.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .base import NO_STEP, Adapter, Identity, Point, Refused, clean_config, flat_config, on_main_process
from .tools import content_of, named, replace, until

SETTLE_SECONDS = 60.0
SECTION = "config"  # of the hyperparameters
STATUS = "fanfold_status"
METRICS = "metrics.jsonl"
PLACE = "CLEARML_CACHE_DIR"  # where offline sessions are
_places: set[str] = set()  # values of it that are ours, and not the user's
_ours: set[str] = set()  # tasks opened for a run of ours in this process
_LISTED = re.compile(r"(.*) \[(\d+)/(\d+)\]", re.DOTALL)
_FRAMEWORKS = (
    "matplotlib tensorflow tensorboard pytorch xgboost scikit fastai lightgbm hydra detect_repository tfdefines joblib "
    "megengine catboost gradio"
).split()
_QUIET: dict[str, Any] = {
    "auto_connect_frameworks": dict.fromkeys(_FRAMEWORKS, False),
    "auto_connect_arg_parser": False,
    "auto_connect_streams": False,
    "auto_resource_monitoring": False,
}


class ClearMLTracker(Adapter):
    """Log to a ClearML task: the one that is open, or a new one; arguments go to `Task.init`.

    `CLEARML_PROJECT` and `CLEARML_TASK` go before `run_name`.
    """

    name: ClassVar[str] = "clearml"
    delivery: ClassVar[str] = "readable"
    delivery_online: ClassVar[str | None] = "at least once"
    layouts: ClassVar[tuple[str, ...]] = ("fanfold", "accelerate")
    task: Any

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name = run_name
        self.init_kwargs = kwargs
        self._initialized_externally = False
        self._identity: Identity | None = None
        self._resumed: str | None = None
        self._tried = False
        self._sent = 0  # events made since start, with those there were
        self._read = _Read()
        self._summary: dict[str, Any] = {}

    @classmethod
    def unusable(cls) -> str | None:
        if _truthy("CLEARML_OFFLINE_MODE") or os.environ.get("CLEARML_API_ACCESS_KEY") or os.environ.get("CLEARML_AUTH_TOKEN"):
            return None
        places = (os.environ.get("CLEARML_CONFIG_FILE") or "~/clearml.conf", "~/trains.conf")
        if any(Path(place).expanduser().exists() for place in places):
            return None
        return "no credentials: run `clearml-init`, set CLEARML_API_ACCESS_KEY, or set CLEARML_OFFLINE_MODE=1"

    # Opening

    def adopt(self, identity: Identity) -> None:
        self._identity = identity

    @property
    def remote(self) -> str | None:
        return str(self.task.id) if hasattr(self, "task") else None

    def resume(self, remote: str) -> None:
        self._resumed = remote

    @on_main_process
    def start(self) -> None:
        from clearml import Task

        current = Task.current_task()
        if current and self._tried:
            current.close()  # half made, by a start that failed
        elif current and current.id in _ours and self._identity is not None:
            raise BlockingIOError(
                "ClearML holds one task per process, and that of another run is open here. This run is delivered when that one "
                "has finished. Use relay='process', the default, to have both at once."
            )
        elif current:
            self._initialized_externally = True
            self.task = current
            self._sent = self._arrived()
            return
        Task.set_random_seed(None)  # or Task.init seeds Python, numpy and torch
        Task._report_subprocess_enabled = False  # noqa: SLF001 - no other switch without a file; the reporter's fork can hang
        arguments = {**self.init_kwargs}
        project, name = os.environ.get("CLEARML_PROJECT"), os.environ.get("CLEARML_TASK")
        arguments.setdefault("project_name", project or self.user_provided_run_name)
        if self._identity is None:
            arguments.setdefault("task_name", name or self.user_provided_run_name)
            self.task = Task.init(**arguments)
            return
        arguments.setdefault("task_name", name or self._identity.name)
        self._open(Task, arguments)

    def _open(self, task: Any, arguments: dict[str, Any]) -> None:
        assert self._identity is not None
        if task.is_offline() and os.environ.get(PLACE) in (None, *_places):
            os.environ[PLACE] = str(self._identity.directory)  # read whenever a session's folder is asked for
            _places.add(os.environ[PLACE])
        known = _prepared(self._resumed or _derived(self._identity), arguments) if task.is_offline() else self._resumed
        known = known or self._find(task, arguments)
        if known is not None:
            arguments |= {"reuse_last_task_id": known, "continue_last_task": 0}  # 0: steps stay what they are
        else:
            arguments |= {"reuse_last_task_id": False, "tags": [*arguments.get("tags", ()), self._tag]}
        self._tried = True
        with _hooks_kept():
            self.task = task.init(**{**_QUIET, **arguments})
        _ours.add(str(self.task.id))
        self._sent = self._arrived()

    @property
    def _tag(self) -> str:
        """What marks the task as ours: a relay killed before it knew the server's id finds it by that."""
        assert self._identity is not None
        return f"fanfold:{self._identity.run_id}"

    def _find(self, task: Any, arguments: dict[str, Any]) -> str | None:
        found = task.query_tasks(project_name=arguments["project_name"], tags=[self._tag])
        return str(found[0]) if found else None

    @property
    def tracker(self) -> Any:
        return self.task

    @property
    def _offline(self) -> bool:
        return bool(self.task.is_offline())

    @property
    def _as_accelerate(self) -> bool:
        """Whether titles, series and configuration are named as in Accelerate: by hand, or where its users ask for it."""
        return self._identity is None or self._identity.layout == "accelerate"

    # Writing

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """Keep the configuration: by hand as Accelerate does, else whole as JSON and flat as hyperparameters."""
        if self._identity is None:
            return self.task.connect_configuration(values)
        if self._as_accelerate:
            self.task.connect_configuration(clean_config(values))
        else:
            text = json.dumps(clean_config(values), indent=1, ensure_ascii=False)
            self.task.set_configuration_object(name=SECTION, config_text=text, config_type="json")
        self.task.set_parameters({f"{SECTION}/{key}": value for key, value in flat_config(values).items()})
        return None

    def add(self, key: str, value: Any, point: Point) -> None:
        logger = self.task.get_logger()
        if isinstance(value, (bool, int, float)):
            self._number(logger, key, value, point)
            self._sent += 1
            return
        title, series = self.place(key)
        items = value if isinstance(value, list) else [value]
        for at, item in enumerate(items, 1):
            put = _text if isinstance(item, str) else _MEDIA[item.kind]
            one = f"{series} [{at}/{len(items)}]" if len(items) > 1 else series  # one of a series and step hides the others
            put(logger, item, title=title, series=one, iteration=point.step)
            self._sent += 1

    def _number(self, logger: Any, key: str, value: float, point: Point) -> None:
        if not math.isfinite(value):
            self._allow(logger, value)
        arguments = {name: argument for name, argument in point.kwargs.items() if name != NO_STEP}
        if point.step is None or NO_STEP in point.kwargs:
            logger.report_single_value(name=key, value=value, **arguments)
            return
        title, series = self.place(key)
        logger.report_scalar(title=title, series=series, value=value, iteration=point.step, **arguments)

    def _allow(self, logger: Any, value: float) -> None:
        """Have the next NaN or infinity stored as itself: a session's file can hold it, ClearML's server cannot."""
        if self._offline and math.isnan(value):
            logger.set_reporting_nan_value(value)
        elif self._offline:
            logger.set_reporting_inf_value(value)  # read when the event is made, so each infinity keeps its sign
        elif self._identity is not None:
            raise Refused(f"ClearML's server has no {value}")  # https://github.com/clearml/clearml/issues/604

    def place(self, key: str) -> tuple[str, str]:
        """Return title and series of a key: Accelerate's by hand; else `val/loss` is series `val` of `loss`, one for one."""
        if self._as_accelerate:
            return self._get_title_series(key)
        series, _, title = key.rpartition("/")
        return (key, key) if not series or not title or series == title or _LISTED.fullmatch(series) else (title, series)

    @staticmethod
    def key_at(title: str, series: str) -> str | None:
        """Return the key of title and series as `place` gave them, or None where more items of the same list follow."""
        listed = _LISTED.fullmatch(series)
        if listed and title != series:
            series, at, items = listed.groups()
            if at != items:
                return None
        return title if title == series else f"{series}/{title}"

    @staticmethod
    def _get_title_series(name: str) -> tuple[str, str]:
        for prefix in ("eval", "test", "train"):
            if name.startswith(f"{prefix}_"):
                return name[len(prefix) + 1 :], prefix
        return name, "train"

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add an image under each key; arguments go to `report_image`."""
        for key, value in values.items():
            title, series = self._get_title_series(key)
            self.task.get_logger().report_image(title=title, series=series, iteration=step, image=value, **kwargs)

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
        title, series = self._get_title_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=dataframe, iteration=step, **kwargs)

    def artifact(self, path: Path, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = named(path, Path(folder), Path(name).name)  # the name it has on the server, where the blob's is a hash
            if not self.task.upload_artifact(name, artifact_object=file, wait_on_upload=True):
                raise ConnectionError(f"ClearML did not take the file {name!r}")

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Report numbers as single values, and anything else as user properties."""
        logger = self.task.get_logger()
        for key, value in flat_config(values).items():
            if self._summary.get(key, self) == value:
                continue
            if isinstance(value, (bool, int, float)):
                if not math.isfinite(value):
                    self._allow(logger, value)
                logger.report_single_value(name=key, value=float(value))
                self._sent += 1
            else:
                self.task.set_user_properties(**{f"summary.{key}": value if isinstance(value, str) else json.dumps(value)})
            self._summary[key] = value

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        if name and "task_name" not in self.init_kwargs and not os.environ.get("CLEARML_TASK"):
            self.task.set_name(name)
        if tags:
            self.task.add_tags(list(tags))
        if notes:
            self.task.set_comment(notes)
        if group:
            self.task.set_user_properties(group=group)

    # Being sure

    def settle(self) -> None:
        """Return when everything is sent; offline, when the session's file has as many events as were made."""
        if not until(self._flushed, SETTLE_SECONDS, pause=0.01):
            raise TimeoutError(f"ClearML did not write its events within {SETTLE_SECONDS:.0f} s")

    def _flushed(self) -> bool:
        self.task.flush(wait_for_uploads=True)
        return not self._offline or self._identity is None or self._arrived() >= self._sent

    def _arrived(self) -> int:
        """Return how many events the offline session holds."""
        folder = self.task.get_offline_mode_folder()
        return self._read.on(Path(str(folder)) / METRICS) if folder is not None else 0

    def counts(self) -> dict[str, int] | None:
        if self._as_accelerate or self._initialized_externally or not self._offline:
            return None  # in Accelerate's names, `loss` and `train_loss` are one series
        self._arrived()
        keys = ((self.key_at(*place), n) for place, n in self._read.found.items())
        return {key: n for key, n in keys if key is not None}

    # Closing

    def close(self, status: str) -> None:
        """End the task: completed, failed, or stopped for killed and preempted. Offline it is a property of the task."""
        self.task.set_user_properties(**{STATUS: status})
        ended, offline = self.task.id, self._offline
        self.finish()
        if status == "finished" or offline or self._initialized_externally:
            return
        from clearml import Task

        again = Task.get_task(task_id=ended)  # close() has marked it completed
        if status == "failed":
            again.mark_failed(status_reason=status, force=True)
        else:
            again.mark_stopped(status_message=status, force=True)

    @on_main_process
    def finish(self) -> None:
        if self.task and not self._initialized_externally:
            self.task.close()


class _Read:
    """A session's events, counted as the file grows."""

    def __init__(self) -> None:
        self.at = 0
        self.found: Counter[tuple[str, str]] = Counter()

    def on(self, path: Path) -> int:
        """Read on, and return how many events there are in all."""
        if path.exists():
            with path.open("rb") as file:
                file.seek(self.at)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self.at += len(whole)
            self.found.update((event["metric"], event["variant"]) for line in whole.splitlines() for event in json.loads(line))
        return sum(self.found.values())


def _truthy(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on", "y", "t")


def _derived(identity: Identity) -> str:
    return "offline-" + hashlib.sha256(f"{identity.project}/{identity.run_id}".encode()).hexdigest()[:32]


def _prepared(number: str, arguments: dict[str, Any]) -> str:
    """Lay out an offline session under an id of ours: ClearML would roll a new one, and a kill would leave two."""
    from clearml.config import get_offline_dir

    folder = Path(str(get_offline_dir(task_id=number)))
    if not (folder / "task.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {"id": number, "type": "training", "output": {}, "execution": {"parameters": {}, "artifacts": []}}
        about |= {"name": arguments["task_name"], "project_name": arguments["project_name"]}
        replace(folder / "task.json", json.dumps(about))
    if (folder / METRICS).exists():
        data = (folder / METRICS).read_bytes()
        os.truncate(folder / METRICS, data.rfind(b"\n") + 1)  # a line torn by a kill would spoil the next one, too
    return number


@contextlib.contextmanager
def _hooks_kept() -> Iterator[None]:
    """Give signals and the exception hook back to whoever had them: ClearML's would end the task while we still deliver."""
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread()]
    handlers, hook = [signal.getsignal(number) for number in numbers], sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def _file(logger: Any, data: bytes, ext: str, *, title: str, series: str, iteration: int | None) -> None:
    """Report a file as it is: `report_image` would make it a JPEG."""
    from clearml.backend_interface.metrics.events import UploadEvent

    # Files are numbered from 0 in each process, so those of a resumed run would overwrite the first ones.
    getattr(UploadEvent, "_metric_counters", {}).setdefault(f"{title}_{series}", time.time_ns() // 1_000_000)
    stream = io.BytesIO(bytes(data))
    logger.report_media(title=title, series=series, iteration=iteration, stream=stream, file_extension=f".{ext}", max_history=-1)


def _text(logger: Any, item: Any, **where: Any) -> None:
    _file(logger, item.encode(), "txt", **where)


def _content(logger: Any, item: Any, **where: Any) -> None:
    _file(logger, *content_of(item), **where)


def _histogram(logger: Any, item: Any, **where: Any) -> None:
    middles = (item.edges[:-1] + item.edges[1:]) / 2
    logger.report_histogram(values=item.counts.tolist(), xlabels=[f"{middle:.6g}" for middle in middles], **where)


def _table(logger: Any, item: Any, **where: Any) -> None:
    rows = [[cell if isinstance(cell, (bool, int, float, str)) else _cell(cell) for cell in row] for row in item.rows]
    logger.report_table(table_plot=[list(item.columns), *rows], **where)


def _cell(cell: Any) -> str:
    return "" if cell is None else str(cell)


def _figure(logger: Any, item: Any, **where: Any) -> None:
    if item.png:
        _content(logger, item, **where)
    else:
        logger.report_plotly(figure=json.loads(item.json), **where)


_MEDIA: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("image", "audio", "video", "text", "html"), _content),
    "histogram": _histogram,
    "table": _table,
    "figure": _figure,
}
