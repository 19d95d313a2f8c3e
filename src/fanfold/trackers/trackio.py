"""Trackio: a SQLite file per project, or a server of its kind.

Numbers and texts go to the local database in one transaction with the time of the call; `trackio.log` would stamp them
with the time of delivery, write them about a second later, and only warn when that fails. Media, and everything for a
Space or a server, take the library's own way.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

from ..media import Media
from .base import Adapter, Alert, Identity, Point, Refusal, Refused, clean, clean_config, on_main_process, prepared
from .tools import file_of, mapped, plain_name, until

RESERVED = frozenset({"project", "run", "timestamp", "step", "time", "metrics"})
SETTLE_SECONDS = 60.0
MAX_INTEGER = 1 << 63


class TrackioTracker(Adapter):
    """Log to the project `run_name`; other arguments go to `trackio.init`."""

    name: ClassVar[str] = "trackio"
    main_process_only = False
    delivery: ClassVar[str] = "readable"
    delivery_online: ClassVar[str | None] = "at least once"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._id: str | None = None
        self._live = False
        self._config: dict[str, Any] = {}
        self._words: dict[str, Any] = {}
        self._queued = 0  # rows given to trackio's own queue, which the database must show in the end
        self._before = 0

    @classmethod
    def unusable(cls) -> str | None:
        if os.environ.get("TRACKIO_SPACE_ID"):
            from huggingface_hub import get_token

            return None if get_token() else "TRACKIO_SPACE_ID is set and there is no token: run `hf auth login`, or set HF_TOKEN"
        server = os.environ.get("TRACKIO_SERVER_URL", "")
        if server and "write_token=" not in server and not os.environ.get("TRACKIO_WRITE_TOKEN"):
            return "TRACKIO_SERVER_URL is set without a token: set TRACKIO_WRITE_TOKEN"
        return None

    def adopt(self, identity: Identity) -> None:
        self._id, self._live = identity.run_id, identity.live
        for key, value in (("name", identity.name), ("group", identity.group)):
            if value is not None:
                self.init_kwargs.setdefault(key, value)
        # The relay's machine is measured by our own probes, and it has no notebook to show a page in.
        for key in ("auto_log_gpu", "auto_log_cpu", "embed"):
            self.init_kwargs.setdefault(key, False)

    def resume(self, remote: str) -> None:
        known = json.loads(remote)
        self._id = known["id"]
        self.init_kwargs["name"] = known["name"]

    @on_main_process
    def start(self) -> None:
        import trackio

        def start() -> Any:
            return trackio.init(project=self.run_name, **self.init_kwargs)

        if self._id is None:
            self.run = start()
            return
        # init() ends the run it finds in its context; in an empty one, a run the user has open stays open.
        alone = self._live and trackio.context_vars.current_run.get() is None
        self.run = start() if alone else contextvars.Context().run(start)
        self.run.id = self._id
        self._before = len(self._rows())
        self._take_over_config()

    def _take_over_config(self) -> None:
        """Go on with the configuration that is there: trackio replaces it whole by what the next row brings."""
        from trackio.sqlite_storage import SQLiteStorage

        if self._before and (known := SQLiteStorage.get_run_config(self.run.project, self.run.name, run_id=self.run.id)):
            self.run.config.update({key: value for key, value in known.items() if key != "status"})
            self.run._config_logged = True  # noqa: SLF001 - as it says

    @property
    def tracker(self) -> Any:
        return self.run

    @property
    def remote(self) -> str | None:
        run = getattr(self, "run", None)
        return None if run is None else json.dumps({"id": run.id, "name": run.name})

    @property
    def database(self) -> Path | None:
        """The file this run is written to, or None where trackio sends it elsewhere or writes fragments first."""
        from trackio import utils
        from trackio.sqlite_storage import SQLiteStorage

        local = self.run.url is None and utils.get_storage_mode() == "sqlite"
        return Path(SQLiteStorage.get_project_db_path(self.run.project)) if local else None

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._config = _writable(clean_config(values))
        self._update_config()

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        """Keep tags and notes in the configuration, where the dashboard shows them; the name was given at the start."""
        del name, group
        self._words |= {key: value for key, value in (("tags", list(tags)), ("notes", notes)) if value}
        self._update_config()

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Keep the summary in the configuration: trackio has none."""
        self._words["summary"] = mapped(clean_config(values), _small)
        self._update_config()

    def alert(self, alert: Alert) -> None:
        """Write an alert with the time of the call; one with an id that is there already is left out."""
        from trackio import AlertLevel
        from trackio.sqlite_storage import SQLiteStorage

        level = {"info": AlertLevel.INFO, "warning": AlertLevel.WARN, "error": AlertLevel.ERROR}[alert.level]
        if self.database is None:
            self.run.alert(alert.title, alert.text or None, level=level, step=alert.step)
            return
        SQLiteStorage.bulk_alert(
            project=self.run.project, run=self.run.name, run_id=self.run.id, titles=[alert.title], texts=[alert.text or None],
            levels=[level.value], steps=[alert.step], timestamps=[_time(alert.time)], alert_ids=[alert.id],
        )  # fmt: skip

    def _update_config(self) -> None:
        changed = {**self._words, **self._config}
        if changed.items() <= self.run.config.items():
            return
        self.run.config.update(changed)
        self.run._config_logged = False  # noqa: SLF001 - it goes with the next row only if this says so

    # What the relay calls

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        with tempfile.TemporaryDirectory(prefix="fanfold-trackio-") as folder:
            ready, refused = prepared(points, lambda _point, key, value: _taken(key, value, Path(folder)))
            rows = [point._replace(values=values) for point, values in zip(points, ready, strict=True)]
            if self.database is not None:
                plain = [point._replace(values=_plain(point)) for point in rows]
                self._insert([point for point in plain if point.values])
                rows = [point._replace(values=_not_plain(point)) for point in rows]
            for point in rows:
                if point.values:
                    self.run.log(point.values, step=point.step)
                    self._queued += 1
        return refused

    def _insert(self, points: Sequence[Point], log_ids: list[str] | None = None) -> None:
        """Write rows in one transaction, each with the time of its call; rows whose id is there already are left out."""
        from trackio.sqlite_storage import SQLiteStorage

        if not points:
            return
        SQLiteStorage.bulk_log(
            project=self.run.project,
            run=self.run.name,
            run_id=self.run.id,
            metrics_list=[{_safe(key): value for key, value in point.values.items()} for point in points],
            steps=[point.step for point in points],
            timestamps=[_time(point.time) for point in points],
            config=None if self.run._config_logged else self.run.config,  # noqa: SLF001 - as the library's own log() does
            log_ids=log_ids or [uuid.uuid4().hex for _ in points],
        )
        self._before += 0 if log_ids else len(points)
        self.run._config_logged = True  # noqa: SLF001 - as above

    def settle(self) -> None:
        """Wait until trackio's sender has written everything: rows of media are in the database, a server has all."""
        self._flush_config()
        if not until(self._written, SETTLE_SECONDS, pause=0.05):
            raise TimeoutError(
                f"trackio has not written all rows of {self.run.name!r} within {SETTLE_SECONDS:g} s. Nothing is lost; it is "
                "looked at again. Check that its folder can be written to, or that its server answers."
            )

    def _written(self) -> bool:
        if self.database is not None:
            return self._queued == 0 or len(self._rows()) >= self._before + self._queued
        return not self.run._queued_logs and not self.run._queued_uploads and not self.run._sending_batch  # noqa: SLF001

    def _rows(self, column: str = "metrics") -> list[str]:
        """Return one column of this run's rows in the local database, as it is stored."""
        if self.database is None or not self.database.exists():
            return []
        query = f"SELECT {column} FROM metrics WHERE run_id = ?"  # noqa: S608 - the column is ours
        with contextlib.closing(sqlite3.connect(f"{self.database.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as found:
            return [row for (row,) in found.execute(query, (self.run.id,))]

    def counts(self) -> dict[str, int] | None:
        """Count the rows of each key in the local database; a server is not asked."""
        if self.database is None:
            return None
        found: dict[str, int] = {}
        for row in self._rows():
            for key in json.loads(row):
                name = key.removeprefix("__")
                found[name] = found.get(name, 0) + 1
        return found

    def artifact(self, path: Path, name: str) -> None:
        from trackio import Artifact

        found = Artifact(plain_name(name), type="file")
        found.add_file(str(path), name=Path(name).name)
        self.run.log_artifact(found)

    def close(self, status: str) -> None:
        """Finish; trackio knows no final status, so it is kept in the configuration."""
        self._words["status"] = status
        self._update_config()
        self.settle()
        self.finish()

    def _flush_config(self) -> None:
        """Write a configuration that no row has carried yet: with a row that is there already, which adds none."""
        if self.run._config_logged:  # noqa: SLF001 - as above
            return
        if self.database is None:
            self.run.log({})
        elif (known := next(iter(self._rows("log_id")), None)) is not None:
            self._insert([Point({}, 0)], log_ids=[known])
        else:
            self._insert([Point({}, 0)])

    # What Accelerate and users call

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log as trackio does; what it would skip (tensors, integers beyond 64 bits) becomes a plain number first."""
        with tempfile.TemporaryDirectory(prefix="fanfold-trackio-") as folder:
            ours = {key: value for key, value in values.items() if _is_ours(value)}
            ready, refused = prepared([Point(clean(ours), step)], lambda _point, key, value: _taken(key, value, Path(folder)))
            self.run.log({**{key: value for key, value in values.items() if key not in ours}, **ready[0]}, step=step, **kwargs)
            self.warn_refused(refused)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
        self.hide_here()

    def hide_here(self) -> None:
        from trackio import context_vars

        run = getattr(self, "run", None)
        if run is not None and context_vars.current_run.get() is run:
            context_vars.current_run.set(None)  # else it is finished once more when the process ends


def _is_ours(value: Any) -> bool:
    """Tell what trackio would skip and we can turn into something it takes."""
    kind = type(value).__module__.partition(".")[0]
    big = isinstance(value, int) and not -MAX_INTEGER <= value < MAX_INTEGER
    return big or kind in ("torch", "jax", "jaxlib") or isinstance(value, Media)


def _safe(key: str) -> str:
    """Return a key as trackio stores it: those it needs itself get two underscores."""
    return f"__{key}" if key in RESERVED or key.startswith("__") else key


def _time(seconds: float | None) -> str:
    moment = datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat()


def _writable(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without keys that trackio uses itself and without integers its JSON cannot hold."""
    return {f"config{key}" if key.startswith("_") else key: mapped(value, _small) for key, value in config.items()}


def _small(value: Any) -> Any:
    big = isinstance(value, int) and not -MAX_INTEGER <= value < 2 * MAX_INTEGER
    return str(value) if big else value


# Media


def _plain(point: Point) -> dict[str, Any]:
    return {key: value for key, value in point.values.items() if isinstance(value, (bool, int, float, str))}


def _not_plain(point: Point) -> dict[str, Any]:
    return {key: value for key, value in point.values.items() if not isinstance(value, (bool, int, float, str))}


def _taken(key: str, value: Any, folder: Path) -> Any:
    """Return a value as trackio takes it: a number or text as it is, media as trackio's objects; or refuse it."""
    try:
        return _one(key, value, folder)
    except (TypeError, ValueError) as error:
        raise Refused(f"trackio's own classes do not take it: {error}") from error


def _one(key: str, value: Any, folder: Path) -> Any:
    if isinstance(value, Media):
        return _native(value, folder)
    return _listed(key, value, folder) if isinstance(value, list) else value


def _listed(key: str, values: list[Any], folder: Path) -> Any:
    """Return several media of one key as a table of one column: a row holds one value of a key."""
    import trackio

    if any(isinstance(value, Media) and value.kind not in ("image", "audio", "video") for value in values):
        raise Refused("trackio takes lists of images, sounds and videos only")
    return trackio.Table(columns=[key], data=[[_one(key, value, folder)] for value in values])


def _native(value: Any, folder: Path) -> Any:
    return _MEDIA[value.kind](value, folder)


def _image(value: Any, folder: Path) -> Any:
    import trackio

    del folder
    return trackio.Image(value.pil(), caption=value.caption)


def _audio(value: Any, folder: Path) -> Any:
    import trackio

    path = file_of(value, folder)
    if not path.endswith((".wav", ".mp3")):
        raise Refused(f"trackio takes WAV and MP3, not {Path(path).suffix}")
    return trackio.Audio(path, caption=value.caption)


def _video(value: Any, folder: Path) -> Any:
    import trackio

    return trackio.Video(file_of(value, folder), caption=value.caption)


def _histogram(value: Any, folder: Path) -> Any:
    import trackio

    del folder
    return trackio.Histogram(np_histogram=(value.counts, value.edges))


def _table(value: Any, folder: Path) -> Any:
    import trackio

    rows = [[_cell(cell, folder) for cell in row] for row in value.rows]
    return trackio.Table(columns=list(value.columns), data=rows)


def _cell(cell: Any, folder: Path) -> Any:
    if isinstance(cell, Media):
        return _native(cell, folder) if cell.kind in ("image", "audio", "video") else f"<{cell.kind}>"
    return cell if cell is None or isinstance(cell, (bool, float, str)) else _small(cell) if isinstance(cell, int) else str(cell)


def _figure(value: Any, folder: Path) -> Any:
    import trackio

    if value.png is not None:
        from ..media import Image

        return _image(Image(value.png, caption=value.caption), folder)
    return trackio.Html(value.html, caption=value.caption)


def _html(value: Any, folder: Path) -> Any:
    import trackio

    del folder
    return trackio.Html(value.html, inject=False)


def _text(value: Any, folder: Path) -> Any:
    import trackio

    del folder
    return trackio.Markdown(value.text)


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
