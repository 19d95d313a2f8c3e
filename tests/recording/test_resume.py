"""A resumed run starts as what it was: config, name, notes, tags, group, summary; and it adds to that, in every tracker."""

import json
import subprocess
import sys

import pytest

import fanfold


def start(runs_dir, **options):
    return fanfold.init("p", dir=runs_dir, id="job", quiet=True, system=False, **options)


def test_a_resumed_run_starts_with_the_stored_config_and_updates_merge(runs_dir):
    with start(runs_dir, config={"lr": 0.1, "model": {"layers": 2}}) as run:
        run.config["epochs"] = 3
    with start(runs_dir) as run:
        assert run.config == {"lr": 0.1, "model": {"layers": 2}, "epochs": 3}
        assert run.config.lr == 0.1
        assert fanfold.open(run.path).config == {"lr": 0.1, "model": {"layers": 2}, "epochs": 3}
        run.config["seed"] = 7
    with start(runs_dir, config={"lr": 0.2}) as run:
        assert run.config == {"lr": 0.2, "model": {"layers": 2}, "epochs": 3, "seed": 7}
        del run.config["epochs"]
        run.config.pop("seed")
    stored = fanfold.open(run.path)
    assert stored.config == {"lr": 0.2, "model": {"layers": 2}}
    assert len(stored.attempts) == 3


def test_name_notes_tags_group_and_summary_are_kept_and_changed(runs_dir):
    with start(runs_dir, name="first", notes="n", tags=["a"], group="g") as run:
        run.name = "renamed"
        run.tags = ["a", "b"]
        run.summary["best"] = 1
    with start(runs_dir) as run:
        assert (run.name, run.notes, run.tags, run.group) == ("renamed", "n", ("a", "b"), "g")
        run.tags = [*run.tags, "c"]
        run.summary["worst"] = 2
        assert dict(run.summary) == {"best": 1, "worst": 2}
    stored = fanfold.open(run.path)
    assert (stored.name, stored.notes, stored.tags, stored.group) == ("renamed", "n", ["a", "b", "c"], "g")
    assert stored.assigned == {"best": 1, "worst": 2}


def test_rules_of_earlier_attempts_hold(runs_dir):
    with start(runs_dir) as run:
        run.define_metric("loss", summary="min")
        run.log({"loss": 1.0}, step=0)
    with start(runs_dir) as run:
        run.log({"loss": 2.0}, step=1)
        assert run.summary["loss"] == 1.0
    assert fanfold.open(run.path).summary["loss"] == 1.0


def test_an_edit_in_the_dashboard_is_what_a_resumed_run_starts_with(runs_dir):
    from fanfold.journal import Kind, Writer

    run = start(runs_dir, tags=["a"])
    run.finish()
    header = fanfold.open(run.path).journals[0].header
    editor = {"format": [1, 0], "role": "editor", "rank": 0, "run": "job", "project": "p", "attempt": header.attempt}
    writer = Writer(run.path / "journal", editor)
    writer.append((Kind.INFO, {"t": 1, "tags": ["edited"], "name": "by hand"}))
    writer.close({"t": 2, "status": "finished"})
    again = start(runs_dir)
    assert (again.tags, again.name) == (("edited",), "by hand")
    again.finish()


def test_a_history_that_cannot_be_read_does_not_stop_a_resume(runs_dir, caplog):
    with start(runs_dir, config={"lr": 1}) as run:
        run.log({"x": 1.0})
    (journal,) = (run.path / "journal").glob("*.ffj")
    data = bytearray(journal.read_bytes())
    data[-200:] = bytes(200)
    journal.write_bytes(data)
    with start(runs_dir) as run:
        run.log({"x": 2.0})
        assert run.summary["x"] == 2.0


def test_every_rank_starts_with_the_stored_config(runs_dir, monkeypatch):
    start(runs_dir, config={"lr": 1}).finish()
    monkeypatch.setenv("FANFOLD_WORLD_SIZE", "2")
    monkeypatch.setenv("FANFOLD_RANK", "1")
    run = start(runs_dir)
    assert run.config == {"lr": 1}
    run.finish()


@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_trackers_have_the_whole_config_after_a_resume(runs_dir, monkeypatch, tmp_path):
    import yaml
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    options = {"trackers": ["tensorboard", "mlflow", "aim"], "tracker_kwargs": {"mlflow": {"tracking_uri": uri}}}
    for config, late in (({"lr": 0.1, "layers": 2}, "epochs"), (None, "seed"), ({"lr": 0.2}, "done")):
        run = start(runs_dir, config=config, **options)
        run.log({"loss": 1.0})
        run.config[late] = 1
        run.finish(timeout=120)
    whole = {"lr": 0.2, "layers": 2, "epochs": 1, "seed": 1, "done": 1}
    assert fanfold.open(run.path).config == whole
    written = sorted((run.path / "trackers" / "tensorboard").rglob("hparams.yml"), key=lambda path: path.stat().st_mtime)
    assert yaml.safe_load(written[-1].read_text()) == whole
    client = MlflowClient(uri)
    (remote,) = [found for experiment in client.search_experiments() for found in client.search_runs([experiment.experiment_id])]
    assert remote.data.params.keys() == whole.keys()
    read = f"import json; from aim import Repo; (run,) = Repo({str(run.path / 'trackers' / 'aim')!r}).iter_runs(); print(json.dumps(run['hparams']))"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", read], capture_output=True, text=True, timeout=120)
    assert json.loads(found.stdout.splitlines()[-1]) == whole, found.stderr
