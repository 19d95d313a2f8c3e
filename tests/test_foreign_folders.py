"""Folders that somebody else wrote: a copied run, another user's .fanfold, a cloned settings file. None of them gets our secrets."""

from __future__ import annotations

import http.server
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fanfold
from fanfold import approvals, settings
from fanfold.cli.prune import may_grow
from fanfold.fleet.forward_journal import Tail
from fanfold.journal import Journal, Writer, liveness
from fanfold.journal.bodies import Header
from fanfold.journal.directory import read_header
from fanfold.journal.origin import origin_of
from fanfold.process import boot_id
from fanfold.relay.cursor import cursor_name
from fanfold.relay.feed import Feed

KEY = "0123456789abcdef0123456789abcdef01234567"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files to another user needs root")


class Listener:
    """A server that writes down every request with its headers."""

    def __init__(self) -> None:
        heard = self.heard = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                heard.append(f"{self.command} {self.path}\n{self.headers}")
                self.send_response(500)
                self.end_headers()

            do_GET = do_POST = do_PUT = do_HEAD = answer

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.server.shutdown()
    listener.server.server_close()


@pytest.fixture
def foreign(tmp_path: Path, runs_dir: Path, listener: Listener) -> Path:
    """A run that somebody else made and sent to servers of theirs, copied into this user's runs."""
    run = fanfold.init("p", id="r", dir=tmp_path / "theirs", system=False)
    run.log({"loss": 1.0})
    run.finish()
    relay = run.path / "relay"
    relay.mkdir()
    plans = {
        "mlflow": {"tracking_uri": listener.url},
        "wandb": {"settings": {"base_url": listener.url}},
        "comet_ml": {"url_override": listener.url},
        "trackio": {"server_url": f"{listener.url}/?write_token=x"},
    }
    for tracker, kwargs in plans.items():
        (relay / f"{cursor_name(tracker, kwargs)}.cursor").write_text(json.dumps({"tracker": tracker, "kwargs": kwargs}))
    shutil.copytree(run.path, runs_dir / "p" / "r")
    return runs_dir / "p" / "r"


def sync(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    secrets = {"WANDB_API_KEY": KEY, "MLFLOW_TRACKING_TOKEN": "ours", "COMET_API_KEY": "ours", "TRACKIO_WRITE_TOKEN": "ours"}
    return subprocess.run(
        [sys.executable, "-m", "fanfold", "sync", *words], env={**os.environ, **secrets, **env}, text=True, capture_output=True,
        timeout=300, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def test_sync_contacts_no_server_that_a_copied_run_chose(foreign: Path, listener: Listener) -> None:
    done = sync("--json")
    assert done.returncode == 2, done.stderr
    assert {one["outcome"] for one in json.loads(done.stdout)} == {"refused"}
    assert len(json.loads(done.stdout)) == 4
    assert listener.heard == []
    shown = sync("r")
    assert shown.returncode == 2
    assert "which you have not used before" in shown.stderr
    assert listener.url in shown.stderr


def test_to_does_not_take_the_server_of_a_copied_run(foreign: Path, listener: Listener, tmp_path: Path) -> None:
    done = sync("r", "--to", "mlflow", "--json", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mine.db")
    assert [one["outcome"] for one in json.loads(done.stdout)] == ["delivered"], done.stderr
    assert listener.heard == []
    assert (tmp_path / "mine.db").exists()


def test_a_copied_run_does_not_choose_the_server_by_where_it_went_before(
    foreign: Path, listener: Listener, tmp_path: Path
) -> None:
    for path in (foreign / "relay").iterdir():
        path.unlink()
    remote = json.dumps({"run_id": "0" * 32, "uri": f"{listener.url}/tmp"})  # its path exists on every disk
    (foreign / "relay" / "mlflow.cursor").write_text(json.dumps({"tracker": "mlflow", "kwargs": {}, "remote": remote}))
    sync("--timeout", "60", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mine.db")
    assert listener.heard == []


def test_destinations_this_user_named_are_served_without_asking(runs_dir: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "boards")
    run = fanfold.init("p", id="r", system=False, trackers="tensorboard", tracker_kwargs={"tensorboard": {"logging_dir": folder}})
    run.log({"loss": 1.0})
    run.finish()
    for path in (run.path / "relay").glob("*.cursor"):
        known = json.loads(path.read_text())
        path.write_text(json.dumps({"tracker": known["tracker"], "kwargs": known["kwargs"]}))  # as if it were killed at once
    done = sync("--json")
    assert (done.returncode, [one["outcome"] for one in json.loads(done.stdout)]) == (0, ["delivered"]), done.stderr
    shutil.rmtree(approvals.folder())
    for path in (run.path / "relay").glob("*.cursor"):
        path.write_text(json.dumps({"tracker": "tensorboard", "kwargs": {"logging_dir": folder}}))
    assert sync().returncode == 2
    assert sync("r", "--to", "tensorboard", "--kwargs", json.dumps({"logging_dir": folder})).returncode == 0


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 2)])
def test_on_a_terminal_sync_asks_and_remembers(runs_dir: Path, tmp_path: Path, answer: str, code: int) -> None:
    run = fanfold.init("p", id="r", system=False)
    run.log({"loss": 1.0})
    run.finish()
    (run.path / "relay").mkdir()
    kwargs = {"logging_dir": str(tmp_path / "boards")}
    cursor = run.path / "relay" / f"{cursor_name('tensorboard', kwargs)}.cursor"
    cursor.write_text(json.dumps({"tracker": "tensorboard", "kwargs": kwargs}))
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "fanfold", "sync"])
    seen = b""
    while b"[y/N]" not in seen:
        seen += os.read(terminal, 1024)
    os.write(terminal, answer.encode() + b"\n")
    while chunk := _read(terminal):
        seen += chunk
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, seen
    assert str(tmp_path / "boards").encode() in seen
    assert approvals.is_approved("tensorboard", {"logging_dir": str(tmp_path / "boards")}) == (answer == "y")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1024)
    except OSError:  # its other side is closed
        return b""


# Settings files and directories


def init_in(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    code = "import fanfold; run = fanfold.init('p', system=False); run.log({'x': 1}); run.finish(3); print(run.path)"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **env},
        text=True,
        capture_output=True,
        timeout=120,
        check=True,
    )


def test_a_token_does_not_go_to_a_server_that_a_found_file_names(tmp_path: Path, listener: Listener) -> None:
    project = tmp_path / "cloned"
    (project / ".fanfold").mkdir(parents=True)
    (project / ".fanfold" / "settings.toml").write_text(f'server = "{listener.url}"\n')
    done = init_in(project, FANFOLD_SERVER_TOKEN="ffk_ours")
    assert done.stdout.startswith(str(project / ".fanfold"))  # the run itself is recorded
    assert f"names the gateway {listener.url}" in done.stderr
    done = init_in(project)
    assert "you have not approved it yet" in done.stderr
    forward = [sys.executable, "-m", "fanfold", "forward", "--once"]
    env = {**os.environ, "FANFOLD_SERVER_TOKEN": "ffk_ours"}
    done = subprocess.run(forward, cwd=project, env=env, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Nothing is sent there" in done.stderr
    assert listener.heard == []


def test_a_server_named_once_with_its_token_may_stand_in_the_file(tmp_path: Path, listener: Listener) -> None:
    project = tmp_path / "project"
    (project / ".fanfold").mkdir(parents=True)
    (project / ".fanfold" / "settings.toml").write_text(f'server = "{listener.url}"\n')
    init_in(project, FANFOLD_SERVER=listener.url, FANFOLD_SERVER_TOKEN="ffk_ours")
    assert any("ffk_ours" in request for request in listener.heard)
    listener.heard.clear()
    init_in(project, FANFOLD_SERVER_TOKEN="ffk_ours")
    assert any("ffk_ours" in request for request in listener.heard)
    listener.heard.clear()
    assert "was never given for it" in init_in(project, FANFOLD_SERVER_TOKEN="ffk_for_another").stderr
    assert not any("ffk_for_another" in request for request in listener.heard)


def test_a_token_in_a_file_goes_to_no_other_server(tmp_path: Path, listener: Listener) -> None:
    project = tmp_path / "project"
    (project / ".fanfold").mkdir(parents=True)
    (project / ".fanfold" / "settings.toml").write_text('server = "https://runs.example.org"\nserver_token = "ffk_theirs"\n')
    init_in(project, FANFOLD_SERVER=listener.url)
    assert listener.heard
    assert not any("ffk_theirs" in request for request in listener.heard)


@as_root
def test_a_directory_of_another_user_found_upward_is_not_used(tmp_path: Path, listener: Listener) -> None:
    theirs, mine = tmp_path / ".fanfold", tmp_path / "mine"
    theirs.mkdir()
    mine.mkdir()
    (theirs / "settings.toml").write_text(f'server = "{listener.url}"\nproject = "theirs"\n')
    for path in (theirs, theirs / "settings.toml"):
        os.chown(path, NOBODY, NOBODY)
    done = init_in(mine)
    assert done.stdout.startswith(str(mine / ".fanfold" / "p"))
    assert done.stderr.count(f"{theirs} belongs to another user") == 1
    assert f"FANFOLD_SAFE_DIRECTORY={theirs}" in done.stderr
    shutil.rmtree(mine / ".fanfold")
    for env in ({"FANFOLD_SAFE_DIRECTORY": str(theirs)}, {"FANFOLD_SAFE_DIRECTORY": "*"}, {"FANFOLD_DIR": str(theirs)}):
        done = init_in(mine, **env)
        assert done.stdout.startswith(str(theirs))
        assert "belongs to" not in done.stderr


@as_root
def test_another_user_uses_neither_a_link_nor_a_folder_of_ours_but_roots(tmp_path: Path) -> None:
    """What a plain user sees: root's folder counts, a third user's does not, and neither does a link that a third user made."""
    code = "from fanfold.settings import find_directory; print(find_directory())"
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path != Path("/") and path.is_relative_to("/tmp/pytest-of-root"):
            path.chmod(0o755)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)

    def found() -> str:
        command = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", sys.executable, "-c", code]
        env = {**os.environ, "HOME": "/nonexistent"}
        done = subprocess.run(command, cwd=deep, env=env, text=True, capture_output=True, timeout=60, check=False)
        return done.stdout.strip() or done.stderr

    (tmp_path / ".fanfold").mkdir()
    assert found() == str(tmp_path / ".fanfold")
    (tmp_path / "a" / ".fanfold").mkdir()
    os.chown(tmp_path / "a" / ".fanfold", NOBODY, NOBODY)
    assert found() == str(tmp_path / ".fanfold")  # a foreign one nearer by is passed over
    (tmp_path / "a" / ".fanfold").rmdir()
    (tmp_path / "a" / ".fanfold").symlink_to(tmp_path / ".fanfold")
    os.chown(tmp_path / "a" / ".fanfold", NOBODY, NOBODY, follow_symlinks=False)
    assert found() == str(tmp_path / ".fanfold")
    os.chown(tmp_path / "a" / ".fanfold", 1234, 1234, follow_symlinks=False)
    assert found() == str(tmp_path / "a" / ".fanfold")


@as_root
def test_a_settings_file_put_into_an_open_directory_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "settings.toml").write_text('project = "theirs"\n')
    os.chown(tmp_path / "settings.toml", NOBODY, NOBODY)
    assert settings.read_file(tmp_path) == {}
    assert "belongs to another user" in caplog.text
    os.chown(tmp_path, NOBODY, NOBODY)  # a shared directory that is somebody's, named on purpose
    assert settings.read_file(tmp_path) == {"project": "theirs"}


@as_root
def test_approvals_that_another_user_could_have_written_do_not_count(tmp_path: Path) -> None:
    approvals.remember("mlflow", {"tracking_uri": "http://x"})
    (path,) = approvals.folder().iterdir()
    assert approvals.is_approved("mlflow", {"tracking_uri": "http://x"})
    path.chmod(0o666)
    assert not approvals.is_approved("mlflow", {"tracking_uri": "http://x"})
    path.chmod(0o600)
    os.chown(path, NOBODY, NOBODY)
    assert not approvals.is_approved("mlflow", {"tracking_uri": "http://x"})


# Where a run says that its journals are written

HEADER = msgspec.convert({"format": [1, 0], "rank": 0, "role": "main"}, Header)


def test_a_spool_that_a_copied_run_names_is_not_touched(runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that came with the run plays a spool of a dead process: bytes to copy anywhere, and files to remove."""
    monkeypatch.setenv("FANFOLD_SPOOL_DIR", str(tmp_path / "spool"))
    shipped, chosen = tmp_path / "shipped" / "x-1", tmp_path / "chosen"
    writer = Writer(runs_dir / "p" / "r" / "journal", {"format": [1, 0], "run": "r", "project": "p", "rank": 0, "role": "main",
                                                       "node": "n", "boot": boot_id(), "spool": str(shipped)})  # fmt: skip
    name = writer.sheet.path.name
    writer.row({"loss": 1.0}, "d", time_ns=1, step=0)
    writer.sheet.close(ended=False)
    shipped.mkdir(parents=True, mode=0o700)
    for each in (name, "authorized_keys.ffj"):
        (shipped / each).write_bytes(b"theirs" * 1000)
    (shipped / "target").write_text(str(chosen))
    run = runs_dir / "p" / "r"
    before = (run / "journal" / name).read_bytes()
    journal = Journal(run / "journal" / name)
    journal.refresh()
    with monkeypatch.context() as dead:
        dead.setattr(liveness, "LOST_SECONDS", -1.0)
        assert journal.status() != "running"
        feed = Feed(run, name="wandb")
        assert [dict(item.point.values) for item in feed.poll()] == [{"loss": 1.0}]
        feed.poll()
    may_grow(journal)
    Tail(run / "journal" / name, read_header(run / "journal" / name)).is_over()
    assert not chosen.exists()
    assert sorted(each.name for each in shipped.iterdir()) == sorted([name, "authorized_keys.ffj", "target"])
    assert (run / "journal" / name).read_bytes() == before


def test_a_live_lock_outside_of_this_users_spools_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_SPOOL_DIR", str(tmp_path / "spool"))
    path = tmp_path / "r" / "journal" / "0-00f0e1d2c3b4a596.ffj"
    own, theirs, above = tmp_path / "spool" / "x-1", tmp_path / "other" / "x-1", tmp_path / "spool" / "x-1" / ".." / ".." / "y"
    assert [origin_of(path, msgspec.structs.replace(HEADER, spool=str(each))) for each in (own, theirs, above)] == [
        own / path.name,
        None,
        None,
    ]
    assert origin_of(path, HEADER) == path


def test_a_relay_brings_home_the_spool_that_the_settings_file_names(runs_dir: Path, tmp_path: Path) -> None:
    code = """
import os, fanfold
run = fanfold.init("p", id="r", system=False, trackers="tensorboard")
for step in range(300):
    run.log({"loss": step / 2}, step=step)
    if step == 100:
        run.flush()  # this much is at home when the process dies
os.kill(os.getpid(), 9)
"""
    spool = tmp_path / "far"
    runs_dir.mkdir()
    (runs_dir / "settings.toml").write_text(f'spool = "always"\nspool_dir = "{spool}"\n')
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120)
    assert done.returncode == -9
    deadline = time.monotonic() + 100
    while any(spool.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(spool.iterdir()) == []
    assert fanfold.open("r", dir=runs_dir).series("loss").steps.tolist() == list(range(300))
