"""DVCLive: a folder of plain files, one table per metric, that DVC shows and compares.

Each row reaches the kernel when it is logged. Files that DVCLive rewrites in full (metrics.json, params.yaml) can be torn by a
kill, and then it could not continue: they are checked before it starts, and rebuilt.
"""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..errors import FanfoldError
from ._dvclive_files import ITSELF, file_name, key_of, mend, read_json, replace_json, rows, summarise
from .base import Identity, Point, Refusal, Refused, clean_config, flat_config
from .destination import Destination, Item
from .face import Tracker

MARKER = ".fanfold.json"  # which run a folder belongs to, and its contents before
_QUIET = {"save_dvc_exp": False, "dvcyaml": None, "report": None, "monitor_system": False}
_ARGUMENTS = frozenset({"timestamp", "plot"})


class DVCLive(Destination):
    """Log to `live`, or to a `dvclive.Live` created with the other arguments; `run_name` is not used, as in Accelerate."""

    name: ClassVar[str] = "dvclive"
    delivery: ClassVar[str] = "readable"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = self.given = live
        self._before: dict[str, int] = {}
        self._pictured: dict[str, str] = {}

    # Opening and closing

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        from dvclive import Live

        if self.given is not None:
            self.live = self.given
            return  # the user's object, with the user's folder and settings
        if identity is None:
            self.live = self.live or Live(**self.init_kwargs)
            return
        self.identity = identity
        arguments = {"dir": str(identity.directory), **_QUIET, **self.init_kwargs}
        if remote is not None and "dir" in self.init_kwargs:  # a folder inside the run's directory moves with it
            arguments["dir"] = remote
        folder = self._folder(Path(arguments["dir"]).absolute(), identity, resumed=remote is not None)
        mark = read_json(folder / MARKER) or {}
        ours = mark.get("run") == identity.run_id
        mend(folder)
        # A folder of this run is continued; any other is emptied or continued according to the user's `resume`.
        self.live = Live(**{**arguments, "dir": str(folder), **({"resume": True} if ours else {})})
        self.live.step = self.live.read_step()  # Live increments the step even though nothing was logged
        self._before = mark["before"] if ours else rows(Path(self.live.dir))
        if not ours:
            replace_json(folder / MARKER, {"run": identity.run_id, "before": self._before})

    def _folder(self, folder: Path, identity: Identity, *, resumed: bool) -> Path:
        """Return where to log. A folder that now belongs to another run is left untouched: Live would empty it."""
        if not resumed or not folder.exists() or (read_json(folder / MARKER) or {}).get("run") == identity.run_id:
            return folder
        self.warn(
            f"folder:{folder}",
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

    def finish(self) -> None:
        self.live.end()

    # Config, summary and files

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config in params.yaml. A value that YAML refuses would empty the file, so all are cleaned first."""
        self.live.log_params(clean_config(values))

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store the summary in `live.summary`, which becomes metrics.json."""
        for key, value in flat_config(values).items():
            summarise(self.live.summary, key.split("/"), value)
        self.settle()

    def artifact(self, path: Path, name: str) -> None:
        """Copy a file to the folder's `artifacts`; with save_dvc_exp=True, DVC tracks it too."""
        target = Path(self.live.artifacts_dir) / file_name(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        if self.init_kwargs.get("save_dvc_exp"):
            self.live.log_artifact(target)

    # Values

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        refused = super().record(values, step, kwargs)
        self.live.next_step()
        return refused

    def add(self, key: str, value: Any, point: Point) -> None:
        if point.step is not None:
            self.live.step = point.step
        super().add(key, value, point)

    def number(self, key: str, value: float | str, point: Point) -> None:
        name = file_name(key)
        if name != key:
            self.warn(
                f"name:{key}",
                f"dvclive keeps {key!r} as {name!r}: a name is the path of a file there, and `step` a column of its own. "
                "All of its values are there. Rename it to have it plain.",
            )
        try:
            if self._clashes(name.split("/")):
                self._add_beside(name, value)
            else:
                self.live.log_metric(name, value, **self._arguments(point))
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise Refused(f"its file would be where a folder is needed, or the reverse ({error})") from error

    def take_text(self, item: Item) -> None:
        if len(item.text) >= csv.field_size_limit() or "\0" in item.text:
            raise Refused("DVCLive could not read its own table again with a text of that length, or one with NUL, in it")
        self.number(item.key, item.text, item.point)

    def _arguments(self, point: Point) -> dict[str, Any]:
        """Return the arguments for `log_metric`. Direct calls may pass any; in a relay, a wrong name must not stop delivery."""
        unknown = set(point.kwargs) - _ARGUMENTS if self.identity is not None and point.kwargs else set()
        for name in unknown:
            self.warn(
                f"argument:{name}",
                f"dvclive takes no argument {name!r} with a value; it is left out and the values are logged. "
                "Pass timestamp= or plot= in log_kwargs={'dvclive': {...}}.",
            )
        return {name: value for name, value in point.kwargs.items() if name not in unknown}

    def _clashes(self, parts: list[str]) -> bool:
        """Return whether metrics.json has a number where this name needs a group, or the reverse."""
        node: Any = self.live.summary
        for part in parts[:-1]:
            node = node.get(part, {})
            if not isinstance(node, dict):
                return True
        return isinstance(node.get(parts[-1]), dict)

    def _add_beside(self, name: str, value: Any) -> None:
        """Log a name that is also a group: it has an ordinary table, and is stored as `_` in its group in metrics.json."""
        from dvclive.plots import Metric

        metric = self.live._metrics.setdefault(name, Metric(name, self.live.plots_dir))  # noqa: SLF001 - as log_metric does
        metric.step = self.live.step
        value = value if isinstance(value, str) or math.isfinite(value) else str(value)
        metric.dump(value)
        summarise(self.live.summary, name.split("/"), value)
        self.warn(
            f"beside:{name}",
            f"dvclive has {name!r} both as a metric and as a group. The history of both is complete; in metrics.json the metric "
            f"is under {ITSELF!r} in the group. Rename one to have it plain.",
        )

    def take(self, item: Item) -> Any:
        """Write one file per step. Resending overwrites it, so media need no counting."""
        if item.kind != "text":
            number = self._number_of(item)
            if self._pictured.get(item.key) == number:
                self.warn(
                    f"repeat:{item.key}",
                    f"dvclive holds one file per step, and {item.key!r} has several at step {number}; the last one is there, all "
                    "of them are in the journal. Look at them with `fanfold show`, or log under different steps.",
                )
            self._pictured[item.key] = number
        try:
            return super().take(item)
        except (FanfoldError, TypeError, ValueError) as error:
            raise Refused(str(error)) from error

    def _number_of(self, item: Item) -> str:
        return f"{self.live.step}-{item.at}" if item.of > 1 else str(self.live.step)

    def _name(self, item: Item) -> str:
        return f"{file_name(item.key)}/{self._number_of(item)}"

    def take_image(self, item: Item) -> None:
        """Log an image as PNG; CMYK and similar modes become RGB, as browsers show them."""
        picture = item.value.pil()
        fits = picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I")
        self.live.log_image(f"{self._name(item)}.png", picture if fits else picture.convert("RGB"))

    def take_video(self, item: Item) -> None:
        """Write an animated GIF next to the images: `log_image` would keep only its first frame."""
        from dvclive.plots import Image

        data, ext = item.content
        if ext == "gif":
            Image(f"{self._name(item)}.gif", self.live.plots_dir).output_path.write_bytes(data)
        else:
            self.cannot("hold this kind of video", item.key, item.value)

    def take_histogram(self, item: Item) -> None:
        edges, counts = item.value.edges.tolist(), item.value.counts.tolist()
        bins = [{"from": low, "to": high, "count": count} for low, high, count in zip(edges, edges[1:], counts, strict=False)]
        self.live.log_plot(self._name(item), bins, x="from", y="count", template="linear")

    def take_table(self, item: Item) -> None:
        columns = item.value.columns
        if not columns:
            self.cannot("hold this kind of table", item.key, item.value)
            return
        found = [clean_config(dict(zip(columns, row, strict=True))) for row in item.value.rows]
        self.live.log_plot(self._name(item), found, x=columns[0], y=columns[1:] or columns[0], template="linear")

    # Settling and counting

    def settle(self) -> None:
        """Write metrics.json. The tables need nothing: each row is written when logged."""
        from dvclive.plots import NumpyEncoder

        self.live.summary["step"] = self.live.step
        # make_summary() writes in place, and next_step() re-reads every table each time.
        replace_json(Path(self.live.metrics_file), self.live.summary, cls=NumpyEncoder)

    def counts(self) -> dict[str, int] | None:
        """Count this run's rows in every table; None for a user's own `live`, whose initial rows are unknown."""
        if self.identity is None:
            return None
        found = {key_of(name): count - self._before.get(name, 0) for name, count in rows(Path(self.live.dir)).items()}
        return {key: count for key, count in found.items() if count > 0}


class DVCLiveTracker(Tracker):
    """Log to `live`, or to a `dvclive.Live` created with the other arguments; `run_name` is not used, as in Accelerate."""

    destination_class = DVCLive
