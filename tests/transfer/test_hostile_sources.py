"""Files made to do harm: they are data. Nothing runs, no link leads out, a small file costs little, and the rest is imported."""

import json
import os
import sqlite3
import struct
import subprocess

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_mlflow import write_run
from test_neptune import offline
from test_trackio import old_database

import fanfold
from fanfold.cli import main
from fanfold.transfer import importing
from fanfold.transfer.reading import read_yaml
from fanfold.transfer.tfrecord import head_of
from transfer_tools import imported

SECRET = b"TOP SECRET 4711"


@pytest.fixture
def secrets(tmp_path):
    """A folder that belongs to somebody else."""
    folder = tmp_path / "secrets"
    (folder / "deep").mkdir(parents=True)
    for name in ("id_rsa", "page.html", "requirements.txt", "deep/notes.txt", "hparams.yaml", "wandb-metadata.json"):
        (folder / name).write_bytes(b'{"host": "' + SECRET + b'"}\nhost: ' + SECRET)
    return folder


def leaked(store) -> list[str]:
    return [str(path) for path in store.rglob("*") if path.is_file() and SECRET in path.read_bytes()]


# Links


def test_folders_of_an_mlflow_run_that_are_links_are_not_read(tmp_path, secrets):
    run = write_run(tmp_path / "mlruns")
    (run / "metrics" / "loss").write_text("1700000000000 0.5 0\n")
    for name in ("artifacts", "tags", "params", "inputs", "outputs"):
        if (run / name).exists():
            (run / name).rmdir()
        (run / name).symlink_to(secrets)
    (found,), (account,) = imported(tmp_path / "mlruns", into=tmp_path / "store")
    assert (found.series("loss").values.tolist(), account.files) == ([0.5], 0)
    assert leaked(tmp_path / "store") == []


def test_a_files_folder_of_wandb_that_is_a_link_is_not_read(tmp_path, secrets):
    from paths import DATA

    place = tmp_path / "wandb" / "offline-run-20260101_000000-abc12345"
    place.mkdir(parents=True)
    log = next((DATA / "wandb-0.22").rglob("*.wandb"))
    (place / log.name).write_bytes(log.read_bytes())
    (place / "files").symlink_to(secrets)
    (found,), _ = imported(tmp_path / "wandb", into=tmp_path / "store")
    assert found.series("loss").values.size
    assert leaked(tmp_path / "store") == []


def test_a_media_folder_of_trackio_that_is_a_link_is_not_read(tmp_path, secrets):
    (tmp_path / "source").mkdir()
    path = old_database(tmp_path / "source")
    (tmp_path / "source" / "media").symlink_to(secrets)
    with sqlite3.connect(path) as database:
        page = json.dumps({"page": {"_type": "trackio.html", "file_path": "page.html"}, "loss": 1.0})
        database.execute("UPDATE metrics SET metrics = ?", (page,))
    database.close()
    _, accounts = imported(path, into=tmp_path / "store")
    assert {left.what for account in accounts for left in account.left} >= {"trackio.html"}
    assert leaked(tmp_path / "store") == []


@pytest.mark.parametrize("entry", [{"tmp_file_name": "id_rsa"}, {"file_path": "HOME/.ssh/id_rsa"}])
def test_uploads_of_neptune_lead_to_no_hidden_file_and_through_no_link(tmp_path, secrets, entry):
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_rsa").write_bytes(SECRET)
    data = home / ".neptune" / "offline"
    data.mkdir(parents=True)
    entry = {key: value.replace("HOME", str(home)) for key, value in entry.items()}
    run = offline(
        data, {"type": "UploadFile", "path": ["f"], "ext": "txt", **entry}, {"type": "AssignFloat", "path": ["lr"], "value": 1.0}
    )
    for folder in [path.parent for path in data.rglob("data-*.log")] or [run]:
        if not (folder / "upload_path").exists():
            (folder / "upload_path").symlink_to(secrets)
    imported(home / ".neptune", into=tmp_path / "store")
    assert leaked(tmp_path / "store") == []


def test_config_files_that_are_links_are_not_read(tmp_path, secrets):
    from torch.utils.tensorboard import SummaryWriter

    log = SummaryWriter(tmp_path / "runs" / "a")
    log.add_scalar("loss", 1.0, 0)
    log.close()
    (tmp_path / "runs" / "a" / "hparams.yaml").symlink_to(secrets / "hparams.yaml")
    (tmp_path / "csv" / "version_0").mkdir(parents=True)
    (tmp_path / "csv" / "version_0" / "metrics.csv").write_text("step,loss\n0,1\n")
    (tmp_path / "csv" / "version_0" / "hparams.yaml").symlink_to(secrets / "hparams.yaml")
    runs, _ = imported(tmp_path / "runs", tmp_path / "csv", into=tmp_path / "store")
    assert len(runs) == 2
    assert leaked(tmp_path / "store") == []


# Code


def test_a_repository_names_no_program_to_check_signatures(tmp_path):
    repository = tmp_path / "repository"
    table = repository / "dvclive" / "plots" / "metrics" / "loss.tsv"
    table.parent.mkdir(parents=True)
    table.write_text("step\tloss\n0\t1\n")

    def git(*words, **options):
        command = ["git", "-C", str(repository), "-c", "user.email=a@b", "-c", "user.name=n", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    who = "a <a@b> 1700000000 +0000"
    lines = [f"tree {git('rev-parse', 'HEAD^{tree}')}", f"author {who}", f"committer {who}", "gpgsig -----BEGIN PGP SIGNATURE-----", " ",
             " abc", " -----END PGP SIGNATURE-----", "", "signed", ""]  # fmt: skip
    signed = "\n".join(lines)
    git("update-ref", "refs/heads/x", git("hash-object", "-t", "commit", "-w", "--stdin", input=signed))
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    program.chmod(0o755)
    git("config", "gpg.program", str(program))
    git("config", "log.showSignature", "true")
    git("log", "--all")
    assert (tmp_path / "ran").exists()  # git itself would run it
    (tmp_path / "ran").unlink()
    runs, _ = imported(repository, into=tmp_path / "store")
    assert runs
    assert not (tmp_path / "ran").exists()


# Names


def test_names_are_text_and_lead_nowhere(tmp_path, capsys):
    run = write_run(tmp_path / "mlruns", run_name='"a\\e[31m\\nred\\x07"')
    (run / "metrics" / "lo\x1b[2Jss\n").write_text("1700000000000 0.5 0\n")
    (run / "artifacts" / "x").write_text("x")
    (run / "artifacts" / "..\\..\\evil").write_text("x")
    (found,), _ = imported(tmp_path / "mlruns", into=tmp_path / "store")
    names = [file["path"] for one in found.artifacts for file in one["files"]]
    assert sorted(names) == ["evil", "x"]
    assert main(["ls", "--dir", str(tmp_path / "store")]) == 0
    assert main(["show", found.id, "--dir", str(tmp_path / "store")]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "\x07" not in shown.out + shown.err


# Sizes


def endless_database(path):
    """Write a database whose pages lead to each other so often that reading all rows would never end."""
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA page_size = 512")
        database.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        rows = [("2026-01-01T00:00:00", "a run", i, '{"loss": 1.0}') for i in range(20_000)]
        database.executemany("INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?)", rows)
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'metrics'").fetchone()
    database.close()
    data = bytearray(path.read_bytes())
    inner = [page for page in range(2, len(data) // 512 + 1) if data[(page - 1) * 512] == 5 and page != root]
    leaf = next(page for page in range(2, len(data) // 512 + 1) if data[(page - 1) * 512] == 13)
    for page, below in zip([root, *inner[:12]], [*inner[:12], leaf], strict=True):
        start = (page - 1) * 512
        (cells,) = struct.unpack_from(">H", data, start + 3)
        struct.pack_into(">I", data, start + 8, below)
        for cell in range(cells):
            (at,) = struct.unpack_from(">H", data, start + 12 + 2 * cell)
            struct.pack_into(">I", data, start + at, below)
    path.write_bytes(data)


def test_an_endless_database_ends(tmp_path):
    endless_database(tmp_path / "p.db")
    _, accounts = imported(tmp_path / "p.db", into=tmp_path / "store")
    assert ["interrupted" in left.why for account in accounts for left in account.left] == [True]


def test_a_table_that_unpacks_to_far_more_than_its_size_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "FREE_BYTES", 1 << 20)
    count = 1 << 21
    pq.write_table(
        pa.table({"step": np.zeros(count, np.int64), "loss": np.ones(count)}), tmp_path / "bomb.parquet", compression="zstd"
    )
    assert (tmp_path / "bomb.parquet").stat().st_size < 100_000
    _, (account,) = imported(tmp_path / "bomb.parquet", into=tmp_path / "store")
    assert [left.why for left in account.left] == ["it unpacks to more than 200 times its size"]
    assert 0 < account.points < count


def test_yaml_that_refers_to_itself_stays_small():
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    assert len(json.dumps(read_yaml(f"a0: &a0 [x]\n{levels}".encode()))) < 10_000_000
    levels = "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    assert read_yaml(f"a0: &a0 {{x: 1}}\n{levels}".encode())["a0"] == {"x": 1}
    with pytest.raises(ValueError, match="more than 4 MiB"):
        read_yaml(b"a" * (5 << 20))


def test_meta_files_of_many_lines_cost_their_size(tmp_path):
    run = write_run(tmp_path / "mlruns")
    (run / "metrics" / "loss").write_text("1700000000000 0.5 0\n")
    with (run / "meta.yaml").open("a") as file:
        file.write("note: x\n" + "  y\n" * 500_000 + "\n" * 500_000)
    (found,), _ = imported(tmp_path / "mlruns", into=tmp_path / "store")
    assert found.series("loss").values.tolist() == [0.5]


def test_a_record_that_claims_a_gigabyte_is_only_what_is_there(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    log = SummaryWriter(tmp_path / "runs" / "a")
    log.add_scalar("loss", 1.0, 0)
    log.close()
    (path,) = (tmp_path / "runs" / "a").iterdir()
    length = (1 << 30) - 1
    with path.open("ab") as file:
        file.write(struct.pack("<QI", length, head_of(length)) + b"x" * 100)
    (run,), (account,) = imported(tmp_path / "runs", into=tmp_path / "store")
    assert run.series("loss").values.tolist() == [1.0]
    assert [(left.what, left.count) for left in account.left] == [("bytes", 112)]


def test_a_pipe_or_an_unreadable_folder_stops_nothing(tmp_path):
    (tmp_path / "source").mkdir()
    os.mkfifo(tmp_path / "source" / "events.out.tfevents.1.x")
    os.mkfifo(tmp_path / "source" / "run-x.wandb")
    os.mkfifo(tmp_path / "source" / "x.db")
    (tmp_path / "source" / "x.zip").symlink_to("/dev/zero")
    (tmp_path / "source" / "good.csv").write_text("step,loss\n0,1\n")
    (run,), _ = imported(tmp_path / "source", tmp_path / "source" / "good.csv", into=tmp_path / "store")
    assert run.series("loss").values.tolist() == [1]
    assert fanfold.runs(dir=tmp_path / "store")
