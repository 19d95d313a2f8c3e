"""What a tracker has of the one run in a folder, by its own library's reader: `readers.py TRACKER FOLDER` prints it as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROJECT = "contract"
Found = dict[str, Any]  # scalars: {key: [(step, value)]}, status, runs


def tensorboard(folder: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = [path for path in (folder / "runs").rglob("trackers/tensorboard/*") if path.is_dir()]
    reader = EventAccumulator(str(runs[0]), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    scalars = {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    return {"scalars": scalars, "status": None, "runs": len(runs)}


def mlflow(_folder: Path) -> Found:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
    runs = client.search_runs([client.get_experiment_by_name(PROJECT).experiment_id])
    run = client.get_run(runs[0].info.run_id)
    points = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    scalars = {key: [(point.step, point.value) for point in found] for key, found in points.items()}
    return {"scalars": scalars, "status": run.info.status.lower(), "runs": len(runs)}


def trackio(_folder: Path) -> Found:
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_run_records(PROJECT)
    name, run_id = runs[0]["name"], runs[0]["id"]
    scalars: dict[str, list[tuple[int, float]]] = {}
    for row in SQLiteStorage.get_logs(PROJECT, name, run_id=run_id):
        for key, value in row.items():
            if key.startswith("m"):
                scalars.setdefault(key, []).append((row["step"], value))
    config = SQLiteStorage.get_run_config(PROJECT, name, run_id=run_id) or {}
    return {"scalars": scalars, "status": config.get("status"), "runs": len(runs)}


def wandb(folder: Path) -> Found:
    from fanfold.trackers._wandb_log import WandbLog, put
    from fanfold.trackers.wandb import EXIT_CODES, STEP

    scalars: dict[str, list[tuple[int, float]]] = {}
    paths, code = sorted(folder.rglob("*.wandb")), None
    for path in paths:
        for record in WandbLog(path).records():
            if record.WhichOneof("record_type") == "exit":
                code = record.exit.exit_code
            if record.WhichOneof("record_type") == "history":
                row: dict[str, Any] = {}
                for item in record.history.item:
                    put(row, item)
                for key in row.keys() - {STEP}:
                    if not key.startswith("_"):
                        scalars.setdefault(key, []).append((row[STEP], row[key]))
    status = {number: name for name, number in EXIT_CODES.items()}.get(code)
    return {"scalars": scalars, "status": status, "runs": len({path.name for path in paths})}


READERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}

if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](Path(sys.argv[2]))))
