"""Requests to a running job (stop, save, evaluate, log, set): one small file each, `requests/<id>.json` in its run's directory.

Whoever asks writes the file; rank 0 of the job takes it away and answers in its journal. Anybody may have put a file there, so a
job takes only regular files of its own user (or of root) with a single name, and never follows a link.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from ..errors import RunError, SettingError, notices, shown, suggestion
from . import directory
from .files import is_folder, open_inside, opened_folder

FOLDER: Final = directory.REQUESTS
ACTIONS: Final = ("stop", "save", "evaluate", "log", "set")
SECONDS: Final = 600.0  # how long a request stays valid, unless it says otherwise
MAX_SECONDS: Final = 7 * 86400.0
MAX_BYTES: Final = 16 << 10
MAX_VALUES: Final = 64
MAX_LOOKED_AT: Final = 1024  # files in one look; the others wait for the next
ID: Final = "[0-9a-f]{16}-[0-9a-f]{8}"
MAX_WAITING: Final = 4096
_SUFFIX: Final = ".json"

Value = bool | int | float | str
Short = Annotated[str, Meta(min_length=1, max_length=200)]


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Something asked of a job: `values` are for `set`, `by` says who asked, times are in seconds since 1970."""

    id: Annotated[str, Meta(pattern=f"^{ID}$", max_length=25)]
    action: Literal["stop", "save", "evaluate", "log", "set"]
    values: dict[Short, Value] = {}
    by: Annotated[str, Meta(max_length=200)] = ""
    time: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    expires: Annotated[float, Meta(ge=0, le=1e12)] = 0.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request: done after `step`, refused or expired, and why. Not answered yet: asked."""

    id: str
    action: str
    state: Literal["asked", "done", "refused", "expired"]
    values: dict[str, Any] = {}
    by: str = ""
    step: int | None = None
    why: str = ""


def new(action: str, values: Mapping[str, Any] | None = None, *, by: str = "", seconds: float = SECONDS) -> JobRequest:
    """Return a request, or raise SettingError for one that no job could carry out."""
    if action not in ACTIONS:
        raise SettingError(f"{shown(action)} is not a request. Nothing was asked.{suggestion(str(action), ACTIONS)}")
    given = dict(values or {})
    if bool(given) != (action == "set"):
        example = "Name what to set, for example lr=0.001." if action == "set" else "Only set takes values."
        raise SettingError(f"{action} {'needs' if action == 'set' else 'takes no'} values. Nothing was asked. {example}")
    if len(given) > MAX_VALUES:
        raise SettingError(f"{len(given)} values at once are too many. Nothing was asked. Set at most {MAX_VALUES}.")
    for name, value in given.items():
        _check(name, value)
    if not 0 < seconds <= MAX_SECONDS:
        raise SettingError(f"a request cannot wait for {seconds} seconds. Nothing was asked. Give 1 to {MAX_SECONDS:.0f}.")
    now = time.time()
    known = {
        "id": f"{time.time_ns():016x}-{secrets.token_hex(4)}",
        "action": action,
        "values": given,
        "by": (by or asker())[:200],
    }
    return msgspec.convert({**known, "time": now, "expires": now + seconds}, JobRequest)


def _check(name: Any, value: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise SettingError(f"{shown(name)} is not the name of something adjustable. Nothing was asked.")
    if not isinstance(value, Value) or (isinstance(value, str) and len(value) > 1000):
        raise SettingError(f"{name} cannot be set to {shown(value)}. Nothing was asked. Give a number, a bool or a short text.")
    if isinstance(value, (int, float)) and not abs(value) < float("inf"):
        raise SettingError(f"{name} cannot be set to {value}. Nothing was asked. Give a finite number.")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise SettingError(f"{name} cannot be set to {value}. Nothing was asked. The number is too large.")


def parse_value(word: str) -> Value:
    """Return the value that a word on the command line means: true, false, a number, or the text itself."""
    if word in ("true", "True", "false", "False"):
        return word.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return word


def asker() -> str:
    """Return who runs this process, and where. Variables such as USER do not count: anybody can set them."""
    from ..process import detect

    return f"{_user()}@{detect().node}"


def _user() -> str:
    if not hasattr(os, "geteuid"):
        return getpass.getuser()
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container whose user id has no name
        return str(os.geteuid())


def checked_id(id: str) -> str:
    """Return the id of a request, or raise SettingError for a text that is none, and so is no name of a file."""
    if not re.fullmatch(ID, id):
        raise SettingError(f"{shown(id)} is not the id of a request. Nothing was done.")
    return id


def encode(request: JobRequest) -> bytes:
    return msgspec.json.encode(request)


def decode(data: bytes) -> JobRequest:
    """Return the request in some bytes; raise ValueError if there is none."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    request = msgspec.json.decode(data, type=JobRequest)
    if len(request.values) > MAX_VALUES or bool(request.values) != (request.action == "set"):
        raise ValueError("its values do not fit its action")
    for name, value in request.values.items():
        _check(name, value)
    return request


def leave(run: Path, request: JobRequest) -> None:
    """Write a request into a run's directory, where its job finds it. Raise RunError if the job would not take it."""
    directory.check_folders(run)
    owner = run.stat().st_uid
    me = os.geteuid() if hasattr(os, "geteuid") else owner
    if me not in (owner, 0):
        raise RunError(
            f"run {run.name} belongs to another user (uid {owner}), whose jobs take requests only from that user. Nothing was "
            "asked. Ask as that user, or through a gateway."
        )
    with opened_folder(run.resolve(), FOLDER) as folder:
        _hand_over(folder, owner)
        with os.scandir(folder) as entries:
            if sum(1 for _ in itertools.islice(entries, MAX_WAITING)) == MAX_WAITING:
                raise RunError(f"{MAX_WAITING} requests wait for run {run.name} already. Nothing was asked. Is its job alive?")
        aside = f".{request.id}.{os.getpid()}"
        try:
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            with os.fdopen(fd, "wb") as file:
                file.write(encode(request))
                _hand_over(file.fileno(), owner)
            os.rename(aside, f"{request.id}{_SUFFIX}", src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(FileNotFoundError):  # renamed
                os.unlink(aside, dir_fd=folder)


def _hand_over(fd: int, owner: int) -> None:
    """Give what root made to the user whose job has to read it. By its descriptor: this user can replace names in the run."""
    if os.geteuid() == 0 == os.fstat(fd).st_uid != owner:
        os.fchown(fd, owner, -1)


def withdraw(run: Path, id: str) -> bool:
    """Take a request back; return False if the job has taken it."""
    try:
        (run / FOLDER / f"{id}{_SUFFIX}").unlink()
    except OSError:
        return False
    return True


def waiting(run: Path) -> list[JobRequest]:
    """Return the requests in a run's directory, oldest first. What a job must not accept is removed, and reported once."""
    folder = run / FOLDER
    try:
        with os.scandir(folder) as entries:
            if not is_folder(folder):
                return []
            found = sorted(entry.name for entry in itertools.islice(entries, MAX_LOOKED_AT))
    except OSError:
        return []
    read = (_accepted(run, name) for name in found if name.endswith(_SUFFIX) and not name.startswith("."))
    return [request for request in read if request is not None]


def take(run: Path, wanted: Callable[[JobRequest], bool] = lambda _: True) -> list[JobRequest]:
    """Take requests out of a run's directory, oldest first; whoever removes one may carry it out, and nobody else."""
    return [request for request in waiting(run) if wanted(request) and withdraw(run, request.id)]


def _accepted(run: Path, name: str) -> JobRequest | None:
    path = run / FOLDER / name
    try:
        return _read(run, name)
    except FileNotFoundError:
        return None  # just withdrawn
    except (OSError, ValueError) as error:
        notices.once(
            f"request refused:{run}",
            f"{path} is not a request that this job accepts: {error}. It is ignored, as are others like it. Training continues.",
        )
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def _read(run: Path, name: str) -> JobRequest:
    with open_inside(run, FOLDER, name) as file:
        found = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and found.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"it belongs to another user (uid {found.st_uid})")
        if found.st_nlink != 1:
            raise ValueError("it has several names (hard links)")
        request = decode(file.read(MAX_BYTES + 1))
    if name != request.id + _SUFFIX:
        raise ValueError("its name is not that of the request in it")
    return request
