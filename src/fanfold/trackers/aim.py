"""Aim: a repository of runs on local disk or behind an `aim://` server. A step holds one value per name: the last one wins.

So sending a point again changes nothing, but a step cannot hold two different values; a warning is logged once for that.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ..plain import plain
from ._aim_repo import EXACT, Row, continues, hash_exactly, index, opened, place_of, reserved, series_of, stored, track_together
from .base import Alert, Identity, Point, Refused, on_main_process
from .destination import LEFT_OUT, Destination, Item, kind_of
from .face import Tracker
from .tools import mapped, markdown, small_integer

Place = tuple[str, str]  # a series: its name, and its context as JSON
EMPTY = "(empty)"  # an empty name or key makes the whole run unreadable for Aim
_QUIET = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}


class Aim(Destination):
    """Track into the Aim repository `logging_dir`; other arguments go to `aim.Run`; files go to `artifacts_uri`."""

    name = "aim"
    own_name = "writer"
    ends_with = "close"
    requires_logging_directory = True
    delivery = "idempotent"
    delivery_online = "idempotent"
    accepts = frozenset({"context", "epoch"})

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = None if logging_dir is None else os.fspath(logging_dir)
        self.artifacts_uri: str | None = self.init_kwargs.pop("artifacts_uri", None)
        self._tags: set[str] = set()
        self._facts: dict[str, Any] = {}
        self._high: dict[Place, int] = {}
        self._series: dict[Place, tuple[Any, Mapping[str, Any]]] = {}  # what Aim knows of series begun here, and their contexts
        self._alerts: dict[tuple[float, str], int] | None = None  # their places among the log records, by time and text

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        super().open(identity, remote)
        self._series = {}
        if identity is not None:
            self._note(run=identity.run_id, status="running")
        self.run.name = identity.name if identity is not None and self.run_name == identity.project else self.run_name

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        """Open the run; one of ours has a hash derived from its id, and records nothing about the relay's own process."""
        if identity is None:
            return self.library.Run(repo=self.aim_repo_path, **self.init_kwargs)
        known = json.loads(remote) if remote else {}
        # A repository inside the run's directory moves with it, and a server is chosen by the user; any other stays where it was.
        if known and self.aim_repo_path != str(identity.directory) and "://" not in str(known["repo"]):
            self.aim_repo_path = known["repo"]
        own = {"run_hash": identity.digest(24), "experiment": identity.project, **_QUIET}
        arguments = {**own, **self.init_kwargs, **({"run_hash": known["hash"]} if known else {})}
        repo = opened(self.aim_repo_path, arguments["run_hash"])
        return self.library.Run(repo=repo, **reserved(repo, arguments))

    @property
    def remote(self) -> str:
        return json.dumps({"hash": self.run.hash, "repo": place_of(self.run.repo)})

    def close(self, status: str) -> None:
        """Record the status, end the run, and index it: until then Aim's queries do not find it."""
        self._note(status=status)
        if status == "finished":
            self.run.report_successful_finish(block=True)
        repo, run_hash = self.run.repo, self.run.hash
        self.finish()
        if not repo.is_remote_repo:
            index(repo, run_hash)

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config as `run["hparams"]`."""
        self.run["hparams"] = _storable(values)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store the summary as `run["summary"]`, where queries can use it."""
        self.run["summary"] = _storable(values)

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        if name and self.identity is not None and self.run_name == self.identity.project:
            self.run.name = name
        if notes is not None:
            self.run.description = notes
        for tag in self._tags - set(tags):
            self.run.remove_tag(tag)
        for tag in dict.fromkeys(tags):
            if tag not in self.run.tags:
                self.run.add_tag(tag)
        self._tags = set(tags)
        if group is not None:
            self._note(group=group)

    def _note(self, **facts: Any) -> None:
        """Store facts that Aim has no field for where its queries can use them: `run.fanfold.status == "failed"`."""
        self._facts.update(facts)
        self.run["fanfold"] = dict(self._facts)

    def alert(self, alert: Alert) -> None:
        """Append an alert to the run's log records, which Aim shows and its notifier watches; one sent again keeps its place."""
        from aim.sdk.logging import LogRecord

        level = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}[alert.level]
        text = f"{alert.title}: {alert.text}" if alert.text else alert.title
        record = LogRecord(text, level, timestamp=alert.time, logger_info=("fanfold", 0), step=alert.step)
        if self._alerts is None:
            records = self.run.get_log_records()
            kept = records.data.view("val").items() if records else ()
            self._alerts = {(one.json()["timestamp"], one.message): place for place, (one,) in kept}
        place = self._alerts.setdefault((alert.time, text), max(self._alerts.values(), default=-1) + 1)
        tracker = self.run._tracker  # noqa: SLF001 - as Run.log_warning() does, which would stamp the time of delivery
        tracker._track(record, alert.time, "__log_records", place)  # noqa: SLF001
        self.run._checkins.check_in(flag_name="new_logs", block=alert.level == "error")  # noqa: SLF001

    def artifact(self, path: Path, name: str) -> None:
        """Copy a file to `artifacts_uri`, by default a folder in the repository."""
        run = self.run
        if self.artifacts_uri is None and run.repo.is_remote_repo:
            self.cannot("keep files on a server without artifacts_uri", name, path)
            return
        run.set_artifacts_uri(self.artifacts_uri or f"file://{run.repo.path}/artifacts")
        safe = PurePosixPath(*[part for part in name.split("/") if part not in ("", ".", "..")] or [EMPTY])
        run.log_artifact(str(path), name=str(safe), block=True)

    def settle(self) -> None:
        """Wait for a server's queue. A local repository needs nothing: each value reaches the kernel when tracked."""
        if self.run.repo.is_remote_repo:
            self.run.repo._client.get_queue().wait_for_finish()  # noqa: SLF001 - Run.close() waits for the same

    def numbers(self, place: Place, rows: Sequence[Row]) -> None:
        """Track numbers of one series: what Aim writes down beside a point, it needs only once for many."""
        series, context = self._series[place]
        track_together(self.run, series, place[0], context, rows)

    def add(self, key: str, value: Any, point: Point) -> None:
        made = self.convert(key, value, point)
        if made is not LEFT_OUT:
            self._track(key, made, value, point)

    def _track(self, key: str, made: Any, value: Any, point: Point) -> None:
        """Track one value; if the name already holds another type, use the same name in a separate context."""
        try:
            self._put(key or EMPTY, made, point)
        except ValueError as error:
            if "Incompatible data types" not in str(error):
                raise Refused(str(error)) from error
            plain = {bool: "number", int: "number", float: "number", list: "list"}
            kind = plain.get(type(value)) or getattr(value, "kind", kind_of(value))
            context = {**(point.kwargs.get("context") or {}), "kind": kind}
            self._put(key or EMPTY, made, point._replace(kwargs={**point.kwargs, "context": context}))

    def _put(self, name: str, value: Any, point: Point) -> None:
        if point.time is None:
            self.run.track(value, name=name, step=point.step, **point.kwargs)
            return
        given = self.arguments(point)
        context, epoch = given.get("context"), given.get("epoch")
        # Aim would number the steps itself, and a resent point would become another one.
        step = point.step if point.step is not None else int(point.time * 1000)
        place = (name, json.dumps(context, sort_keys=True, default=str) if context else "{}")
        high = self._high.get(place, step - 1)
        self._high[place] = max(high, step)
        if high < step <= EXACT and place in self._series and continues(self._series[place][0], value, step):
            self.wait(place, (step, value, point.time, epoch))
            return
        self.send_waiting(place)
        if step <= high:
            self._check_repeat(name, value, step, context or {})
        if abs(step) > EXACT:
            hash_exactly(self.run, name, value, context or {})
        # track() would stamp the time of delivery, which may be hours after the call.
        tracker = self.run._tracker  # noqa: SLF001 - no public way to set the time
        tracker._track(value, point.time, name, step, epoch, context=context)  # noqa: SLF001
        if not self.run.repo.is_remote_repo:
            self._series[place] = (series_of(self.run, name, context or {}), context or {})

    def _check_repeat(self, name: str, value: Any, step: int, context: Mapping[str, Any]) -> None:
        """Warn once per name that a step gets a second value; a step above the highest so far cannot have one."""
        before = stored(self.run, name, step, context)
        if before is not None and _differs(before, value):
            self.warn_repeat(name, step)

    def take_text(self, item: Item) -> Any:
        return self.library.Text(item.text)

    def take_html(self, item: Item) -> Any:
        return self.library.Text(item.value.html)

    def take_table(self, item: Item) -> Any:
        return self.library.Text(markdown(item.value))

    def take_image(self, item: Item) -> Any:
        return self.library.Image(item.value.pil(), caption=item.caption or "")

    def take_audio(self, item: Item) -> Any:
        data, ext = item.content
        if ext not in self.library.Audio.audio_formats:
            return self.left_out(item)
        return self.library.Audio(data, format=ext, caption=item.caption or "")

    def take_video(self, item: Item) -> Any:
        """Return an animated GIF as an animated image; Aim has no type for other videos."""
        import PIL.Image

        data, ext = item.content
        if ext != "gif":
            return self.left_out(item)
        return self.library.Image(PIL.Image.open(io.BytesIO(data), formats=("GIF",)), caption=item.caption or "")

    def take_histogram(self, item: Item) -> Any:
        """Return a distribution. Aim stores counts between two ends, which represents only bins of equal width."""
        import numpy as np

        edges = item.value.edges
        even = np.linspace(edges[0], edges[-1], len(edges))
        if not np.allclose(edges, even, rtol=1e-9, atol=1e-9 * float(edges[-1] - edges[0])):
            return self.left_out(item)
        ends = (float(edges[0]), float(edges[-1]))
        return self.library.Distribution(hist=np.asarray(item.value.counts), bin_range=ends)

    def take_plotly(self, item: Item) -> Any:
        try:
            import plotly.io
        except ImportError:
            return self.library.Text(item.value.json)
        return self.library.Figure(plotly.io.from_json(item.value.json))


class AimTracker(Tracker):
    destination_class = Aim

    @on_main_process
    def log_images(  # type: ignore[override]  # the signature is Accelerate's
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Track images or (image, caption) pairs; `kwargs` holds arguments for `aim_image` and for `track`."""
        chosen = kwargs or {}
        for key, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            made = self.destination.library.Image(image, caption=caption, **chosen.get("aim_image", {}))
            self.destination.run.track(made, name=key, step=step, **chosen.get("track", {}))


def _storable(values: Mapping[str, Any]) -> Any:
    """Return a config without what Aim refuses: integers beyond 64 bits and empty keys."""
    return mapped(plain(values), small_integer, key=lambda name: name or EMPTY)


def _differs(before: Any, value: Any) -> bool:
    numbers = isinstance(before, (int, float)) and isinstance(value, (int, float))
    return not numbers or repr(float(before)) != repr(float(value))
