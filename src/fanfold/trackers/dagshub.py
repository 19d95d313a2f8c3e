"""DagsHub: its hosted MLflow where a repository is named; else the two files of its own logger, to be committed.

`dagshub.init()` is never called: it asks the service, and a person when there is no token.
"""

from __future__ import annotations

import csv
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from .base import Adapter, Identity, Point, Refusal, clean_config, on_main_process
from .mlflow import MLflowTracker

HOST = "https://dagshub.com"


class DagsHubTracker(Adapter):
    """Log to a DagsHub repository, or to `metrics.csv` and `params.yml` when none is named.

    The repository is `repo="owner/name"`, `tracking_uri=` or an `MLFLOW_TRACKING_URI` that ends in `.mlflow`; further
    arguments are MLflowTracker's. Without one, `logging_dir`, `metrics_path` and `hparams_path` say where the files are.
    """

    name: ClassVar[str] = "dagshub"
    delivery: ClassVar[str] = "readable"
    delivery_online: ClassVar[str | None] = "idempotent"

    def __init__(
        self,
        run_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        *,
        repo: str | None = None,
        host: str | None = None,
        tracking_uri: str | None = None,
        metrics_path: str | os.PathLike[str] | None = None,
        hparams_path: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self.tracking_uri = tracking_uri or _repository_uri(repo, host) or _uri_in_environment()
        self._way: _Hosted | _Files
        if self.tracking_uri:
            self._way = _Hosted(run_name, tracking_uri=self.tracking_uri, **kwargs)
        else:
            self._way = _Files(logging_dir, metrics_path, hparams_path)

    @classmethod
    def unusable(cls) -> str | None:
        if not _uri_in_environment() or _has_token():
            return None
        return "no token: set DAGSHUB_USER_TOKEN or run `dagshub login`"

    @property
    def tracker(self) -> Any:
        return self._way.tracker

    def adopt(self, identity: Identity) -> None:
        self._way.adopt(identity)

    @on_main_process
    def start(self) -> None:
        self._way.start()

    @property
    def remote(self) -> str | None:
        return self._way.remote

    def resume(self, remote: str) -> None:
        self._way.resume(remote)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._way.store_init_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._way.log(values, step, **kwargs)

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        return self._way.write(points)

    def settle(self) -> None:
        self._way.settle()

    def counts(self) -> dict[str, int] | None:
        return self._way.counts()

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        self._way.describe(name=name, tags=tags, notes=notes, group=group)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        self._way.set_summary(values)

    def artifact(self, path: Path, name: str) -> None:
        self._way.artifact(path, name)

    def close(self, status: str) -> None:
        self._way.close(status)

    @on_main_process
    def finish(self) -> None:
        self._way.finish()


class _Hosted(MLflowTracker):
    """The MLflow server DagsHub keeps for each repository."""

    name: ClassVar[str] = "dagshub"

    @on_main_process
    def start(self) -> None:
        if not {"MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN"} & os.environ.keys():
            token = os.environ.get("DAGSHUB_USER_TOKEN") or _token(str(self.tracking_uri))
            os.environ.update(MLFLOW_TRACKING_USERNAME=token, MLFLOW_TRACKING_PASSWORD=token)  # a token stands for both
        super().start()


class _Files(Adapter):
    """DAGsHubLogger's two files. It begins them anew each time; a run that is resumed goes on where they ended."""

    name: ClassVar[str] = "dagshub"
    delivery: ClassVar[str] = "readable"

    def __init__(self, folder: Any, metrics_path: Any, hparams_path: Any) -> None:
        super().__init__()
        self._given = (folder, metrics_path, hparams_path)
        self._goes_on = False
        self._place(Path(folder or "."))

    def _place(self, folder: Path) -> None:
        _, metrics, hparams = self._given
        self.metrics_path = Path(metrics or folder / "metrics.csv")
        self.hparams_path = Path(hparams or folder / "params.yml")

    def adopt(self, identity: Identity) -> None:
        if self._given[0] is None:
            self._place(identity.directory)

    @property
    def tracker(self) -> Any:
        return self.logger

    @property
    def remote(self) -> str:
        return str(self.metrics_path.absolute())

    def resume(self, remote: str) -> None:
        self._goes_on = remote == self.remote

    @on_main_process
    def start(self) -> None:
        from dagshub.logger import DAGsHubLogger

        self.logger = DAGsHubLogger(str(self.metrics_path), hparams_path=str(self.hparams_path), eager_logging=False)
        self.logger.ensure_dir(self.logger.metrics_path)
        if self._goes_on and (whole := _whole_rows(self.metrics_path)):
            os.truncate(self.metrics_path, whole)  # a kill may have left half a row
            self.logger.metrics_file = self.metrics_path.open("a", newline="", encoding="utf-8")
            self.logger.metrics_csv_writer = csv.writer(self.logger.metrics_file, quoting=csv.QUOTE_NONNUMERIC)
        self.logger.save_metrics()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.logger.log_hyperparams(clean_config(values))
        self.logger.save_hparams()

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        rows = []
        for point in points:
            ms = self.logger.epoch_milisec() if point.time is None else int(point.time * 1000)
            rows.append(({key: _cell(value) for key, value in point.values.items() if self._takes(key, value)}, ms, point.step))
        self.logger.unsaved_metrics = rows  # in place of what a failed write left there: that comes again
        self.logger.save_metrics()
        return ()

    def _takes(self, key: str, value: Any) -> bool:
        if isinstance(value, (bool, int, float, str)) or _is_text(value):
            return True
        self._cannot("keep media in its CSV file", key, value)
        return False

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log(values, step, **kwargs)
        self.settle()

    def settle(self) -> None:
        self.logger.metrics_file.flush()

    def counts(self) -> dict[str, int]:
        self.settle()
        with self.metrics_path.open(newline="", encoding="utf-8") as file:
            return dict(Counter(row["Name"] for row in csv.DictReader(file)))

    @on_main_process
    def finish(self) -> None:
        self.logger.save()
        self.logger.close()


def _cell(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value.text if _is_text(value) else value


def _is_text(value: Any) -> bool:
    return getattr(value, "kind", "") == "text"


def _whole_rows(path: Path) -> int:
    """Return how many bytes of a CSV file are whole rows: a line end inside quotes ends none."""
    end, whole, quotes = 0, 0, 0
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                end += len(line)
                quotes += line.count(b'"')
                if line.endswith(b"\n") and quotes % 2 == 0:
                    whole = end
    return whole


def _repository_uri(repo: str | None, host: str | None) -> str | None:
    host = (host or os.environ.get("DAGSHUB_CLIENT_HOST") or HOST).rstrip("/")
    return f"{host}/{repo.strip('/')}.mlflow" if repo else None


def _uri_in_environment() -> str | None:
    uri = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    return uri if uri.endswith(".mlflow") else None


def _has_token() -> bool:
    names = ("DAGSHUB_USER_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN")
    return any(os.environ.get(name) for name in names) or _token_file().exists()


def _token_file() -> Path:
    """Return where `dagshub login` keeps tokens; asked without importing it, which would draw random numbers."""
    caches = Path("~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    return Path(os.environ.get("DAGSHUB_CLIENT_TOKENS_CACHE", caches / "dagshub" / "tokens")).expanduser()


def _token(uri: str) -> str:
    """Return the token of `dagshub login`, or raise: a browser window is no answer here."""
    from dagshub.auth import get_token

    parts = urlsplit(uri)
    return str(get_token(host=f"{parts.scheme}://{parts.netloc}", fail_if_no_token=True))
