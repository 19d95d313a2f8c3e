"""The demo: a real training on two real processes, and what it shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fanfold
from fanfold.cli import demo_training
from paths import SRC


def demo(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SRC), "DEMO_EXIT": "1", **more}
    command = [sys.executable, "-m", "fanfold", "demo", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL, check=False)


def test_demo_trains_two_ranks_and_shows_the_run(runs_dir: Path) -> None:
    done = demo("--steps", "30", FANFOLD_MODE="disabled", FANFOLD_RUN_ID="taken")
    assert done.returncode == 0, done.stderr
    (run,) = fanfold.runs("demo")
    assert run.id in done.stdout
    assert run.status == "finished"
    assert run.ranks == [0, 1]
    assert run.series("loss", fold="mean").count.tolist() == [2] * 30
    losses = run.series("loss").values
    assert losses[-5:].mean() < losses[:5].mean()  # it learns
    assert {point.kind for key in run.keys("media") for point in run.media(key)} == {"image", "histogram", "table"}
    assert run.config["steps"] == 30
    said = done.stderr.splitlines()
    assert said[1].startswith("  starting the processes")
    assert said[-1] == "  step 30 of 30" or said[-1].startswith("  step 2")  # the last look may come before the last step
    assert done.stdout.splitlines()[-1].startswith("Dashboard  http://localhost:")
    for word in ("Over ranks", "lowest", "(rank 1)", "fanfold show -", "fanfold ls", str(run.path), "mean of 2 ranks"):
        assert word in done.stdout


def test_demo_speaks_json(runs_dir: Path) -> None:
    done = demo("--steps", "4", "--ranks", "1", "--json", "--project", "try/it")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["project"], told["status"], told["ranks"]) == ("try/it", "finished", [0])


def test_demo_without_torch_says_what_to_install(runs_dir: Path) -> None:
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec\n"
        "sys.modules['torch'] = None\n"
        "from fanfold.cli import main; sys.exit(main(['demo']))"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "pip install torch" in done.stderr
    assert not runs_dir.exists()


def test_demo_text_is_in_its_alphabet() -> None:
    assert set(demo_training.corpus(3, 500)) <= set(range(len(demo_training.ALPHABET)))
    assert demo_training.corpus(3, 5) == demo_training.corpus(3, 5) != demo_training.corpus(4, 5)
