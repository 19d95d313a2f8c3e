"""Reporting callbacks in the real Transformers Trainer, with the real libraries offline, beside Transformers' own."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

import reporting_cases as cases
import reporting_readers as readers
from reporting_cases import SECRET

OURS = "tensorboard wandb mlflow comet_ml clearml trackio dvclive azure_ml swanlab neptune flyte aim codecarbon"  # all at once
THEIRS = "tensorboard wandb mlflow comet_ml trackio dvclive azure_ml"  # the others do not work offline, or hang there at times
SUMMARY = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}
EVAL = {"loss", "runtime", "samples_per_second", "steps_per_second"}
MODELS = {"WANDB_LOG_MODEL": "checkpoint", "CLEARML_LOG_MODEL": "TRUE", "HF_MLFLOW_LOG_ARTIFACTS": "1"}
OPTIONS = {"neptune": {"log_checkpoints": "last"}, "dvclive": {"log_model": True, "save_dvc_exp": False}}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Path]:
    """Train once with all of ours and once with all of theirs; return the folders."""
    home = tmp_path_factory.mktemp("reporting")
    tagged = {**MODELS, "MLFLOW_TAGS": '{"team": "a"}'}
    ours = cases.case(home / "ours", "transformers", OURS, env=tagged, options=OPTIONS)
    theirs = cases.case(home / "theirs", "transformers", THEIRS, "theirs", env={"WANDB_LOG_MODEL": "checkpoint"})
    cases.run_all(home, [ours, theirs])
    folders = {which: home / which for which in ("ours", "theirs")}
    for folder in folders.values():
        assert cases.codes(folder) == [0], cases.output(folder)[-3000:]
    return folders


def steps(found: dict) -> dict:
    return {key: [step for step, _ in points] for key, points in found.items()}


def values(found: dict) -> dict:
    """Return the values that are the same each time: no times, and not the axis itself."""
    odd = ("runtime", "per_second", "global_step")
    return {key: [value for _, value in points] for key, points in found.items() if not any(word in key for word in odd)}


def without(found: dict, *words: str) -> dict:
    return {key: points for key, points in found.items() if not any(word in key for word in words)}


def expected(train: str = "", evaluation: str = "eval_", test: str = "test_", summary: str | None = None) -> dict:
    """Return the steps of every key, as the training of reporting_train.py logs them."""
    found = {f"{train}{key}": [2, 4] for key in ("loss", "grad_norm", "learning_rate")}
    found |= {f"{train if summary is None else summary}{key}": [4] for key in SUMMARY} | {f"{train}epoch": [2, 2, 4, 4, 4, 4]}
    return found | {f"{evaluation}{key}": [2, 4, 4] for key in EVAL} | {f"{test}{key}": [4] for key in EVAL}


def both(trained, name):
    return (getattr(readers, name)(trained[which]) for which in ("ours", "theirs"))


# Beside Transformers' own callbacks: the same names, steps and values; each difference is meant


def test_tensorboard_has_what_transformers_sends_and_predictions_too(trained):
    ours, theirs = both(trained, "tensorboard")
    assert steps(without(ours, "test/")) == steps(theirs)
    assert values(without(ours, "test/")) == values(theirs)
    assert steps(ours) == expected("train/", "eval/", "test/") | {"args": [0], "model_config": [0]}


def test_wandb_has_what_transformers_sends(trained):
    ours, theirs = both(trained, "wandb")
    assert steps(ours) == steps(theirs)
    assert values(ours) == values(theirs)
    assert {key for key in ours if key.startswith("summary:train_") or key == "summary:total_flos"} >= {
        f"summary:{key}" for key in SUMMARY
    }


def test_wandb_keeps_architecture_checkpoints_and_final_model_as_transformers_does(trained):
    def artifacts(which):
        (records,) = readers.wandb_logs(trained[which])
        found = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
        return [(artifact.name.startswith("model-tiny-run"), artifact.type, sorted(artifact.aliases)) for artifact in found]

    assert artifacts("ours") == artifacts("theirs")
    assert [aliases for *_, aliases in artifacts("ours")] == [
        ["base_model", "latest"], ["checkpoint_global_step_2", "epoch_0.5", "latest"],
        ["checkpoint_global_step_4", "epoch_1.0", "latest"], ["final_model", "latest"],
    ]  # fmt: skip


def test_wandb_has_one_run_with_name_axis_and_configuration_without_secrets(trained):
    (records,) = readers.wandb_logs(trained["ours"])
    kinds = [record.WhichOneof("record_type") for record in records]
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in records
        if record.WhichOneof("record_type") == "config"
        for item in record.config.update
    }
    assert (run.display_name, run.project) == ("tiny-run", "huggingface")
    assert (config["width"], config["max_steps"], config["model/num_parameters"]) == (4, 4, 5)
    assert SECRET not in str(config)
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert ("*", "train/global_step") in [(metric.glob_name, metric.step_metric) for metric in metrics]
    assert (kinds.count("exit"), records[-1].exit.exit_code if kinds[-1] == "exit" else 0) == (1, 0)


def test_mlflow_keeps_evaluations_after_training_in_the_same_run(trained):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{trained['theirs']}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("exp").experiment_id])
    first = next(run for run in runs if run.info.run_name == "tiny-run")
    theirs = {
        key: [(point.step, point.value) for point in client.get_metric_history(first.info.run_id, key)]
        for key in first.data.metrics
    }
    ours = readers.mlflow(trained["ours"])
    assert steps(ours) == expected()
    during = {
        key: points[:-1] if key.startswith("eval_") or key == "epoch" else points
        for key, points in without(ours, "test_").items()
    }
    assert (steps(during), values(during)) == (steps(theirs), values(theirs))
    assert len(runs) == 2  # theirs opened a second, nameless one


def test_mlflow_has_params_tags_status_and_checkpoints(trained):
    run, client = readers.mlflow_run(trained["ours"])
    assert (run.info.status, run.info.run_name, run.data.tags["team"]) == ("FINISHED", "tiny-run", "a")
    assert (run.data.params["width"], run.data.params["max_steps"]) == ("4", "4")
    assert SECRET not in str(run.data)
    assert sorted(item.path for item in client.list_artifacts(run.info.run_id)) == ["checkpoint-2", "checkpoint-4"]
    kept = [item.path for item in client.list_artifacts(run.info.run_id, "checkpoint-4/artifacts/checkpoint-4")]
    assert "checkpoint-4/artifacts/checkpoint-4/model.safetensors" in kept


def test_comet_has_what_transformers_sends(trained):
    ours, theirs = both(trained, "comet_ml")
    assert (steps(ours), values(ours)) == (steps(theirs), values(theirs))
    assert steps(ours) == expected("train/", "eval/", "test/")


def test_comet_has_the_same_parameters(trained):
    def names(which):
        found = [message.get("param") or {} for message in readers.comet_messages(trained[which])]
        return {param["paramName"] for param in found if param.get("source") == "manual"}

    assert names("ours") - {"curr_step"} == names("theirs")
    assert "args|max_steps" in names("ours")


def test_clearml_has_titles_and_single_values_in_one_task(trained):
    ours = steps(readers.clearml(trained["ours"]))
    single = ours.pop("Summary/epoch"), *(ours.pop(f"Summary/{key}") for key in sorted(SUMMARY))
    assert [len(found) for found in single] == [6, 1, 1, 1, 1, 1]
    assert ours == {
        key: found
        for key, found in expected("train/", "eval/", "test/", summary="-").items()
        if key[0] != "-" and key != "train/epoch"
    }


def test_clearml_has_arguments_model_configuration_and_checkpoints(trained):
    task = json.loads(next((trained["ours"] / "clearml" / "offline").glob("*/task.json")).read_text())
    known = {f"{section}/{item['name']}": item["value"] for section in task["hyperparams"].values() for item in section.values()
             for section in [item["section"]]}  # fmt: skip
    assert known["Transformers/max_steps"] == "4"
    assert SECRET not in json.dumps(task)
    assert "width" in task["configuration"]["Model Configuration"]["value"]
    assert {artifact["key"] for artifact in task["execution"]["artifacts"]} >= {"checkpoint-2", "checkpoint-4"}


def test_trackio_has_global_steps_and_the_summary(trained):
    ours, theirs = both(trained, "trackio")
    assert steps(ours) == expected("train/", "eval/", "test/") | {"train/global_step": [2, 2, 4, 4, 4, 4, 4]}
    assert set(ours) - set(theirs) == {f"train/{key}" for key in SUMMARY}  # theirs throws it away
    assert {key: found for key, found in values(ours).items() if key in theirs} == values(theirs)
    assert steps(theirs)["train/loss"] == [0, 2]  # calls, not steps


def test_dvclive_has_global_steps_and_takes_arguments_for_live(trained):
    ours, theirs = both(trained, "dvclive")
    assert steps(ours) == {key.replace("train_", "train/"): found for key, found in expected(evaluation="eval/").items()}
    assert values(without(ours, "test_")) == values(theirs)
    assert steps(theirs)["loss"] == [0, 2]
    assert (trained["ours"] / "out" / "last" / "model.safetensors").exists()


def test_azure_has_what_transformers_sends_and_predictions_too(trained):
    ours, theirs = both(trained, "azure_ml")
    assert values(without(ours, "test_")) == values(theirs)
    assert {key: len(points) for key, points in ours.items()} == {key: len(found) for key, found in expected().items()}


# Where Transformers' own does not work here


def test_swanlab_has_one_value_of_each_step(trained):
    wanted = expected("train/", "eval/", "test/", summary="single_value/") | {"train/global_step": [2, 4], "train/epoch": [2, 4]}
    assert steps(readers.swanlab(trained["ours"])) == wanted | {f"eval/{key}": [2, 4] for key in EVAL}


def test_neptune_has_everything_below_its_namespace(trained):
    ours = steps(readers.neptune(trained["ours"]))
    base = {f"finetuning/{key}": found for key, found in expected("train/", "eval/", "test/").items()}
    assert ours == base | {"finetuning/train/epoch": [None] * 6}
    known = {"/".join(operation["path"]): operation for operation in readers.neptune_operations(trained["ours"])}
    assert known["finetuning/trainer_parameters/max_steps"]["value"] == 4
    assert known["finetuning/model_parameters/width"]["value"] == 4
    assert SECRET not in str(known)
    assert {operation["type"] for operation in known.values() if "checkpoints" in operation["path"]} <= {
        "UploadFileSet",
        "DeleteFiles",
    }
    assert "finetuning/checkpoints/last" in known
    folders = list((readers.neptune_folder(trained["ours"]) / "offline").iterdir())
    assert len(folders) == 2  # training, and what came after: one run once synced, by the custom id of both


def test_flyte_outside_a_task_writes_the_page(trained):
    assert steps(readers.flyte(trained["ours"])) == expected()


def test_any_other_tracker_gets_rewritten_names(trained):
    found = steps(readers.aim(trained["ours"]))
    assert {key for key in found if not key.startswith("__")} == {
        *expected("train/", "eval/", "test/"),
    }  # fmt: skip
    assert (found["train/loss"], found["test/loss"]) == ([2, 4], [4])


def test_codecarbon_measures_beside_training(trained):
    lines = (trained["ours"] / "out" / "emissions.csv").read_text().splitlines()
    assert lines[0].startswith("timestamp,") and len(lines) == 2


def test_nothing_of_an_upload_is_left_behind(trained):
    left = [path for path in (trained["ours"] / "out").glob(".fanfold-upload-*") if not list(path.glob("checkpoint-*"))]
    assert left == []


def test_a_secret_of_the_configuration_is_in_no_file_but_the_models_own(trained):
    ours = trained["ours"]
    saved = (ours / "out" / "checkpoint-4" / "config.json").read_bytes()
    assert SECRET.encode() in saved
    found = [path for path in ours.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert found and {path.read_bytes() for path in found} == {saved}
    for path in ours.rglob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            inside = {name for name in archive.namelist() if SECRET.encode() in archive.read(name)}
        assert all(name.endswith(("config.json", ".zip")) for name in inside), (path, inside)


def test_it_ends_without_a_word_about_trouble_and_with_stdout_whole(trained):
    """Libraries that stand in for stdout, and end in another order than they began, once made it an endless recursion."""
    output = cases.output(trained["ours"])
    assert not [word for word in ("could not", "not delivered", "RecursionError", "Traceback") if word in output]
    assert output.rstrip().endswith("the very end")
