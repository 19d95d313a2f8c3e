"""Comet: experiments online, or offline as archives that `comet upload` sends later.

When killed offline, Comet leaves an empty archive and its messages in a temporary folder. Here that folder belongs to the run, so
the next relay archives it. Offline nothing is lost or repeated; online a kill may repeat points.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..journal.writer import try_lock
from ..plain import plain
from ..process import digest
from . import _comet_archives as archives
from .base import Alert, Identity, Point, Refusal, flat_config
from .destination import Destination, Item
from .face import Tracker
from .tools import GrowingFile, text_of

MAX_NAME = 100  # Comet cuts longer names, so two keys could collide
MAX_VALUE = 1000  # longer parameters are cut, too
STATUS, SETTLED, RUN = "fanfold_status", "fanfold_settled", "fanfold_run"

# Comet's automatic features: it reads the script, the host and its network, patches stdout, starts codecarbon.
_QUIET = {
    **dict.fromkeys(("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch", "log_env_details"), False),
    **dict.fromkeys(("log_env_gpu", "log_env_host", "log_env_cpu", "log_env_network", "log_env_disk"), False),
    **dict.fromkeys(("auto_output_logging", "auto_param_logging", "auto_metric_logging", "auto_log_co2"), False),
    "display_summary_level": 0,
}


class Comet(Destination):
    """Log to a Comet experiment; `run_name` is the project, other arguments go to `comet_ml.start`."""

    name = "comet_ml"
    own_name = "writer"
    delivery = "readable"
    delivery_online = "at least once"
    _lock = -1
    _settles = 0

    @classmethod
    def unusable(cls) -> str | None:
        offline = os.environ.get("COMET_START_ONLINE", "1").strip().lower() in ("0", "false", "no", "off")
        if offline or os.environ.get("COMET_API_KEY") or archives.has_key():
            return None
        return "no API key: set COMET_API_KEY, run `comet login`, or set COMET_START_ONLINE=0"

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        if identity is not None:
            os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # otherwise importing Comet mirrors every MLflow run
            os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "false")
        arguments = {"project_name": self.run_name, **self.init_kwargs}
        if identity is None:
            return self.library.start(**arguments)
        known = {"experiment_key": os.environ.get("COMET_EXPERIMENT_KEY") or identity.digest(32), "mode": "get_or_create"}
        arguments = {**known, **arguments} if remote is None else {**arguments, "experiment_key": remote, "mode": "get_or_create"}
        key = arguments["experiment_key"]
        self._end_others(key)
        self._acquire(identity.directory)
        self._archives, arguments["experiment_config"] = self._config(identity.directory)
        self._pending = identity.directory / "open" / key  # where Comet keeps messages not archived yet
        self._pending.mkdir(parents=True, exist_ok=True)
        archives.seal(self._pending, self._archives, key, project=self.run_name, workspace=arguments.get("workspace"))
        before, tempfile.tempdir = tempfile.tempdir, str(self._pending)  # Comet has no setting for it
        try:
            experiment = self.library.start(**arguments)
        finally:
            tempfile.tempdir = before
        if not experiment.alive:
            raise ConnectionError("Comet could not be reached, or refused the API key; its log above says which")
        experiment.set_name(identity.name)
        experiment.log_other(RUN, identity.run_id)  # an import recognises the run by it
        if self._is_offline(experiment):
            self._messages = GrowingFile(Path(experiment.tmpdir) / archives.MESSAGES)
        return experiment

    def _config(self, directory: Path) -> tuple[Path, Any]:
        """Return the folder for offline archives, and Comet's configuration."""
        config = self.init_kwargs.get("experiment_config")
        given = config.get("offline_directory") if isinstance(config, Mapping) else getattr(config, "offline_directory", None)
        folder = Path(given or os.environ.get("COMET_OFFLINE_DIRECTORY") or directory)
        folder.mkdir(parents=True, exist_ok=True)
        if config is not None and not isinstance(config, Mapping):
            return folder, config
        return folder, self.library.ExperimentConfig(**{**_QUIET, **(config or {}), "offline_directory": str(folder)})

    def _acquire(self, directory: Path) -> None:
        """Become the only process with this experiment: one told to stop may still be writing its archive at exit."""
        directory.mkdir(parents=True, exist_ok=True)
        if self._lock < 0:
            self._lock = os.open(directory / "open.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if try_lock(self._lock) is False:
            raise BlockingIOError("another process still closes this experiment")

    def _end_others(self, key: str) -> None:
        """End an experiment that is open in this process: starting a second one would discard its queue."""
        other = self.library.get_running_experiment()
        if other is not None and not other.ended and other.get_key() != key:
            other.end()
            self.warn(
                "second experiment",
                "Comet holds one experiment per process and another was open. That one was ended; what it had is complete. "
                "Use relay='process', the default, to have several.",
            )

    @property
    def remote(self) -> str | None:
        return None if self.run is None else str(self.run.get_key())

    def _is_offline(self, experiment: Any) -> bool:
        return isinstance(experiment, self.library.OfflineExperiment)

    def close(self, status: str) -> None:
        self.run.log_other(STATUS, status)
        self.finish()

    def finish(self) -> None:
        self.run.end()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config as parameters, and also as `config.json` if Comet would cut a value."""
        config = plain(values)
        self.run.log_parameters(config)
        if any(len(str(value)) > MAX_VALUE for value in config.values()):
            self.run.log_asset_data(json.dumps(config, indent=1), name="config.json", overwrite=True)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store the summary as "other" values, which Comet's tables show next to metrics."""
        for key, value in flat_config(values).items():
            self.run.log_other(_name(key), value if isinstance(value, (bool, int, float)) else text_of(value))

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        if name:
            self.run.set_name(name)
        if tags:
            self.run.add_tags(list(tags))
            if self.identity is not None:  # for an archive built after a kill: Comet keeps tags only in memory until the end
                archives.keep_tags(self._pending, tags)
        for key, value in (("notes", notes), ("group", group)):
            if value:
                self.run.log_other(key, value)

    def alert(self, alert: Alert) -> None:
        """Store an alert as a text, and send it as a notification if Comet is online."""
        facts = {"alert": alert.level, "title": alert.title, "id": alert.id}
        self.run.log_text(f"{alert.title}\n{alert.text}".strip(), step=alert.step, metadata=facts)
        if not self._is_offline(self.run):
            more = {"text": alert.text, "step": alert.step}
            self.run.send_notification(alert.title, status=alert.level, additional_data=more)

    def artifact(self, path: Path, name: str) -> None:
        self.run.log_asset(str(path), file_name=name)

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        if step is not None:
            self.run.set_step(step)
        return super().record(values, step, kwargs)

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        """Log the numbers of a point in one call: with a step, each call records it as a parameter of the experiment."""
        return self.write_rows(points, self._log_row)

    def _log_row(self, numbers: dict[str, float], point: Point) -> None:
        # A bool would be stored as text.
        row = {_name(key): int(value) if isinstance(value, bool) else value for key, value in numbers.items()}
        self.run.log_metrics(row, step=point.step, **point.kwargs)

    def take_text(self, item: Item) -> None:
        if isinstance(item.value, str):
            self.run.log_other(_name(item.key), item.value)
            if self.identity is None:
                return  # when used directly, texts are stored as Accelerate does
        self.run.log_text(item.text, **_where(item))

    def take_image(self, item: Item) -> None:
        data, ext = item.content
        self.run.log_image(io.BytesIO(data), name=_name(item.key), image_format=ext, **_where(item))

    def take_histogram(self, item: Item) -> None:
        from comet_ml.data_structure import Histogram

        held, edges = Histogram(), item.value.edges
        held.add((edges[:-1] + edges[1:]) / 2, counts=item.value.counts)
        if held.is_empty():  # Comet refuses an empty one
            self._asset(item, b"[]", "json")
        else:
            self.run.log_histogram_3d(held, name=_name(item.key), **_where(item))

    def take_audio(self, item: Item) -> None:
        """Log a file, kept until the next settle: Comet scales an array to its loudest sample, and reads files later."""
        path = self.file_of(item)
        named = {"file_name": f"{_name(item.key)}{path.suffix}", "sample_rate": item.value.sample_rate}
        self.run.log_audio(str(path), **named, **_where(item))

    def take_video(self, item: Item) -> None:
        data, ext = item.content
        self.run.log_video(io.BytesIO(data), name=f"{_name(item.key)}.{ext}", format=ext, **_where(item))

    def take_plotly(self, item: Item) -> None:
        self._asset(item, item.value.json.encode(), "json")

    def take_file(self, item: Item) -> None:
        self._asset(item, *item.content)

    def _asset(self, item: Item, data: bytes, ext: str) -> None:
        self.run.log_asset_data(data, name=f"{_name(item.key)}.{ext}", **_where(item))

    def settle(self) -> None:
        """Wait until the server has everything; offline, until a final message is in the file: messages are written in order."""
        if not self._is_offline(self.run):
            if not self.run.flush():
                raise ConnectionError("Comet has not confirmed everything yet")
        elif self.identity is not None:
            self._settles += 1
            mark = f"{os.getpid()}.{self._settles}"
            self.run.log_other(SETTLED, mark)
            wanted = f'"value":"{mark}"'.encode()
            self.wait_until(lambda: any(wanted in line for line in self._messages.read()), "written its messages")
        self.drop_files()

    def counts(self) -> dict[str, int] | None:
        """Count points by key in the archives and open messages; a list of media counts once its last item is there."""
        if self.identity is None or not self._is_offline(self.run):
            return None
        new = archives.lines(self._messages.path.read_bytes())
        known = (*archives.messages(self._archives, self.run.get_key()), *new)
        return dict(Counter(key for message in known if (key := archives.key_of(message)) is not None))


class CometMLTracker(Tracker):
    destination_class = Comet


def _name(key: str) -> str:
    return key if len(key) <= MAX_NAME else f"{key[: MAX_NAME - 13]}~{digest(key)}"


def _where(item: Item) -> dict[str, Any]:
    facts = {"key": item.key, "item": item.at + 1, "items": item.of}
    return {"step": item.step, "metadata": facts | ({"caption": item.caption} if item.caption else {})}
