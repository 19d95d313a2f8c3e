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
import psutil
import pytest

import fanfold
from fanfold import approvals, settings
from fanfold.cli.prune import may_grow
from fanfold.errors import RunError, SettingError
from fanfold.fleet.destination import Upstream, destination
from fanfold.fleet.forward_journal import Tail
from fanfold.journal import Journal, Writer, liveness
from fanfold.journal.bodies import Header
from fanfold.journal.directory import read_header
from fanfold.journal.format import SUFFIX
from fanfold.journal.origin import origin_of
from fanfold.journal.spool import Spool
from fanfold.probes.energy import EnergyProbe
from fanfold.probes.native import build, library
from fanfold.process import Meeting, boot_id, detect, digest
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


@pytest.fixture(autouse=True)
def forwarders_end(tmp_path: Path) -> Iterator[None]:
    """End the forwarders that init() started: their server never takes anything, so they would wait for it for good."""
    yield
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "forward" in words and any(str(tmp_path) in word for word in words):
            process.kill()


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


def test_a_file_that_names_no_server_chooses_neither_token_nor_authority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_SERVER", "https://runs.example.org")
    found = destination({"server_token": "ffk_theirs", "server_ca": "theirs.pem"})
    assert found == Upstream("https://runs.example.org", None, None)


@pytest.mark.parametrize(
    "server",
    ["https://x/$(id)", "https://`id`", "https://x/;id", "https://x/'", "https://x/\x1b[31m", "https://x/ y", "https://["],
)
def test_a_server_in_a_file_is_not_shown_as_a_command_that_does_something_else(server: str) -> None:
    with pytest.raises(SettingError, match="is not the address of a gateway") as told:
        destination({"server": server})
    assert "--to" not in str(told.value) and "\x1b" not in str(told.value)


def test_an_authority_in_a_file_is_approved_together_with_its_server(tmp_path: Path) -> None:
    url, theirs = "https://runs.example.org", str(tmp_path / "theirs.pem")
    destination({}, to=url)
    assert destination({"server": url}) == Upstream(url, None, None)
    with pytest.raises(SettingError, match="not approved it yet"):
        destination({"server": url, "server_ca": theirs})
    destination({"server": url, "server_ca": theirs}, to=url)
    assert destination({"server": url, "server_ca": theirs}) == Upstream(url, None, theirs)


@pytest.mark.parametrize("name", ["log", "lock"])
def test_a_forwarder_writes_no_file_through_a_link_in_a_cloned_directory(tmp_path: Path, listener: Listener, name: str) -> None:
    folder, elsewhere = tmp_path / "cloned" / ".fanfold" / ".forward", tmp_path / "elsewhere"
    folder.mkdir(parents=True)
    (folder / f"{digest(listener.url)}.{name}").symlink_to(elsewhere)
    done = init_in(tmp_path / "cloned", FANFOLD_SERVER=listener.url)
    assert done.stdout.startswith(str(tmp_path / "cloned" / ".fanfold"))  # the run itself is recorded
    forward = [sys.executable, "-m", "fanfold", "forward", "--once", "--to", listener.url]
    subprocess.run(forward, cwd=tmp_path / "cloned", capture_output=True, timeout=60, check=False)
    assert not elsewhere.exists()


@pytest.mark.parametrize("linked", ["p", "p/r"])
def test_a_run_is_not_written_through_a_link_that_a_cloned_directory_holds(tmp_path: Path, linked: str) -> None:
    cloned, elsewhere = tmp_path / ".fanfold", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (cloned / linked).parent.mkdir(parents=True)
    (cloned / linked).symlink_to(elsewhere)
    with pytest.raises(RunError, match="is a link"):
        fanfold.init("p", id="r", dir=cloned, system=False)
    assert list(elsewhere.iterdir()) == []


def test_ranks_that_meet_in_a_shared_directory_write_through_no_link(tmp_path: Path) -> None:
    elsewhere, pipe = tmp_path / "elsewhere", tmp_path / "pipe"
    os.mkfifo(pipe)
    meeting = Meeting(tmp_path, detect(), 0)
    for folder in meeting.directories:
        folder.mkdir(parents=True)
        (folder / "1-x.ask").touch()
        (folder / "1-x.tmp").symlink_to(elsewhere)
        (folder / f"{digest(boot_id())}.{os.getpid()}").symlink_to(elsewhere)
    meeting.answer("key")
    meeting.stand("key")
    assert not elsewhere.exists()
    assert (meeting.directories[0] / "1-x.answer").read_text() == "key"
    meeting.leave()
    (meeting.directories[0] / f"{digest(boot_id())}.standing").symlink_to(pipe)  # reading it would never end
    with pytest.raises(OSError):
        meeting._left_behind()


def test_a_deleted_journal_is_restored_through_no_link(tmp_path: Path) -> None:
    run = fanfold.init("p", id="r", dir=tmp_path / "runs", system=False)
    run.log({"loss": 1.0})
    (journal,) = (run.path / "journal").glob(f"*{SUFFIX}")
    journal.with_name(f"{journal.name}.part").symlink_to(tmp_path / "elsewhere")
    journal.unlink()
    run.log({"loss": 2.0})
    run.finish()
    assert not (tmp_path / "elsewhere").exists()
    assert list(fanfold.open("r", dir=tmp_path / "runs").series("loss").values) == [1.0, 2.0]


def test_media_in_a_folder_that_somebody_else_prepared_are_not_for_others_to_read(tmp_path: Path) -> None:
    (tmp_path / "runs" / "p" / "r" / "blobs").mkdir(parents=True)
    run = fanfold.init("p", id="r", dir=tmp_path / "runs", system=False)
    (tmp_path / "file").write_text("private")
    run.artifact(tmp_path / "file")
    run.finish()
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) >= 2
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("place", ["private/p/r/journal", "cloned/.fanfold/p/r/journal/../../../../../private/p/r/journal"])
def test_a_spool_that_a_cloned_directory_brings_is_copied_to_no_other_run(tmp_path: Path, place: str) -> None:
    cloned, private = tmp_path / "cloned", tmp_path / "private" / "p" / "r" / "journal"
    spool = cloned / "spool" / "x-1"
    for folder in (cloned / ".fanfold" / "p" / "r" / "journal", private, spool):
        folder.mkdir(parents=True)
    (cloned / ".fanfold" / "settings.toml").write_text('spool = "always"\nspool_dir = "spool"\n')
    (spool / "target").write_text(str(tmp_path / place))
    (spool / f"0-0123456789abcdef{SUFFIX}").write_bytes(b"forged")
    assert init_in(cloned).stdout.startswith(str(cloned / ".fanfold"))
    assert list(private.iterdir()) == []


def test_a_spool_is_mirrored_through_no_link(tmp_path: Path) -> None:
    home = tmp_path / "journal"
    home.mkdir()
    spool = Spool(tmp_path / "spool", home)
    (spool.directory / f"0-a{SUFFIX}").write_bytes(b"frames")
    (home / f"0-a{SUFFIX}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        spool.mirror()
    assert not (tmp_path / "elsewhere").exists()


def test_the_energy_probe_writes_its_log_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "energy.log").symlink_to(tmp_path / "elsewhere")
    probe = EnergyProbe(print, log=tmp_path / "energy.log")
    probe.start()
    probe.stop(5)
    assert not (tmp_path / "elsewhere").exists()


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
def test_a_directory_of_another_user_right_here_is_not_used_either(tmp_path: Path) -> None:
    theirs, own = tmp_path / ".fanfold", tmp_path / f".fanfold-{os.geteuid()}"
    theirs.mkdir()
    (theirs / "settings.toml").write_text('tags = ["theirs"]\n')
    for path in (theirs, theirs / "settings.toml"):
        os.chown(path, NOBODY, NOBODY)
    done = init_in(tmp_path)
    assert done.stdout.startswith(str(own / "p"))
    assert f"{theirs} belongs to another user" in done.stderr
    (tmp_path / "below").mkdir()
    assert init_in(tmp_path / "below").stdout.startswith(str(own / "p"))
    assert list(fanfold.open(done.stdout.strip()).tags) == []
    os.chown(own, NOBODY, NOBODY)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        init_in(tmp_path)
    assert "belong to other users" in failed.value.stderr
    assert init_in(tmp_path, FANFOLD_DIR=str(tmp_path / "mine")).stdout.startswith(str(tmp_path / "mine"))


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


# The working directory may be one like /tmp, where anybody can leave a file with the name of a module

STARTS_PROCESSES = {
    "console": "run = fanfold.init(project='p', console=True, system=False); print('hello'); run.finish()",
    "relay": "run = fanfold.init(project='p', trackers=['tensorboard'], system=False); run.log({'loss': 1.0}); run.finish()",
    "energy": "from fanfold.probes.energy import EnergyProbe; probe = EnergyProbe(print); probe.start(); probe.stop(5)",
    "notebook": "fanfold.ui().stop()",
    "merge": "from fanfold.store.merge import start; one = start(Path('runs'), quiet=False); print(one.communicate(timeout=60))",
}


@pytest.mark.parametrize("kind", STARTS_PROCESSES)
def test_our_processes_import_nothing_from_the_working_directory(tmp_path: Path, kind: str) -> None:
    left, program = tmp_path / "left", tmp_path / "program"
    left.mkdir()
    program.mkdir()
    for name in ("fanfold", "msgspec", "runpy", "json"):
        (left / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n")
    script = program / "train.py"
    script.write_text(f"import fanfold\nfrom pathlib import Path\n{STARTS_PROCESSES[kind]}\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=left,
        env={**os.environ, "FANFOLD_DIR": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()


# The cache: answers are read from it, and a library is loaded from it

LIBRARY = """
#include <stdio.h>
__attribute__((constructor)) static void loaded(void) { fclose(fopen("%s", "w")); }
"""


def planted(cache: Path, marker: Path, name: str) -> None:
    """Put a library that leaves a marker when it is loaded where ours would be."""
    folder = cache / "native"
    folder.mkdir(parents=True)
    source = cache.with_name("planted.c")
    source.write_text(LIBRARY % marker)
    subprocess.run([build.compiler() or "g++", "-xc++", "-shared", "-fPIC", "-o", str(folder / name), str(source)], check=True)
    build.seal(folder / name)


@as_root
@pytest.mark.parametrize("way", ["theirs", "open to all", "in a folder of theirs", "ours"])
def test_a_library_that_another_user_could_have_put_into_the_cache_is_not_loaded(
    tmp_path: Path, monkeypatch: Any, way: str
) -> None:
    place = tmp_path / "place"
    cache, marker = place / "cache", tmp_path / "loaded"
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(cache))
    planted(cache, marker, build.library_name())
    if way == "theirs":
        for path in (cache, *cache.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    elif way == "open to all":
        cache.chmod(0o777)
    elif way == "in a folder of theirs":
        os.chown(place, NOBODY, NOBODY)
    monkeypatch.setattr(build, "beside", lambda: tmp_path / "none")  # as in a wheel without it
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(library.NativeUnavailable):  # the planted one lacks our functions
        library._open()
    assert marker.exists() == (way == "ours")


@as_root
def test_derived_data_in_a_folder_that_others_share_is_private(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    shared = tmp_path / "shared"
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(shared))
    shared.mkdir()
    shared.chmod(0o1777)
    run = fanfold.init("llm", dir=tmp_path / "runs", system=False, quiet=True)
    run.log({"loss": 0.5}, step=0)
    run.finish()
    assert len(fanfold.runs("llm", dir=tmp_path / "runs")) == 1
    (own,) = shared.iterdir()
    assert (own.name, own.stat().st_mode & 0o777) == (f"user-{os.geteuid()}", 0o700)
    assert any(own.glob("catalogue-*.db"))
    os.chown(own, NOBODY, NOBODY)  # now it is theirs, with a catalogue that they wrote
    content = {path.name: path.read_bytes() for path in own.iterdir()}
    assert [one.summary for one in fanfold.runs("llm", dir=tmp_path / "runs")] == [{"loss": 0.5}]
    assert {path.name: path.read_bytes() for path in own.iterdir()} == content
    assert "Nothing is cached" in caplog.text


def test_projects_are_closed_to_strangers_whatever_the_umask(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    before = os.umask(0)
    try:
        fanfold.init("llm", dir=tmp_path / "runs", id="r", system=False, quiet=True).finish()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "runs" / "llm", tmp_path / "runs" / "llm" / "r")}
    assert modes == {"llm": 0o775, "r": 0o700}
