"""Importing from Aim: its own repositories, what fanfold sent there, and what is missing or damaged."""

import math
import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fanfold
from fanfold.errors import MissingExtra
from fanfold.transfer.aim import AimImporter
from fanfold.transfer.events import Facts
from round_trip import (
    brought_back,
    flat_config,
    played,
    points,
    same_file,
    same_histograms,
    same_images,
    same_points,
    same_texts,
    send,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # Aim's own affair: importing it warns

# What a user of Aim does, with Aim's own calls.
OWN_CALLS = """
    import numpy as np
    from aim import Distribution, Image, Run, Text
    run = Run(repo=".", experiment="exp", system_tracking_interval=None, log_system_params=False, capture_terminal_logs=False)
    run.name, run.description = "my name", "notes"
    run.add_tag("t")
    run["hparams"] = {"lr": 0.1, "nested": {"a": [1, 2]}}
    for i in range(50):
        run.track(1 / (i + 1), name="loss", step=i * 2, epoch=i // 10, context={"subset": "train"})
        run.track(float(i), name="loss", step=i, context={"subset": "val", "fold": 3})
    run.track(float("nan"), name="odd", step=0)
    run.track(-float("inf"), name="odd", step=1)
    run.track(Text("hello"), name="said", step=1)
    pixels = np.full((4, 5, 3), 7, np.uint8)
    run.track(Image(pixels, caption="c"), name="image", step=2)
    run.track([Image(pixels), Image(pixels + 1)], name="images", step=2)
    run.track(Distribution(hist=np.array([1, 2]), bin_range=(0, 1)), name="distribution", step=2)
    run.close()
    old = Run(repo=".", system_tracking_interval=None, log_system_params=False, capture_terminal_logs=False)
    old.name, old.archived = "old", True
    old.close()
"""


@pytest.fixture(scope="module")
def product(tmp_path_factory) -> Path:
    """A folder with a repository that Aim itself wrote."""
    folder = tmp_path_factory.mktemp("aim")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(OWN_CALLS)], cwd=folder, capture_output=True, text=True, timeout=200,
                          env={**os.environ, "HOME": str(folder)}, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def named(directory: Path, name: str) -> fanfold.StoredRun:
    (found,) = [run for run in fanfold.runs(dir=directory) if run.name == name]
    return found


def listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file())


def test_runs_that_aim_wrote_are_carried_and_the_repository_is_untouched(product, tmp_path):
    before = listing(product)
    accounts = fanfold.import_runs(product, dir=tmp_path)
    assert listing(product) == before
    assert [left for account in accounts for left in account.left] == []
    run = named(tmp_path, "my name")
    assert (run.project, run.status, run.notes, run.tags) == ("exp", "finished", "notes", ["t"])
    assert run.config == {"lr": 0.1, "nested": {"a": [1, 2]}}
    series = run.series("train/loss")
    assert (series.steps.tolist(), series.values.tolist()) == ([i * 2 for i in range(50)], [1 / (i + 1) for i in range(50)])
    assert run.series("val/loss [fold=3]").values.tolist() == [float(i) for i in range(50)]
    assert run.series("epoch").values.tolist() == [i // 10 for i in range(50)]
    odd = run.series("odd").values
    assert math.isnan(odd[0])
    assert odd[1] == -math.inf
    assert [(point.step, point.text) for point in run.texts("said")] == [(1, "hello")]
    assert (run.media("image")[0].load().caption, run.media("image")[0].load().array()[0, 0].tolist()) == ("c", [7, 7, 7])
    assert [point.load().array()[0, 0, 0] for point in run.media("images")] == [7, 8]
    histogram = run.media("distribution")[0].load()
    assert (histogram.counts.tolist(), histogram.edges.tolist()) == ([1, 2], [0.0, 0.5, 1.0])
    old = next(found for found in AimImporter().find(product / ".aim") if found.name == "old")
    assert [event.archived for event in AimImporter().read(old) if isinstance(event, Facts)] == [True]


def test_a_run_sent_to_aim_comes_back_equal(tmp_path):
    original = played(tmp_path, 41)
    send(tmp_path, "aim", {"logging_dir": str(tmp_path / "repo")})
    run, account = brought_back(tmp_path / "repo", tmp_path / "back")
    assert run.id == original.id
    assert (run.name, run.status, run.notes, run.group) == (original.name, original.status, original.notes, original.group)
    assert (sorted(run.tags), run.assigned) == (sorted(original.tags), original.assigned)
    for key in ("loss", "val/acc", "count", "odd"):
        same_points(original, run, key)
    assert flat_config(run) == flat_config(original)
    same_texts(original, run, "essay")
    same_images(original, run, "image")
    same_histograms(original, run, "histogram")
    same_file(original, run, "model.bin")
    assert account.left == []


def test_importing_twice_adds_nothing(product, tmp_path):
    fanfold.import_runs(product, dir=tmp_path)
    before = points(named(tmp_path, "my name"), "train/loss")
    assert {account.outcome for account in fanfold.import_runs(product, dir=tmp_path)} == {"unchanged"}
    assert points(named(tmp_path, "my name"), "train/loss") == before


def test_without_aim_the_extra_is_named(product, monkeypatch):
    monkeypatch.setitem(sys.modules, "aim.storage.rockscontainer", None)
    with pytest.raises(MissingExtra, match=r"fanfold\[aim\]"):
        list(AimImporter().find(product / ".aim"))


def test_damaged_repositories_never_raise(product, tmp_path):
    """A damaged store may end the process from inside RocksDB, so each is read in a process of its own."""
    rng = random.Random(8)
    script = """if True:
        import sys
        from pathlib import Path
        from fanfold.transfer.aim import AimImporter
        for folder in sys.argv[1:]:
            for found in AimImporter().find(Path(folder)):
                list(AimImporter().read(found))
    """
    folders = []
    for i in range(20):
        folder = tmp_path / str(i) / ".aim"
        shutil.copytree(product / ".aim", folder)
        path = rng.choice([path for path in (folder / "seqs").rglob("*") if path.is_file() and path.stat().st_size])
        data = bytearray(path.read_bytes())
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        folders.append(str(folder))
    done = subprocess.run([sys.executable, "-c", script, *folders], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
