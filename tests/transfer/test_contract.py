"""The importer contract, for every importer of ours: on files that the products wrote, or in the form they write."""

import base64
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import test_aim
import test_offline_sessions as sessions
import test_swanlab
from test_mlflow import write_run
from test_neptune import SCALE, Export, local_database, offline
from test_trackio import old_database

import fanfold
from fanfold.cli import main
from fanfold.testing import ImporterContract
from fanfold.transfer.aim import AimImporter
from fanfold.transfer.bundle import BundleImporter
from fanfold.transfer.clearml import ClearMLImporter
from fanfold.transfer.comet import CometImporter
from fanfold.transfer.csv_logger import CSVLoggerImporter
from fanfold.transfer.dvclive import DVCLiveImporter
from fanfold.transfer.hf_trainer import HFTrainerImporter
from fanfold.transfer.importers import built_in
from fanfold.transfer.mlflow import MLflowImporter
from fanfold.transfer.neptune import NeptuneImporter
from fanfold.transfer.swanlab import SwanLabImporter
from fanfold.transfer.tables import TablesImporter
from fanfold.transfer.tensorboard import TensorBoardImporter
from fanfold.transfer.trackio import TrackioImporter
from fanfold.transfer.wandb import WandbImporter
from paths import DATA, HELPERS

pytestmark = pytest.mark.filterwarnings("ignore")  # Aim warns when it is imported


def unzip(name: str, folder: Path) -> None:
    with zipfile.ZipFile(DATA / name) as archive:
        archive.extractall(folder)


@pytest.fixture(scope="session")
def products(tmp_path_factory):
    """Have each product that needs its library write a run once; each test gets a copy."""
    root = tmp_path_factory.mktemp("products")
    env = {**os.environ, "WANDB_SILENT": "true", "HOME": str(root), "WANDB_DATA_DIR": str(root / "data"),
           "COMET_DISABLE_AUTO_LOGGING": "1", "CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": str(root / "clearml"),
           "SWANLAB_MODE": "offline"}  # fmt: skip

    def run(*words: str) -> None:
        done = subprocess.run([sys.executable, *words], env=env, cwd=root, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr

    run(str(HELPERS / "wandb_writer.py"), str(root))
    run("-c", sessions.COMET, str(root / "comet"))
    run("-c", sessions.CLEARML)
    run("-c", sessions.DVCLIVE, "1")
    run("-c", textwrap.dedent(test_swanlab.OWN_CALLS), "{}")
    (root / "aim").mkdir()
    run("-c", f"import os; os.chdir('aim')\n{textwrap.dedent(test_aim.OWN_CALLS).split('old = Run')[0]}")
    return root


class OfProduct:
    """A contract on a copy of what a product wrote."""

    @pytest.fixture(autouse=True)
    def original(self, products):
        self.products = products


class TestTensorBoard(ImporterContract):
    importer = TensorBoardImporter

    def write(self, folder):
        self.log(folder, range(30))

    def grow(self, folder):
        self.log(folder, range(20, 50))  # started again, from an earlier step

    def log(self, folder, steps):
        from torch.utils.tensorboard import SummaryWriter

        log = SummaryWriter(folder / "exp")
        for step in steps:
            log.add_scalar("loss", step / 7, step)
        log.add_text("note", "hello", 1)
        log.add_image("pic", np.zeros((3, 4, 4), np.uint8), 1)
        log.add_hparams({"lr": 0.1}, {"m": 1.0})
        log.close()


class TestWandb(OfProduct, ImporterContract):
    importer = WandbImporter

    def write(self, folder):
        shutil.copytree(self.products / "wandb", folder / "wandb", symlinks=True)
        (self.log,) = folder.rglob("*.wandb")
        self.whole = self.log.read_bytes()
        self.log.write_bytes(self.whole[: len(self.whole) // 2])
        os.utime(self.log, (time.time() - 60,) * 2)  # not begun only now

    def grow(self, folder):
        self.log.write_bytes(self.whole)


class TestMLflowFiles(ImporterContract):
    importer = MLflowImporter

    def write(self, folder):
        self.run = write_run(folder, status=3, end_time=1_700_000_009_000)
        (self.run / "metrics" / "loss").write_text("".join(f"170000000000{i} {1 / (i + 1)} {i}\n" for i in range(9)))
        (self.run / "params" / "lr").write_text("0.1")
        (self.run / "artifacts" / "notes.txt").write_text("hello")

    def grow(self, folder):
        with (self.run / "metrics" / "loss").open("a") as file:
            file.write("1700000000010 0.5 10\n1700000000011 nan 11\n")
        (self.run / "metrics" / "new").write_text("1700000000010 0.5 10\n")


class TestMLflow2Files(ImporterContract):
    importer = MLflowImporter
    damages = 20

    def write(self, folder):
        unzip("mlruns_2_22.zip", folder)
        for run in (folder / "mlruns").glob("*/*"):  # one run is enough
            if (run / "meta.yaml").exists() and not (run / "params" / "lr").exists() and run.parent.name != "datasets":
                shutil.rmtree(run)


class TestMLflowDatabase(ImporterContract):
    importer = MLflowImporter

    def write(self, folder):
        with sqlite3.connect(folder / "mlflow.db") as database:
            database.executescript("""
                CREATE TABLE experiments (experiment_id INTEGER PRIMARY KEY, name TEXT, lifecycle_stage TEXT);
                CREATE TABLE runs (run_uuid TEXT PRIMARY KEY, name TEXT, status TEXT, start_time INTEGER, end_time INTEGER,
                                   lifecycle_stage TEXT, artifact_uri TEXT, experiment_id INTEGER);
                CREATE TABLE metrics (key TEXT, value REAL, timestamp INTEGER, run_uuid TEXT, step INTEGER, is_nan INTEGER);
                CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT);
                CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT);
                INSERT INTO experiments VALUES (1, 'exp', 'active');
                INSERT INTO runs VALUES ('r1', 'a run', 'RUNNING', 1700000000000, NULL, 'active', '', 1);
                INSERT INTO params VALUES ('lr', '0.1', 'r1');
            """)
            rows = [("loss", 1 / (i + 1), 1_700_000_000_000 + i, "r1", i, 0) for i in range(9)]
            database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
        database.close()

    def grow(self, folder):
        with sqlite3.connect(folder / "mlflow.db") as database:
            database.execute("INSERT INTO metrics VALUES ('loss', 0, 1700000000100, 'r1', 9, 1)")
            database.execute("UPDATE runs SET status = 'FINISHED', end_time = 1700000000200")
        database.close()


class TestTrackio(ImporterContract):
    importer = TrackioImporter

    def write(self, folder):
        unzip("trackio_0_9_1.zip", folder)

    def grow(self, folder):
        (path,) = folder.rglob("*.db")
        with sqlite3.connect(path) as database:
            ((name, step),) = database.execute("SELECT run_name, max(step) FROM metrics")
            database.execute("INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?)",
                             ("2030-01-01T00:00:00+00:00", name, step + 1, json.dumps({"loss": 0.25})))  # fmt: skip
        database.close()


class TestSwanLab(OfProduct, ImporterContract):
    importer = SwanLabImporter

    def write(self, folder):
        shutil.copytree(self.products / "swan", folder / "swan")
        (self.log,) = folder.rglob("run-*.swanlab")
        self.whole = self.log.read_bytes()
        self.log.write_bytes(self.whole[: len(self.whole) // 2])

    def grow(self, folder):
        self.log.write_bytes(self.whole)


class TestAim(OfProduct, ImporterContract):
    importer = AimImporter
    damages = 5  # its files are only read by Aim itself

    def write(self, folder):
        shutil.copytree(self.products / "aim", folder / "repo")


class TestComet(OfProduct, ImporterContract):
    importer = CometImporter

    def write(self, folder):
        (archive,) = (self.products / "comet").glob("*.zip")
        shutil.copy(archive, folder)


class TestClearML(OfProduct, ImporterContract):
    importer = ClearMLImporter

    def write(self, folder):
        (archive,) = (self.products / "clearml" / "offline").glob("*.zip")
        with zipfile.ZipFile(archive) as found:
            found.extractall(folder / archive.stem)
        (self.metrics,) = folder.rglob("metrics.jsonl")

    def grow(self, folder):
        lines = self.metrics.read_text().splitlines(keepends=True)
        (scalar,) = [line for line in lines if '"loss"' in line][-1:]
        self.metrics.write_text("".join([*lines, scalar]))


class TestDVCLive(OfProduct, ImporterContract):
    importer = DVCLiveImporter

    def write(self, folder):
        shutil.copytree(self.products / "dvclive", folder / "dvclive")

    def grow(self, folder):
        with next(folder.rglob("loss.tsv")).open("a") as file:
            file.write("3\t0.125\n")


def state(*steps):
    history = [{"step": step, "epoch": step / 4, "loss": 1 / (step + 1)} for step in steps]
    return json.dumps({"global_step": steps[-1], "max_steps": 100, "log_history": history})


class TestHFTrainer(ImporterContract):
    importer = HFTrainerImporter

    def write(self, folder):
        (folder / "out" / "checkpoint-4").mkdir(parents=True)
        (folder / "out" / "checkpoint-4" / "trainer_state.json").write_text(state(1, 2, 3, 4))

    def grow(self, folder):
        (folder / "out" / "checkpoint-8").mkdir()
        (folder / "out" / "checkpoint-8" / "trainer_state.json").write_text(state(1, 2, 3, 4, 6, 8))


class TestCSVLogger(ImporterContract):
    importer = CSVLoggerImporter

    def write(self, folder):
        (folder / "version_0").mkdir()
        (folder / "version_0" / "hparams.yaml").write_text("lr: 0.1\n")
        (folder / "version_0" / "metrics.csv").write_text(
            "epoch,step,train_loss\n" + "".join(f"0,{i},{1 / (i + 1)}\n" for i in range(9))
        )

    def grow(self, folder):
        with (folder / "version_0" / "metrics.csv").open("a") as file:
            file.write("1,9,0.1\n1,10,0.05\n")


class TestTable(ImporterContract):
    importer = TablesImporter

    def write(self, folder):
        (folder / "table.csv").write_text("step,loss\n" + "".join(f"{i},{1 / (i + 1)}\n" for i in range(9)))

    def grow(self, folder):
        with (folder / "table.csv").open("a") as file:
            file.write("9,0.1\n10,0.05\n")

    def test_other_files_are_not_taken_for_runs(self, tmp_path):
        """A table may be any file, so it is only looked at if the user names it."""
        assert self.importer.searched is False


class TestNeptuneExport(ImporterContract):
    importer = NeptuneImporter

    def write(self, folder):
        self.export = Export(folder / "exports")
        self.export.add("sys/name", "string", string_value="a run")
        for i in range(20):
            self.export.add("loss", "float_series", i / 2, i, float_value=1 / (i + 1))
        self.export.write()


class TestNeptuneOffline(ImporterContract):
    importer = NeptuneImporter

    def write(self, folder):
        values = [{"value": float(i), "step": i, "ts": 1.7e9 + i} for i in range(9)]
        offline(
            folder, {"type": "LogFloats", "path": ["a"], "values": values}, {"type": "AssignFloat", "path": ["lr"], "value": 0.1}
        )


class TestNeptuneScale(ImporterContract):
    importer = NeptuneImporter

    def write(self, folder):
        local_database(folder, *((kind, base64.b64decode(data)) for kind, data in SCALE))


class TestBundle(ImporterContract):
    importer = BundleImporter

    def write(self, folder):
        run = fanfold.init("p", dir=folder.parent / "runs", id="a", system=False, quiet=True)
        for step in range(9):
            run.log({"loss": 1 / (step + 1)}, step=step)
        run.log({"note": "hello"}, step=3)
        run.finish()
        assert main(["export", "a", "--whole", "-o", str(folder / "bundle"), "--dir", str(folder.parent / "runs")]) == 0


CONTRACTS = [value for name, value in globals().items() if name.startswith("Test")]


@pytest.mark.faults
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__[4:])
def test_a_thousand_damaged_copies_are_never_an_exception(contract, products, tmp_path):
    case = contract()
    case.products, case.damages = products, 1000
    case.test_damage_is_never_an_exception(tmp_path)


def test_every_importer_of_ours_has_a_contract():
    tested = {contract.importer.kind for contract in CONTRACTS}
    assert {importer.kind for importer in built_in()} == tested


def test_each_run_of_a_database_is_found(tmp_path):
    assert [found.name for found in TrackioImporter().find(old_database(tmp_path))] == ["a run", "other"]
