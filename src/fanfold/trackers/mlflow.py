"""MLflow: a database, a folder or a server. A point carries its own time, so that sent twice it is one row.

The relay goes through MlflowClient with an explicit run: MLflow's *active run* belongs to one thread, and its exit hook
would call a run finished that is not.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from ..errors import notices
from ._mlflow import Kept, Names, files_of, hide, legal, safe_path
from .base import Adapter, Identity, Point, Refusal, Refused, clean, flat_config, on_main_process, prepared
from .tools import named

_STATUS = {"finished": "FINISHED", "failed": "FAILED"}  # everything else was ended from outside: KILLED
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}  # else a dead server blocks 246 s
_TABLES = "mlflow.loggedArtifacts"


class MLflowTracker(Adapter):
    """Log to an MLflow run. `MLFLOW_EXPERIMENT_NAME`, `_RUN_ID`, `_TAGS` and `_NESTED_RUN` come before the arguments."""

    name: ClassVar[str] = "mlflow"
    delivery: ClassVar[str] = "idempotent"
    delivery_online: ClassVar[str | None] = "idempotent"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__()
        tags = os.environ.get("MLFLOW_TAGS", tags)
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        self.tags: dict[str, Any] | None = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = _truth(os.environ.get("MLFLOW_NESTED_RUN", nested_run))
        self.run_name = run_name
        self.description = description
        self.tracking_uri = tracking_uri
        self._ours: Identity | None = None
        self._named = run_name is not None
        self._doubt = False  # whether a file store may hold points that come again
        self._stored: dict[str, set[tuple[int, int, str]]] = {}
        self._recent: set[tuple[str, int, int, str]] = set()
        self._tables: list[dict[str, str]] = []
        self._words: dict[str, str] = {}  # tags still to set; kept until MLflow has them

    @classmethod
    def unusable(cls) -> str | None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        allowed = os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("1", "true")
        if uri and _is_folder(uri) and not allowed:
            return "MLflow refuses a file store unless MLFLOW_ALLOW_FILE_STORE=true"
        return None

    # Which run

    def adopt(self, identity: Identity) -> None:
        self._ours = identity
        self.run_name = self.run_name or identity.name
        if "mlflow" not in sys.modules:  # a process whose own code uses MLflow keeps its own patience
            for name, value in _PATIENCE.items():
                os.environ.setdefault(name, value)

    @property
    def remote(self) -> str | None:
        """The run's id, and where it is if that is on this disk: a relative path means another place another day."""
        if not hasattr(self, "active_run"):
            return None
        known = {"run_id": self.active_run.info.run_id}
        return json.dumps(known | ({"uri": self._uri} if self._uri.startswith(("sqlite:", "file:")) else {}))

    def resume(self, remote: str) -> None:
        known = json.loads(remote)
        self.run_id = known["run_id"]
        uri = str(known.get("uri", ""))
        place = unquote(urlsplit(uri).path)
        # Only a place on this disk: a run's folder, which may be anybody's, never names the server that gets our credentials.
        if uri.startswith(("sqlite:///", "file:///")) and place and Path(place).exists():
            self.tracking_uri = uri

    @on_main_process
    def start(self) -> None:
        import mlflow

        if self._ours is None and self.tracking_uri:
            mlflow.set_tracking_uri(self.tracking_uri)
        self._uri = _absolute(self.tracking_uri or mlflow.get_tracking_uri())
        self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        self._as_files = _is_folder(self._uri)
        self.active_run = self._start_fluent() if self._ours is None else self._start_ours(self._ours)
        found = self.active_run.data
        prefix = "fanfold.key/"
        known = {key: name[len(prefix) :] for name, key in found.tags.items() if name.startswith(prefix)}
        self._names = Names(as_files=self._as_files, known=known, stored=found.metrics)
        self._tables = json.loads(found.tags.get(_TABLES, "[]"))
        self._doubt = bool(found.metrics)

    def show_here(self) -> None:
        """Make ours the active run of this thread, so that `mlflow.log_metric` goes to it; a run of the user's stays."""
        import mlflow

        if mlflow.active_run() is not None:
            return
        if _absolute(mlflow.get_tracking_uri()) != self._uri:
            mlflow.set_tracking_uri(self._uri)
        mlflow.start_run(run_id=self.active_run.info.run_id)

    def hide_here(self) -> None:
        if hasattr(self, "active_run"):
            hide(self.active_run.info.run_id)

    def _start_fluent(self) -> Any:
        import mlflow

        return mlflow.start_run(
            run_id=self.run_id,
            experiment_id=self._experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _start_ours(self, identity: Identity) -> Any:
        """Go on in the run that carries our id, or make it: a kill in between leaves one, not two."""
        tags = {"fanfold.run_id": _quoted(identity.run_id), "fanfold.project": _quoted(identity.project)}
        experiment = self._experiment() or "0"
        run_id = self.run_id or self._find(experiment, tags)
        if run_id is None:
            more = {str(key): str(value) for key, value in (self.tags or {}).items()}
            more |= {"mlflow.note.content": self.description} if self.description else {}
            run_id = self._client.create_run(experiment, tags={**tags, **more}, run_name=self.run_name).info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
        return self._client.get_run(run_id)

    def _find(self, experiment: str, tags: Mapping[str, str]) -> str | None:
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found = self._client.search_runs([experiment], wanted, max_results=1, order_by=["attributes.start_time ASC"])
        return found[0].info.run_id if found else None

    def _experiment(self) -> str | None:
        """Return the experiment of our name, made if there is none; None means MLflow's default."""
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
            found = self._client.get_experiment_by_name(self.experiment_name)  # another run made it just now
            return str(found.experiment_id)

    @property
    def tracker(self) -> Any:
        return self.active_run

    # Points

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        recent = set[tuple[str, int, int, str]]()
        ready, refused = prepared(points, lambda point, key, value: self._ready(point, key, value, recent))
        made = [one for values in ready for several in values.values() for one in several]
        self._say_words()
        self._send([one for one in made if not isinstance(one, Kept)])
        self._keep([one for one in made if isinstance(one, Kept)])
        self._recent = recent  # only now: a batch that failed comes again, and must be the same rows
        return refused

    def _ready(self, point: Point, key: str, value: Any, recent: set[tuple[str, int, int, str]]) -> list[Any]:
        """Return the metrics or files that one value becomes."""
        from mlflow.entities import Metric

        model, stamp = self._arguments(point)
        step = point.step or 0
        if not isinstance(value, (bool, int, float)):
            return list(files_of(key, value, step, stamp))
        if not self._holds(key, value, point.step):
            return []
        name, number = self._name(key), float(value)
        return [Metric(name, number, self._moment(name, step, number, stamp, recent), step, model_id=model)]

    def _arguments(self, point: Point) -> tuple[str | None, int]:
        """Return what log_metrics' arguments mean here: the model, and the time in milliseconds."""
        for other in set(point.kwargs) - {"synchronous", "timestamp", "model_id"}:
            self._cannot(f"take the argument {other!r} from a relay", ", ".join(point.values), point.kwargs[other])
        ms = point.kwargs.get("timestamp") or int((time.time() if point.time is None else point.time) * 1000)
        return point.kwargs.get("model_id"), int(ms)

    def _moment(self, name: str, step: int, value: float, ms: int, recent: set[tuple[str, int, int, str]]) -> int:
        """Return the time to give a point: two equal ones of one millisecond would be one row, so the second moves on."""
        while (row := (name, step, ms, repr(value))) in recent or row in self._recent:
            ms += 1
        recent.add(row)
        return ms

    def _holds(self, key: str, value: float, step: int | None) -> bool:
        """Tell whether the store keeps a number as it is: only files keep infinity, tables turn it into 1.8e308."""
        if self._as_files or value not in (float("inf"), -float("inf")):
            return True
        self._words[f"fanfold.inf/{legal(key)}"] = f"{value} at step {step}"
        notices.once(
            f"{self.name}:inf:{key}",
            f"MLflow would keep {value} as ±1.797e308, so {key!r} has no point at step {step} there. Its tag fanfold.inf/{key} "
            "names the latest such step, and the journal has them all. Look at it with `fanfold show`.",
        )
        return False

    def _name(self, key: str) -> str:
        new = key not in self._names.given
        name = self._names(key)
        if new and name != key:
            self._words[f"fanfold.key/{name}"] = key
            self._say_name(key, name)
        return name

    def _say_name(self, key: str, name: str) -> None:
        notices.once(
            f"{self.name}:key:{key}",
            f"MLflow does not take the name {key!r}; it is {name!r} there. Nothing else changes. "
            "Use letters, digits and _ - . : / and spaces, up to 250, to have the same name everywhere.",
        )

    def _say_words(self) -> None:
        """Set the tags that explain what follows; what fails here is tried again with the same points."""
        for key, text in list(self._words.items()):
            self._tag(key, text)
            del self._words[key]

    def _send(self, metrics: list[Any]) -> None:
        from mlflow.exceptions import MlflowException

        fresh = self._fresh(metrics) if self._as_files and self._doubt else metrics
        (self._doubt, self._stored), before = (True, {}), (self._doubt, self._stored)  # until all of it went well
        for start in range(0, len(fresh), 1000):
            try:
                self._client.log_batch(self.active_run.info.run_id, metrics=fresh[start : start + 1000], synchronous=True)
            except MlflowException as error:
                raise self._verdict(error) from error
        self._doubt, self._stored = before

    def _fresh(self, metrics: list[Any]) -> list[Any]:
        """Leave out what a file store has already: unlike a table, it would keep the same point twice."""
        for name in {metric.key for metric in metrics} - self._stored.keys():
            history = self._client.get_metric_history(self.active_run.info.run_id, name)
            self._stored[name] = {(m.timestamp, m.step, repr(m.value)) for m in history}
        return [m for m in metrics if (m.timestamp, m.step, repr(m.value)) not in self._stored[m.key]]

    def _verdict(self, error: Any) -> Exception:
        """Return Refused for what MLflow will never take; the error itself for a server that is away, or a deleted run."""
        final = error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
        if final and self._client.get_run(self.active_run.info.run_id).info.lifecycle_stage == "active":
            return Refused(str(error))
        return error  # type: ignore[no-any-return]

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if self._ours is not None:
            self.warn_refused(self.write([Point(clean(values), step, time.time(), kwargs)]))
            return
        import mlflow

        numbers, kept = {}, []
        for key, value in clean(values).items():
            if not isinstance(value, (bool, int, float)):
                kept += list(files_of(key, value, step or 0, int(time.time() * 1000)))
            elif self._holds(key, value, step):
                numbers[self._name(key)] = value
        self._say_words()
        if numbers:
            mlflow.log_metrics(numbers, step=step, **{**self._elsewhere(), **kwargs})
        self._keep(kept)

    def _elsewhere(self) -> dict[str, str]:
        """Name the run where it is not this thread's active one: MLflow would open a stray run."""
        import mlflow

        active, mine = mlflow.active_run(), self.active_run.info.run_id
        return {} if active is not None and active.info.run_id == mine else {"run_id": mine}

    # Config, words and files

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as params. They are write-once and short: what does not fit becomes a tag."""
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        flat = flat_config(values) if self._ours is not None else values
        names = Names(as_files=self._as_files)
        have = self._client.get_run(self.active_run.info.run_id).data.params
        new: dict[str, Any] = {}
        for key, value in flat.items():
            name, text = names(str(key)), str(value)
            if name != str(key):
                self._say_name(str(key), name)
            if len(text) > MAX_PARAM_VAL_LENGTH:
                self._aside(key, name, text, f"MLflow keeps params up to {MAX_PARAM_VAL_LENGTH} characters")
            elif have.get(name, text) != text:
                self._aside(key, name, text, "MLflow never changes a param")
            elif name not in have:
                new[name] = value
        self._params(new)

    def _aside(self, key: str, name: str, text: str, why: str) -> None:
        self._tag(f"fanfold.config/{name}", text)
        notices.once(
            f"{self.name}:config:{key}",
            f"{why}, so the value of {key!r} is in the tag fanfold.config/{name} instead. Nothing is lost. Look for it there.",
        )

    def _params(self, params: dict[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Param

        names = list(params)
        for start in range(0, len(names), 100):
            some = {name: params[name] for name in names[start : start + 100]}
            if self._elsewhere():
                texts = [Param(name, str(value)) for name, value in some.items()]
                self._client.log_batch(self.active_run.info.run_id, params=texts, synchronous=True)
            else:
                mlflow.log_params(some)

    def _tag(self, key: str, text: str) -> None:
        """Set a tag; one too long for MLflow becomes a file, and the tag says where."""
        from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

        key = legal(key)
        if len(text) > MAX_TAG_VAL_LENGTH:
            path = f"tags/{safe_path(key)}.txt"
            self._keep([Kept(path, text.encode())])
            text = f"{len(text)} characters: see the artifact {path}"
        self._client.set_tag(self.active_run.info.run_id, key, text)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Keep numbers as metrics `summary/<key>`, which MLflow's tables sort by, and anything else as tags."""
        have = self._client.get_run(self.active_run.info.run_id).data.metrics
        for key, value in flat_config(values).items():
            name = self._name(f"summary/{key}")
            if isinstance(value, (int, float)) and self._holds(f"summary/{key}", value, 0):
                if repr(have.get(name)) != repr(float(value)):
                    self._client.log_metric(self.active_run.info.run_id, name, float(value), step=0)
            elif not isinstance(value, (int, float)):
                self._tag(f"fanfold.summary/{legal(key)}", value if isinstance(value, str) else json.dumps(value))
        self._say_words()

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        if name and not self._named:
            self._client.update_run(self.active_run.info.run_id, name=name)
        have = self._client.get_run(self.active_run.info.run_id).data.tags
        words = {"fanfold.tags": ", ".join(tags), "mlflow.note.content": notes, "fanfold.group": group}
        for key, text in words.items():
            if (text or "") != have.get(key, "") and not (key == "mlflow.note.content" and self.description):
                self._tag(key, text or "")

    def artifact(self, path: Path, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            named(path, Path(folder), safe_path(name))
            self._client.log_artifacts(self.active_run.info.run_id, folder)

    def _keep(self, kept: Iterable[Kept]) -> None:
        """Upload files in one go, and tell MLflow's page about pictures and tables."""
        kept = list(kept)
        if not kept:
            return
        run_id = self.active_run.info.run_id
        with tempfile.TemporaryDirectory() as folder:
            for file in kept:
                place = Path(folder, file.path)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(file.data)
            self._client.log_artifacts(run_id, folder)
        if any(file.path.startswith("images/") for file in kept):
            self._client.set_tag(run_id, "mlflow.loggedImages", True)
        self._list_tables([file.path for file in kept if file.path.startswith("tables/")])

    def _list_tables(self, paths: list[str]) -> None:
        new = [{"path": path, "type": "table"} for path in paths]
        longer = self._tables + [entry for entry in new if entry not in self._tables]
        text = json.dumps(longer)
        if len(longer) > len(self._tables) and len(text) <= 8000:  # a tag holds no more; later tables are files all the same
            self._client.set_tag(self.active_run.info.run_id, _TABLES, text)
            self._tables = longer

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Keep a figure as a file of the run; arguments go to MLflow's `log_figure`."""
        import mlflow

        if where := self._elsewhere():
            self._client.log_figure(figure=figure, artifact_file=artifact_file, **where, **save_kwargs)
        else:
            mlflow.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Keep all files of a folder with the run."""
        import mlflow

        if where := self._elsewhere():
            self._client.log_artifacts(local_dir=local_dir, artifact_path=artifact_path, **where)
        else:
            mlflow.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file with the run."""
        import mlflow

        if where := self._elsewhere():
            self._client.log_artifact(local_path=local_path, artifact_path=artifact_path, **where)
        else:
            mlflow.log_artifact(local_path=local_path, artifact_path=artifact_path)

    # The end

    def settle(self) -> None:
        """Return at once: every call above waits until the store has committed."""

    def close(self, status: str) -> None:
        self._client.set_terminated(self.active_run.info.run_id, _STATUS.get(status, "KILLED"))

    @on_main_process
    def finish(self) -> None:
        if self._elsewhere():
            self.close("finished")
        else:
            import mlflow

            mlflow.end_run()


def _truth(value: Any) -> bool:
    """Read a setting of yes or no; `"False"` means no."""
    return value.strip().lower() in ("1", "true", "yes", "y", "t", "on") if isinstance(value, str) else bool(value)


def _is_folder(uri: str) -> bool:
    return urlsplit(uri).scheme in ("", "file") and not uri.startswith(("databricks", "uc"))


def _absolute(uri: str) -> str:
    """Return a local address that means the same from any working directory."""
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////") and ":memory:" not in uri:
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    if _is_folder(uri) and not uri.startswith("file:"):
        return Path(uri).absolute().as_uri()
    return uri


def _quoted(text: str) -> str:
    """Return a text that can stand between quotes in MLflow's filters."""
    return text.replace("'", "%27").replace('"', "%22").replace("`", "%60")
