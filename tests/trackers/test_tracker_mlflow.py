"""MLflow under the tracker contract: a database and a folder here, a real server in test_tracker_mlflow_server.py."""

import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from fanfold.errors import notices
from fanfold.relay.process import make
from fanfold.testing import ALL, Seen
from fanfold.trackers._mlflow import Names, legal
from fanfold.trackers.base import Identity, Point
from fanfold.trackers.mlflow import MLflowTracker
from warm_contract import WarmContract


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """MLflow puts files it is not told where to put into the working folder."""
    monkeypatch.chdir(tmp_path)


pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's own affair

SETTINGS = {"MLFLOW_EXPERIMENT_NAME": "contract", "MLFLOW_DISABLE_TELEMETRY": "true"}


def files_of(client, run_id, folder=None):
    """Yield the path of every file a run keeps."""
    for entry in client.list_artifacts(run_id, folder):
        if entry.is_dir:
            yield from files_of(client, run_id, entry.path)
        else:
            yield entry.path


def read_back(uri: str, experiment_name: str) -> Seen:
    """Read what an experiment holds with MLflow's own client."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name(experiment_name).experiment_id])
    run = client.get_run(runs[0].info.run_id)
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    files = list(files_of(client, run.info.run_id))
    texts = {
        path.split("/")[1]: [Path(client.download_artifacts(run.info.run_id, path)).read_text()]
        for path in files
        if path.startswith("texts/")
    }
    shown = [path.split("/")[1].split("+")[0] for path in files if "/" in path and not path.endswith(".webp")]
    return Seen(
        scalars={key: [(point.step, point.value) for point in points] for key, points in history.items()},
        texts=texts,
        config=dict(run.data.params),
        media={key: shown.count(key) for key in shown},
        artifacts=files,
        summary={key.removeprefix("summary/"): value for key, value in run.data.metrics.items() if key.startswith("summary/")}
        | {
            key.removeprefix("fanfold.summary/"): value
            for key, value in run.data.tags.items()
            if key.startswith("fanfold.summary/")
        },
        tags=run.data.tags.get("fanfold.tags", "").split(", "),
        status=run.info.status.lower(),
        runs=len(runs),
    )


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    """A database with MLflow's tables, made once: making them takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> str:
    shutil.copyfile(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


class MLflowContract(WarmContract):
    """Read in this process, because MLflow's client reads any store without changing anything."""

    name = "mlflow"

    def seen(self, folder: Path) -> Seen:
        settings = self.environment(folder)
        return read_back(settings["MLFLOW_TRACKING_URI"], settings["MLFLOW_EXPERIMENT_NAME"])


class SQLContract(MLflowContract):
    holds = ALL - {"inf", "metric", "alert"}

    @staticmethod
    def stored(value: float) -> float:
        return value + 0.0  # SQLite has one zero: -0.0 comes back as 0.0


class TestDatabase(SQLContract):
    @pytest.fixture(autouse=True)
    def tables(self, database: str) -> None:
        pass

    def environment(self, folder: Path) -> dict[str, str]:
        return {**SETTINGS, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}


class TestFolder(MLflowContract):
    """What differs in a file store; the rest takes the same way as to a database."""

    holds = ALL - {"metric", "alert"}
    test_a_killed_process_is_delivered_whole_and_ends_as_killed = None
    test_it_works_by_hand_as_accelerate_uses_it = None

    @pytest.fixture(autouse=True)
    def allowed(self, monkeypatch) -> None:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    def environment(self, folder: Path) -> dict[str, str]:
        return {**SETTINGS, "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}


# What is special to MLflow


def adopted(uri: str, folder: Path, **arguments) -> MLflowTracker:
    """Return a started tracker as a relay has it."""
    tracker = MLflowTracker("specials", tracking_uri=uri, **arguments)
    tracker.destination.open(Identity("run-1", "a name", "specials", None, folder))
    return tracker


def run_of(tracker: MLflowTracker):
    return tracker._client.get_run(tracker.active_run.info.run_id)


def history(tracker: MLflowTracker, key: str) -> list[tuple[int, float]]:
    points = tracker._client.get_metric_history(tracker.active_run.info.run_id, key)
    return [(point.step, point.value) for point in points]


@pytest.fixture(params=["database", "folder"])
def store(request, empty_database: Path, tmp_path: Path, monkeypatch) -> str:
    """Both kinds of local store, one after the other."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    shutil.copyfile(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db" if request.param == "database" else (tmp_path / "mlruns").as_uri()


def test_starting_again_without_a_cursor_finds_the_run_by_its_tag(store, tmp_path):
    first, second = adopted(store, tmp_path), adopted(store, tmp_path)
    assert first.active_run.info.run_id == second.active_run.info.run_id
    assert run_of(second).data.tags["fanfold.run_id"] == "run-1"


def test_the_same_points_sent_again_are_the_same_rows(store, tmp_path):
    points = [Point({"x": float(i), "nan": float("nan")}, i, 1000.0 + i) for i in range(5)]
    adopted(store, tmp_path).write(points[:3])
    again = adopted(store, tmp_path)
    again.write(points)
    assert history(again, "x") == [(i, float(i)) for i in range(5)]
    assert len(history(again, "nan")) == 5


def test_equal_points_of_one_millisecond_are_kept_and_not_doubled(store, tmp_path):
    points = [Point({"x": 1.0}, 7, 1000.0001), Point({"x": 1.0}, 7, 1000.0002), Point({"x": 1.0}, 7, 1000.0003)]
    adopted(store, tmp_path).write(points)
    again = adopted(store, tmp_path)
    again.write(points)
    assert history(again, "x") == [(7, 1.0)] * 3


def test_names_mlflow_refuses_are_replaced_said_and_never_mixed(store, tmp_path):
    keys = ["a=b", "a@b", "a_b", "/top", "up/../x", "ü" * 300]
    tracker = adopted(store, tmp_path)
    tracker.write([Point({key: float(i)}, 0, 1000.0) for i, key in enumerate(keys)])
    data = run_of(tracker).data
    assert sorted(data.metrics.values()) == [float(i) for i in range(len(keys))]
    originals = {value: name.removeprefix("fanfold.key/") for name, value in data.tags.items() if name.startswith("fanfold.key/")}
    assert {data.metrics[originals.get(key, key)] for key in keys} == set(map(float, range(len(keys))))
    assert notices.counts["mlflow:name:a=b"] == 1


def test_a_replaced_name_is_the_same_after_a_restart(store, tmp_path):
    adopted(store, tmp_path).write([Point({"a=b": 1.0, "a@b": 2.0}, 0, 1000.0)])
    again = adopted(store, tmp_path)
    again.write([Point({"a@b": 3.0, "a=b": 4.0}, 1, 1001.0)])
    assert history(again, "a_b") == [(0, 1.0), (1, 4.0)]


def test_a_key_and_one_below_it_fit_into_a_folder_too(store, tmp_path):
    tracker = adopted(store, tmp_path)
    tracker.write([Point({"loss": 1.0, "loss/train": 2.0}, 0, 1000.0), Point({"acc/val": 3.0, "acc": 4.0}, 0, 1000.0)])
    assert sorted(run_of(tracker).data.metrics.values()) == [1.0, 2.0, 3.0, 4.0]


def test_infinity_is_left_out_of_a_table_said_and_named_in_a_tag(database, tmp_path):
    tracker = adopted(database, tmp_path)
    tracker.write([Point({"x": float("inf"), "y": 1.0}, 3, 1000.0), Point({"x": -float("inf")}, 4, 1001.0)])
    data = run_of(tracker).data
    assert data.metrics == {"y": 1.0}
    assert data.tags["fanfold.inf/x"] == "-inf at step 4"
    assert notices.counts["mlflow:inf:x"] == 2


def test_params_too_long_or_changed_become_tags_and_nothing_raises(store, tmp_path):
    tracker = adopted(store, tmp_path)
    tracker.store_init_configuration({"lr": 0.1, "long": "x" * 7000, "longer": "y" * 9000, "two\nlines": "a\nb", "same": 1})
    tracker.store_init_configuration({"lr": 0.2, "same": 1, "new": None})
    data = run_of(tracker).data
    assert data.params == {"lr": "0.1", "two_lines": "a\nb", "same": "1", "new": "None"}
    assert data.tags["fanfold.config/lr"] == "0.2"
    assert data.tags["fanfold.config/long"] == "x" * 7000
    path = tracker._client.download_artifacts(tracker.active_run.info.run_id, "tags/fanfold.config/longer.txt")
    assert Path(path).read_text() == "y" * 9000


def test_words_of_a_run_arrive_and_change(database, tmp_path):
    tracker = adopted(database, tmp_path)
    tracker.describe(name="first", tags=["a", "b"], notes="hello", group="g")
    tracker.describe(name="second", tags=[], notes="hello", group="g")
    run = run_of(tracker)
    assert run.info.run_name == "second"
    assert (run.data.tags["fanfold.tags"], run.data.tags["mlflow.note.content"], run.data.tags["fanfold.group"]) == (
        "",
        "hello",
        "g",
    )


def test_a_table_is_read_back_by_mlflows_own_reader(database, tmp_path, monkeypatch):
    import mlflow

    from fanfold.media import Table

    tracker = adopted(database, tmp_path)
    tracker.write([Point({"table": Table(columns=["a", "b"], data=[[1, "x"], [2, None]])}, 3, 1000.0)])
    mlflow.set_tracking_uri(database)
    (path,) = [path for path in files_of(tracker._client, tracker.active_run.info.run_id) if path.startswith("tables/")]
    info = tracker.active_run.info
    frame = tracker._client.load_table(info.experiment_id, path, [info.run_id])
    assert frame["a"].tolist() == [1, 2]
    assert frame["b"].tolist()[0] == "x"


@pytest.mark.parametrize(
    ("status", "there"), [("finished", "FINISHED"), ("failed", "FAILED"), ("killed", "KILLED"), ("preempted", "KILLED")]
)
def test_a_run_ends_as_what_it_was_and_runs_again_when_resumed(database, tmp_path, status, there):
    tracker = adopted(database, tmp_path)
    tracker.close(status)
    assert run_of(tracker).info.status == there
    assert run_of(adopted(database, tmp_path)).info.status == "RUNNING"


def test_a_relative_database_is_found_again_from_another_folder(empty_database, tmp_path, monkeypatch):
    shutil.copyfile(empty_database, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    first = adopted("sqlite:///mlflow.db", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    second = MLflowTracker("specials")
    second.destination.open(Identity("run-1", "a name", "specials", None, tmp_path), first.remote)
    assert second.active_run.info.run_id == first.active_run.info.run_id


def test_by_hand_a_log_from_another_thread_reaches_the_same_run(database, tmp_path):
    import mlflow

    tracker = MLflowTracker("by hand", tracking_uri=database, tags={"team": "x"}, run_name="hand", description="why")
    tracker.start()
    assert mlflow.active_run().info.run_id == tracker.active_run.info.run_id
    config = {"lr": 0.1, "nested": {"a": [1]}}
    tracker.store_init_configuration(config)
    tracker.log({"loss": 1.0, "note": "text", "n": 2}, step=1, synchronous=True)
    worker = threading.Thread(target=tracker.log, args=({"loss": 0.5},), kwargs={"step": 2})
    worker.start()
    worker.join()
    (tmp_path / "file.txt").write_text("kept")
    tracker.log_artifact(str(tmp_path / "file.txt"), artifact_path="sub")
    tracker.finish()
    run = run_of(tracker)
    assert history(tracker, "loss") == [(1, 1.0), (2, 0.5)]
    assert run.data.params == {"lr": "0.1", "nested": "{'a': [1]}"}
    assert (run.info.status, run.data.tags["team"], config) == ("FINISHED", "x", {"lr": 0.1, "nested": {"a": [1]}})
    assert "sub/file.txt" in list(files_of(tracker._client, run.info.run_id))
    assert len(tracker._client.search_runs([run.info.experiment_id])) == 1
    assert mlflow.active_run() is None


def test_a_relay_takes_experiment_and_run_name_from_tracker_kwargs():
    tracker = make("mlflow", {"experiment_name": "e", "run_name": "r"}, Path("runs/project/id"))
    assert (tracker.experiment_name, tracker.run_name) == ("e", "r")
    assert make("mlflow", {}, Path("runs/project/id")).experiment_name == "project"


def test_environment_comes_before_arguments(monkeypatch):
    for name, value in (("EXPERIMENT_NAME", "e"), ("RUN_ID", "r"), ("TAGS", '{"a": 1}'), ("NESTED_RUN", "False")):
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    tracker = MLflowTracker("x", run_id="y", tags={"b": 2}, nested_run=True)
    assert (tracker.experiment_name, tracker.run_id, tracker.tags, tracker.nested_run) == ("e", "r", {"a": 1}, False)


def test_a_file_store_without_permission_is_named_unusable(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///somewhere")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    assert "MLFLOW_ALLOW_FILE_STORE" in str(MLflowTracker.unusable())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x.db")
    assert MLflowTracker.unusable() is None


def test_every_legal_name_is_one_mlflow_takes():
    from mlflow.utils.validation import _validate_metric_name

    for key in ["", ".", "..", "/", "a//b", "a/", "x\n", "日本/損失", "a" * 999, "a\tb", "%[]=@#"]:
        _validate_metric_name(legal(key))
    names = Names(as_files=True)
    assert len({names(key) for key in ("a=b", "a@b", "a_b", "a_b/c", "a#b/c")}) == 5


@pytest.mark.parametrize("size", [150_000])
def test_a_relay_killed_while_it_makes_the_database_is_delivered_by_the_next(size, tmp_path):
    """Kill when the files of the database, whatever their names, have grown to a size."""
    dying = f"""
        import os, pathlib, sys, threading, time
        from fanfold.trackers import MLflowTracker
        from fanfold.trackers.base import Identity, Point
        place, deadly = pathlib.Path({str(tmp_path / "data")!r}), int(sys.argv[1])
        def watch():
            while sum(path.stat().st_size for path in place.iterdir() if "journal" not in path.name) < deadly:
                time.sleep(0.001)
            os.kill(os.getpid(), 9)
        if deadly:
            threading.Thread(target=watch, daemon=True).start()
        tracker = MLflowTracker("p", tracking_uri=f"sqlite:///{{place}}/mlflow.db")
        tracker.destination.open(Identity("run-1", "a name", "p", None, place.parent))
        tracker.destination.write([Point({{"x": 1.5}}, 3, 1234.25)])
        tracker.destination.close("finished")
    """
    (tmp_path / "data").mkdir()
    program = [sys.executable, "-c", textwrap.dedent(dying)]
    assert subprocess.run([*program, str(size)], check=False, timeout=300).returncode == -9
    subprocess.run([*program, "0"], check=True, timeout=300)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/data/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.data.metrics == {"x": 1.5}
