"""DVCLive: a folder of plain files, one table per metric, that DVC shows and compares.

Each row is in the kernel's hands when it is logged. Files that DVCLive replaces whole (metrics.json, params.yaml) can be
torn by a kill, and then it could not go on: they are checked before it starts, and made again.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..errors import FanfoldError, notices
from .base import Adapter, Identity, Point, Refused, clean_config, flat_config, on_main_process
from .tools import replace

MARKER = ".fanfold.json"  # which run a folder belongs to, and what was in it before
ITSELF = "_"  # metrics.json: the metric `a` beside a group `a/…`
_QUIET = {"save_dvc_exp": False, "dvcyaml": None, "report": None, "monitor_system": False}
_ARGUMENTS = frozenset({"timestamp", "plot"})
_LONGEST = 240  # bytes of a file's name without its ending


class DVCLiveTracker(Adapter):
    """Log to `live`, or to a `dvclive.Live` made of the other arguments; `run_name` is not used, as in Accelerate."""

    name: ClassVar[str] = "dvclive"
    requires_logging_directory: ClassVar[bool] = False
    delivery: ClassVar[str] = "readable"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.live = live
        self.init_kwargs = kwargs
        self._identity: Identity | None = None
        self._own_folder = False
        self._resumed = False
        self._before: dict[str, int] = {}
        self._pictured: dict[str, str] = {}

    def adopt(self, identity: Identity) -> None:
        """Take a folder of our run's own where none was given, and save no DVC experiment unless that was asked for."""
        if self.live is not None:
            return  # the user's object, with a folder and settings of the user's
        self._identity = identity
        self._own_folder = "dir" not in self.init_kwargs
        self.init_kwargs = {"dir": str(identity.directory), **_QUIET, **self.init_kwargs}

    @on_main_process
    def start(self) -> None:
        from dvclive import Live

        if self.live is not None:
            return
        if self._identity is None:
            self.live = Live(**self.init_kwargs)
            return
        self._start_for(self._identity)

    def _start_for(self, identity: Identity) -> None:
        """Go on in a folder that is this run's; any other is emptied or gone on with, as the user's `resume` says."""
        from dvclive import Live

        folder = self._folder(identity)
        mark = _read_json(folder / MARKER) or {}
        ours = mark.get("run") == identity.run_id
        _mend(folder)
        arguments = {**self.init_kwargs, "dir": str(folder)}
        self.live = Live(**(arguments | {"resume": True} if ours else arguments))
        self.live.step = self.live.read_step()  # Live counts on by one, though nothing was logged
        self._before = mark["before"] if ours else _rows(Path(self.live.dir))
        if not ours:
            _replace_json(folder / MARKER, {"run": identity.run_id, "before": self._before})

    def _folder(self, identity: Identity) -> Path:
        """Return where to log. A folder that was ours and is another run's now stays untouched: Live would empty it."""
        folder = Path(self.init_kwargs["dir"]).absolute()
        if not self._resumed or not folder.exists() or (_read_json(folder / MARKER) or {}).get("run") == identity.run_id:
            return folder
        notices.once(
            f"dvclive:folder:{folder}",
            f"{folder} belongs to another run by now, so what is left of {identity.run_id} goes to {identity.directory}. "
            "What was there before is in the journal. Give each run a dir= of its own to keep them apart.",
        )
        return identity.directory

    @property
    def tracker(self) -> Any:
        return self.live

    @property
    def remote(self) -> str:
        return str(Path(self.live.dir).absolute())

    def resume(self, remote: str) -> None:
        self._resumed = True
        if not self._own_folder:  # a folder inside the run's directory moves with it; any other stays where it was
            self.init_kwargs["dir"] = remote

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration in params.yaml. One value that YAML refuses would empty that file: all are cleaned."""
        self.live.log_params(clean_config(values))

    def add(self, key: str, value: Any, point: Point) -> None:
        if point.step is not None:
            self.live.step = point.step
        if isinstance(value, list):
            for i, item in enumerate(value):
                self._add_media(key, item, f"{self.live.step}-{i}")
        elif isinstance(value, (bool, int, float, str)):
            self._add_metric(key, value, point)
        elif value.kind == "text":
            self._add_metric(key, value.text, point)
        else:
            self._add_media(key, value, str(self.live.step))

    def _add_metric(self, key: str, value: Any, point: Point) -> None:
        name = _file_name(key)
        if name != key:
            notices.once(
                f"dvclive:name:{key}",
                f"dvclive keeps {key!r} as {name!r}: a name is the path of a file there, and `step` a column of its own. "
                "All of its values are there. Rename it to have it plain.",
            )
        if isinstance(value, str) and (len(value) >= csv.field_size_limit() or "\0" in value):
            raise Refused("DVCLive could not read its own table again with a text of that length, or one with NUL, in it")
        try:
            if self._clashes(name.split("/")):
                self._add_beside(name, value)
            else:
                self.live.log_metric(name, value, **self._arguments(point))
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise Refused(f"its file would stand where a folder is needed, or the reverse ({error})") from error

    def _arguments(self, point: Point) -> dict[str, Any]:
        """Return what goes to `log_metric`. By hand anything does; from the journal, a wrong name must not stop delivery."""
        unknown = set(point.kwargs) - _ARGUMENTS if self._identity is not None else set()
        for name in unknown:
            notices.once(
                f"dvclive:argument:{name}",
                f"dvclive takes no argument {name!r} with a value; it is left out and the values are logged. "
                "Pass timestamp= or plot= in log_kwargs={'dvclive': {...}}.",
            )
        return {name: value for name, value in point.kwargs.items() if name not in unknown}

    def _clashes(self, parts: list[str]) -> bool:
        """Tell whether metrics.json has a number where this name needs a group, or the reverse."""
        node: Any = self.live.summary
        for part in parts[:-1]:
            node = node.get(part, {})
            if not isinstance(node, dict):
                return True
        return isinstance(node.get(parts[-1]), dict)

    def _add_beside(self, name: str, value: Any) -> None:
        """Log a name that is a group as well: its table is as any other, in metrics.json it stands as `_` in the group."""
        from dvclive.plots import Metric

        metric = self.live._metrics.setdefault(name, Metric(name, self.live.plots_dir))  # noqa: SLF001 - as log_metric does
        metric.step = self.live.step
        value = value if isinstance(value, str) or math.isfinite(value) else str(value)
        metric.dump(value)
        _summarise(self.live.summary, name.split("/"), value)
        notices.once(
            f"dvclive:beside:{name}",
            f"dvclive has {name!r} both as a metric and as a group. The history of both is complete; in metrics.json the metric "
            f"stands under {ITSELF!r} in the group. Rename one to have it plain.",
        )

    def _add_media(self, key: str, value: Any, number: str) -> None:
        """Write one file per step. Sent again, it is written over: media need no counting."""
        make = _MEDIA.get(value.kind)
        if self._pictured.get(key) == number:
            notices.once(
                f"dvclive:repeat:{key}",
                f"dvclive holds one file per step, and {key!r} has several at step {number}; the last one is there, all of them "
                "are in the journal. Look at them with `fanfold show`, or log under different steps.",
            )
        self._pictured[key] = number
        try:
            done = make is not None and make(self.live, f"{_file_name(key)}/{number}", value)
        except (FanfoldError, TypeError, ValueError) as error:
            raise Refused(str(error)) from error
        if not done:
            self._cannot(f"hold this kind of {value.kind}", key, value)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log(values, step, **kwargs)
        self.live.next_step()

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Keep the summary in `live.summary`, which becomes metrics.json."""
        for key, value in flat_config(values).items():
            _summarise(self.live.summary, key.split("/"), value)
        self.settle()

    def settle(self) -> None:
        """Write metrics.json. The tables need nothing, each row is written as it is logged."""
        from dvclive.plots import NumpyEncoder

        self.live.summary["step"] = self.live.step
        # make_summary() writes in place, and next_step() reads every table again, each time.
        _replace_json(Path(self.live.metrics_file), self.live.summary, cls=NumpyEncoder)

    def counts(self) -> dict[str, int] | None:
        """Count the rows of every table that are this run's; None for a `live` of the user's, whose start is not known."""
        if self._identity is None:
            return None
        found = {_key_of(name): rows - self._before.get(name, 0) for name, rows in _rows(Path(self.live.dir)).items()}
        return {key: rows for key, rows in found.items() if rows > 0}

    def artifact(self, path: Path, name: str) -> None:
        """Copy a file to the folder's `artifacts`; with save_dvc_exp=True, DVC tracks it too."""
        target = Path(self.live.artifacts_dir) / _file_name(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        if self.init_kwargs.get("save_dvc_exp"):
            self.live.log_artifact(target)

    @on_main_process
    def finish(self) -> None:
        self.live.end()


def _mend(folder: Path) -> None:
    """Remove what a kill left torn: Live cannot go on from it. Config comes again, the summary is made of the tables."""
    from dvclive.serialize import YAMLError, load_yaml

    for path in _tables(folder).values():
        _cut(path)
    params, summary = folder / "params.yaml", folder / "metrics.json"
    if params.exists():
        try:
            sound = isinstance(load_yaml(params), dict)
        except YAMLError:
            sound = False
        if not sound:
            params.unlink()
    if summary.exists() and _read_json(summary) is None:
        _replace_json(summary, _latest(folder))


def _cut(path: Path) -> None:
    """Cut a table after its last whole row: a long text goes out in pieces. A line ends where quotes are even."""
    data = path.read_bytes()
    whole = len(data)
    while whole and not (data[whole - 1 : whole] == b"\n" and data.count(b'"', 0, whole) % 2 == 0):
        whole = data.rfind(b"\n", 0, whole - 1) + 1
    if whole == 0:
        path.unlink()  # Live writes the head of a table only where there is no file
    elif whole < len(data):
        os.truncate(path, whole)


def _latest(folder: Path) -> dict[str, Any]:
    """Return the last value of every table, grouped as metrics.json groups them."""
    found: dict[str, Any] = {}
    step = 0
    for name, path in _tables(folder).items():
        head, *rows = _read_table(path)
        for row in rows[-1:]:
            step = max(step, int(row[head.index("step")]))
            _summarise(found, name.split("/"), _number(row[-1]))
    return {**found, "step": step}


def _number(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (int, float)) else text


def _rows(folder: Path) -> dict[str, int]:
    return {name: len(_read_table(path)) - 1 for name, path in _tables(folder).items()}


def _read_table(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t"))


def _tables(folder: Path) -> dict[str, Path]:
    """Return name → file of every metric's table."""
    base = folder / "plots" / "metrics"
    found = (path for path in sorted(base.rglob("*.tsv")) if path.is_file())
    return {path.relative_to(base).as_posix().removesuffix(".tsv"): path for path in found}


def _summarise(summary: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Put a latest value into metrics.json's groups; what is a metric and a group stands as `_` in the group."""
    for part in parts[:-1]:
        inner = summary.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = summary[part] = {ITSELF: inner}
        summary = inner
    if isinstance(summary.get(parts[-1]), dict):
        summary[parts[-1]][ITSELF] = value
    else:
        summary[parts[-1]] = value


def _file_name(key: str) -> str:
    """Return a key as the path of a file: parts that would lead out of the folder, or are none, are escaped."""
    parts = [_escaped(part) for part in key.split("/")]
    if any(len(part.encode()) > _LONGEST for part in parts):
        raise Refused(f"DVCLive keeps it in a file of that name, and {len(key)} characters are too many for one")
    return "/".join(parts)


def _escaped(part: str) -> str:
    if part in ("", ".", ".."):
        return part.replace(".", "%2E") or "%_"
    if re.fullmatch("step_*", part):
        return f"{part}_"  # a column `step` of values would take the place of DVCLive's own
    return re.sub(r"%(?=[0-9A-F]{2}|_)", "%25", part).replace("\0", "%00")


def _key_of(name: str) -> str:
    return "/".join(_unescaped(part) for part in name.split("/"))


def _unescaped(part: str) -> str:
    if part == "%_":
        return ""
    if re.fullmatch("step_+", part):
        return part[:-1]
    return re.sub("%(2E|25|00)", lambda found: chr(int(found[1], 16)), part)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _replace_json(path: Path, content: Any, **options: Any) -> None:
    replace(path, json.dumps(content, indent=4, **options) + "\n")


# Media: each writes one file and tells whether it could


def _image(live: Any, name: str, value: Any) -> bool:
    live.log_image(f"{name}.png", _pil(value.pil()))
    return True


def _pil(picture: Any) -> Any:
    """Return a picture that PNG holds; CMYK and the like become RGB, as every browser shows them."""
    return picture if picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I") else picture.convert("RGB")


def _figure(live: Any, name: str, value: Any) -> bool:
    if not value.png:
        return False
    import PIL.Image

    live.log_image(f"{name}.png", PIL.Image.open(io.BytesIO(value.png), formats=("PNG",)))
    return True


def _video(live: Any, name: str, value: Any) -> bool:
    """Write a moving GIF beside the images: `log_image` would keep its first picture only."""
    from dvclive.plots import Image

    film = value.encode()
    if film.ext == "gif":
        Image(f"{name}.gif", live.plots_dir).output_path.write_bytes(film.data)
    return bool(film.ext == "gif")


def _histogram(live: Any, name: str, value: Any) -> bool:
    edges = value.edges.tolist()
    bins = [
        {"from": low, "to": high, "count": count}
        for low, high, count in zip(edges, edges[1:], value.counts.tolist(), strict=False)
    ]
    live.log_plot(name, bins, x="from", y="count", template="linear")
    return True


def _table(live: Any, name: str, value: Any) -> bool:
    if not value.columns:
        return False
    rows = [clean_config(dict(zip(value.columns, row, strict=True))) for row in value.rows]
    live.log_plot(name, rows, x=value.columns[0], y=value.columns[1:] or value.columns[0], template="linear")
    return True


_MEDIA: dict[str, Callable[[Any, str, Any], bool]] = {
    "image": _image,
    "figure": _figure,
    "video": _video,
    "histogram": _histogram,
    "table": _table,
}
