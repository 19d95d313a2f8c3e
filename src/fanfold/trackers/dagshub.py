"""DagsHub: its hosted MLflow if a repository is named; otherwise the two files of its own logger, to be committed.

`dagshub.init()` is never called: it contacts the service, and prompts the user if there is no token.
"""

from __future__ import annotations

import csv
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..plain import plain
from .base import Identity, Point, Refusal
from .destination import Destination, Item
from .face import Tracker
from .mlflow import MLflow
from .tools import cut_torn_end

HOST = "https://dagshub.com"
Folder = str | os.PathLike[str] | None


class Hosted(MLflow):
    """The MLflow server that DagsHub hosts for each repository."""

    name = "dagshub"

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        if not {"MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN"} & os.environ.keys():
            token = os.environ.get("DAGSHUB_USER_TOKEN") or _token(str(self.tracking_uri))
            os.environ.update(MLFLOW_TRACKING_USERNAME=token, MLFLOW_TRACKING_PASSWORD=token)  # a token serves as both
        super().open(identity, remote)


class DagsHubFiles(Destination):
    """DAGsHubLogger's two files. The library starts them from scratch each time; here a resumed run appends to them."""

    name = "dagshub"
    settles_each_call = True
    delivery = "readable"
    delivery_online = "idempotent"  # for the hosted MLflow
    tracking_uri: str | None = None

    def __init__(
        self, run_name: str | None = None, logging_dir: Folder = None, *, metrics_path: Folder = None, hparams_path: Folder = None
    ) -> None:
        super().__init__(run_name)
        self._given = (logging_dir, metrics_path, hparams_path)

    @classmethod
    def unusable(cls) -> str | None:
        if not _uri_in_environment() or _has_token():
            return None
        return "no token: set DAGSHUB_USER_TOKEN or run `dagshub login`"

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        from dagshub.logger import DAGsHubLogger

        given, metrics, hparams = self._given
        folder = Path(given or ".") if given is not None or identity is None else identity.directory
        self.metrics_path = Path(metrics or folder / "metrics.csv")
        path = str(hparams or folder / "params.yml")
        self.run = DAGsHubLogger(str(self.metrics_path), hparams_path=path, eager_logging=False)
        self.run.ensure_dir(self.run.metrics_path)
        if remote == self.remote and cut_torn_end(self.metrics_path, quoted=True):
            self.run.metrics_file = self.metrics_path.open("a", newline="", encoding="utf-8")
            self.run.metrics_csv_writer = csv.writer(self.run.metrics_file, quoting=csv.QUOTE_NONNUMERIC)
        self.run.save_metrics()

    @property
    def remote(self) -> str:
        return str(self.metrics_path.absolute())

    def set_config(self, values: dict[str, Any]) -> None:
        self.run.log_hyperparams(plain(values))
        self.run.save_hparams()

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        rows, refused = self.converted(points)
        times = [self.run.epoch_milisec() if point.time is None else round(point.time * 1000) for point in points]
        steps = [point.step for point in points]
        self.run.unsaved_metrics = list(zip(rows, times, steps, strict=True))  # drops what a failed write left: it is sent again
        self.run.save_metrics()
        return refused

    def number(self, key: str, value: float, point: Point) -> float:
        return int(value) if isinstance(value, bool) else value

    def take_text(self, item: Item) -> str:
        return item.text

    def settle(self) -> None:
        self.run.metrics_file.flush()

    def counts(self) -> dict[str, int]:
        self.settle()
        with self.metrics_path.open(newline="", encoding="utf-8") as file:
            return dict(Counter(row["Name"] for row in csv.DictReader(file)))

    def finish(self) -> None:
        self.run.save()
        self.run.close()


class DagsHubTracker(Tracker):
    """Log to a DagsHub repository, or to `metrics.csv` and `params.yml` when none is named.

    The repository is `repo="owner/name"`, `tracking_uri=` or an `MLFLOW_TRACKING_URI` that ends in `.mlflow`; further
    arguments are MLflowTracker's. Without one, `logging_dir`, `metrics_path` and `hparams_path` say where the files are.
    """

    destination_class = DagsHubFiles

    def __init__(
        self, run_name: str | None = None, logging_dir: Folder = None, *, repo: str | None = None, host: str | None = None,
        tracking_uri: str | None = None, metrics_path: Folder = None, hparams_path: Folder = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        uri = tracking_uri or _repository_uri(repo, host) or _uri_in_environment()
        if uri:
            self.face(Hosted(run_name, tracking_uri=uri, **kwargs))
        else:
            self.face(DagsHubFiles(run_name, logging_dir, metrics_path=metrics_path, hparams_path=hparams_path))


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
    """Return the path of the tokens of `dagshub login`, without importing dagshub, which would draw random numbers."""
    caches = Path("~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    return Path(os.environ.get("DAGSHUB_CLIENT_TOKENS_CACHE", caches / "dagshub" / "tokens")).expanduser()


def _token(uri: str) -> str:
    """Return the token of `dagshub login`, or raise: opening a browser is not an option here."""
    from dagshub.auth import get_token

    parts = urlsplit(uri)
    return str(get_token(host=f"{parts.scheme}://{parts.netloc}", fail_if_no_token=True))
