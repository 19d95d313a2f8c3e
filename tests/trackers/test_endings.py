"""How a training process ends must not matter: every tracker has every point and the true status, read back by its library."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_tracker_aim
import test_tracker_clearml
import test_tracker_comet
import test_tracker_dvclive
import test_tracker_mlflow
import test_tracker_neptune
import test_tracker_swanlab
import test_tracker_tensorboard
import test_tracker_trackio
import test_tracker_wandb

from fanfold.testing import TIMEOUT, TrackerContract

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's own, when it is read
CONTRACTS: dict[str, TrackerContract] = {
    contract.name: contract()
    for contract in (
        test_tracker_aim.TestAim, test_tracker_clearml.TestClearML, test_tracker_comet.TestComet,
        test_tracker_dvclive.TestDVCLive, test_tracker_mlflow.TestDatabase, test_tracker_neptune.TestNeptune,
        test_tracker_swanlab.TestSwanLab, test_tracker_tensorboard.TestTensorBoard, test_tracker_trackio.TestTrackio,
        test_tracker_wandb.TestWandb,
    )
}  # fmt: skip
POINTS = 200
WAYS = {  # the last line of the script: its exit code, and the status every tracker must show
    "exception": ("raise RuntimeError('the loss is gone')", 1, "failed"),
    "end of script": ("", 0, "finished"),
    "sys.exit": ("sys.exit(3)", 3, "failed"),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -15, "preempted"),
}
SAME = {("mlflow", "preempted"): "killed", ("swanlab", "preempted"): "killed"}  # those systems have no other word
LOGS = f"\nfor i in range({POINTS}):\n    run.log({{'x': float(i)}}, step=i)\n"


def check(contract: TrackerContract, folder: Path, status: str) -> None:
    """Read back through the library: every point once, in one run, with the true status."""
    seen = contract.seen(folder)
    assert contract._same(seen.scalars["x"], [(i, float(i)) for i in range(POINTS)])
    assert seen.runs == 1
    if "status" in contract.holds:
        assert seen.status == SAME.get((contract.name, status), status)


def every_tracker_one_way_and_the_rest_in_faults() -> Iterator[Any]:
    for number, name in enumerate(CONTRACTS):
        for place, way in enumerate(WAYS):
            yield pytest.param(name, way, marks=() if number % len(WAYS) == place else pytest.mark.faults)


@pytest.mark.parametrize(("name", "way"), list(every_tracker_one_way_and_the_rest_in_faults()))
def test_a_tracker_in_this_process_gets_everything(name, way, tmp_path):
    contract, (last, code, status) = CONTRACTS[name], WAYS[way]
    done = contract.play(tmp_path, LOGS + last, relay="thread")
    assert done.returncode == code, done.stderr
    check(contract, tmp_path, status)


def test_a_thread_that_trains_on_after_the_main_thread_is_waited_for(tmp_path):
    body = """
import threading
def train():
    for i in range(200):
        run.log({"x": float(i)}, step=i)
        time.sleep(0.005)
threading.Thread(target=train).start()
"""
    contract = CONTRACTS["wandb"]
    done = contract.play(tmp_path, body, relay="thread")
    assert done.returncode == 0, done.stderr
    check(contract, tmp_path, "finished")


@pytest.mark.parametrize("way", [way if way == "SIGTERM" else pytest.param(way, marks=pytest.mark.faults) for way in WAYS])
def test_trackers_in_processes_of_their_own_get_everything(way, tmp_path):
    last, code, status = WAYS[way]
    kwargs = {name: contract.kwargs(tmp_path) for name, contract in CONTRACTS.items()}
    settings = {key: value for one in CONTRACTS.values() for key, value in one.environment(tmp_path).items()}
    script = f"""
import fanfold, os, signal, sys
run = fanfold.init("contract", id="contract-1", name="contract run", dir={str(tmp_path / "runs")!r}, system=False, quiet=True,
                   trackers={list(CONTRACTS)!r}, tracker_kwargs={kwargs!r})
"""
    done = TrackerContract().script(tmp_path, script + LOGS + last, **settings)
    assert done.returncode == code, done.stderr
    cursors = drained(tmp_path)
    assert cursors == dict.fromkeys(CONTRACTS, (POINTS, status, None))
    if way == "SIGTERM":  # the hardest: the training process left before anything was delivered
        for contract in CONTRACTS.values():
            check(contract, tmp_path, status)


def drained(folder: Path) -> dict[str, tuple]:
    """Wait until every relay has left its cursor; return how many values each delivered, and the status it closed with."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        found = [json.loads(path.read_text()) for path in folder.glob("runs/contract/contract-1/relay/*.cursor")]
        if all(one["owner"] is None and one["closed"] for one in found):
            break
        time.sleep(0.2)
    return {one["tracker"]: (one["delivered"], one["closed"], one["error"]) for one in found}
