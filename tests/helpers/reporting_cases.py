"""Training cases with reporting callbacks, run by reporting_train.py: the loop, the callbacks, the folder and the environment."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from paths import HELPERS

SECRET = "-".join(("sk", "kept", "from", "them", "all"))  # split: ClearML stores a copy of the source


def settings(folder: Path) -> dict[str, str]:
    """Return an environment that keeps every library offline and its output below a folder."""
    return {
        "HOME": str(folder), "TMPDIR": str(folder / "tmp"), "HF_HOME": str(folder / "hf"), "FANFOLD_DIR": str(folder / "runs"),
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_DIR": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "MLFLOW_EXPERIMENT_NAME": "exp", "MLFLOW_DISABLE_TELEMETRY": "true",
        "COMET_START_ONLINE": "0", "COMET_LOGGING_CONSOLE": "error", "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
        "COMET_AUTO_LOG_CO2": "false", "CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "NEPTUNE_MODE": "offline", "NEPTUNE_PROJECT": "a/b", "SWANLAB_MODE": "offline", "SWANLAB_LOG_DIR": str(folder / "swanlog"),
        "TRACKIO_DIR": str(folder / "trackio"), "DVC_NO_ANALYTICS": "1", "DVC_STUDIO_OFFLINE": "true",
    }  # fmt: skip


# Transformers imports Comet on its own, so these must be set in the process from which all cases are forked.
COMMON = {"COMET_DISABLE_AUTO_LOGGING": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def case(
    folder: Path, way: str, names: str, kind: str = "ours", action: str = "train", env: Any = None, **more: Any
) -> dict[str, Any]:
    """Describe a training: its loop and its callbacks."""
    (folder / "tmp").mkdir(parents=True)
    return {"folder": str(folder), "way": way, "names": names.split(), "kind": kind, "action": action, "options": {},
            "env": {**settings(folder), **(env or {})}, **more}  # fmt: skip


def run_all(home: Path, cases: list[dict[str, Any]], seconds: float = 800) -> None:
    """Run all cases to completion; the output and exit code of each are in its folder."""
    plan = home / "cases.json"
    plan.write_text(json.dumps(cases))
    empty = empty_mlflow(home)
    for one in cases:
        shutil.copyfile(empty, Path(one["folder"], "mlflow.db"))
    with (home / "output").open("wb") as out:
        command = [sys.executable, str(HELPERS / "reporting_train.py"), str(plan)]
        done = subprocess.run(
            command, env={**os.environ, **COMMON}, stdout=out, stderr=subprocess.STDOUT, timeout=seconds, check=False
        )
    assert done.returncode == 0, (home / "output").read_text()[-3000:]


def codes(folder: Path) -> list[int]:
    """Return the exit codes of a case, by rank."""
    return [int(path.read_text()) for path in sorted(folder.glob("code-*"))]


def output(folder: Path) -> str:
    return (folder / "output").read_text()


def empty_mlflow(home: Path) -> Path:
    """Return a database with MLflow's tables: creating them takes seconds, copying the file does not."""
    from mlflow import MlflowClient

    path = home / "empty.db"
    if not path.exists():
        MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])
