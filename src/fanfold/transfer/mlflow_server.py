"""An MLflow server, over its REST interface. Credentials go only to the address that the user typed."""

from __future__ import annotations

import base64
import json
import math
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode, urlsplit, urlunsplit

from ..errors import SettingError
from ..plain import from_json
from .events import Event
from .mlflow_run import TRACES, MLflowFacts, began, ended, files, keys_of
from .mlflow_sql import events_of
from .reading import Account, resumed

SECONDS = 60.0
MOST_ANSWER = 256 << 20
MOST_FILES = 100_000
BROKEN = (OSError, HTTPException, ValueError, TypeError, AttributeError)  # urllib's errors are OSErrors


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow a server to another address, which would get our credentials."""

    def redirect_request(self, *_arguments: Any) -> None:
        return None


class MLflowServer:
    """A server at an address."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        user, password = parts.username, parts.password
        host = parts.netloc.rpartition("@")[2]
        self.address = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self._opener = urllib.request.build_opener(_NoRedirect)
        token = os.environ.get("MLFLOW_TRACKING_TOKEN")
        user, password = (
            user or os.environ.get("MLFLOW_TRACKING_USERNAME"),
            password or os.environ.get("MLFLOW_TRACKING_PASSWORD"),
        )
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        if user is not None:
            pair = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
            self._headers = {"Authorization": f"Basic {pair}"}

    def open(self, path: str, query: dict[str, Any] | None = None, body: Any = None) -> IO[bytes]:
        """Send a request; raise one of BROKEN if it fails."""
        address = f"{self.address}/{path}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(address, data, headers)  # noqa: S310 - http or https, as the user typed
        answer: IO[bytes] = self._opener.open(request, timeout=SECONDS)
        return answer

    def ask(self, path: str, query: dict[str, Any] | None = None, body: Any = None, version: str = "2.0") -> dict[str, Any]:
        """Return the JSON that a request is answered with."""
        with self.open(f"api/{version}/mlflow/{path}", query, body) as answer:
            found = json.loads(answer.read(MOST_ANSWER))
        return dict(found)

    def pages(
        self, path: str, name: str, query: dict[str, Any], *, post: bool = False, version: str = "2.0"
    ) -> Iterator[dict[str, Any]]:
        """Yield the entries of all pages of an answer."""
        token = ""
        while True:
            asked = {**query, "page_token": token} if token else query
            answer = self.ask(path, body=asked, version=version) if post else self.ask(path, asked)
            yield from (entry for entry in answer.get(name) or () if isinstance(entry, dict))
            before, token = token, str(answer.get("next_page_token") or "")
            if not token or token == before:
                return


def runs_at(address: str) -> Iterator[tuple[str, MLflowFacts]]:
    """Yield all runs of a server; raise SettingError if there is none at this address."""
    server = MLflowServer(address)
    try:
        experiments = {
            str(entry.get("experiment_id")): entry
            for entry in server.pages("experiments/search", "experiments", {"max_results": 1000, "view_type": "ALL"}, post=True)
        }
    except BROKEN as error:
        raise SettingError(
            f"{server.address} does not answer as an MLflow server does: {error}. Nothing was imported from it. Check the "
            "address, and MLFLOW_TRACKING_TOKEN or MLFLOW_TRACKING_USERNAME and _PASSWORD if it asks for a login."
        ) from error
    for experiment, about in experiments.items():
        query = {"experiment_ids": [experiment], "run_view_type": "ALL", "max_results": 1000}
        for run in server.pages("runs/search", "runs", query, post=True):
            kept = _kept(run, about)
            kept.latest = run
            yield str(kept.info.get("run_id")), kept


def _kept(run: dict[str, Any], experiment: dict[str, Any]) -> MLflowFacts:
    info, data = dict(run.get("info") or {}), run.get("data") or {}
    info |= {name: _integer(info.get(name)) for name in ("start_time", "end_time")}
    pairs = {
        name: {str(entry["key"]): str(entry.get("value") or "") for entry in data.get(name) or ()} for name in ("params", "tags")
    }
    inputs = (run.get("inputs") or {}).get("dataset_inputs") or ()
    datasets = [
        {**(entry.get("dataset") or {}), "tags": {str(tag.get("key")): tag.get("value") for tag in entry.get("tags") or ()}}
        for entry in inputs
    ]
    deleted = "deleted" in (info.get("lifecycle_stage"), experiment.get("lifecycle_stage"))
    return MLflowFacts(
        info=info,
        params=pairs["params"],
        tags=pairs["tags"],
        experiment=str(experiment.get("name")),
        datasets=datasets,
        archived=deleted,
    )


def _integer(value: Any) -> int | None:
    """Return an integer that JSON may spell as a text."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def read_at(address: str, run_id: str, position: Any) -> Iterator[Event]:
    """Yield a run's events."""
    yield from resumed(_events(MLflowServer(address), run_id), position)


def _events(server: MLflowServer, run_id: str) -> Iterator[Event]:
    account = Account()
    try:
        run = server.ask("runs/get", {"run_id": run_id}).get("run") or {}
        experiment = server.ask("experiments/get", {"experiment_id": (run.get("info") or {}).get("experiment_id")}).get(
            "experiment"
        )
        kept = _kept(run, experiment or {})
        parent = kept.tags.get("mlflow.parentRunId")
        if parent:
            about = server.ask("runs/get", {"run_id": parent}).get("run") or {}
            kept.parent = str((about.get("info") or {}).get("run_name") or "")
        yield from began(kept)
        if traces := _traces(server, kept):
            account.leave("traces", TRACES, count=traces)
        for metric in (run.get("data") or {}).get("metrics") or ():
            yield from _history(server, kept, str(metric.get("key")), account)
        with tempfile.TemporaryDirectory(prefix="fanfold-mlflow-") as folder:
            yield from files(kept, _downloaded(server, run_id, Path(folder), account), account)
        yield from account.events()
        yield from ended(kept)
    except BROKEN as error:
        account.leave("the rest of the run", f"the server failed: {error}", run_id)
        yield from account.events()


def _history(server: MLflowServer, kept: MLflowFacts, key: str, account: Account) -> Iterator[Event]:
    query = {"run_id": kept.info["run_id"], "metric_key": key, "max_results": 25_000}
    rows = []
    for point in server.pages("metrics/get-history", "metrics", query):
        value = from_json(point.get("value"))
        nan = isinstance(value, float) and math.isnan(value)
        rows.append((key, value, _integer(point.get("timestamp")), _integer(point.get("step")) or 0, nan))
    yield from events_of(rows, keys_of(kept), account, ours="fanfold.run_id" in kept.tags)


def _traces(server: MLflowServer, kept: MLflowFacts) -> int:
    """Return how many traces belong to a run; 0 from a server that is too old to say."""
    place = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": str(kept.info.get("experiment_id"))}}
    query = {"locations": [place], "filter": f"request_metadata.`mlflow.sourceRun` = '{kept.info['run_id']}'", "max_results": 500}
    try:
        return sum(1 for _ in server.pages("traces/search", "traces", query, post=True, version="3.0"))
    except BROKEN:
        return 0


def _downloaded(server: MLflowServer, run_id: str, folder: Path, account: Account) -> dict[str, Path]:
    """Download the run's files under names of our own."""
    found: dict[str, Path] = {}
    for name in _listed(server, run_id, account):
        place = folder / str(len(found))
        try:
            with server.open("get-artifact", {"path": name, "run_uuid": run_id}) as answer, place.open("wb") as file:
                while part := answer.read(1 << 20):
                    file.write(part)
        except urllib.error.HTTPError as error:
            account.leave("files", f"the server does not give them: {error.code} {error.reason}", name)
            continue
        found[name] = place
    return found


def _listed(server: MLflowServer, run_id: str, account: Account) -> Iterator[str]:
    waiting, seen = [""], 0
    while waiting:
        path = waiting.pop()
        query = {"run_id": run_id, **({"path": path} if path else {})}
        for entry in server.pages("artifacts/list", "files", query):
            name = str(entry.get("path") or "")
            seen += 1
            if seen > MOST_FILES:
                account.leave("files", f"there are more than {MOST_FILES}")
                return
            if ".." in name.split("/") or name.startswith("/") or not name.startswith(path):
                account.leave("files", "their path leads elsewhere", name)
            elif entry.get("is_dir"):
                waiting.append(name)
            else:
                yield name
