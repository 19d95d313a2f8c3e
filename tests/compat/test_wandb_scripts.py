"""`import fanfold as wandb`: the verbs that plain scripts call besides init() and log()."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fanfold
import fanfold as wandb


def stored() -> fanfold.StoredRun:
    id = wandb.run.id
    wandb.finish()
    return fanfold.open(id)


@pytest.fixture
def started(runs_dir):
    wandb.init(project="p", system=False)
    yield
    wandb.finish()


def test_login_and_settings_are_accepted(runs_dir, caplog):
    assert wandb.login(key="secret", relogin=True) is True
    wandb.init(project="p", settings=wandb.Settings(start_method="fork"), system=False)
    wandb.log({"a": 1})
    assert stored().series("a").values.tolist() == [1]
    assert "secret" not in caplog.text
    assert any("needs no account" in message for message in caplog.messages)


def test_watch_logs_histograms_of_gradients_and_parameters(started):
    model = torch.nn.Linear(3, 2)
    wandb.watch(model, log="all", log_freq=2)
    for step in range(4):
        model(torch.ones(1, 3)).sum().backward()
        wandb.log({"loss": 1.0}, step=step)
    wandb.unwatch()
    model(torch.ones(1, 3)).sum().backward()
    found = stored()
    assert sorted(found.keys("media")) == ["gradients/bias", "gradients/weight", "parameters/bias", "parameters/weight"]
    assert [point.step for point in found.media("gradients/weight")] == [0, 2]
    assert found.media("gradients/weight")[0].load().counts.sum() == 6


def test_save_and_artifacts_keep_files_with_the_run(started, tmp_path, caplog):
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "data" / name).write_text(name)
    assert len(wandb.save(str(tmp_path / "data" / "*.txt"), policy="live")) == 2
    artifact = wandb.Artifact("set", type="dataset", description="d", metadata={"rows": 2})
    artifact.add_dir(tmp_path / "data")
    artifact.add_file(tmp_path / "data" / "a.txt", name="../../inner/a.txt")
    with artifact.new_file("made.json") as file:
        file.write("{}")
    artifact.add_reference("s3://bucket/key")
    wandb.log_artifact(artifact, aliases=["latest"])
    wandb.log_model(tmp_path / "data" / "a.txt", "weights")
    assert any("copies the file now" in message for message in caplog.messages)
    found = {one["name"]: one for one in stored().artifacts}
    assert sorted(found) == ["a.txt", "b.txt", "set", "weights"]
    assert [file["path"] for file in found["set"]["files"]] == ["a.txt", "b.txt", "inner/a.txt", "made.json"]
    assert (found["set"]["kind"], found["weights"]["kind"]) == ("dataset", "model")
    wanted = {"rows": 2, "references": ["s3://bucket/key"], "aliases": ["latest"], "description": "d"}
    assert found["set"]["metadata"] == wanted


def test_plots_become_tables_and_histograms(started):
    table = wandb.Table(columns=["x", "y", "z"], data=[[1, 2, 3], [4, 5, 6]])
    probabilities = np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8], [0.7, 0.3]])
    wandb.log({
        "line": wandb.plot.line(table, "x", "y", title="t"), "bar": wandb.plot.bar(table, "x", "z"),
        "scatter": wandb.plot.scatter(table, "y", "z"), "hist": wandb.plot.histogram(table, "x"),
        "series": wandb.plot.line_series([0, 1], [[2, 3], [4, 5]], keys=["a", "b"]),
        "confusion": wandb.plot.confusion_matrix(y_true=[0, 1, 1], preds=[0, 1, 0], class_names=["cat", "dog"]),
        "roc": wandb.plot.roc_curve([0, 1, 1, 0], probabilities, labels=["n", "p"]),
        "pr": wandb.plot.pr_curve([0, 1, 1, 0], probabilities),
    })  # fmt: skip
    found = stored()
    assert found.table("line").rows == [[1, 2], [4, 5]]
    assert found.table("series").rows == [["a", 0, 2], ["a", 1, 3], ["b", 0, 4], ["b", 1, 5]]
    assert found.table("confusion").rows == [["cat", "cat", 1], ["cat", "dog", 0], ["dog", "cat", 1], ["dog", "dog", 1]]
    assert found.media("hist")[0].load().counts.sum() == 2
    assert [row[1:] for row in found.table("roc").rows if row[0] == "p"] == [[0, 0], [0, 0.5], [0, 1], [0.5, 1], [1, 1]]
    assert found.table("pr").rows[0] == ["0", 0.5, 1.0]


def test_roc_curves_equal_those_of_scikit_learn(started):
    from sklearn.metrics import auc, roc_curve

    rng = np.random.default_rng(0)
    actual, scores = rng.integers(0, 2, 200), rng.random(200).round(2)
    table = wandb.plot.roc_curve(actual, np.stack([1 - scores, scores], axis=1))
    ours = np.array([row[1:] for row in table.rows if row[0] == "1"])
    assert auc(*ours.T) == pytest.approx(auc(*roc_curve(actual, scores)[:2]))


def test_the_rest_warns_once_or_says_what_to_use(started, caplog):
    for _ in range(2):
        wandb.log_code(".")
        wandb.mark_preempting()
    assert len([message for message in caplog.messages if "does nothing here" in message]) == 2
    with pytest.raises(AttributeError, match=r"fanfold\.runs\(\)"):
        wandb.Api()
    with pytest.raises(AttributeError, match="group="):
        wandb.sweep({})
    with pytest.raises(AttributeError):
        wandb.nonsense  # noqa: B018 - looking it up raises


def test_the_run_has_what_scripts_expect_of_wandbs(runs_dir, tmp_path, caplog):
    """Scripts call verbs on the run that init() returned as often as on the module; each acts on that run."""
    run = wandb.init(project="p", system=False, quiet=True)
    other = wandb.init(project="p", system=False, quiet=True)  # now the current one
    model = torch.nn.Linear(2, 1)
    run.watch(model, log_freq=1)
    model(torch.ones(1, 2)).sum().backward()
    run.unwatch()
    (tmp_path / "f.txt").write_text("hi")
    run.save(str(tmp_path / "*.txt"))
    data = wandb.Artifact("data", "dataset")
    data.add_file(str(tmp_path / "f.txt"))
    assert run.log_artifact(data) is data
    run.log_model(str(tmp_path / "f.txt"), "model")
    (Path(run.dir) / "weights.pt").write_text("w")
    run.alert("hot", "very", level=wandb.AlertLevel.WARN)
    run.use_artifact("data:latest")
    facts = (run.url, run.get_url(), run.entity, run.project_name(), run.sweep_id, run.step)
    assert facts == (None, None, "", "p", None, 0)
    with pytest.raises(AttributeError, match="'Run' object has no attribute 'no_such_thing'"):
        _ = run.no_such_thing
    run.finish()
    other.finish()
    found = fanfold.open(run.id)
    assert [artifact["name"] for artifact in found.artifacts] == ["f.txt", "data", "model"]
    assert len(found.media("gradients/weight")) == 1
    assert (found.alerts[0]["level"], found.path / "files" / "weights.pt") == ("warning", Path(run.dir) / "weights.pt")
    assert fanfold.open(other.id).artifacts == []


def test_wandbs_verbs_are_not_among_ours():
    assert not {"login", "watch", "save", "Artifact", "plot"} & set(dir(fanfold))


def test_arguments_that_only_wandb_has_are_ignored_once_each(tmp_path, caplog):
    run = fanfold.init("p", dir=tmp_path, system=False)
    for key in ("epoch", "loss"):
        fanfold.define_metric(key, hidden=True, step_sync=True, goal="minimize", overwrite=False, summary="min")
    fanfold.log({"loss": 1.0, "epoch": 0})
    fanfold.log({"loss": 2.0, "epoch": 1})
    fanfold.finish(quiet=True)
    stored = fanfold.open(run.id, dir=tmp_path)
    assert (stored.status, stored.summary["loss"]) == ("finished", 1.0)
    said = [record.message for record in caplog.records if "has no meaning" in record.message]
    assert [text.split("=")[0].removeprefix("fanfold: ") for text in said] == [
        "define_metric(hidden", "define_metric(step_sync", "define_metric(goal", "define_metric(overwrite", "finish(quiet",
    ]  # fmt: skip
    strict = fanfold.init("p", dir=tmp_path, system=False, strict=True)
    with pytest.raises(TypeError, match="has no argument 'colour'"):
        strict.define_metric("loss", colour="red")
    strict.finish()
