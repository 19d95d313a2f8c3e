"""Read what reporting callbacks wrote, with each library's own reader: key → [(step, value)], in order."""

from __future__ import annotations

import csv
import json
import math
import re
import sqlite3
import zipfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from fanfold.callbacks import rewrite_logs

SUMMARY = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}


def tensorboard(folder: Path) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    reader = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False).Reload()
    texts = {
        tag.removesuffix("/text_summary"): [(e.step, "text") for e in reader.Tensors(tag)] for tag in reader.Tags()["tensors"]
    }
    return texts | {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def wandb_logs(folder: Path) -> list[list]:
    from fanfold.trackers._wandb_log import WandbLog

    return [list(WandbLog(path).records()) for path in sorted(folder.rglob("run-*.wandb"))]


def wandb(folder: Path) -> dict:
    """Read the only run; a resumed run has one log per start."""
    logs = wandb_logs(folder)
    ids = {record.run.run_id for records in logs for record in records if record.WhichOneof("record_type") == "run"}
    assert len(ids) == 1, ids
    records = [record for log in logs for record in log]
    return wandb_rows(records) | wandb_summary(records)


def wandb_rows(records: list) -> dict:
    """Return the history by key, with wandb's own x axis, `train/global_step`, as the step."""
    from fanfold.trackers._wandb_log import put

    found: dict = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row: dict = {}
            for item in record.history.item:
                put(row, item)
            for key, value in row.items():
                if not key.startswith("_"):
                    found.setdefault(key, []).append((row.get("train/global_step"), value))
    return found


def wandb_summary(records: list) -> dict:
    found: dict = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            for item in (item for item in record.summary.update if item.key):
                found[f"summary:{item.key}"] = [(None, json.loads(item.value_json))]
    return found


def mlflow(folder: Path) -> dict:
    run, client = mlflow_run(folder)
    return {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics}


def mlflow_run(folder: Path) -> tuple:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("exp").experiment_id])
    return run, client


def comet_messages(folder: Path) -> list[dict]:
    """Read the only experiment; a resumed one has one archive per start."""
    paths = sorted((folder / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    assert len({path.name.split("-")[0].removesuffix(".zip") for path in paths}) == 1, paths
    found = []
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            found += [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
    return found


def comet_ml(folder: Path) -> dict:
    found: dict = {}
    for message in comet_messages(folder):
        if message.get("metric") and message["metric"]["metricName"].split(".")[0] not in ("sys", "process duration"):
            metric = message["metric"]
            found.setdefault(metric["metricName"], []).append((message.get("step", metric.get("step")), metric["metricValue"]))
    return found


def clearml(folder: Path) -> dict:
    (path,) = (folder / "clearml" / "offline").glob("*.zip")
    found: dict = {}
    with zipfile.ZipFile(path) as archive:
        for line in archive.read("metrics.jsonl").splitlines():
            for event in json.loads(line):
                if not event["metric"].startswith(":"):
                    found.setdefault(f"{event['metric']}/{event['variant']}", []).append((event["iter"], event["value"]))
    return found


def trackio(folder: Path) -> dict:
    """Read the only table directly, because trackio's own reader takes its folder from the environment at import."""
    (path,) = (folder / "trackio").glob("*.db")
    found: dict = {}
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(DISTINCT run_name) FROM metrics").fetchone() == (1,)
        for step, metrics in database.execute("SELECT step, metrics FROM metrics ORDER BY id"):
            for key, value in json.loads(metrics).items():
                found.setdefault(key, []).append((step, value))
    return found


def dvclive(folder: Path) -> dict:
    home = next(folder.rglob("dvclive/plots/metrics"))
    found = {}
    for path in home.rglob("*.tsv"):
        key = str(path.relative_to(home)).removesuffix(".tsv")
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        found[key] = [(int(row["step"]), float(row[path.stem])) for row in rows]
    return found


def swanlab_records(folder: Path) -> list:
    from fanfold.trackers.swanlab import records

    found = [record for path in sorted((folder / "swanlog").rglob("run-*.swanlab")) for record in records(path)]
    assert len({record.start.id for record in found if record.HasField("start")}) == 1  # one run, however many starts
    return found


def swanlab(folder: Path) -> dict:
    found: dict = {}
    for record in swanlab_records(folder):
        if record.WhichOneof("record_type") == "scalar" and not record.scalar.key.startswith("__"):
            found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
    return found


def neptune_operations(folder: Path) -> list[dict]:
    from fanfold.trackers._neptune_offline import operations

    return list(operations(neptune_folder(folder)))


def neptune_folder(folder: Path) -> Path:
    (found,) = folder.glob("runs/*/*/reports/*/*/trackers/neptune")
    return found


def neptune(folder: Path) -> dict:
    found: dict = {}
    for operation in neptune_operations(folder):
        key = "/".join(operation["path"])
        if operation["type"] == "LogFloats" and not key.startswith(("monitoring", "source_code")):
            found.setdefault(key, []).extend((value["step"], value["value"]) for value in operation["values"])
        elif operation["type"] == "AssignFloat" and key == "finetuning/train/epoch":
            found.setdefault(key, []).append((None, operation["value"]))
    return found


def azure_ml(folder: Path) -> dict:
    """Read what the library's Run printed among other output: outside a job it stores nothing and has no steps."""
    found: dict = {}
    waiting: list[str] = []
    for key, value in re.findall(
        r"Attempted to log scalar metric (\w+):|^(\d[\d.e+-]*)(?=$|\{)", (folder / "output").read_text(), re.MULTILINE
    ):
        if key:
            waiting.append(key)
        elif waiting:
            found.setdefault(waiting.pop(0), []).append((None, float(value)))
    return found


def flyte(folder: Path) -> dict:
    page = (folder / "out" / "deck.html").read_text()
    head, *rows = re.findall(r"<tr>(.*?)</tr>", page[page.index('<table class="history">') :], re.DOTALL)
    keys = [unescape(key) for key in re.findall(r"<th>(.*?)</th>", head)][1:]
    found: dict = {}
    for row in rows:
        step, *cells = re.findall(r"<td>(.*?)</td>", row)
        for key, cell in zip(keys, cells, strict=True):
            if cell:
                found.setdefault(key, []).append((int(step), float(cell)))
    return found


def aim_runs(folder: Path) -> Iterator:
    from aim import Repo

    repo = Repo.from_path(str(folder / "out" / "runs"))
    yield from repo.iter_runs()
    repo.close()


def aim(folder: Path) -> dict:
    found: dict = {}
    for run in aim_runs(folder):
        for metric in run.metrics():
            steps, (values, *_) = metric.data.numpy()[0], metric.data.numpy()[1]
            found[metric.name] = list(zip((int(step) for step in steps), values, strict=True))
    return found


def statuses(folder: Path) -> dict[str, str]:
    """Return the final status of the run in each system."""
    (records,) = wandb_logs(folder)
    run, _ = mlflow_run(folder)
    task = json.loads(next((folder / "clearml" / "offline").glob("*/task.json")).read_text())
    with sqlite3.connect(next((folder / "trackio").glob("*.db"))) as database:
        (config,) = database.execute("SELECT config FROM configs ORDER BY id DESC").fetchone()
    noted = [operation["value"] for operation in neptune_operations(folder) if operation["path"] == ["sys", "failed"]]
    return {
        "wandb": str([record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]),
        "mlflow": run.info.status,
        "clearml": task["hyperparams"]["properties"]["fanfold_status"]["value"],
        "comet_ml": [message["value"] for message in comet_messages(folder) if message.get("key") == "fanfold_status"][-1],
        "neptune": str(noted[-1]),
        "trackio": json.loads(config)["status"],
        "swanlab": next(str(record.finish.state) for record in swanlab_records(folder) if record.HasField("finish")),
        "aim": next(run["fanfold", "status"] for run in aim_runs(folder)),
        "flyte": re.findall(r"<th>status</th><td>(\w+)", (folder / "out" / "deck.html").read_text())[0],
    }


def wanted(name: str, rows: list) -> dict:
    """Return the metrics that a system should have, under its names, given the logs of a Trainer."""
    found: dict = {}
    for step, logs in rows:
        for key, value in logs.items():
            found.setdefault(named(name, key), []).append((step, value))
    if name in ("swanlab", "aim"):  # one value per step: the first, or the last
        found = {key: list(dict(points if name == "aim" else points[::-1]).items()) for key, points in found.items()}
    return found


def named(name: str, key: str) -> str:
    (rewritten,) = rewrite_logs({key: 0})
    if name in ("mlflow", "azure_ml", "flyte"):
        return key
    if name == "dvclive":
        return key.replace("train_", "train/").replace("eval_", "eval/")
    if name == "clearml" and key in {*SUMMARY, "epoch"}:
        return f"Summary/{key}"
    if name in ("wandb", "swanlab") and key in SUMMARY:
        return f"summary:{key}" if name == "wandb" else f"single_value/{key}"
    return f"finetuning/{rewritten}" if name == "neptune" else rewritten


def check(name: str, folder: Path) -> None:
    """Compare a system's data with what the callbacks received: names, order, steps and values."""
    extra = ("args", "model_config", "train/global_step", "summary:_", "__system__")
    found = {key: points for key, points in globals()[name](folder).items() if not key.startswith(extra)}
    expected = wanted(name, json.loads((folder / "logs.json").read_text()))
    assert found.keys() == expected.keys()
    for key, points in expected.items():
        stepless = name == "azure_ml" or key.startswith(("Summary/", "summary:")) or key == "finetuning/train/epoch"
        if not stepless:
            assert [step for step, _ in found[key]] == [step for step, _ in sorted(points)], key
        values = zip((value for _, value in found[key]), (value for _, value in sorted(points, key=lambda p: p[0])), strict=True)
        assert all(math.isclose(ours, told, rel_tol=1e-6) for ours, told in values), key
