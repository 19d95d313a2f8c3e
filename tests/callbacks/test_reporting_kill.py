"""A training with reporting callbacks that is killed: `fanfold sync` delivers every point logged before, and none twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import reporting_cases as cases
import reporting_readers as readers

TRACKERS = ["tensorboard", "mlflow", "wandb", "dvclive", "trackio", "aim", "swanlab", "comet_ml", "clearml"]
LONG = {"max_steps": 40, "logging_steps": 1, "eval_steps": 10, "save_steps": 20}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::sqlalchemy.exc.SADeprecationWarning"),
    pytest.mark.timeout(900),  # the first test waits for all programs, which take minutes with every tracker
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Train in our Trainer and in Transformers', kill both, and deliver what is left."""
    home = tmp_path_factory.mktemp("killed")
    ways = ("trainer", "transformers")
    cases.run_all(home, [cases.case(home / way, way, " ".join(TRACKERS), action="kill", arguments=LONG) for way in ways])
    for way in ways:
        assert cases.codes(home / way) == [-9], cases.output(home / way)[-3000:]
        env = {**os.environ, **cases.COMMON, **cases.settings(home / way)}
        sync = [sys.executable, "-m", "fanfold", "sync", "--json"]
        done = subprocess.run(sync, cwd=home / way, env=env, capture_output=True, text=True, timeout=400, check=False)
        (home / way / "sync").write_text(f"{done.stdout}\n{done.stderr}")
        assert done.returncode == 0, done.stdout + done.stderr
    return home


@pytest.mark.parametrize("way", ["trainer", "transformers"])
@pytest.mark.parametrize("name", TRACKERS)
def test_every_point_before_the_kill_is_there_once(killed, way, name):
    readers.check(name, killed / way)
