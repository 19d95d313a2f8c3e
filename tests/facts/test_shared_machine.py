"""A second user of the machine: in a directory of runs that many share, and where root works on what users own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fanfold
from fanfold import settings
from fanfold.errors import JournalError, RunError, SettingError
from fanfold.fleet.client import Client
from fanfold.fleet.forward_note import home
from fanfold.fleet.forwarder import Forwarder, only_one
from fanfold.fleet.grants import Grants
from fanfold.fleet.tokens import Tokens
from fanfold.journal import directory, packing, requests
from fanfold.process import Meeting, detect
from fanfold.provenance.replace import replacing

EVE, ANN = 65534, 1234
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="being several users needs root")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp; pytest's own folders are closed to other users."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def being(user: int) -> Iterator[None]:
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


def make_run(root: Path, user: int, calls: int = 1) -> Path:
    run = fanfold.init("p", dir=root, id="job7", config={"checkpoint": "theirs.pt"}, system=False, quiet=True)
    for step in range(calls):
        run.log({"loss": 1.0}, step=step)
    run.finish(1)
    for path in (run.path.parent, *run.path.parent.rglob("*")):
        os.chown(path, user, user)
        path.chmod(0o777 if path.is_dir() else 0o666)
    return run.path


def test_a_run_that_another_user_made_first_is_not_continued(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = make_run(shared, EVE)
    with pytest.raises(RunError, match="belongs to another user"):
        fanfold.init("p", dir=shared, id="job7", system=False, quiet=True)
    assert len(list((theirs / "journal").glob("*.ffj"))) == 1
    run = fanfold.init("p", dir=shared, resume="auto", system=False, quiet=True)  # the newest unfinished run is theirs
    assert (run.id == "job7", dict(run.config)) == (False, {})
    run.finish()
    monkeypatch.setenv("FANFOLD_SAFE_DIRECTORY", str(shared))
    run = fanfold.init("p", dir=shared, id="job7", system=False, quiet=True)
    assert dict(run.config) == {"checkpoint": "theirs.pt"}
    run.finish()


def test_a_run_in_the_directory_of_its_owner_is_continued(shared: Path) -> None:
    make_run(shared, ANN)
    os.chown(shared, ANN, ANN)  # as in a container that runs as root, over the folder of a user
    run = fanfold.init("p", dir=shared, id="job7", system=False, quiet=True)
    assert dict(run.config) == {"checkpoint": "theirs.pt"}
    run.finish()


def test_where_the_filesystem_gives_our_files_to_another_user_runs_are_ours(shared: Path) -> None:
    """As NFS does with root's. Only this thread's access to files is that of another user."""
    setfsuid = ctypes.CDLL(None).setfsuid
    setfsuid(ANN)
    try:
        for _ in range(2):  # the second rank finds the folder that the first has made
            directory.make_run(shared / "p" / "r")
    finally:
        setfsuid(0)
    assert (shared / "p" / "r").stat().st_uid == ANN
    assert [path.name for path in shared.iterdir()] == ["p"]
    with pytest.raises(RunError, match="belongs to another user"):
        directory.make_run(shared / "p" / "r")


def test_a_link_put_into_a_new_directory_of_runs_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder where everybody may rename everything, the new directory can be exchanged before the first file is in it."""
    (tmp_path / "mine").write_text("mine")
    mkdir = Path.mkdir

    def exchanged(self: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(self, *args, **kwargs)
        if self.name == "runs":
            (self / ".gitignore").symlink_to(tmp_path / "mine")

    monkeypatch.setattr(Path, "mkdir", exchanged)
    fanfold.init("p", dir=tmp_path / "runs", system=False, quiet=True).finish()
    assert (tmp_path / "mine").read_text() == "mine"


def test_ranks_of_several_users_meet_in_one_directory(shared: Path) -> None:
    for count, user in enumerate((ANN, EVE)):
        with being(user):
            meeting = Meeting(shared, detect(), count)
            meeting.stand("key")
            assert meeting._left_behind() == "key"
    assert (shared / ".join").stat().st_mode & 0o7777 == 0o1777
    shutil.rmtree(shared / ".join")
    shared.chmod(0o700)
    Meeting(shared, detect(), 0).stand("key")
    assert (shared / ".join").stat().st_mode & 0o7777 == 0o700


def test_a_rank_that_cannot_meet_the_others_says_so(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    (shared / ".join").mkdir(mode=0o755)  # as an earlier version made it, for another user
    with being(ANN), pytest.raises(RunError, match="FANFOLD_RUN_ID"):
        fanfold.init("p", dir=shared, system=False, quiet=True)


def test_forwarders_of_several_users_work_in_one_directory(shared: Path) -> None:
    for user in (ANN, EVE):
        with being(user), only_one(shared, "https://runs.example.org"):
            assert home(shared).stat().st_uid == user
            assert home(shared).stat().st_mode & 0o077 == 0
    assert home(shared).name == ".forward-0"


def test_a_forwarder_ships_no_run_of_another_user_with_its_token(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = make_run(shared, EVE)

    def found() -> list[Path]:
        forwarder = Forwarder(shared, Client("http://127.0.0.1:9", None))
        forwarder._scan()
        return list(forwarder.runs)

    with being(ANN):
        assert found() == []
    assert "not forwarded with your token" in caplog.text
    assert found() == [theirs]  # root serves all users
    monkeypatch.setenv("FANFOLD_SAFE_DIRECTORY", str(shared))
    with being(ANN):
        assert found() == [theirs]


def test_files_of_tokens_and_grants_that_another_user_made_let_nobody_in(shared: Path) -> None:
    tokens = Tokens(shared / ".tokens.json")
    _, word = tokens.create("x", projects=["*"], scopes=["write"])
    assert tokens.find(word) is not None
    grants = shared / "grants.toml"
    grants.write_text('everyone = ["*:write"]\n')
    grants.chmod(0o644)
    for path in (tokens.path, grants):
        os.chown(path, EVE, EVE)
    with pytest.raises(SettingError, match="belongs to another user"):
        Tokens(tokens.path).find(word)
    with pytest.raises(SettingError, match="belongs to another user"):
        Grants([], grants)


def test_settings_that_everybody_can_write_are_not_read(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    (shared / "settings.toml").write_text('mode = "disabled"\n')
    (shared / "settings.toml").chmod(0o666)
    assert settings.read_file(shared) == {}
    assert "everybody on this machine can write to" in caplog.text
    (shared / "settings.toml").chmod(0o664)
    assert settings.read_file(shared) == {"mode": "disabled"}


# Root works in a folder whose owner replaces names at the worst moment


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Path | None], Path], None]:
    """Put a link to a file of root's in a name's place, just before its owner or permissions are set."""

    def swap(name: Callable[[], Path | None], secret: Path) -> None:
        def before(call: Callable[..., Any]) -> Callable[..., Any]:
            def hooked(*args: Any, **kwargs: Any) -> Any:
                path = name()
                if path is not None and not path.is_symlink():
                    path.rename(path.with_name("elsewhere"))
                    path.symlink_to(secret)
                return call(*args, **kwargs)

            return hooked

        for verb in ("chown", "fchown", "chmod", "fchmod"):
            monkeypatch.setattr(os, verb, before(getattr(os, verb)))

    return swap


def untouched(secret: Path) -> bool:
    found = secret.stat()
    return (found.st_uid, found.st_mode & 0o777) == (0, 0o600)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "shadow").write_text("secret")
    (tmp_path / "shadow").chmod(0o600)
    return tmp_path / "shadow"


def test_root_asks_the_job_of_a_user_and_gives_nothing_else_away(shared: Path, secret: Path, swapped) -> None:
    run = make_run(shared, EVE)
    shutil.rmtree(run / "requests", ignore_errors=True)
    requests.leave(run, requests.new("save"))
    (left,) = (run / "requests").iterdir()
    assert [(path.stat().st_uid, path.stat().st_mode & 0o777) for path in (run / "requests", left)] == [
        (EVE, 0o700),
        (EVE, 0o600),
    ]
    shutil.rmtree(run / "requests")
    folder = secret.parent / "folder"
    folder.mkdir(mode=0o700)
    swapped(lambda: next(run.glob("requests"), None), folder)
    requests.leave(run, requests.new("stop"))
    assert folder.stat().st_uid == 0
    assert list(folder.iterdir()) == []


def test_root_packs_the_journals_of_a_user_and_gives_nothing_else_away(shared: Path, secret: Path, swapped) -> None:
    (path,) = make_run(shared, EVE, calls=2000).glob("journal/*.ffj")
    swapped(lambda: next(path.parent.glob(".*.ffz.*"), None), secret)
    with contextlib.suppress(OSError, JournalError):
        packing.pack(path)
    assert untouched(secret)


def test_root_stamps_the_model_of_a_user_and_gives_nothing_else_away(shared: Path, secret: Path, swapped) -> None:
    model = shared / "model.bin"
    model.write_bytes(b"weights")
    os.chown(model, EVE, EVE)
    model.chmod(0o666)
    swapped(lambda: next(iter(shared.glob("*.stamping")), None), secret)
    with contextlib.suppress(OSError), replacing(model) as file:
        file.write(b"stamped")
    assert untouched(secret)
