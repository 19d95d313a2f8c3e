"""Files that other versions of the products wrote, with their own calls: tests/data/other_versions.zip, one folder for each version."""

import math
import shutil
import zipfile

import pytest

from paths import DATA
from transfer_tools import imported

VERSIONS = {
    "wandb_0_16": ({"loss", "n", "nan", "epoch", "val/acc"}, {"lr": 0.1, "deep": {"n": 3}}),
    "wandb_0_25": ({"loss", "n", "nan", "epoch", "val/acc"}, {"lr": 0.1, "deep": {"n": 3}}),
    "mlflow_2_22": ({"train/loss", "nan", "inf"}, {"lr": 0.1, "layers": 3}),  # a database; the file store is in mlruns_2_22.zip
    "trackio_0_2": ({"loss", "extra"}, {}),  # it did not store the config yet
    "trackio_0_20": ({"loss", "extra"}, {"lr": 0.1}),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_another_version_wrote_is_carried(version, tmp_path):
    with zipfile.ZipFile(DATA / "other_versions.zip") as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith(f"{version}/")])
    (run,), (account,) = imported(tmp_path / version, into=tmp_path / "store")
    keys, config = VERSIONS[version]
    assert (set(run.keys()) - {"system"} >= keys, run.config, run.status) == (True, config, "finished")
    loss = "train/loss" if version.startswith("mlflow") else "loss"
    assert run.series(loss).values.tolist() == [1 / (i + 1) for i in range(20)]
    if "nan" in keys:
        assert all(map(math.isnan, run.series("nan").values.tolist()))
    if version.startswith("wandb"):
        assert (account.left, account.media, run.texts("txt")[0][-1]) == ([], 1, "hello")
        assert run.metrics["val/*"]["x"] == "epoch"
        assert run.assigned == {"best": 3}
    if version.startswith("trackio"):
        assert (account.left, account.texts) == ([], 20)


def test_parts_of_a_run_in_several_places_are_joined_and_copies_are_named(tmp_path):
    """A resumed run may have left folders on several machines; a copy of a folder is no second run, and is not passed over silently."""
    with zipfile.ZipFile(DATA / "other_versions.zip") as archive:
        archive.extractall(tmp_path / "found", [name for name in archive.namelist() if name.startswith("wandb_")])
    (run,), (account,) = imported(tmp_path / "found", into=tmp_path / "store")
    assert (len(run.attempts), account.left) == (2, [])
    one = imported(tmp_path / "found" / "wandb_0_16", into=tmp_path / "one")[1][0].points
    two = imported(tmp_path / "found" / "wandb_0_25", into=tmp_path / "two")[1][0].points
    assert account.points == one + two
    shutil.copytree(tmp_path / "found" / "wandb_0_16", tmp_path / "copies" / "a")
    shutil.copytree(tmp_path / "found" / "wandb_0_16", tmp_path / "copies" / "b")
    (run,), (account,) = imported(tmp_path / "copies", tmp_path / "copies" / "a", into=tmp_path / "third")
    assert (account.points, [(left.what, left.count) for left in account.left]) == (one, [("copy of a run", 1)])
    assert "/b/" in account.left[0].example
