"""MLflow under the tracker contract over HTTP, against a real server; and what happens while that server is away."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from test_tracker_mlflow import SETTINGS, SQLContract, read_back

from mlflow_server import MLflowServer


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """MLflow puts files it is not told where to put into the working folder."""
    monkeypatch.chdir(tmp_path)


pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = MLflowServer(tmp_path_factory.mktemp("server")).start()
    yield running
    running.kill()


class TestServer(SQLContract):
    """What goes over the wire; the rest takes the same way as to a database."""

    @pytest.fixture(autouse=True)
    def address(self, server: MLflowServer, tmp_path: Path) -> None:
        self.url = server.url

    def environment(self, folder: Path) -> dict[str, str]:
        return {**SETTINGS, "MLFLOW_TRACKING_URI": self.url, "MLFLOW_EXPERIMENT_NAME": f"{folder.parent.name} {folder.name}"}


def test_a_server_killed_in_the_middle_of_delivery_gets_every_point_once(server: MLflowServer, tmp_path: Path):
    script = f"""
        import sys, fanfold
        run = fanfold.init("outage", id="run-1", dir={str(tmp_path / "runs")!r}, system=False, quiet=True, trackers=["mlflow"])
        for i in range(4000):
            run.log({{"x": float(i), "y": -float(i)}}, step=i)
            if i % 1000 == 999:
                print(i, flush=True)
                sys.stdin.readline()
        run.finish(timeout=60)
    """
    settings = {**SETTINGS, "MLFLOW_TRACKING_URI": server.url, "MLFLOW_EXPERIMENT_NAME": "outage"}
    training = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env={**os.environ, **settings}, cwd=tmp_path, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    cursor = tmp_path / "runs" / "outage" / "run-1" / "relay" / "mlflow.cursor"
    try:
        _go_on(training)
        _until(lambda: _read(cursor).get("delivered", 0) > 0)
        _go_on(training)  # these are on their way when the server dies
        server.kill()
        _go_on(training)
        _until(lambda: _read(cursor).get("error"))
        server.start()
        _go_on(training)
        assert training.wait(60) == 0
        seen = read_back(server.url, "outage")
    finally:
        training.kill()
        training.communicate()
    assert sorted(seen.scalars["x"]) == [(i, float(i)) for i in range(4000)]
    assert sorted(seen.scalars["y"]) == [(i, -float(i)) for i in range(4000)]
    assert (seen.runs, seen.status) == (1, "finished")


def _go_on(training) -> None:
    """Let the training log its next thousand steps."""
    assert training.stdout.readline()
    training.stdin.write("\n")
    training.stdin.flush()


def _read(cursor: Path) -> dict:
    return json.loads(cursor.read_text()) if cursor.exists() else {}


def _until(happens) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)
