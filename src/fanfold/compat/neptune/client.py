"""Runs, their paths and files with the methods of Neptune's client. docs/neptune-compat.md lists what they do here."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import RunError, notices, verb
from ...media import Html, Image, Media, Text
from ...plain import plain
from ...recording import api

# Namespaces whose values are settings of the run; all other assigned values are results.
CONFIG = ("parameters", "params", "config", "configuration", "hparams", "hyperparams", "hyperparameters", "args")
# Arguments of Neptune's init_run() that are about its servers and its own monitoring.
_IGNORED = frozenset(
    (
        "api_token proxies mode flush_period fail_on_exception source_files git_ref dependencies monitoring_namespace "
        "async_lag_callback async_lag_threshold async_no_progress_callback async_no_progress_threshold "
        "capture_traceback capture_stderr"
    ).split()
)


def init_run(
    project: str | None = None,
    *,
    with_id: str | None = None,
    custom_run_id: str | None = None,
    name: str | None = None,
    description: str | None = None,
    tags: Iterable[str] | str | None = None,
    mode: str | None = None,
    capture_stdout: bool | None = None,
    capture_hardware_metrics: bool | None = None,
    **other: Any,
) -> Run:
    """Start a run, or continue the one named by `with_id` or `custom_run_id`. Arguments of fanfold.init() work too."""
    if mode == "read-only":
        raise RunError("mode='read-only' reads a run. Nothing was started. Use fanfold.open(run_id) instead.")
    ignored = sorted(set(other) & _IGNORED)
    for one in ignored:
        notices.once(f"neptune:{one}", f"init_run({one}=…) has no meaning in fanfold and is ignored; the run starts without it.")
    options = {one: value for one, value in other.items() if one not in _IGNORED}
    id = with_id or custom_run_id
    given: dict[str, Any] = {
        "name": name, "notes": description, "tags": [tags] if isinstance(tags, str) else None if tags is None else list(tags),
        "id": id, "resume": "allow" if id else None, "console": capture_stdout, "system": capture_hardware_metrics,
        "mode": "disabled" if mode == "debug" else None,
    }  # fmt: skip
    # Neptune names a project with its workspace: only the last part is a project here.
    project = None if project is None else str(project).rpartition("/")[2]
    return Run(api.init(project, **{one: value for one, value in given.items() if value is not None}, **options))


class Known(NamedTuple):
    """What this process has set, by path."""

    values: dict[str, Any]  # assigned values, and the last value of each series
    steps: dict[str, int]  # the last step of each series


class Run:
    """A run with Neptune's methods; `run.fanfold` is the run itself."""

    def __init__(self, run: Any = None) -> None:
        self.fanfold: Any = init_run().fanfold if run is None else run
        self._known = Known({}, {})

    def __getitem__(self, path: str) -> Handler:
        return Handler(self, _clean(path), self._known)

    def __setitem__(self, path: str, value: Any) -> None:
        self[path].assign(value)

    def __delitem__(self, path: str) -> None:
        self[path].pop()

    def assign(self, value: Mapping[str, Any], *, wait: bool = False) -> None:
        """Assign every value of a dict."""
        del wait
        for path, one in value.items():
            self[path].assign(one)

    def exists(self, path: str) -> bool:
        return any(known == _clean(path) or known.startswith(f"{_clean(path)}/") for known in self._known.values)

    def fetch(self) -> dict[str, Any]:
        """Return the assigned values of this process as a nested dict."""
        return self[""].fetch()  # type: ignore[no-any-return]

    def get_structure(self) -> dict[str, Any]:
        return self.fetch()

    def get_url(self) -> str:
        return str(self.fanfold.path)

    def stop(self, seconds: float | None = None) -> None:
        """End the run."""
        self.fanfold.finish(30.0 if seconds is None else seconds)

    def wait(self, **_options: Any) -> None:
        """Wait until everything is on disk."""
        self.fanfold.flush()

    def sync(self, **_options: Any) -> None:
        self.wait()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.fanfold.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in ("print_structure", "log_files", "define_metric", "pop", "container_type"):
            raise AttributeError(f"a fanfold run has no Neptune attribute {name!r}; run.fanfold is the run itself")
        return lambda *_args, **_kwargs: _unsupported(f"run.{name}()", "see docs/neptune-compat.md")


class Handler:
    """A path of a run: a series, a single value, a file, a set of tags, or a namespace with more of them."""

    def __init__(self, run: Run, path: str, known: Known) -> None:
        self._run, self._path, self._known = run, path, known

    def __getitem__(self, path: str) -> Handler:
        return Handler(self._run, _clean(f"{self._path}/{path}"), self._known)

    def __setitem__(self, path: str, value: Any) -> None:
        self[path].assign(value)

    @property
    def strict(self) -> bool:
        return bool(self._run.fanfold.strict)

    # Series

    @verb("append to a series")
    def append(
        self, value: Any, *, step: float | None = None, timestamp: float | datetime | None = None, wait: bool = False,
        **facts: Any,
    ) -> None:  # fmt: skip
        """Add a value to the series of this path; a dict adds one to each series below it."""
        del wait
        if isinstance(value, Mapping):
            for name, one in value.items():
                self[str(name)].append(one, step=step, timestamp=timestamp, **facts)
            return
        number = self._known.steps.get(self._path, -1) + 1 if step is None else step
        values = {self._path: _loggable(value, facts)}
        if isinstance(number, float) and math.isfinite(number) and number != int(number):
            values[f"{self._path}/step"] = number  # the exact step stays available as an x axis
            number = math.floor(number)
        self._known.steps[self._path] = int(number)
        self._known.values[self._path] = value
        self._run.fanfold.log(values, int(number), **({} if timestamp is None else {"time": timestamp}))

    def log(self, value: Any, *, step: float | None = None, timestamp: float | datetime | None = None, **facts: Any) -> None:
        """Add a value, or every value of a list: the older name of append() and extend()."""
        if isinstance(value, (list, tuple)):
            self.extend(value, steps=None if step is None else [step] * len(value),
                        timestamps=None if timestamp is None else [timestamp] * len(value), **facts)  # fmt: skip
        else:
            self.append(value, step=step, timestamp=timestamp, **facts)

    @verb("extend a series")
    def extend(
        self, values: Any, *, steps: Iterable[float] | None = None, timestamps: Iterable[Any] | None = None, wait: bool = False,
        **facts: Any,
    ) -> None:  # fmt: skip
        """Add many values to the series of this path; a dict of lists adds them to the series below it."""
        del wait
        if isinstance(values, Mapping):
            for name, some in values.items():
                self[str(name)].extend(some, steps=steps, timestamps=timestamps, **facts)
            return
        items = list(values)
        places: list[Any] = [None] * len(items) if steps is None else list(steps)
        times: list[Any] = [None] * len(items) if timestamps is None else list(timestamps)
        if not len(items) == len(places) == len(times):
            raise ValueError(f"{self._path!r} got {len(items)} values, {len(places)} steps and {len(times)} timestamps.")
        for value, step, when in zip(items, places, times, strict=True):
            self.append(value, step=step, timestamp=when, **facts)

    # Single values

    @verb("assign a value")
    def assign(self, value: Any, *, wait: bool = False) -> None:
        """Set the value of this path; a dict sets one for each path below it."""
        del wait
        if isinstance(value, (File, Media)) or _is_figure(value):
            self.upload(value)
        else:
            found = plain(value)
            self._set(found)
            leaves = _flat(found) if isinstance(found, dict) else [("", found)]
            self._known.values.update({_clean(f"{self._path}/{name}"): one for name, one in leaves})

    def _set(self, value: Any) -> None:
        run, first = self._run.fanfold, self._path.partition("/")[0].lower()
        if self._path in ("sys/name", "sys/description", "sys/group"):
            setattr(run, {"name": "name", "description": "notes", "group": "group"}[self._path[4:]], str(value))
        elif first == "sys":
            _unsupported(f"run[{self._path!r}]", "sys/ is written by the tracker itself; sys/name, description and tags work")
        elif first in CONFIG or any(part.lower() in CONFIG for part in self._path.split("/")):
            run.config.update(_merged(run.config, self._path.split("/"), value))
        elif isinstance(value, dict):
            run.summary.update({f"{self._path}/{name}" if self._path else name: one for name, one in _flat(value)})
        else:
            run.summary.update({self._path: value})

    @verb("add to a set")
    def add(self, values: Iterable[str] | str, *, wait: bool = False) -> None:
        """Add tags; other sets of texts are kept as a list in the summary."""
        del wait
        given = [values] if isinstance(values, str) else [str(one) for one in values]
        run = self._run.fanfold
        if self._path in ("sys/tags", "sys/group_tags"):
            run.tags = (*run.tags, *(tag for tag in given if tag not in run.tags))
        else:
            known = list(self._known.values.get(self._path) or [])
            self.assign([*known, *(one for one in given if one not in known)])

    @verb("remove from a set")
    def remove(self, values: Iterable[str] | str, *, wait: bool = False) -> None:
        """Remove tags."""
        del wait
        given = {values} if isinstance(values, str) else set(values)
        run = self._run.fanfold
        if self._path in ("sys/tags", "sys/group_tags"):
            run.tags = tuple(tag for tag in run.tags if tag not in given)
        else:
            self.assign([one for one in self._known.values.get(self._path) or [] if one not in given])

    def clear(self, **_options: Any) -> None:
        if self._path in ("sys/tags", "sys/group_tags"):
            self._run.fanfold.tags = ()
        else:
            _unsupported(f"run[{self._path!r}].clear()", "what was logged stays in the journal")

    def pop(self, **_options: Any) -> None:
        _unsupported(f"run[{self._path!r}].pop()", "what was logged stays in the journal; log under another name")

    # Files

    @verb("upload a file")
    def upload(self, value: Any, *, include_plotlyjs: Any = None, wait: bool = False) -> None:
        """Keep a file, an image, a figure or HTML with the run."""
        del include_plotlyjs, wait
        self._known.values[self._path] = value
        if isinstance(value, (str, os.PathLike)):
            self._run.fanfold.artifact(value, self._path)
        elif isinstance(value, File) and value.path is not None:
            self._run.fanfold.artifact(value.path, self._path)
        else:
            self._run.fanfold.log({self._path: _loggable(value, {})})

    @verb("upload files")
    def upload_files(self, paths: str | Iterable[str], **_options: Any) -> None:
        """Keep every file that matches a pattern, or a list of them."""
        for pattern in [paths] if isinstance(paths, str) else paths:
            for path in sorted(glob.glob(str(pattern), recursive=True)):  # noqa: PTH207 - the pattern may be absolute
                if Path(path).is_file():
                    self._run.fanfold.artifact(path, f"{self._path}/{Path(path).name}")

    def track_files(self, path: str, **_options: Any) -> None:
        """Keep the files themselves: fanfold has no references to files elsewhere."""
        self._run.fanfold.artifact(path, self._path, kind="dataset")

    def download(self, **_options: Any) -> None:
        _unsupported(f"run[{self._path!r}].download()", "artifacts are in the run: fanfold.open(id).artifact_file(…)")

    # Reading what this process set

    def fetch(self) -> Any:
        """Return the value this process assigned, or those below this path."""
        values = self._known.values
        if self._path == "sys/tags":
            return set(self._run.fanfold.tags)
        if self._path in ("sys/id", "sys/custom_run_id"):
            return str(self._run.fanfold.id)
        if self._path == "sys/name":
            return str(self._run.fanfold.name)
        if self._path in values:
            return values[self._path]
        before = f"{self._path}/" if self._path else ""
        found: dict[str, Any] = {}
        for path, value in values.items():
            if path.startswith(before):
                _put(found, path[len(before) :].split("/"), value)
        if not found and self._path:
            raise KeyError(f"run[{self._path!r}] was not set by this process. fanfold.open(id) reads what others logged.")
        return found

    def fetch_last(self) -> Any:
        return self.fetch()

    def exists(self) -> bool:
        return self._run.exists(self._path)

    def fetch_values(self, **_options: Any) -> Any:
        """Return the series as a DataFrame with Neptune's columns."""
        import pandas as pd

        from ...store import open_run

        self._run.fanfold.flush()
        series = open_run(self._run.fanfold.path).series(self._path)
        times = pd.to_datetime(series.times, unit="s", utc=True)
        return pd.DataFrame({"step": series.steps.astype(float), "value": series.values, "timestamp": times})


class File:
    """A file to upload: a path, an image, HTML, or content."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, media: Any = None) -> None:
        self.path, self.media = path, media

    @staticmethod
    def as_image(image: Any, **_options: Any) -> File:
        return File(media=image if _is_figure(image) else Image(image))

    @staticmethod
    def as_html(chart: Any, **_options: Any) -> File:
        return File(media=Html(chart) if isinstance(chart, str) else chart)

    @staticmethod
    def as_pickle(_value: Any) -> File:
        raise TypeError("File.as_pickle() is not supported: reading a pickle runs code. Save the object and upload its file.")

    @staticmethod
    def from_path(path: str | os.PathLike[str], extension: str | None = None) -> File:
        del extension
        return File(path)

    @staticmethod
    def from_content(content: str | bytes, extension: str | None = None) -> File:
        if isinstance(content, str):
            return File(media=Html(f"{content}\n") if extension == "html" else Text(content))
        return File(media=Image(content))

    @staticmethod
    def create_from(value: Any) -> File:
        return File(value) if isinstance(value, (str, os.PathLike)) else File(media=_loggable(value, {}))


def stringify_unsupported(value: Any) -> Any:
    """Return values as they are: fanfold takes any."""
    return value


def _loggable(value: Any, facts: Mapping[str, Any]) -> Any:
    if isinstance(value, File):
        if value.path is not None:
            value = Image(value.path)
        else:
            value = value.media
    if isinstance(value, Image) and facts.get("name") and value.caption is None:
        value.caption = str(facts["name"])
    return value


def _is_figure(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("matplotlib", "plotly", "PIL")


def _clean(path: str) -> str:
    return "/".join(part for part in str(path).split("/") if part)


def _merged(config: Any, parts: list[str], value: Any) -> dict[str, Any]:
    """Return the top-level entry of a config with one value set inside; the name of the namespace itself is kept."""
    top = parts[0]
    entry = plain(config.get(top)) if top in config else {}
    if len(parts) == 1:
        return {top: {**entry, **value} if isinstance(entry, dict) and isinstance(value, dict) else value}
    entry = entry if isinstance(entry, dict) else {}
    _put(entry, parts[1:], value)
    return {top: entry}


def _put(found: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        inner = found.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = found[part] = {"": inner}
        found = inner
    known = found.get(parts[-1])
    found[parts[-1]] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, one in value.items():
        if isinstance(one, Mapping):
            yield from _flat(one, f"{before}{name}/")
        else:
            yield f"{before}{name}", one


def _unsupported(what: str, instead: str) -> None:
    notices.once(f"neptune:{what}", f"{what} has no counterpart in fanfold and does nothing: {instead}.")
