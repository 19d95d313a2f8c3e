"""Importing from a real MLflow server, and from databases through SQLAlchemy."""

import http.server
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from test_mlflow import OWN_CALLS, SETTINGS, check_own_calls, named

import fanfold
from fanfold.errors import SettingError
from mlflow_server import MLflowServer
from round_trip import played, points, run_in, same_file, same_images, same_points, same_texts, send

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's own affair


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = MLflowServer(tmp_path_factory.mktemp("server"), "/team").start()
    yield found
    found.kill()


def play(folder: Path, uri: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(OWN_CALLS), uri], env={**os.environ, **SETTINGS}, cwd=folder,
                          capture_output=True, text=True, timeout=200, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_runs_of_a_server_are_carried_with_everything_and_only_once(server, tmp_path):
    play(tmp_path, server.url)
    accounts = fanfold.import_runs(server.url, dir=tmp_path / "back")
    assert {account.outcome for account in accounts} == {"imported"}
    assert [left for account in accounts for left in account.left] == []
    check_own_calls(tmp_path / "back")
    before = points(named(tmp_path / "back", 'a "name"'), "train/loss")
    fanfold.import_runs(server.url, dir=tmp_path / "back")
    assert points(named(tmp_path / "back", 'a "name"'), "train/loss") == before


def test_a_run_sent_to_a_server_comes_back_equal(tmp_path):
    found = MLflowServer(tmp_path).start()
    try:
        original = played(tmp_path, 5)
        send(tmp_path, "mlflow", MLFLOW_TRACKING_URI=found.url, MLFLOW_EXPERIMENT_NAME="exp", **SETTINGS)
        (account,) = fanfold.import_runs(found.url, dir=tmp_path / "back")
    finally:
        found.kill()
    run = run_in(tmp_path / "back")
    assert (run.id, run.status, run.tags) == (original.id, original.status, original.tags)
    for key in ("loss", "val/acc", "count"):
        same_points(original, run, key, time_unit=1e-3)
    same_texts(original, run, "essay")
    same_images(original, run, "image")
    same_file(original, run, "model.bin")
    assert [left.what for left in account.left] == ["infinite values"]


def test_other_databases_are_read_through_sqlalchemy(tmp_path):
    play(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    accounts = fanfold.import_runs(f"sqlite+pysqlite:///{tmp_path}/mlflow.db", dir=tmp_path / "back")
    assert len(accounts) == 4
    run = named(tmp_path / "back", 'a "name"')
    assert run.series("train/loss").values.tolist() == [1 / (i + 1) for i in range(50)]
    assert run.config["lr"] == 0.1
    assert {left.what for account in accounts for left in account.left} == {"the run's files"}


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Sends every request to another address, and notes what it was asked with."""

    asked: list[str | None] = []  # noqa: RUF012 - shared by all requests
    target = ""

    def do_POST(self) -> None:
        Elsewhere.asked.append(self.headers.get("Authorization"))
        self.send_response(302)
        self.send_header("Location", Elsewhere.target)
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_arguments: object) -> None:
        pass


def test_credentials_go_to_no_other_address(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    first, second = (http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) for _ in range(2))
    for one in (first, second):
        threading.Thread(target=one.serve_forever, daemon=True).start()
    Elsewhere.target = f"http://127.0.0.1:{second.server_port}/"
    try:
        with pytest.raises(SettingError, match="does not answer as an MLflow server does"):
            fanfold.import_runs(f"http://127.0.0.1:{first.server_port}", dir=tmp_path)
    finally:
        first.shutdown()
        second.shutdown()
    assert Elsewhere.asked == ["Bearer secret"]


def test_an_address_where_nobody_answers_is_a_clear_error(tmp_path):
    with pytest.raises(SettingError, match="Check the address"):
        fanfold.import_runs("http://127.0.0.1:9", dir=tmp_path)
