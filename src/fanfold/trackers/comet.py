"""Comet: experiments online, or offline as archives that `comet upload` sends later.

Comet leaves an empty archive when it is killed offline. Its messages are in a temporary folder by then; here that folder is
the run's own, so the next relay makes the archive of it. Offline nothing is lost or repeated; online a kill may repeat points.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..errors import notices
from ..journal.writer import try_lock
from ..process import digest
from . import _comet_archives as archives
from .base import Adapter, Alert, Identity, Point, clean_config, flat_config, on_main_process
from .tools import content_of

SETTLE_SECONDS = 60.0
MAX_NAME = 100  # Comet cuts longer names, so two keys could become one
MAX_VALUE = 1000  # and longer parameters
STATUS, SETTLED = "fanfold_status", "fanfold_settled"

# What Comet does by itself: reads the script, the host and its network, patches stdout, starts codecarbon.
_QUIET = {
    **dict.fromkeys(("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch", "log_env_details"), False),
    **dict.fromkeys(("log_env_gpu", "log_env_host", "log_env_cpu", "log_env_network", "log_env_disk"), False),
    **dict.fromkeys(("auto_output_logging", "auto_param_logging", "auto_metric_logging", "auto_log_co2"), False),
    "display_summary_level": 0,
}


class CometMLTracker(Adapter):
    """Log to a Comet experiment; `run_name` is the project, other arguments go to `comet_ml.start`."""

    name: ClassVar[str] = "comet_ml"
    delivery: ClassVar[str] = "readable"
    delivery_online: ClassVar[str | None] = "at least once"
    writer: Any

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._identity: Identity | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._lock = -1
        self._settles = 0
        self._read_to = 0

    @classmethod
    def unusable(cls) -> str | None:
        if not archives.says_online(None) or os.environ.get("COMET_API_KEY") or archives.has_key():
            return None
        return "no API key: set COMET_API_KEY, run `comet login`, or set COMET_START_ONLINE=0"

    # Opening

    def adopt(self, identity: Identity) -> None:
        """Take key, name and folder from our run, and switch off what Comet does by itself."""
        self._identity = identity
        derived = hashlib.sha256(f"{identity.project}/{identity.run_id}".encode()).hexdigest()[:32]
        self.init_kwargs.setdefault("experiment_key", os.environ.get("COMET_EXPERIMENT_KEY") or derived)
        self.init_kwargs.setdefault("mode", "get_or_create")
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # or importing Comet mirrors every MLflow run
        os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "false")

    @property
    def remote(self) -> str | None:
        return str(self.writer.get_key()) if hasattr(self, "writer") else None

    def resume(self, remote: str) -> None:
        self.init_kwargs |= {"experiment_key": remote, "mode": "get_or_create"}

    @on_main_process
    def start(self) -> None:
        import comet_ml

        begin = getattr(comet_ml, "start", None) or comet_ml.Experiment  # `start` came with 3.41
        if self._identity is None:
            self.writer = begin(project_name=self.run_name, **self.init_kwargs)
            return
        self._end_others(comet_ml)
        self._acquire()
        with _temporary_files_in(self._open_folder()):
            self.writer = begin(
                **{"project_name": self.run_name, **self.init_kwargs, "experiment_config": self._config(comet_ml)}
            )
        if not self.writer.alive:
            raise ConnectionError("Comet could not be reached, or refused the API key; its log above says which")
        self.writer.set_name(self._identity.name)

    def _config(self, comet_ml: Any) -> Any:
        given = self.init_kwargs.get("experiment_config")
        if given is not None and not isinstance(given, Mapping):
            return given
        return comet_ml.ExperimentConfig(**{**_QUIET, **(given or {}), "offline_directory": str(self._archives())})

    def _archives(self) -> Path:
        """Return where the offline archives go."""
        assert self._identity is not None
        config = self.init_kwargs.get("experiment_config")
        given = config.get("offline_directory") if isinstance(config, Mapping) else getattr(config, "offline_directory", None)
        folder = Path(given or os.environ.get("COMET_OFFLINE_DIRECTORY") or self._identity.directory)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _open_folder(self) -> Path:
        """Return where Comet keeps what is not archived yet; archive what a killed relay left there."""
        assert self._identity is not None
        key: str = self.init_kwargs["experiment_key"]
        folder: Path = self._identity.directory / "open" / key
        folder.mkdir(parents=True, exist_ok=True)
        archives.seal(folder, self._archives(), key, project=self.run_name, workspace=self.init_kwargs.get("workspace"))
        return folder

    def _acquire(self) -> None:
        """Be the only process with this experiment: one that was told to stop may still be writing its archive at exit."""
        assert self._identity is not None
        self._identity.directory.mkdir(parents=True, exist_ok=True)
        if self._lock < 0:
            self._lock = os.open(self._identity.directory / "open.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if try_lock(self._lock) is False:
            raise BlockingIOError("another process still closes this experiment")

    def _end_others(self, comet_ml: Any) -> None:
        """End an experiment that is open in this process: starting a second one would throw its queue away."""
        other = comet_ml.get_running_experiment()
        if other is not None and not other.ended and other.get_key() != self.init_kwargs["experiment_key"]:
            other.end()
            notices.once(
                "comet_ml:second experiment",
                "Comet holds one experiment per process and another was open. That one was ended; what it had is complete. "
                "Use relay='process', the default, to have several.",
            )

    @property
    def tracker(self) -> Any:
        return self.writer

    @property
    def _offline(self) -> bool:
        import comet_ml

        return isinstance(self.writer, comet_ml.OfflineExperiment)

    # Writing

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as parameters, and whole as `config.json` where Comet would cut a value."""
        config = clean_config(values)
        self.writer.log_parameters(config)
        if any(len(str(value)) > MAX_VALUE for value in config.values()):
            self.writer.log_asset_data(json.dumps(config, indent=1), name="config.json", overwrite=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if step is not None:
            self.writer.set_step(step)
        super().log(values, step, **kwargs)

    def add(self, key: str, value: Any, point: Point) -> None:
        if isinstance(value, (bool, int, float)):
            number = int(value) if isinstance(value, bool) else value  # a bool would be stored as a text
            self.writer.log_metric(_name(key), number, step=point.step, **point.kwargs)
            return
        if isinstance(value, str):
            self.writer.log_other(_name(key), value)
            if self._identity is None:
                return  # by hand, texts are what they are in Accelerate
        items = value if isinstance(value, list) else [value]
        for at, item in enumerate(items, 1):
            facts = {"key": key, "item": at, "items": len(items)}
            put = _text if isinstance(item, str) else _MEDIA[item.kind]
            put(self, item, name=_name(key), step=point.step, metadata=facts | _caption(item))

    def scratch(self, data: bytes, ext: str) -> str:
        """Write a file that lives until the next settle: Comet reads some kinds from files only, later."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="fanfold-comet-")
        fd, path = tempfile.mkstemp(suffix=f".{ext}", dir=self._scratch.name)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        return path

    def artifact(self, path: Path, name: str) -> None:
        self.writer.log_asset(str(path), file_name=name)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Keep the summary as "other" values, which Comet's tables show beside metrics."""
        for key, value in flat_config(values).items():
            plain = value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            self.writer.log_other(_name(key), plain)

    def alert(self, alert: Alert) -> None:
        """Keep an alert as a text, and send it as a notification where Comet is online."""
        facts = {"alert": alert.level, "title": alert.title, "id": alert.id}
        self.writer.log_text(f"{alert.title}\n{alert.text}".strip(), step=alert.step, metadata=facts)
        if not self._offline:
            self.writer.send_notification(
                alert.title, status=alert.level, additional_data={"text": alert.text, "step": alert.step}
            )

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        if name:
            self.writer.set_name(name)
        if tags:
            self.writer.add_tags(list(tags))
            self._keep_tags(tags)
        for key, value in (("notes", notes), ("group", group)):
            if value:
                self.writer.log_other(key, value)

    def _keep_tags(self, tags: Sequence[str]) -> None:
        """Note the tags for an archive made after a kill: Comet has them in memory only, until the end."""
        if self._identity is not None:
            archives.keep_tags(self._identity.directory / "open" / self.init_kwargs["experiment_key"], tags)

    # Being sure

    def settle(self) -> None:
        """Return when the server has all, or offline when a last message is in the file: they are written in order."""
        if not self._offline:
            if not self.writer.flush():
                raise ConnectionError("Comet has not confirmed everything yet")
        elif self._identity is not None:
            self._settles += 1
            mark = f"{os.getpid()}.{self._settles}"
            self.writer.log_other(SETTLED, mark)
            self._wait_for(f'"value":"{mark}"'.encode())
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _wait_for(self, mark: bytes) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        path, tail = Path(self.writer.tmpdir) / archives.MESSAGES, b""
        while time.monotonic() < deadline:
            with path.open("rb") as file:
                file.seek(self._read_to)
                new = file.read()
            self._read_to += len(new)
            tail = tail[-200:] + new
            if mark in tail:
                return
            time.sleep(0.005)
        raise TimeoutError(f"Comet did not write its messages within {SETTLE_SECONDS:.0f} s")

    def counts(self) -> dict[str, int] | None:
        """Count what the archives and the open messages hold, by key; a list of media counts when its last item is there."""
        if self._identity is None or not self._offline:
            return None
        found: Counter[str] = Counter()
        path = Path(self.writer.tmpdir) / archives.MESSAGES
        for message in (*archives.messages(self._archives(), self.writer.get_key()), *archives.lines(path.read_bytes())):
            key = archives.key_of(message)
            if key is not None:
                found[key] += 1
        return dict(found)

    # Closing

    def close(self, status: str) -> None:
        self.writer.log_other(STATUS, status)
        self.finish()

    @on_main_process
    def finish(self) -> None:
        self.writer.end()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(folder)  # Comet has no setting for it
    try:
        yield
    finally:
        tempfile.tempdir = before


def _name(key: str) -> str:
    return key if len(key) <= MAX_NAME else f"{key[: MAX_NAME - 13]}~{digest(key)}"


def _caption(item: Any) -> dict[str, str]:
    caption = getattr(item, "caption", None)
    return {"caption": caption} if caption else {}


def _text(tracker: CometMLTracker, item: Any, *, name: str, step: int | None, metadata: dict[str, Any]) -> None:
    del name
    tracker.writer.log_text(item if isinstance(item, str) else item.text, step=step, metadata=metadata)


def _image(tracker: CometMLTracker, item: Any, *, name: str, step: int | None, metadata: dict[str, Any]) -> None:
    encoded = item.encode()
    tracker.writer.log_image(io.BytesIO(bytes(encoded.data)), name=name, image_format=encoded.ext, step=step, metadata=metadata)


def _histogram(tracker: CometMLTracker, item: Any, *, name: str, step: int | None, metadata: dict[str, Any]) -> None:
    from comet_ml.data_structure import Histogram

    held, edges = Histogram(), item.edges
    held.add((edges[:-1] + edges[1:]) / 2, counts=item.counts)
    if held.is_empty():  # Comet takes none without a value
        _asset(tracker, b"[]", f"{name}.json", step, metadata)
    else:
        tracker.writer.log_histogram_3d(held, name=name, step=step, metadata=metadata)


def _audio(tracker: CometMLTracker, item: Any, *, name: str, step: int | None, metadata: dict[str, Any]) -> None:
    encoded = item.encode()  # as a file: an array would be scaled to its loudest sample
    path = tracker.scratch(bytes(encoded.data), encoded.ext)
    tracker.writer.log_audio(path, sample_rate=item.sample_rate, file_name=f"{name}.{encoded.ext}", metadata=metadata, step=step)


def _video(tracker: CometMLTracker, item: Any, *, name: str, step: int | None, metadata: dict[str, Any]) -> None:
    encoded = item.encode()
    data = io.BytesIO(bytes(encoded.data))
    tracker.writer.log_video(data, name=f"{name}.{encoded.ext}", format=encoded.ext, step=step, metadata=metadata)


def _table(tracker: CometMLTracker, item: Any, *, name: str, step: int | None, metadata: dict[str, Any]) -> None:
    _asset(tracker, content_of(item)[0], f"{name}.csv", step, metadata)


def _html(tracker: CometMLTracker, item: Any, *, name: str, step: int | None, metadata: dict[str, Any]) -> None:
    _asset(tracker, item.html.encode(), f"{name}.html", step, metadata)


def _figure(tracker: CometMLTracker, item: Any, *, name: str, step: int | None, metadata: dict[str, Any]) -> None:
    if item.png:
        tracker.writer.log_image(io.BytesIO(item.png), name=name, step=step, metadata=metadata)
    else:
        _asset(tracker, item.json.encode(), f"{name}.json", step, metadata)


def _asset(tracker: CometMLTracker, data: bytes, name: str, step: int | None, metadata: dict[str, Any]) -> None:
    tracker.writer.log_asset_data(data, name=name, step=step, metadata=metadata)


_MEDIA: dict[str, Callable[..., None]] = {
    "image": _image,
    "histogram": _histogram,
    "audio": _audio,
    "video": _video,
    "text": _text,
    "html": _html,
    "table": _table,
    "figure": _figure,
}
