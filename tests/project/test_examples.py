"""Each example runs as a user would run it, offline, and leaves the run it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import fanfold
from paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "accelerate_tracking": "text: 20 lines; run: 20 points, 1 rank(s)",
    "by_hand": "by hand: 20 points, the last 0.05",
    "custom_callback": "stopped early: True",
    "datasets": "in the workers: 64 x sin, 64 x cos; training waited",
    "early_stopping": "of 50; the best loss was",
    "hand_written_loop": "steps of at most 240; the best was at step",
    "hello": "",
    "keras_fit": "sum-of-two: 3 points by batch, 3 by epoch\n33 parameters, Adam",
    "lightning_trainer": "line: 2 attempts, 16 steps, lr 0.1",
    "media": "picture: (32, 32, 3)",
    "read_back": "best of 3: lr-0.1",
    "resume": "after the restart: finished, 2 attempts, 60 steps, of which 30 are the second attempt's",
    "tensors": "keys: loss, grad/norm, grad/largest, epoch, warm, time",
    "trainer": "2 attempts, 64 steps, test mae 0.",
    "train_ddp": "2 ranks; slowest at the last step: rank ",
    "transformers_trainer": "finished after 2 attempts, 8 steps",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_leaves_a_finished_run(example: Path, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if example.stem == "train_ddp" else []
    done = subprocess.run(
        [sys.executable, *launcher, str(example)],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert SAYS[example.stem] in done.stdout
    runs = fanfold.runs(dir=tmp_path / "runs")
    assert runs
    assert {run.status for run in runs} == {"finished"}
    if example.stem == "train_ddp":
        assert [run.ranks for run in runs] == [[0, 1]]
        assert runs[0].series("loss", fold="mean").count.tolist() == [2] * 100


def test_examples_are_short() -> None:
    for example in EXAMPLES:
        assert len(example.read_text(encoding="utf-8").splitlines()) < 60, example


def environment(tmp_path: Path) -> dict[str, str]:
    ours = {"FANFOLD_DIR": str(tmp_path / "runs"), "FANFOLD_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FANFOLD_")}
    return {**kept, **ours, "PYTHONPATH": path}


NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# The metric that each notebook logs, and how many runs it leaves.
LEAVES = {
    "boosting": ("test/rmse", 2),
    "jax": ("gradient norm", 1),
    "language_model": ("perplexity", 1),
    "optuna": ("loss", 12),
    "ray_tune": ("loss", 2),
    "reinforcement_learning": ("return", 1),
    "vision": ("accuracy", 1),
}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_its_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FANFOLD_DIR")  # runs go beside the notebook
    book = nbformat.read(notebook, as_version=4)
    NotebookClient(book, timeout=250, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "<" in book.cells[-1].outputs[-1].data["text/html"]
    metric, count = LEAVES[notebook.stem]
    runs = fanfold.runs(dir=tmp_path / ".fanfold")
    assert len(runs) == count
    assert {run.status for run in runs} == {"finished"}
    assert all(metric in run.keys() for run in runs)  # noqa: SIM118 - a method of runs


def test_notebooks_are_committed_without_outputs_and_are_in_the_gallery() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    for notebook in NOTEBOOKS:
        cells = nbformat.read(notebook, as_version=4).cells
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells), notebook
        assert f"/examples/notebooks/{notebook.name}" in page
        assert f"blob/main/examples/notebooks/{notebook.name}" in cells[0].source
    assert [example.name for example in EXAMPLES if f"examples/{example.name}" not in page] == []
