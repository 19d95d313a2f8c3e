"""DagsHub under the tracker contract: its own logger's files, and a real MLflow server at a repository's address."""

import csv
from pathlib import Path

import pytest
import yaml
from test_tracker_mlflow import SETTINGS, SQLContract, read_back

from fanfold.testing import Seen, TrackerContract
from fanfold.trackers.base import Identity, Point
from fanfold.trackers.dagshub import DagsHubTracker
from mlflow_server import MLflowServer


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """MLflow puts files it is not told where to put into the working folder."""
    monkeypatch.chdir(tmp_path)


pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


class TestFiles(TrackerContract):
    name = "dagshub"
    holds = frozenset({"nan", "inf", "late", "repeat", "text", "config", "resume"})

    def environment(self, folder: Path) -> dict[str, str]:
        return {"DAGSHUB_QUIET": "1", "MLFLOW_TRACKING_URI": ""}

    def seen(self, folder: Path) -> Seen:
        place = folder / "runs" / "contract" / "contract-1" / "trackers" / "dagshub"
        with (place / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = [(row["Name"], int(row["Step"]), row["Value"]) for row in csv.DictReader(file)]
        numbers, texts = [row for row in rows if _is_number(row[2])], [row for row in rows if not _is_number(row[2])]
        hparams = place / "params.yml"
        return Seen(
            scalars={name: [(step, float(value)) for key, step, value in numbers if key == name] for name, *_ in numbers},
            texts={name: [value for key, _, value in texts if key == name] for name, *_ in texts},
            config=yaml.safe_load(hparams.read_text()) if hparams.exists() else None,
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = MLflowServer(tmp_path_factory.mktemp("hosted"), prefix="/owner/repo.mlflow").start()
    yield running
    running.kill()


class TestHosted(SQLContract):
    """What shows that the address and the arguments reach MLflow; MLflow itself is tested in its own file."""

    name = "dagshub"
    test_a_killed_process_is_delivered_whole_and_ends_as_killed = None
    test_a_second_attempt_continues_the_same_remote_run_and_syncing_adds_nothing = None

    @pytest.fixture(autouse=True)
    def address(self, server: MLflowServer) -> None:
        self.url = server.url

    def environment(self, folder: Path) -> dict[str, str]:
        return {**SETTINGS, "MLFLOW_EXPERIMENT_NAME": folder.name, "DAGSHUB_USER_TOKEN": "t"}

    def kwargs(self, folder: Path) -> dict[str, str]:
        return {"repo": "owner/repo", "host": self.url.removesuffix("/owner/repo.mlflow")}

    def seen(self, folder: Path) -> Seen:
        return read_back(self.url, folder.name)


def opened(folder: Path, remote: str | None = None, **arguments) -> DagsHubTracker:
    tracker = DagsHubTracker("project", **arguments)
    tracker.destination.open(Identity("run-1", "name", "project", None, folder), remote)
    return tracker


def names_in(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row["Name"] for row in csv.DictReader(file)]


def test_a_torn_row_is_cut_off_and_sent_again(tmp_path):
    first = opened(tmp_path)
    first.write([Point({"x": 1.0, "note": 'two\nlines, "quoted"'}, 0, 1000.0)])
    first.settle()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write('"x",2.0,"torn\nrow')
    again = opened(tmp_path, first.remote)
    assert again.counts() == {"x": 1, "note": 1}
    again.write([Point({"x": 2.0}, 1, 1001.0)])
    again.finish()
    assert names_in(tmp_path / "metrics.csv") == ["x", "note", "x"]


def test_a_new_run_begins_the_files_of_the_user_anew(tmp_path):
    for _ in range(2):
        tracker = opened(tmp_path / "run", metrics_path=str(tmp_path / "m.csv"), hparams_path=str(tmp_path / "p.yml"))
        tracker.write([Point({"x": 1.0, "ok": True}, 0, 1000.0)])
        tracker.finish()
    assert (tmp_path / "m.csv").read_text().splitlines() == ["Name,Value,Timestamp,Step", '"x",1.0,1000000,0', '"ok",1,1000000,0']


@pytest.mark.parametrize(
    ("arguments", "uri", "wanted"),
    [
        ({"repo": "me/it"}, "", "https://dagshub.com/me/it.mlflow"),
        ({"repo": "me/it", "host": "https://hub.example/"}, "", "https://hub.example/me/it.mlflow"),
        ({"tracking_uri": "http://x/me/it.mlflow"}, "", "http://x/me/it.mlflow"),
        ({}, "https://dagshub.com/me/it.mlflow", "https://dagshub.com/me/it.mlflow"),
        ({}, "http://localhost:5000", None),
        ({}, "", None),
    ],
)
def test_the_repository_is_found_in_arguments_or_environment(monkeypatch, arguments, uri, wanted):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert DagsHubTracker("x", **arguments).tracking_uri == wanted


def test_a_repository_without_a_token_is_named_unusable(monkeypatch, tmp_path):
    for name in ("DAGSHUB_USER_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DAGSHUB_CLIENT_TOKENS_CACHE", str(tmp_path / "tokens"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert DagsHubTracker.unusable() is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://dagshub.com/me/it.mlflow")
    assert "DAGSHUB_USER_TOKEN" in str(DagsHubTracker.unusable())
    (tmp_path / "tokens").write_text("version: '1'")
    assert DagsHubTracker.unusable() is None
