"""What every reporting callback does: who reports, when a run begins and ends, what happens when a tracker is down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import reporting_cases as cases
import reporting_readers as readers
from fanfold.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    KubeflowCallback,
    TensorBoardCallback,
    TrackingCallback,
    TrainerControl,
    TrainerState,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
    report,
    rewrite_logs,
    tracking,
)
from fanfold.callbacks.model_info import checkpoint_of, staged, unstage
from fanfold.callbacks.reporting import INTEGRATION_TO_CALLBACK
from fanfold.cli import main
from fanfold.errors import MissingExtra, SettingError
from fanfold.trackers import GeneralTracker
from mlflow_server import MLflowServer

os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # Transformers imports Comet, which would mirror MLflow's runs
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::sqlalchemy.exc.SADeprecationWarning")


class Memory(GeneralTracker):
    """A tracker of the user's own, which fails as often as it is told to."""

    name = "memory"
    requires_logging_directory = False

    def __init__(self, failures: int = 0, error: type[Exception] = ConnectionError) -> None:
        super().__init__()
        self.rows, self.calls, self.failures, self.error = [], [], failures, error

    @property
    def tracker(self):
        return self.rows

    def start(self):
        self.calls.append(("start", threading.current_thread().name))
        if self.failures > 0 and self.error is OSError:
            self.failures -= 1
            raise OSError("no answer")

    def store_init_configuration(self, values):
        self.calls.append(("config", values["learning_rate"]))

    def log(self, values, step=None, **kwargs):
        if self.failures > 0:
            self.failures -= 1
            raise self.error("no answer")
        self.rows.append((step, values))

    def finish(self):
        self.calls.append(("finish", threading.current_thread().name))


@pytest.fixture(autouse=True)
def own_runs(runs_dir, monkeypatch):
    """Keep the runs of a test in its folder, and end what it leaves open."""
    monkeypatch.setenv("FANFOLD_SYSTEM", "0")
    yield
    for callback in list(tracking._open):
        callback.finish()
    for run in list(report._hosts):
        run.finish(1.0)


@pytest.fixture
def args(tmp_path):
    given = {"output_dir": str(tmp_path / "out"), "run_name": None, "project": "p", "learning_rate": 0.1}
    return SimpleNamespace(to_dict=lambda: given, load_best_model_at_end=False, **given)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory) -> Path:
    return cases.empty_mlflow(tmp_path_factory.mktemp("mlflow"))


@pytest.fixture
def database(empty_database, tmp_path, monkeypatch) -> str:
    """Have MLflow write to a database of this test, in the experiment `exp`, and to nothing it was told before."""
    import mlflow

    shutil.copyfile(empty_database, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "exp")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("exp")
    yield f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(None)


class Play:
    """Tell a callback what a Trainer tells it."""

    def __init__(self, args, *callbacks, **state):
        self.args, self.state = args, TrainerState(max_steps=4, **state)
        self.handler = CallbackHandler([DefaultFlowCallback, *callbacks], torch.nn.Linear(2, 1), None, None, None)

    def __getattr__(self, event):
        return lambda *given: getattr(self.handler, event)(self.args, self.state, TrainerControl(), *given)

    def log(self, step, **logs):
        self.state.global_step = step
        self.on_log(logs)


def test_names_are_rewritten_as_transformers_does():
    logs = ("loss", "eval_loss", "test_acc", "epoch", "train_loss", "evaluate", "eval_")
    named = ["train/loss", "eval/loss", "test/acc", "train/epoch", "train/train_loss", "train/evaluate", "eval/"]
    assert rewrite_logs({key: i for i, key in enumerate(logs)}) == {key: i for i, key in enumerate(named)}


def test_a_tracker_of_ones_own_gets_start_config_rows_and_finish_in_one_thread(args):
    memory = Memory()
    play = Play(args, TrackingCallback(memory))
    play.on_train_begin()
    logs = {"loss": torch.tensor(0.5), "eval_acc": 1, "nested": {"a": 2}}
    play.log(3, **logs)
    logs["loss"].fill_(9.0)
    play.on_train_end()
    assert memory.rows == [(3, {"train/loss": torch.tensor(0.5), "eval/acc": 1, "train/nested/a": 2})]
    thread = "fanfold-relay-memory"
    assert memory.calls == [("start", thread), ("config", 0.1), ("finish", thread)]


def test_other_ranks_report_nothing(args):
    memory = Memory()
    play = Play(args, TrackingCallback(memory), is_world_process_zero=False)
    play.on_train_begin()
    play.log(1, loss=1)
    play.on_train_end()
    assert (memory.rows, memory.calls) == ([], [])


def test_a_tracker_that_fails_is_tried_again_and_gets_everything_in_order(args, caplog):
    memory = Memory(failures=2)
    play = Play(args, TrackingCallback(memory))
    play.on_train_begin()
    for step in range(1, 20):
        play.log(step, loss=step)
    while len(memory.rows) < 19:
        time.sleep(0.05)
    assert [row[0] for row in memory.rows] == list(range(1, 20))
    assert caplog.text.count("the tracker memory failed: ConnectionError: no answer") == 1
    play.on_train_end()
    assert memory.calls[-1][0] == "finish"


def test_a_dead_tracker_holds_nobody_up_and_says_how_to_deliver_later(args, capsys):
    memory = Memory(failures=1 << 30)
    play = Play(args, callback := TrackingCallback(memory))
    play.on_train_begin()
    play.log(1, loss=1)
    play.on_train_end()
    assert (
        "memory: 1 value is not delivered yet (ConnectionError: no answer). Deliver it with: fanfold sync"
        in capsys.readouterr().err
    )
    assert callback.report.ended


def test_a_second_training_from_the_start_is_a_new_run_and_a_resumed_one_is_not(args, tmp_path):
    play = Play(args, callback := TensorBoardCallback())
    play.on_train_begin()
    play.log(1, loss=1.0)
    play.on_train_end()
    first = callback.logging_dir
    play.log(1, eval_loss=2.0)
    play.on_train_begin()  # goes on from step 1
    play.log(2, loss=0.5)
    play.on_train_end()
    assert callback.logging_dir == first
    assert {key: [s for s, _ in found] for key, found in readers.tensorboard(tmp_path).items() if "loss" in key} == {
        "train/loss": [1, 2], "eval/loss": [1],
    }  # fmt: skip
    play.state.global_step = 0
    callback.logging_dir = str(tmp_path / "elsewhere")
    play.on_train_begin()
    assert callback.logging_dir not in (first, str(tmp_path / "elsewhere"))
    play.on_exception(RuntimeError("stop"))


def test_evaluation_without_training_writes_below_the_output_folder(args, tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    callback = TensorBoardCallback()
    Play(args, callback).log(0, eval_loss=1.0)
    assert list((tmp_path / "cwd").iterdir()) == []
    assert readers.tensorboard(tmp_path / "out")["eval/loss"] == [(0, 1.0)]
    callback.finish()


def test_a_writer_of_ones_own_is_used_and_left_open(args, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "mine"))
    play = Play(args, callback := TensorBoardCallback(tb_writer=writer))
    play.on_train_begin()
    play.log(1, loss=1.0)
    play.on_train_end()
    assert callback.tb_writer is writer
    writer.add_scalar("own", 1.0, 1)
    writer.close()
    found = readers.tensorboard(tmp_path)
    assert (found["train/loss"], found["own"]) == ([(1, 1.0)], [(1, 1.0)])


def test_an_exception_ends_the_run_as_failed_and_frees_mlflow(args, tmp_path, monkeypatch, database):
    import mlflow

    monkeypatch.setenv("MLFLOW_MAX_LOG_PARAMS", "2")
    play = Play(args, INTEGRATION_TO_CALLBACK["mlflow"]())
    play.on_train_begin()
    assert mlflow.active_run() is not None
    play.log(1, **{"loss": 1.0, "a(b)": 2.0})
    play.on_exception(RuntimeError("stop"))
    play.on_train_end()
    assert mlflow.active_run() is None
    run, _ = readers.mlflow_run(tmp_path)
    assert (run.info.status, run.data.metrics, len(run.data.params)) == ("FAILED", {"loss": 1.0, "a_b_": 2.0}, 2)


def test_a_run_of_the_users_is_used_and_left_open(args, tmp_path, database):
    import mlflow

    with mlflow.start_run(run_name="mine"):
        play = Play(args, INTEGRATION_TO_CALLBACK["mlflow"]())
        play.on_train_begin()
        play.log(1, loss=1.0)
        play.on_train_end()
        assert mlflow.active_run().info.run_name == "mine"
    run, _ = readers.mlflow_run(tmp_path)
    assert (run.info.run_name, run.data.metrics) == ("mine", {"loss": 1.0})


def test_a_setup_of_the_users_own_decides_which_run_it_is(args, tmp_path, database):
    import mlflow

    class Mine(INTEGRATION_TO_CALLBACK["mlflow"]):
        def setup(self, args, state, model):  # without **kwargs, as MLflow's is in Transformers
            self._ml_flow.start_run(run_name="set up here")

    play = Play(args, Mine())
    play.on_train_begin()
    play.log(1, loss=1.0)
    play.on_train_end()
    mlflow.end_run()
    run, _ = readers.mlflow_run(tmp_path)
    assert (run.info.run_name, run.data.metrics) == ("set up here", {"loss": 1.0})


def test_dagshub_without_an_address_says_what_to_do(args, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    play = Play(args, INTEGRATION_TO_CALLBACK["dagshub"]())
    with pytest.raises(Exception, match=r"MLFLOW_TRACKING_URI.*dagshub.init"):
        play.on_train_begin()


def test_dagshub_reports_to_its_server_even_if_that_comes_late(args, tmp_path, monkeypatch):
    import mlflow

    server = MLflowServer(tmp_path, prefix="/owner/repo.mlflow")
    mlflow.set_tracking_uri(None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "exp")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "token")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "token")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    play = Play(args, INTEGRATION_TO_CALLBACK["dagshub"]())
    play.on_train_begin()  # nobody answers
    play.log(1, loss=1.0)
    server.start()
    try:
        play.log(2, loss=2.0)
        play.on_train_end()
        client = mlflow.MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("exp").experiment_id])
        found = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")]
        assert (run.info.status, found) == ("FINISHED", [(1, 1.0), (2, 2.0)])
    finally:
        server.kill()
        mlflow.set_tracking_uri(None)


def test_a_staged_checkpoint_outlives_the_one_it_was_made_of(tmp_path):
    (tmp_path / "checkpoint-1" / "deep").mkdir(parents=True)
    (tmp_path / "checkpoint-1" / "deep" / "file").write_text("weights")
    copy = staged(tmp_path / "checkpoint-1")
    assert (copy / "deep" / "file").samefile(tmp_path / "checkpoint-1" / "deep" / "file")
    subprocess.run(["rm", "-r", str(tmp_path / "checkpoint-1")], check=True)
    assert (copy.name, (copy / "deep" / "file").read_text()) == ("checkpoint-1", "weights")
    unstage(copy)
    assert list(tmp_path.iterdir()) == []


# report_to


def test_report_to_takes_none_names_lists_and_tuples():
    get = get_reporting_integration_callbacks
    assert get(None) == get("none") == get(["none"]) == get([]) == []
    board, flow = INTEGRATION_TO_CALLBACK["tensorboard"], INTEGRATION_TO_CALLBACK["mlflow"]
    assert get("tensorboard") == [board]
    assert get(["tensorboard", "mlflow", "tensorboard"]) == get(("tensorboard", "mlflow")) == [board, flow]


def test_an_unknown_report_to_lists_the_known():
    with pytest.raises(
        ValueError, match=r"wandbb is not supported, only aim, azure_ml, clearml, .*, wandb are supported"
    ) as error:
        get_reporting_integration_callbacks(["tensorboard", "wandbb"])
    assert isinstance(error.value, SettingError)


def test_all_is_what_is_installed_and_usable(monkeypatch, caplog):
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "COMET_API_KEY", "CLEARML_API_ACCESS_KEY", "CLEARML_OFFLINE_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", "/nonexistent")
    names = [cls.__name__ for cls in get_reporting_integration_callbacks("all")]
    assert {"TensorBoardCallback", "WandbCallback", "MLflowCallback", "DVCLiveCallback", "CodeCarbonCallback"} <= set(names)
    assert not {"FlyteCallback", "DagsHubCallback", "AzureMLCallback", "CometCallback"} & set(names)
    assert "leaves out trackers that need setting up first: comet_ml (no API key" in caplog.text
    extended = get_reporting_integration_callbacks(["all", "flyte"])
    assert [cls.__name__ for cls in extended] == [*names, "FlyteCallback"]


def test_mlflow_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    assert "mlflow" not in get_available_reporting_integrations()


def test_a_library_that_is_missing_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setattr("fanfold.trackers.registry._found", lambda module: False)
    with pytest.raises(MissingExtra, match=r"pip install 'fanfold\[tensorboard\]'"):
        TensorBoardCallback()


def test_reporting_to_one_imports_no_other(tmp_path):
    code = """
import sys
from fanfold.callbacks import get_reporting_integration_callbacks
get_reporting_integration_callbacks(["mlflow", "wandb", "comet_ml", "clearml"])
print(sorted({"mlflow", "wandb", "comet_ml", "clearml", "neptune", "torch", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# When the process ends

ENDING = """
import concurrent.futures, multiprocessing, os, sys, threading
from types import SimpleNamespace
from fanfold.callbacks import CallbackHandler, DefaultFlowCallback, TrackingCallback, TrainerControl, TrainerState
from fanfold.trackers import GeneralTracker

def say(line):
    os.write(1, f"{line}\\n".encode())

class Pooled(GeneralTracker):
    requires_logging_directory, tracker, pool = False, None, concurrent.futures.ThreadPoolExecutor()
    def __init__(self, name):
        self.name = name
        super().__init__()
    def log(self, values, step=None, **kwargs):
        say(f"{self.name} log {step}")
    def finish(self):
        if self.name == "main" and pooled:
            self.pool.submit(say, "main finish").result()
        else:
            say(f"{self.name} finish")

class Play:
    def __init__(self, name):
        self.args = SimpleNamespace(output_dir="out", run_name=None, project="p", learning_rate=0.1)
        self.state = TrainerState(max_steps=4)
        self.handler = CallbackHandler([DefaultFlowCallback, TrackingCallback(Pooled(name))], None, None, None, None)
        self.tell("on_train_begin")
    def tell(self, event, *given):
        getattr(self.handler, event)(self.args, self.state, TrainerControl(), *given)
    def log(self, step):
        self.state.global_step = step
        self.tell("on_log", {"loss": step})

def in_a_thread():
    play = Play("thread")
    play.log(1)
    went.set()
    threading.main_thread().join()
    play.log(2)

pooled, went = sys.argv[1] == "pool", threading.Event()
Play("main").log(1)
child = multiprocessing.get_context("fork").Process(target=say, args=("child",))
child.start()
child.join()
if not pooled:
    threading.Thread(target=in_a_thread).start()
    went.wait()
"""


@pytest.mark.parametrize("what", ["pool", "thread"])
def test_a_process_that_ends_in_training_delivers_all_and_its_children_end_nothing(tmp_path, what):
    """A tracker may still use thread pools; a training in a thread of the user's goes on until that thread ends."""
    command = [sys.executable, "-c", ENDING, what]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert [line for line in lines if line.startswith("main")] == ["main log 1", "main finish"]
    wanted = ["thread log 1", "thread log 2", "thread finish"] if what == "thread" else []
    assert [line for line in lines if line.startswith("thread")] == wanted
    assert lines.count("child") == 1


def test_two_trackers_of_one_name_in_one_training_do_not_end_each_other(args):
    first, second = Memory(), Memory()
    play = Play(args, TrackingCallback(first), TrackingCallback(second))
    play.on_train_begin()
    play.log(1, loss=1)
    play.on_train_end()
    assert first.rows == second.rows == [(1, {"train/loss": 1})]
    assert [call[0] for call in first.calls] == [call[0] for call in second.calls] == ["start", "config", "finish"]


# Trials and folders


def test_a_trials_checkpoint_is_found_in_its_folder_or_reported_missing(args, caplog):
    for trial, name in (("run-0", "checkpoint-2"), ("run-1", "checkpoint-2")):
        Path(args.output_dir, trial, name).mkdir(parents=True)
    os.utime(Path(args.output_dir, "run-0", "checkpoint-2"), (1, 1))
    state = TrainerState(global_step=2, is_hyper_param_search=True)
    assert checkpoint_of(args, state) == Path(args.output_dir, "run-1", "checkpoint-2")
    assert checkpoint_of(args, TrainerState(global_step=2)) is None
    assert "there is no checkpoint-2" in caplog.text


def test_a_folder_of_ones_own_has_a_folder_for_each_further_training_and_each_trial(args, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    play = Play(args, callback := TensorBoardCallback())
    folders = []
    for search in (False, False, True):
        play.state = TrainerState(max_steps=4, is_hyper_param_search=search)
        play.on_train_begin()
        folders.append(str(Path(callback.logging_dir).relative_to(tmp_path)))
        play.on_train_end()
    assert folders == ["board", "board/2", "board/trial-3"]


# Kubeflow


class Controller(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.said.append((self.headers["Authorization"], body["trainerStatus"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        """Say nothing."""


def test_kubeflow_is_told_how_far_training_is(args, tmp_path, monkeypatch, caplog):
    server = HTTPServer(("127.0.0.1", 0), Controller)
    server.said = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "token").write_text("let-me-in\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    now = [0.0]
    callback = KubeflowCallback(clock=lambda: now[0])
    play = Play(args, callback)
    play.on_train_begin()
    for step in (1, 2, 3):
        now[0] += 4.0
        play.log(step, loss=0.5)
        callback.on_step_end(args, play.state, None)  # due at 8 s only
        callback.wait(10)
    play.on_train_end()
    assert [status.get("progressPercentage") for _, status in server.said] == [0, 50, 100]
    assert server.said[0][0] == "Bearer let-me-in"
    assert server.said[1][1]["estimatedRemainingSeconds"] == 8
    told = {item["name"]: item["value"] for item in server.said[1][1]["metrics"]}
    assert told == {"loss": "0.5", "current_step": "2", "total_steps": "4", "current_epoch": "0"}
    server.shutdown()
    server.server_close()
    play.on_train_begin()
    play.on_exception(RuntimeError("stop"))
    play.on_train_end()
    callback.wait(10)
    assert (len(server.said), caplog.text.count("was not reported to Kubeflow")) == (3, 1)


def test_kubeflow_is_reported_to_inside_a_job_only(monkeypatch):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    assert "kubeflow" not in get_available_reporting_integrations()
    with pytest.raises(SettingError, match="KUBEFLOW_TRAINER_SERVER_URL is not set"):
        get_reporting_integration_callbacks("kubeflow")[0]()
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9")
    assert "kubeflow" in get_available_reporting_integrations()
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    assert "kubeflow" not in get_available_reporting_integrations()


@pytest.mark.parametrize("where", ["environment", "file"])
def test_a_disabled_fanfold_reports_nothing_and_says_so_once(args, runs_dir, monkeypatch, caplog, where):
    if where == "environment":
        monkeypatch.setenv("FANFOLD_MODE", "disabled")
    else:
        runs_dir.mkdir(parents=True, exist_ok=True)
        (runs_dir / "settings.toml").write_text('mode = "disabled"\n')
    before, memory = sorted(runs_dir.rglob("*")), Memory()
    for _ in range(2):
        play = Play(args, TrackingCallback(memory))
        play.on_train_begin()
        play.log(1, loss=0.5)
        play.on_train_end()
    assert (memory.rows, memory.calls) == ([], [])
    assert sorted(runs_dir.rglob("*")) == before
    (warning,) = [message for message in caplog.messages if "disabled" in message]
    assert "nothing is reported to trackers either" in warning


def test_sync_knows_a_report_by_the_id_it_lists(args, capsys):
    play = Play(args, callback := TensorBoardCallback())
    play.on_train_begin()
    play.log(1, loss=1.0)
    play.on_train_end()
    report = callback.report.run.id
    assert report != callback.report.host.id
    callback._finish_host("finished")
    assert main(["sync", report, "--to", "tensorboard", "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)[0]["run"] == report
    assert main(["sync", f"{report}-2"]) == 1
    assert "no run" in capsys.readouterr().err
