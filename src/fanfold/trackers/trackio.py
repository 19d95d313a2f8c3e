"""Trackio: one SQLite file per project, or a Trackio server.

Numbers and texts go to the local database in one transaction with the time of the call; `trackio.log` would use the time of
delivery, write them about a second later, and only warn if that fails. Media, and everything for a Space or a server, go through
the library.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import sqlite3
import sys
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..media import Media
from ..plain import plain
from .base import Alert, Identity, Point, Refusal, Refused, clean
from .destination import Destination, Item
from .face import Tracker
from .tools import cell_of, mapped, plain_name, small_integer

RESERVED = frozenset({"project", "run", "timestamp", "step", "time", "metrics"})
MAX_INTEGER = 1 << 63
_small = functools.partial(small_integer, most=2 * MAX_INTEGER - 1)  # as JSON can hold it
_PLAIN = (bool, int, float, str)


class Trackio(Destination):
    """Log to the project `run_name`; other arguments go to `trackio.init`."""

    name = "trackio"
    main_process_only = False
    delivery = "readable"
    delivery_online = "at least once"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._config: dict[str, Any] = {}
        self._words: dict[str, Any] = {}  # in the config, because trackio has no other place for them

    @classmethod
    def unusable(cls) -> str | None:
        if os.environ.get("TRACKIO_SPACE_ID"):
            from huggingface_hub import get_token

            return None if get_token() else "TRACKIO_SPACE_ID is set and there is no token: run `hf auth login`, or set HF_TOKEN"
        server = os.environ.get("TRACKIO_SERVER_URL", "")
        if server and "write_token=" not in server and not os.environ.get("TRACKIO_WRITE_TOKEN"):
            return "TRACKIO_SERVER_URL is set without a token: set TRACKIO_WRITE_TOKEN"
        return None

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        super().open(identity, remote)
        self._queued = 0  # rows passed to trackio's own queue, which must reach the database eventually
        self._before = 0 if identity is None else len(self._rows())
        if self.identity is not None:
            self._take_over_config()

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        if identity is None:
            return self.library.init(project=self.run_name, **self.init_kwargs)
        known = json.loads(remote) if remote else {}
        self._stay_in(known.get("folder", ""))
        # Our probes measure the machine, and a relay has no notebook to show a page in.
        own = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False, "name": identity.name, "group": identity.group}
        arguments = {**{key: value for key, value in own.items() if value is not None}, **self.init_kwargs}
        arguments |= {"name": known["name"]} if known else {}
        # init() ends the run it finds in its context; in an empty context, a user's open run stays open.
        alone = identity.live and self.library.context_vars.current_run.get() is None
        start = functools.partial(self.library.init, project=self.run_name, **arguments)
        run = start() if alone else contextvars.Context().run(start)
        run.id = known.get("id") or identity.run_id
        return run

    def _take_over_config(self) -> None:
        """Continue with the existing config: trackio replaces all of it with the next row's."""
        from trackio.sqlite_storage import SQLiteStorage

        if self._before and (known := SQLiteStorage.get_run_config(self.run.project, self.run.name, run_id=self.run.id)):
            self.run.config.update({key: value for key, value in known.items() if key != "status"})
            self.run._config_logged = True  # noqa: SLF001 - the config is there

    @property
    def remote(self) -> str | None:
        if self.run is None:
            return None
        place = {} if self.run.url else {"folder": self._folder()}
        return json.dumps({"id": self.run.id, "name": self.run.name, **place})

    @staticmethod
    def _folder() -> str:
        from trackio import utils

        return str(Path(utils.TRACKIO_DIR).absolute())

    def _stay_in(self, folder: str) -> None:
        """Continue in the folder with the first part of the run, wherever TRACKIO_DIR points now: trackio reads it once."""
        if folder and any(Path(folder).glob("*.db")):
            if "trackio" not in sys.modules:
                os.environ["TRACKIO_DIR"] = folder
            elif self._folder() != folder:
                self.warn(
                    "folder",
                    f"Trackio has the first part of this run in {folder}. The rest goes to {self._folder()}, because trackio was "
                    f"imported before. Set TRACKIO_DIR={folder} to have it in one place.",
                )

    @property
    def database(self) -> Path | None:
        """The file this run is written to, or None if trackio sends it elsewhere or writes fragments first."""
        from trackio import utils
        from trackio.sqlite_storage import SQLiteStorage

        local = self.run.url is None and utils.get_storage_mode() == "sqlite"
        return Path(SQLiteStorage.get_project_db_path(self.run.project)) if local else None

    def set_config(self, values: dict[str, Any]) -> None:
        self._config = _writable(plain(values))
        self._update_config()

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        """Store tags and notes in the config, where the dashboard shows them; the name was set at the start."""
        self._words |= {key: value for key, value in (("tags", list(tags)), ("notes", notes)) if value}
        self._update_config()

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store the summary in the config: trackio has none."""
        self._words["summary"] = mapped(plain(values), _small)
        self._update_config()

    def _update_config(self) -> None:
        changed = {**self._words, **self._config}
        if changed.items() <= self.run.config.items():
            return
        self.run.config.update(changed)
        self.run._config_logged = False  # noqa: SLF001 - only then is it sent with the next row

    def _flush_config(self) -> None:
        """Write a config that no row has carried yet, along with an existing row, so that none is added."""
        if self.run._config_logged:  # noqa: SLF001 - as above
            return
        if self.database is None:
            self.run.log({})
        else:
            known = next(iter(self._rows("log_id")), None)
            self._insert([Point({}, 0)], log_ids=None if known is None else [known])

    def alert(self, alert: Alert) -> None:
        """Write an alert with the time of the call; one whose id already exists is left out."""
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

    def artifact(self, path: Path, name: str) -> None:
        found = self.library.Artifact(plain_name(name), type="file")
        found.add_file(str(path), name=Path(name).name)
        self.run.log_artifact(found)

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        rows, refused = self.converted(points)
        if self.database is not None:
            plain = [{key: value for key, value in row.items() if isinstance(value, _PLAIN)} for row in rows]
            self._insert([point._replace(values=row) for point, row in zip(points, plain, strict=True) if row])
            rows = [{key: value for key, value in row.items() if not isinstance(value, _PLAIN)} for row in rows]
        for point, row in zip(points, rows, strict=True):
            if row:
                self.run.log(row, step=point.step)
                self._queued += 1
        return refused

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        """Log as trackio does; values it would skip (tensors, integers beyond 64 bits) become plain numbers first."""
        ours = {key: value for key, value in values.items() if _is_ours(value)}
        rows, refused = self.converted([Point(clean(ours), step)])
        self.run.log({**{key: value for key, value in values.items() if key not in ours}, **rows[0]}, step=step, **kwargs)
        return refused

    def _insert(self, points: Sequence[Point], log_ids: list[str] | None = None) -> None:
        """Write rows in one transaction, each with the time of its call; rows whose id already exists are left out."""
        from trackio.sqlite_storage import SQLiteStorage

        if not points:
            return
        SQLiteStorage.bulk_log(
            project=self.run.project, run=self.run.name, run_id=self.run.id,
            metrics_list=[{_safe(key): value for key, value in point.values.items()} for point in points],
            steps=[point.step for point in points], timestamps=[_time(point.time) for point in points],
            config=None if self.run._config_logged else self.run.config,  # noqa: SLF001 - as the library's own log() does
            log_ids=log_ids or [uuid.uuid4().hex for _ in points],
        )  # fmt: skip
        self._before += 0 if log_ids else len(points)
        self.run._config_logged = True  # noqa: SLF001 - as above

    def settle(self) -> None:
        """Wait until trackio's sender has written everything: media rows are in the database, a server has everything."""
        self._flush_config()
        self.wait_until(self._written, "written all rows")

    def _written(self) -> bool:
        if self.database is not None:
            return self._queued == 0 or len(self._rows()) >= self._before + self._queued
        return not self.run._queued_logs and not self.run._queued_uploads and not self.run._sending_batch  # noqa: SLF001

    def _rows(self, column: str = "metrics") -> list[str]:
        """Return one column of this run's rows in the local database, as stored."""
        if self.database is None or not self.database.exists():
            return []
        query = f"SELECT {column} FROM metrics WHERE run_id = ?"  # noqa: S608 - the column name is ours
        with contextlib.closing(sqlite3.connect(f"{self.database.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as found:
            return [row for (row,) in found.execute(query, (self.run.id,))]

    def counts(self) -> dict[str, int] | None:
        """Count the rows of each key in the local database; a server is not queried."""
        if self.database is None:
            return None
        return dict(Counter(key.removeprefix("__") for row in self._rows() for key in json.loads(row)))

    def close(self, status: str) -> None:
        """Finish; trackio has no final status, so it is stored in the config."""
        self._words["status"] = status
        self._update_config()
        self.settle()
        self.finish()

    def finish(self) -> None:
        self.run.finish()
        self.hide_here()

    def hide_here(self) -> None:
        from trackio import context_vars

        if self.run is not None and context_vars.current_run.get() is self.run:
            context_vars.current_run.set(None)  # otherwise it is finished again at process exit

    def together(self, key: str, made: list[Any]) -> Any:
        """Return several media of one key as a table with one column: a row holds one value per key."""
        lib = self.library
        if not all(isinstance(one, (lib.Image, lib.Audio, lib.Video)) for one in made):
            raise Refused("trackio takes lists of images, sounds and videos only")
        return lib.Table(columns=[key], data=[[one] for one in made])

    def take_text(self, item: Item) -> Any:
        return item.value if isinstance(item.value, str) else self.library.Markdown(item.text)

    def take_image(self, item: Item) -> Any:
        return self.library.Image(item.value.pil(), caption=item.caption)

    def take_audio(self, item: Item) -> Any:
        path = self.file_of(item)
        if path.suffix not in (".wav", ".mp3"):
            raise Refused(f"trackio takes WAV and MP3, not {path.suffix}")
        return self.library.Audio(str(path), caption=item.caption)

    def take_video(self, item: Item) -> Any:
        return self.library.Video(str(self.file_of(item)), caption=item.caption)

    def take_histogram(self, item: Item) -> Any:
        return self.library.Histogram(np_histogram=(item.value.counts, item.value.edges))

    def take_table(self, item: Item) -> Any:
        rows = [[self._cell(cell, item) for cell in row] for row in item.value.rows]
        return self.library.Table(columns=list(item.value.columns), data=rows)

    def _cell(self, cell: Any, item: Item) -> Any:
        if isinstance(cell, Media):
            known = cell.kind in ("image", "audio", "video")
            return self.nested(cell, item) if known else f"<{cell.kind}>"
        return None if cell is None else _small(cell_of(cell))

    def take_plotly(self, item: Item) -> Any:
        return self.library.Html(item.value.html, caption=item.caption)

    def take_html(self, item: Item) -> Any:
        return self.library.Html(item.value.html, inject=False)


class TrackioTracker(Tracker):
    destination_class = Trackio


def _is_ours(value: Any) -> bool:
    """Return whether trackio would skip a value that we can convert for it."""
    kind = type(value).__module__.partition(".")[0]
    big = isinstance(value, int) and not -MAX_INTEGER <= value < MAX_INTEGER
    return big or kind in ("torch", "jax", "jaxlib") or isinstance(value, Media)


def _safe(key: str) -> str:
    """Return a key as trackio stores it: keys it uses itself get two underscores."""
    return f"__{key}" if key in RESERVED or key.startswith("__") else key


def _time(seconds: float | None) -> str:
    moment = datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat()


def _writable(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without keys that trackio uses itself and integers its JSON cannot hold."""
    return {f"config{key}" if key.startswith("_") else key: mapped(value, _small) for key, value in config.items()}
