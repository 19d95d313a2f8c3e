"""MLflow: a database, a folder or a server. A point carries its own time, so that sending it twice yields one row.

For our runs everything goes through MlflowClient with an explicit run: MLflow's *active run* belongs to one thread, and its exit
hook would mark an unfinished run as finished.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ._mlflow import Names, RunFile, absolute, create_database, files_of, hide, is_folder, legal, pictures_of, quoted, safe_path
from .base import Identity, Point, Refusal, Refused, clean, flat_config, on_main_process
from .destination import Destination, Item
from .face import Tracker
from .tools import named, text_of, truthy

Row = tuple[str, int, int, str]  # name, step, time, value
_STATUS = {"finished": "FINISHED", "failed": "FAILED"}  # everything else was ended from outside: KILLED
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}  # otherwise a dead server blocks 246 s
_TABLES = "mlflow.loggedArtifacts"
_KEYS = "fanfold.key/"
_RULES = "names there are letters, digits, spaces and _ - . : /, up to 250"


class MLflow(Destination):
    """Log to an MLflow run. `MLFLOW_EXPERIMENT_NAME`, `_RUN_ID`, `_TAGS` and `_NESTED_RUN` override the arguments."""

    name = library_name = "mlflow"
    own_name = "active_run"
    delivery = delivery_online = "idempotent"
    accepts = frozenset({"synchronous", "timestamp", "model_id"})

    def __init__(
        self, experiment_name: str | None = None, logging_dir: str | os.PathLike[str] | None = None, run_id: str | None = None,
        tags: dict[str, Any] | str | None = None, nested_run: bool | None = False, run_name: str | None = None,
        description: str | None = None, tracking_uri: str | None = None,
    ) -> None:  # fmt: skip
        tags = os.environ.get("MLFLOW_TAGS", tags)
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        self.tags: dict[str, Any] | None = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = truthy(os.environ.get("MLFLOW_NESTED_RUN", nested_run))
        self.run_name, self.description, self.tracking_uri = run_name, description, tracking_uri
        self._recent: set[Row] = set()  # of the last batch
        self._batch: set[Row] = set()
        self._words: dict[str, str] = {}  # tags still to set; kept until MLflow has them

    @classmethod
    def unusable(cls) -> str | None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if uri and is_folder(uri) and not truthy(os.environ.get("MLFLOW_ALLOW_FILE_STORE")):
            return "MLflow refuses a file store unless MLFLOW_ALLOW_FILE_STORE=true"
        return None

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        if identity is not None and "mlflow" not in sys.modules:  # if the process's own code uses MLflow, its timeouts are kept
            for name, value in _PATIENCE.items():
                os.environ.setdefault(name, value)
        super().open(identity, remote)
        found = self.run.data
        keys = {key: name[len(_KEYS) :] for name, key in found.tags.items() if name.startswith(_KEYS)}
        self._as_files = is_folder(self._uri)
        self._names = Names(as_files=self._as_files, known=keys, stored=found.metrics)
        self._tables: list[dict[str, str]] = json.loads(found.tags.get(_TABLES, "[]"))
        self._doubt = bool(found.metrics)  # whether a file store may already hold points that are sent again
        self._stored: dict[str, set[tuple[int, int, str]]] = {}

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        known = json.loads(remote) if remote else {}
        uri = _local(str(known.get("uri", ""))) or self.tracking_uri
        if identity is None and uri:
            self.library.set_tracking_uri(uri)
        self._uri = absolute(uri or self.library.get_tracking_uri())
        if identity is not None:
            create_database(self._uri)
        self._client = self.library.MlflowClient(tracking_uri=self._uri)
        run_id = known.get("run_id", self.run_id)
        if identity is not None:
            return self._begin_ours(identity, run_id)
        return self.library.start_run(
            run_id=run_id, experiment_id=self._experiment(), run_name=self.run_name, nested=self.nested_run, tags=self.tags,
            description=self.description,
        )  # fmt: skip

    @property
    def remote(self) -> str | None:
        """The run's id, and its location if on local disk: a relative path may later mean another place."""
        if self.run is None:
            return None
        place = {"uri": self._uri} if self._uri.startswith(("sqlite:", "file:")) else {}
        return json.dumps({"run_id": self._id, **place})

    @property
    def _id(self) -> str:
        return str(self.run.info.run_id)

    def show_here(self) -> None:
        """Make ours the active run of this thread, so that `mlflow.log_metric` logs to it; a user's active run is kept."""
        if self.library.active_run() is None:
            if absolute(self.library.get_tracking_uri()) != self._uri:
                self.library.set_tracking_uri(self._uri)
            self.library.start_run(run_id=self._id)

    def hide_here(self) -> None:
        if self.run is not None:
            hide(self._id)

    def _begin_ours(self, identity: Identity, run_id: str | None) -> Any:
        """Continue the run that carries our id, or create it: a kill in between leaves one run, not two."""
        tags = {"fanfold.run_id": quoted(identity.run_id), "fanfold.project": quoted(identity.project)}
        experiment = self._experiment() or "0"
        if run_id is None:
            wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
            found = self._client.search_runs([experiment], wanted, max_results=1, order_by=["attributes.start_time ASC"])
            run_id = found[0].info.run_id if found else None
        if run_id is None:
            more = {str(key): str(value) for key, value in (self.tags or {}).items()}
            more |= {"mlflow.note.content": self.description} if self.description else {}
            name = self.run_name or identity.name
            run_id = self._client.create_run(experiment, tags={**tags, **more}, run_name=name).info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
        return self._client.get_run(run_id)

    def _experiment(self) -> str | None:
        """Return the id of our experiment, created if there is none; None means MLflow's default."""
        from mlflow.exceptions import MlflowException

        if not self.experiment_name:
            return None
        if found := self._client.get_experiment_by_name(self.experiment_name):
            return str(found.experiment_id)
        place = None if self.logging_dir is None else os.fspath(self.logging_dir)
        try:
            return str(self._client.create_experiment(self.experiment_name, artifact_location=place, tags=self.tags))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = self._client.get_experiment_by_name(self.experiment_name)  # another run has just created it
            return str(found.experiment_id)

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        self._batch = set()
        rows, refused = self.converted(points)
        made = [one for row in rows for several in row.values() for one in several]
        self._set_words()
        self._send([one for one in made if not isinstance(one, RunFile)])
        self._keep([one for one in made if isinstance(one, RunFile)])
        self._recent = self._batch  # only now: a failed batch is sent again, and must yield the same rows
        return refused

    def number(self, key: str, value: float, point: Point) -> list[Any]:
        from mlflow.entities import Metric

        if not self._holds(key, value, point.step):
            return []
        name, number, step = self._name(key), float(value), point.step or 0
        moment = self._moment(name, step, number, self._ms(point))
        return [Metric(name, number, moment, step, model_id=point.kwargs.get("model_id"))]

    def take_image(self, item: Item) -> list[RunFile]:
        return pictures_of(item, self._ms(item.point))

    def take_file(self, item: Item) -> list[RunFile]:
        return [files_of(item, self._ms(item.point))]

    take_figure = take_file

    def together(self, key: str, made: list[Any]) -> list[Any]:
        return list(itertools.chain(*made))

    def _ms(self, point: Point) -> int:
        """Return a point's time in milliseconds."""
        given = self.arguments(point).get("timestamp")
        return int(given) if given else round((time.time() if point.time is None else point.time) * 1000)

    def _moment(self, name: str, step: int, value: float, ms: int) -> int:
        """Return the time for a point: two equal points in one millisecond would be one row, so the second is shifted."""
        while (row := (name, step, ms, repr(value))) in self._batch or row in self._recent:
            ms += 1
        self._batch.add(row)
        return ms

    def _holds(self, key: str, value: float, step: int | None) -> bool:
        """Return whether the store keeps a number unchanged: only files keep infinity, tables turn it into 1.8e308."""
        if self._as_files or value not in (float("inf"), -float("inf")):
            return True
        self._words[f"fanfold.inf/{legal(key)}"] = f"{value} at step {step}"
        self.warn(
            f"inf:{key}",
            f"MLflow would keep {value} as ±1.797e308, so {key!r} has no point at step {step} there. Its tag fanfold.inf/{key} "
            "names the latest such step, and the journal has them all. Look at it with `fanfold show`.",
        )
        return False

    def _name(self, key: str) -> str:
        new = key not in self._names.given
        name = self._names(key)
        if new and name != key:
            self._words[f"{_KEYS}{name}"] = key
            self.warn_renamed(key, name, _RULES)
        return name

    def _set_words(self) -> None:
        """Set the tags that explain the following points; after a failure they are retried with the same points."""
        for key, text in list(self._words.items()):
            self._tag(key, text)
            del self._words[key]

    def _send(self, metrics: list[Any]) -> None:
        from mlflow.exceptions import MlflowException

        fresh = self._fresh(metrics) if self._as_files and self._doubt else metrics
        (self._doubt, self._stored), before = (True, {}), (self._doubt, self._stored)  # until everything succeeded
        for start in range(0, len(fresh), 1000):
            try:
                self._client.log_batch(self._id, metrics=fresh[start : start + 1000], synchronous=True)
            except MlflowException as error:
                raise self._verdict(error) from error
        self._doubt, self._stored = before

    def _fresh(self, metrics: list[Any]) -> list[Any]:
        """Leave out points a file store already has: unlike a table, it would keep the same point twice."""
        for name in {metric.key for metric in metrics} - self._stored.keys():
            history = self._client.get_metric_history(self._id, name)
            self._stored[name] = {(m.timestamp, m.step, repr(m.value)) for m in history}
        return [m for m in metrics if (m.timestamp, m.step, repr(m.value)) not in self._stored[m.key]]

    def _verdict(self, error: Any) -> Exception:
        """Return Refused for what MLflow will never accept; the error itself for an unreachable server or a deleted run."""
        final = error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
        if final and self._client.get_run(self._id).info.lifecycle_stage == "active":
            return Refused(str(error))
        return error  # type: ignore[no-any-return]

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        """Record values; in direct calls, numbers go through `mlflow.log_metrics` with all its arguments."""
        if self.identity is not None:
            return super().record(values, step, kwargs)
        found = clean(values)
        numbers = {key: value for key, value in found.items() if isinstance(value, (bool, int, float))}
        held = {self._name(key): value for key, value in numbers.items() if self._holds(key, value, step)}
        self._set_words()
        if held:
            where = {} if self._is_active() else {"run_id": self._id}  # on another thread, MLflow would open a stray run
            self.library.log_metrics(held, step=step, **{**where, **kwargs})
        return self.write([Point({key: value for key, value in found.items() if key not in numbers}, step)])

    def _is_active(self) -> bool:
        active = self.library.active_run()
        return active is not None and active.info.run_id == self._id

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config as params. They are write-once and short: whatever does not fit becomes a tag."""
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        flat = flat_config(values) if self.identity else values
        names = Names(as_files=self._as_files)
        have = self._client.get_run(self._id).data.params
        new: list[Param] = []
        for key, value in flat.items():
            name, text = names(str(key)), str(value)
            if name != str(key):
                self.warn_renamed(str(key), name, _RULES)
            if len(text) > MAX_PARAM_VAL_LENGTH:
                self._aside(key, name, text, f"MLflow keeps params up to {MAX_PARAM_VAL_LENGTH} characters")
            elif have.get(name, text) != text:
                self._aside(key, name, text, "MLflow never changes a param")
            elif name not in have:
                new.append(Param(name, text))
        for start in range(0, len(new), 100):
            self._client.log_batch(self._id, params=new[start : start + 100], synchronous=True)

    def _aside(self, key: str, name: str, text: str, why: str) -> None:
        self._tag(f"fanfold.config/{name}", text)
        self.warn(
            f"config:{key}",
            f"{why}, so the value of {key!r} is in the tag fanfold.config/{name} instead. Nothing is lost. Look for it there.",
        )

    def _tag(self, key: str, text: str) -> None:
        """Set a tag; one too long for MLflow becomes a file, and the tag holds its path."""
        from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

        key = legal(key)
        if len(text) > MAX_TAG_VAL_LENGTH:
            path = f"tags/{safe_path(key)}.txt"
            self._keep([RunFile(path, text.encode())])
            text = f"{len(text)} characters: see the artifact {path}"
        self._client.set_tag(self._id, key, text)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store numbers as metrics `summary/<key>`, by which MLflow's tables sort, and anything else as tags."""
        have = self._client.get_run(self._id).data.metrics
        for key, value in flat_config(values).items():
            name = self._name(f"summary/{key}")
            if not isinstance(value, (int, float)):
                self._tag(f"fanfold.summary/{legal(key)}", text_of(value))
            elif self._holds(f"summary/{key}", value, 0) and repr(have.get(name)) != repr(float(value)):
                self._client.log_metric(self._id, name, float(value), step=0)
        self._set_words()

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        if name and self.run_name is None:
            self._client.update_run(self._id, name=name)
        have = self._client.get_run(self._id).data.tags
        words = {"fanfold.tags": ", ".join(tags), "mlflow.note.content": notes, "fanfold.group": group}
        for key, text in words.items():
            if (text or "") != have.get(key, "") and not (key == "mlflow.note.content" and self.description):
                self._tag(key, text or "")

    def artifact(self, path: Path, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            named(path, Path(folder), safe_path(name))
            self._client.log_artifacts(self._id, folder)

    def _keep(self, kept: Iterable[RunFile]) -> None:
        """Upload files at once, and list images and tables where MLflow's UI looks for them."""
        kept = list(kept)
        if not kept:
            return
        with tempfile.TemporaryDirectory() as folder:
            for file in kept:
                place = Path(folder, file.path)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(file.data)
            self._client.log_artifacts(self._id, folder)
        if any(file.path.startswith("images/") for file in kept):
            self._client.set_tag(self._id, "mlflow.loggedImages", True)
        tables = [{"path": file.path, "type": "table"} for file in kept if file.path.startswith("tables/")]
        longer = self._tables + [entry for entry in tables if entry not in self._tables]
        text = json.dumps(longer)
        if len(longer) > len(self._tables) and len(text) <= 8000:  # the limit of a tag; later tables are still stored as files
            self._client.set_tag(self._id, _TABLES, text)
            self._tables = longer

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, _STATUS.get(status, "KILLED"))

    def finish(self) -> None:
        if self._is_active():
            self.library.end_run()
        else:
            self.close("finished")


class MLflowTracker(Tracker):
    destination_class = MLflow

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure as a file of the run; arguments go to MLflow's `log_figure`."""
        self._client.log_figure(self.active_run.info.run_id, figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store all files of a folder with the run."""
        self._client.log_artifacts(self.active_run.info.run_id, local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file with the run."""
        self._client.log_artifact(self.active_run.info.run_id, local_path, artifact_path)


def _local(uri: str) -> str | None:
    """Return an address that a run recorded, if it is an existing place on local disk.

    A run's folder may come from anyone, so it never names the server that gets our credentials.
    """
    place = unquote(urlsplit(uri).path)
    return uri if uri.startswith(("sqlite:///", "file:///")) and place and Path(place).exists() else None
