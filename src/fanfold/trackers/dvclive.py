"""DVCLive: a folder of plain files, one table per metric, that DVC shows and compares.

Each row reaches the kernel when it is logged. Files that DVCLive rewrites in full (metrics.json, params.yaml) can be torn by a
kill, and then it could not continue: they are checked before it starts, and rebuilt.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import FanfoldError
from ..plain import plain
from ._dvclive_files import ITSELF, append_rows, clashes, file_name, key_of, mend, replace_json, rows, summarise
from .base import Identity, Point, Refusal, Refused, flat_config
from .destination import Destination, Item
from .face import Tracker
from .tools import copied, read_json

MARKER = ".fanfold.json"  # which run a folder belongs to, and its contents before
_QUIET = {"save_dvc_exp": False, "dvcyaml": None, "report": None, "monitor_system": False}


class DVCLive(Destination):
    """Log to `live`, or to a `dvclive.Live` created with the other arguments; `run_name` is not used, as in Accelerate."""

    name = "dvclive"
    own_name = "live"
    ends_with = "end"
    points_replace_summary = True
    delivery = "readable"
    accepts = frozenset({"timestamp", "plot"})

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.run = self.given = live  # the user's object, with the user's folder and settings
        self._pictured: dict[str, str] = {}
        self._begun: set[str] = set()  # tables that DVCLive has written a row of

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        from dvclive import Live

        if identity is None:
            return Live(**self.init_kwargs)
        arguments = {"dir": str(identity.directory), **_QUIET, **self.init_kwargs}
        if remote is not None and "dir" in self.init_kwargs:  # a folder inside the run's directory moves with it
            arguments["dir"] = remote
        folder = self._folder(Path(arguments["dir"]).absolute(), identity, resumed=remote is not None)
        mark = read_json(folder / MARKER) or {}
        ours = mark.get("run") == identity.run_id
        mend(folder)
        # A folder of this run is continued; any other is emptied or continued according to the user's `resume`.
        live = Live(**{**arguments, "dir": str(folder), **({"resume": True} if ours else {})})
        live.step = live.read_step()  # Live increments the step even though nothing was logged
        self._before = mark["before"] if ours else rows(Path(live.dir))
        if not ours:
            replace_json(folder / MARKER, {"run": identity.run_id, "before": self._before})
        return live

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
    def remote(self) -> str:
        return str(Path(self.run.dir).absolute())

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config in params.yaml. A value that YAML refuses would empty the file, so all are cleaned first."""
        self.run.log_params(plain(values))

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store the summary in `live.summary`, which becomes metrics.json."""
        for key, value in flat_config(values).items():
            summarise(self.run.summary, key.split("/"), value)
        self.settle()

    def artifact(self, path: Path, name: str) -> None:
        """Copy a file to the folder's `artifacts`; with save_dvc_exp=True, DVC tracks it too."""
        target = copied(path, Path(self.run.artifacts_dir), file_name(name))
        if self.init_kwargs.get("save_dvc_exp"):
            self.run.log_artifact(target)

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        refused = super().record(values, step, kwargs)
        self.run.next_step()
        return refused

    def numbers(self, place: str, rows: Sequence[tuple[int, float]]) -> None:
        """Append rows to a table at once: DVCLive opens the file for every row. The last one becomes its latest value."""
        now, table = self.run.step, Path(self.run.plots_dir, "metrics", f"{place}.tsv")
        if table.exists():  # otherwise someone has deleted it, and DVCLive begins it again
            append_rows(table, rows[:-1])
            rows = rows[-1:]
        for step, value in rows:
            self.run.step = step
            self._log(place, value)
        self.run.step = now

    def add(self, key: str, value: Any, point: Point) -> None:
        if point.step is not None:
            self.run.step = point.step
        super().add(key, value, point)

    def number(self, key: str, value: float | str, point: Point) -> None:
        name = file_name(key)
        if name != key:
            self.warn_renamed(key, name, "a name is the path of a file there, and `step` is a column of its own")
        if name in self._begun and isinstance(value, (int, float)) and not point.kwargs:
            self.wait(name, (self.run.step, value))
            return
        self.send_waiting(name)
        arguments = self.arguments(point)
        try:
            self._log(name, value, **arguments)
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise Refused(f"its file would be where a folder is needed, or the reverse ({error})") from error
        if not arguments:  # `plot=False` writes no row
            self._begun.add(name)

    def _log(self, name: str, value: float | str, **arguments: Any) -> None:
        if clashes(self.run.summary, name.split("/")):
            self._add_beside(name, value)
        else:
            self.run.log_metric(name, value, **arguments)

    def take_text(self, item: Item) -> None:
        if len(item.text) >= csv.field_size_limit() or "\0" in item.text:
            raise Refused("DVCLive could not read its own table again with a text of that length, or one with NUL, in it")
        self.number(item.key, item.text, item.point)

    def _add_beside(self, name: str, value: Any) -> None:
        """Log a name that is also a group: it has an ordinary table, and is stored as `_` in its group in metrics.json."""
        from dvclive.plots import Metric

        metric = self.run._metrics.setdefault(name, Metric(name, self.run.plots_dir))  # noqa: SLF001 - as log_metric does
        metric.step = self.run.step
        value = value if isinstance(value, str) or math.isfinite(value) else str(value)
        metric.dump(value)
        summarise(self.run.summary, name.split("/"), value)
        self.warn(
            f"beside:{name}",
            f"dvclive has {name!r} both as a metric and as a group. The history of both is complete; in metrics.json the metric "
            f"is under {ITSELF!r} in the group. Rename one to have it plain.",
        )

    def take(self, item: Item) -> Any:
        """Write one file per step. Resending overwrites it, so media need no counting."""
        if item.kind != "text":
            name = self._name(item)
            if self._pictured.get(item.key) == name:
                self.warn_repeat(item.key, self.run.step)
            self._pictured[item.key] = name
        try:
            return super().take(item)
        except (FanfoldError, TypeError, ValueError) as error:
            raise Refused(str(error)) from error

    def _name(self, item: Item) -> str:
        return f"{file_name(item.key)}/{self.run.step}" + (f"-{item.at}" if item.of > 1 else "")

    def take_image(self, item: Item) -> None:
        """Log an image as PNG; CMYK and similar modes become RGB, as browsers show them."""
        picture = item.value.pil()
        fits = picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I")
        self.run.log_image(f"{self._name(item)}.png", picture if fits else picture.convert("RGB"))

    def take_video(self, item: Item) -> Any:
        """Write an animated GIF next to the images: `log_image` would keep only its first frame."""
        from dvclive.plots import Image

        data, ext = item.content
        if ext != "gif":
            return self.left_out(item)
        return Image(f"{self._name(item)}.gif", self.run.plots_dir).output_path.write_bytes(data)

    def take_histogram(self, item: Item) -> None:
        edges, counts = item.value.edges.tolist(), item.value.counts.tolist()
        bins = [{"from": low, "to": high, "count": count} for low, high, count in zip(edges, edges[1:], counts, strict=False)]
        self.run.log_plot(self._name(item), bins, x="from", y="count", template="linear")

    def take_table(self, item: Item) -> Any:
        columns = item.value.columns
        if not columns:
            return self.left_out(item)
        found = [plain(dict(zip(columns, row, strict=True))) for row in item.value.rows]
        return self.run.log_plot(self._name(item), found, x=columns[0], y=columns[1:] or columns[0], template="linear")

    def settle(self) -> None:
        """Write metrics.json. The tables need nothing: each row is written when logged."""
        from dvclive.plots import NumpyEncoder

        self.run.summary["step"] = self.run.step
        # make_summary() writes in place, and next_step() re-reads every table each time.
        replace_json(Path(self.run.metrics_file), self.run.summary, cls=NumpyEncoder)

    def counts(self) -> dict[str, int] | None:
        """Count this run's rows in every table; None for a user's own `live`, whose initial rows are unknown."""
        if self.identity is None:
            return None
        found = {key_of(name): count - self._before.get(name, 0) for name, count in rows(Path(self.run.dir)).items()}
        return {key: count for key, count in found.items() if count > 0}


class DVCLiveTracker(Tracker):
    destination_class = DVCLive
