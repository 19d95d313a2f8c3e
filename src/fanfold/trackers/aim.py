"""Aim: a repository of runs on this disk, or behind an `aim://` server. A step holds one value per name: the last one wins.

So sending a point again changes nothing, and two different values of one step cannot both be there; that is said.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from ..errors import FanfoldError, notices
from ..media import Media
from .base import Adapter, Alert, Identity, Point, Refused, clean_config, on_main_process
from .tools import mapped, markdown

BUILD_SECONDS = 60.0  # a repository without a version that has not changed for so long was left by a kill
EXACT = 1 << 53  # Aim files a point under a hash of its step as a float: beyond this, neighbours would share one
EMPTY = "(empty)"  # an empty name or key makes the whole run unreadable for Aim
_QUIET = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}


class AimTracker(Adapter):
    """Track into the Aim repository `logging_dir`; other arguments go to `aim.Run`, `artifacts_uri` says where files go."""

    name: ClassVar[str] = "aim"
    requires_logging_directory: ClassVar[bool] = True
    delivery: ClassVar[str] = "idempotent"
    delivery_online: ClassVar[str | None] = "idempotent"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self.artifacts_uri: str | None = kwargs.pop("artifacts_uri", None)
        self.init_kwargs = kwargs
        self._identity: Identity | None = None
        self._renames = False
        self._tags: set[str] = set()
        self._facts: dict[str, Any] = {}
        self._high: dict[tuple[str, str], int] = {}

    def adopt(self, identity: Identity) -> None:
        """Take hash, name and experiment from our run, and leave out what would describe the relay's own process."""
        self._identity = identity
        if self.run_name == identity.project:
            self.run_name, self._renames = identity.name, True
        run_hash = hashlib.sha256(f"{identity.project}\0{identity.run_id}".encode()).hexdigest()[:24]
        own = {"run_hash": run_hash, "experiment": identity.project}
        self.init_kwargs = {**own, **_QUIET, **self.init_kwargs}

    @on_main_process
    def start(self) -> None:
        from aim import Run

        where = os.fspath(self.aim_repo_path) if self.aim_repo_path is not None else None
        if self._identity is None:
            self.writer = Run(repo=where, **self.init_kwargs)
        else:
            repo = _opened(where, self.init_kwargs["run_hash"])
            self.writer = Run(repo=repo, **_reserved(repo, self.init_kwargs))
            self._note(run=self._identity.run_id, status="running")
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        return self.writer

    @property
    def remote(self) -> str:
        return json.dumps({"hash": self.writer.hash, "repo": _place(self.writer.repo)})

    def resume(self, remote: str) -> None:
        known = json.loads(remote)
        self.init_kwargs["run_hash"] = known["hash"]
        inside = self._identity is not None and str(self.aim_repo_path) == str(self._identity.directory)
        # A repository inside the run's directory moves with it, and a server is the user's to name; any other stays where it was.
        if not inside and "://" not in str(known["repo"]):
            self.aim_repo_path = known["repo"]

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as `run["hparams"]`."""
        self.writer["hparams"] = mapped(clean_config(values), _storable, key=lambda name: name or EMPTY)

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        if name and self._renames:
            self.writer.name = name
        if notes is not None:
            self.writer.description = notes
        for tag in self._tags - set(tags):
            self.writer.remove_tag(tag)
        for tag in dict.fromkeys(tags):
            if tag not in self.writer.tags:
                self.writer.add_tag(tag)
        self._tags = set(tags)
        if group is not None:
            self._note(group=group)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Keep the summary as `run["summary"]`, where queries can ask for it."""
        self.writer["summary"] = mapped(clean_config(values), _storable, key=lambda name: name or EMPTY)

    def alert(self, alert: Alert) -> None:
        """Add an alert to the run's log records, which Aim's notifier watches; sent again, it is the same record."""
        from aim.sdk.logging import LogRecord

        level = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}[alert.level]
        text = f"{alert.title}: {alert.text}" if alert.text else alert.title
        record = LogRecord(text, level, timestamp=alert.time, logger_info=("fanfold", 0), step=alert.step)
        tracker = self.writer._tracker  # noqa: SLF001 - as Run.log_warning() does, which would stamp the time of delivery
        tracker._track(record, alert.time, "__log_records", int(alert.time * 1000))  # noqa: SLF001
        self.writer._checkins.check_in(flag_name="new_logs", block=alert.level == "error")  # noqa: SLF001

    def _note(self, **facts: Any) -> None:
        """Keep what Aim has no field for where its queries can ask: `run.fanfold.status == "failed"`."""
        self._facts.update(facts)
        self.writer["fanfold"] = dict(self._facts)

    def add(self, key: str, value: Any, point: Point) -> None:
        if isinstance(value, (bool, int, float)):
            self._track(key, value, "number", point)
        elif (made := self._converted(key, value)) is not None:
            self._track(key, made, "text" if isinstance(value, str) else getattr(value, "kind", "list"), point)

    def _track(self, key: str, value: Any, kind: str, point: Point) -> None:
        """Track one value; where the name holds another type already, under the same name in a context of its own."""
        try:
            self._put(key or EMPTY, value, point)
        except ValueError as error:
            if "Incompatible data types" not in str(error):
                raise Refused(str(error)) from error
            context = {**(point.kwargs.get("context") or {}), "kind": kind}
            self._put(key or EMPTY, value, point._replace(kwargs={**point.kwargs, "context": context}))

    def _put(self, name: str, value: Any, point: Point) -> None:
        if point.time is None:
            self.writer.track(value, name=name, step=point.step, **point.kwargs)
            return
        self._check_arguments(point)
        context, epoch = point.kwargs.get("context"), point.kwargs.get("epoch")
        # Aim would count the steps itself, and a point sent again would be another one.
        step = point.step if point.step is not None else int(point.time * 1000)
        self._check_repeat(name, value, step, context or {})
        if abs(step) > EXACT:
            _hash_exactly(self.writer, name, value, context or {})
        # track() would stamp the time of delivery, which may be hours after the call.
        tracker = self.writer._tracker  # noqa: SLF001 - no public way to give a time
        tracker._track(value, point.time, name, step, epoch, context=context)  # noqa: SLF001

    def _check_arguments(self, point: Point) -> None:
        for name in set(point.kwargs) - {"context", "epoch"}:
            notices.once(
                f"aim:argument:{name}",
                f"aim takes no argument {name!r} with a value; it is left out and the values are tracked. "
                "Pass context= or epoch= in log_kwargs={'aim': {...}}.",
            )

    def _check_repeat(self, name: str, value: Any, step: int, context: Mapping[str, Any]) -> None:
        """Say once per name that a step gets a second value. Only a step not above the highest so far is looked up."""
        place = (name, json.dumps(context, sort_keys=True, default=str))
        high = self._high.get(place)
        self._high[place] = step if high is None else max(high, step)
        if high is None or step > high:
            return
        before = _stored(self.writer, name, step, context)
        if before is not None and _differs(before, value):
            notices.once(
                f"aim:repeat:{name}",
                f"aim holds one value per step, and {name!r} has several at step {step}; the last one is there, "
                "all of them are in the journal. Look at them with `fanfold show`, or log under different steps.",
            )

    def _converted(self, key: str, value: Any) -> Any:
        """Return the object Aim has for a text or media, a list of them for a list, or None where it has none."""
        if isinstance(value, list):
            return [made for item in value if (made := self._converted(key, item)) is not None] or None
        try:
            made = _text(value) if isinstance(value, str) else _MEDIA[value.kind](value) if isinstance(value, Media) else value
        except (FanfoldError, TypeError, ValueError) as error:
            raise Refused(str(error)) from error
        if made is None:
            self._cannot(f"hold this kind of {value.kind}", key, value)
        return made

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Track images, or (image, caption) pairs; `kwargs` has arguments for `aim_image` and for `track`."""
        import aim

        chosen = kwargs or {}
        for key, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            made = aim.Image(image, caption=caption, **chosen.get("aim_image", {}))
            self.writer.track(made, name=key, step=step, **chosen.get("track", {}))

    def settle(self) -> None:
        """Wait for a server's queue. A repository on disk needs nothing: each value is in the kernel's hands when tracked."""
        if self.writer.repo.is_remote_repo:
            self.writer.repo._client.get_queue().wait_for_finish()  # noqa: SLF001 - what Run.close() itself waits for

    def artifact(self, path: Path, name: str) -> None:
        """Copy a file to `artifacts_uri`, by default a folder of the repository's own."""
        run = self.writer
        if self.artifacts_uri is None and run.repo.is_remote_repo:
            self._cannot("keep files on a server without artifacts_uri", name, path)
            return
        run.set_artifacts_uri(self.artifacts_uri or f"file://{run.repo.path}/artifacts")
        safe = PurePosixPath(*[part for part in name.split("/") if part not in ("", ".", "..")] or [EMPTY])
        run.log_artifact(str(path), name=str(safe), block=True)

    def close(self, status: str) -> None:
        """Note the status, end the run, and put it into the index: until then no query of Aim finds it."""
        self._note(status=status)
        if status == "finished":
            self.writer.report_successful_finish(block=True)
        repo, run_hash = self.writer.repo, self.writer.hash
        self.finish()
        if not repo.is_remote_repo:
            _index(repo, run_hash)

    @on_main_process
    def finish(self) -> None:
        self.writer.close()


def _opened(where: str | None, run_hash: str) -> Any:
    """Open a repository. A new one is built aside and moved into place: Aim cannot open one that a kill left half built."""
    from aim.sdk.repo import Repo
    from aim.sdk.repo_utils import get_repo
    from aim.sdk.utils import clean_repo_path

    where = where or Repo.default_repo_path()
    if not where.startswith(("aim://", "ssh://")):
        _build(Path(clean_repo_path(where)).absolute(), run_hash)
    return get_repo(where)


def _build(root: Path, run_hash: str) -> None:
    from aim.sdk.configs import get_aim_repo_name
    from aim.sdk.repo import Repo

    home, aside = root / get_aim_repo_name(), root / f".fanfold-{run_hash}"  # the latter is this run's relay's alone
    shutil.rmtree(aside, ignore_errors=True)
    if (home / "VERSION").exists() or any(home.glob("*/chunks/*")):
        return  # built; an old one without a version is Aim's to upgrade
    if home.exists():
        _discard(home)
    aside.mkdir(parents=True)
    Repo(str(aside), init=True).close()
    try:
        (aside / home.name).rename(home)
    except OSError:
        if not (home / "VERSION").exists():  # else another run has built it meanwhile
            raise
    shutil.rmtree(aside, ignore_errors=True)


def _discard(home: Path) -> None:
    """Move a half-built repository away, unless its builder may still be at work."""
    if time.time() - max(path.stat().st_mtime for path in (home, *home.rglob("*"))) < BUILD_SECONDS:
        raise BlockingIOError(f"{home} has no VERSION yet: another process may be building it")
    home.rename(home.with_name(f"{home.name}.incomplete-{time.time_ns()}"))


def _reserved(repo: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the run's arguments with its place in the repository made: Aim opens a hash it knows, but creates only its own."""
    run_hash = arguments["run_hash"]
    if repo.is_remote_repo:
        known = run_hash in repo.list_all_runs()
        return arguments if known else {name: value for name, value in arguments.items() if name != "run_hash"}
    (Path(repo.path) / "meta" / "chunks" / run_hash).mkdir(parents=True, exist_ok=True)
    # A relay that was killed leaves its lock; ours on the cursor says it is gone, and the store's own stops a living one.
    left = (Path(repo.path) / "locks" / f"{run_hash}.softlock").exists()
    return {"force_resume": left, **arguments}


def _place(repo: Any) -> str:
    return f"aim://{repo.root_path}" if repo.is_remote_repo else str(repo.root_path)


def _index(repo: Any, run_hash: str) -> None:
    """Make a finished run visible to queries. Where `aim up` holds the index, it does so itself."""
    from aim.sdk.index_manager import RepoIndexManager, aimrocks
    from filelock import Timeout

    try:
        RepoIndexManager.get_index_manager(repo).index(run_hash)
    except (aimrocks.errors.RocksIOError, Timeout):
        notices.once(
            f"aim:index:{run_hash}",
            f"aim's index is held by another process, so run {run_hash} may not be found by queries yet. Nothing is lost. "
            "`aim up` adds it by itself; elsewhere run `aim storage reindex`.",
        )


def _storable(value: Any) -> Any:
    """Return a value without what Aim refuses: integers beyond 64 bits."""
    return str(value) if type(value) is int and not -(1 << 63) <= value < 1 << 63 else value


def _stored(run: Any, name: str, step: int, context: Mapping[str, Any]) -> Any:
    """Return what a name holds at a step, or None."""
    from aim.storage.context import Context

    known = run._tracker.sequence_infos.get((Context(dict(context)).idx, name))  # noqa: SLF001 - a reader sees no open run
    if known is None or not known.initialized:
        return None
    try:
        return known.val_view[known.step_hash_fn(step)]
    except KeyError:
        return None


def _hash_exactly(run: Any, name: str, value: Any, context: Mapping[str, Any]) -> None:
    """Have a sequence of numbers file each step beyond 2**53 under a hash of its own; readers go by the steps themselves."""
    from aim.storage.context import Context

    tracker, idx = run._tracker, Context(dict(context)).idx  # noqa: SLF001 - no public way
    info = tracker.sequence_infos[idx, name]
    if not info.initialized:
        tracker._init_sequence_info(idx, name, tracker._normalized_values(value, name)[name])  # noqa: SLF001 - as track() does
    if info.version == 2:
        info.step_hash_fn = _step_hash


def _step_hash(step: int) -> int:
    from aim.storage.hashing import hash_auto

    return int(hash_auto(step if abs(step) <= EXACT else str(step)))


def _differs(before: Any, value: Any) -> bool:
    if isinstance(before, (int, float)) and isinstance(value, (int, float)):
        return struct.pack("<d", before) != struct.pack("<d", value)
    return True


def _text(value: str) -> Any:
    import aim

    return aim.Text(value)


def _image(value: Any) -> Any:
    import aim

    return aim.Image(value.pil(), caption=value.caption or "")


def _audio(value: Any) -> Any:
    import aim

    sound = value.encode()
    if sound.ext not in aim.Audio.audio_formats:
        return None
    return aim.Audio(bytes(sound.data), format=sound.ext, caption=value.caption or "")


def _video(value: Any) -> Any:
    """Return a moving GIF as the moving image it is; Aim has nothing for other films."""
    import aim
    import PIL.Image

    film = value.encode()
    if film.ext != "gif":
        return None
    return aim.Image(PIL.Image.open(io.BytesIO(film.data), formats=("GIF",)), caption=value.caption or "")


def _histogram(value: Any) -> Any:
    """Return a distribution, which Aim keeps as counts between two ends: only bins of equal width are that."""
    import aim
    import numpy as np

    edges = value.edges
    even = np.linspace(edges[0], edges[-1], len(edges))
    if not np.allclose(edges, even, rtol=1e-9, atol=1e-9 * float(edges[-1] - edges[0])):
        return None
    return aim.Distribution(hist=np.asarray(value.counts), bin_range=(float(edges[0]), float(edges[-1])))


def _figure(value: Any) -> Any:
    import aim

    if value.png:
        import PIL.Image

        return aim.Image(PIL.Image.open(io.BytesIO(value.png), formats=("PNG",)), caption=value.caption or "")
    try:
        import plotly.io
    except ImportError:
        return _text(value.json)
    return aim.Figure(plotly.io.from_json(value.json))


_MEDIA: dict[str, Callable[[Any], Any]] = {
    "image": _image,
    "audio": _audio,
    "video": _video,
    "histogram": _histogram,
    "table": lambda value: _text(markdown(value)),
    "figure": _figure,
    "html": lambda value: _text(value.html),
    "text": lambda value: _text(value.text),
}
