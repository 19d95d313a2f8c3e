"""Every FANFOLD_* variable: one table, and one resolver (argument, environment, settings file, default).

The settings file is `settings.toml` in the runs' directory. Nothing is read at import.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import numbers
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

from .errors import SettingError, clean_text, notices, outcome, shown

T = TypeVar("T")
DIRECTORY_NAME = ".fanfold"
FILE_NAME = "settings.toml"
MAX_NAMES = 10_000
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


# Each parser accepts the text of a variable, or a value from Python or the settings file. Its error says what is expected.


def _boolean(value: Any) -> bool:
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise ValueError("one of 1, true, yes, on, 0, false, no, off")
    if type(value).__name__ in ("bool", "bool_") or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise ValueError("True or False")


def _boolean_or_json(value: Any) -> bool | Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str) or not value.strip().startswith("{"):
        return _boolean(value)
    import json

    try:
        found: dict[str, Any] = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"a JSON object, true or false ({error})") from error
    return found


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError("a whole number") from error


def _number(value: Any) -> float:
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError("a number") from error


def _text(value: Any) -> str:
    """Return a text; numbers, paths and identifiers are accepted, because they are often passed as they are."""
    like_text = isinstance(value, (str, os.PathLike, enum.Enum, numbers.Number)) or type(value).__name__ == "UUID"
    if isinstance(value, bool) or not like_text:
        raise ValueError("a text")
    text, error = outcome(lambda: clean_text("".join((str(value),))))
    if error is not None or text is None:
        raise ValueError("a text") from error
    return text


def _path(value: Any) -> str:
    found, _ = outcome(os.fspath, value)
    if not isinstance(found, str):
        raise TypeError("a path: a text or a pathlib.Path")
    return found


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (bytes, bytearray, Mapping)):
        raise TypeError("a text or a list of texts")
    found, error = outcome(lambda: tuple(_text(one) for one in itertools.islice(value, MAX_NAMES)))
    if error is not None or found is None:
        raise ValueError("a text or a list of texts") from error
    return found


def _choice(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError("one of " + ", ".join(words))
        return value

    return parse


def _resume(value: Any) -> str:
    if isinstance(value, bool):
        return "auto" if value else "never"
    return _choice("never", "allow", "must", "auto")(value)


class Setting(NamedTuple):
    """One row of the table: the name, parser, default and meaning of a setting."""

    name: str
    parse: Callable[[Any], Any]
    default: Any
    meaning: str

    @property
    def variable(self) -> str:
        return f"FANFOLD_{self.name.upper()}"

    @property
    def argument(self) -> str:
        return "id" if self.name == "run_id" else self.name


_ROWS = (
    Setting("blackbox", _boolean_or_json, None, "Keep evidence of hangs, crashes and memory errors. Default: on in jobs of "
            "torchrun, accelerate launch and srun. A JSON object sets memory, and hang: seconds without a sign of life."),
    Setting("cache_dir", _path, None, "Where derived data lives: catalogue and indexes. Safe to delete at any time."),
    Setting("console", _boolean, False, "Capture console output with the run."),
    Setting("dir", _path, None, "Where runs live. Default: the nearest .fanfold in a parent directory, else a new one."),
    Setting("durability", _choice("process", "power"), "process", "What log() survives before it returns: "
            "the death of the process, or also a power cut (each write waits for the disk)."),
    Setting("energy", _boolean, False, "Record energy, emissions and power of each node, with CodeCarbon."),
    Setting("gpus", _choice("visible", "all"), "visible", "Which GPUs of the node are watched: those the process sees, or all."),
    Setting("goodput", _boolean, True, "Time what training does besides its steps: saving, evaluating, waiting for data."),
    Setting("group", _text, None, "A name that several runs share, such as a sweep."),
    Setting("hold", _number, None, "How many seconds a step waits for device values, media and slow ranks before it goes to "
            "trackers. Default: 10, or 90 on a network filesystem."),
    Setting("mode", _choice("on", "disabled", "online", "offline"), "on", "disabled: every call works and nothing is recorded. "
            "online and offline are wandb's words for on."),
    Setting("name", _text, None, "The run's name. Default: two words and a number derived from its id."),
    Setting("node", _text, None, "This node's name. Default: the host name."),
    Setting("notes", _text, None, "A sentence about the run."),
    Setting("ops", _boolean_or_json, False, "Profile PyTorch's operators and record which of its APIs are used; a JSON object "
            "sets window, every, sampling, inputs."),
    Setting("oidc_secret", _text, None, "The gateway's secret at the OpenID Connect provider."),
    Setting("project", _text, "default", "The project a run belongs to."),
    Setting("quiet", _boolean, False, "Print nothing at init and finish; warnings still go to the logger."),
    Setting("rank", _whole, None, "This process's rank, if no launcher sets it."),
    Setting("resume", _resume, "allow",
            "What to do when the run exists: refuse, continue, require it, or look for the last unfinished one."),
    Setting("run_id", _text, None, "The run's id; every process that has it joins the same run."),
    Setting("safe_directory", _names, (), "Comma-separated folders that may be used although another user owns them; * for all."),
    Setting("server", _text, None, "The gateway that runs go to, such as https://runs.example.org; init() starts a forwarder."),
    Setting("server_ca", _path, None, "A file of certificates that sign the gateway's; default: the system's."),
    Setting("server_token", _text, None, "What the forwarder shows the gateway."),
    Setting("session_secret", _text, None, "What a gateway signs logins with; the same for all that stand behind one address."),
    Setting("spool", _choice("auto", "always", "never"), "auto", "Write journals to a node-local spool first: "
            "on network filesystems, always, or never."),
    Setting("spool_dir", _path, None, "The node-local spool. Default: a folder of yours in the system's temporary directory."),
    Setting("stamp", _boolean, False, "Write into every model file saved while the run is active which run it comes from."),
    Setting("strict", _boolean, False, "Raise instead of warning when a value cannot be logged."),
    Setting("system", _boolean, True, "Record CPU, memory, disk, network and GPU metrics every 10 s."),
    Setting("tags", _names, (), "Comma-separated tags."),
    Setting("token", _text, None, "The token of `fanfold ui`. "
            "Default: made up at each start."),
    Setting("world_size", _whole, None, "How many processes the run has, if no launcher sets it."),
)  # fmt: skip
TABLE: Mapping[str, Setting] = {row.name: row for row in _ROWS}
# Variables that are not settings: for the command line, or in place of a launcher's.
_OTHERS = (
    "FANFOLD_CLICKHOUSE_PASSWORD",
    "FANFOLD_DEBUG",
    "FANFOLD_EXEC",
    "FANFOLD_LOCAL_RANK",
    "FANFOLD_LOCAL_WORLD_SIZE",
    "FANFOLD_NOTIFY",
)


def resolve(name: str, argument: Any = None, *, file: Mapping[str, Any] | None = None) -> Any:
    """Return a setting: the argument if given, else the environment, else the settings file, else the default."""
    setting = TABLE[name]
    if argument is not None:
        return parsed(setting, argument, f"init({setting.argument}=…)")
    text = os.environ.get(setting.variable)
    if text is not None:
        return parsed(setting, text, setting.variable)
    if file and name in file:
        return parsed(setting, file[name], f"{FILE_NAME}: {name}")
    return setting.default


def unknown_variables() -> dict[str, str | None]:
    """Return the FANFOLD_* variables that nothing reads, each with the most similar known one."""
    known = [*(row.variable for row in _ROWS), *_OTHERS]
    found = sorted(name for name in os.environ if name.startswith("FANFOLD_") and name not in known)
    if not found:
        return {}
    import difflib

    return {name: next(iter(difflib.get_close_matches(name, known, 1, cutoff=0.8)), None) for name in found}


def parsed(setting: Setting, value: Any, origin: str, effect: str = "The run was not started.") -> Any:
    """Return a value parsed by its setting; raise SettingError if the parser rejects it."""
    try:
        return setting.parse(value)
    except (ValueError, TypeError) as error:
        raise SettingError(
            f"{origin} is {shown(value)}, which cannot be understood. {effect} {setting.meaning} Give {error}."
        ) from error


def read_file(directory: Path) -> dict[str, Any]:
    """Read `settings.toml` in `directory`; raise an error that lists the known names if one is unknown."""
    path = directory / FILE_NAME
    return read_toml(path, TABLE, "The run was not started.") if path.is_file() and _is_safe_file(path) else {}


def read_toml(path: Path, known: Iterable[str], effect: str) -> dict[str, Any]:
    """Read a file of settings; raise an error that states the `effect` if it is not TOML, or has names that are not `known`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not valid TOML: {error}. {effect} Correct or remove the file.") from error
    names = list(known)
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise SettingError(f"{path} has unknown settings: {', '.join(unknown)}. {effect} Known: {', '.join(names)}.")
    return found


def options_of(kind: type[T], argument: str, given: Any) -> T | None:
    """Return what was given for an argument of init() as a dataclass of options: True, a dict, or nothing."""
    if not given and not isinstance(given, Mapping):
        return None
    if given is True:
        return kind()
    from dataclasses import fields

    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(given, Mapping) or set(given) - set(known):
        raise SettingError(
            f"init({argument}={given!r}) cannot be understood. The run was not started. "
            f"Pass True, or a dict of some of these: {', '.join(known)}."
        )
    return kind(**given)


def is_address(given: object) -> bool:
    """Return whether a text is the address of a store on a server rather than a directory."""
    return isinstance(given, str) and "://" in given


def is_gateway(address: str | os.PathLike[str] | None) -> bool:
    """Return whether the address of a store, or FANFOLD_DIR, is that of a gateway."""
    return str(store_address(address) or "").startswith(("http://", "https://"))


def split_address(text: str) -> SplitResult:
    """Return the parts of a URL; all of them are empty if it is invalid, such as one with an unclosed bracket."""
    try:
        return urlsplit(text)
    except ValueError:
        return urlsplit("")


def store_address(argument: str | os.PathLike[str] | None = None) -> str | os.PathLike[str] | None:
    """Return the address of the store of runs: the argument, else FANFOLD_DIR, else None."""
    return argument if argument is not None else os.environ.get(TABLE["dir"].variable)


def find_directory(argument: str | os.PathLike[str] | None = None, *, writing: bool = False) -> Path:
    """Return the directory of runs: the argument, FANFOLD_DIR, the nearest .fanfold in this or a parent directory, or ./.fanfold.

    Raise for the address of a store on a server; `stores.open_store` opens it for reading.
    """
    effect = "The run was not started." if writing else "Nothing was opened."
    checked = None if argument is None else parsed(TABLE["dir"], argument, "dir=…", effect)
    given = store_address(checked)
    if is_address(given):
        if writing:
            raise SettingError(
                "the directory of runs is the address of a server. The run was not started: a run writes to this machine, and a "
                "forwarder carries it on. Name a directory, and the gateway in FANFOLD_SERVER."
            )
        raise SettingError("this works on a directory of runs, and this is the address of a server. Name a directory.")
    if given:
        return Path(given).expanduser().absolute()
    here = Path.cwd()
    found = next((folder for place in (here, *here.parents) if (folder := _found_in(place)) is not None), None)
    if found is not None:
        return found
    folder, own = here / DIRECTORY_NAME, _own_name(here)
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises if a parent is not accessible
        return folder
    if os.path.lexists(own):
        raise SettingError(f"{folder} and {own} belong to other users. {effect} Work in a folder of yours, or set FANFOLD_DIR.")
    return own


def _own_name(place: Path) -> Path:
    """Return the directory of runs that this user has in a place where another user has the usual name."""
    return place / f"{DIRECTORY_NAME}-{os.geteuid()}"


def _found_in(place: Path) -> Path | None:
    """Return the directory of runs in a folder, if there is one that may be used."""
    folder = place / DIRECTORY_NAME
    if not os.path.isdir(folder):  # noqa: PTH112
        return None
    own = _own_name(place)
    found = [folder, own] if os.path.isdir(own) else [folder]  # noqa: PTH112
    return next(filter(_is_safe_directory, found), None)


def _owners(path: Path) -> set[int]:
    """Return the owners of a path and, if it is a link, of the link."""
    return {path.stat().st_uid, path.lstat().st_uid}


def _is_safe_directory(folder: Path) -> bool:
    """Return whether a .fanfold found in a parent may be used: owned by this user or root, or in FANFOLD_SAFE_DIRECTORY."""
    strangers = _owners(folder) - {os.geteuid(), 0}
    if not strangers or _is_called_safe(folder):
        return True
    notices.once(
        f"owner:{folder}",
        f"{folder} belongs to another user ({_user(min(strangers))}), so it is not used: its settings could send your runs "
        f"elsewhere. To use it, set FANFOLD_DIR={folder} or FANFOLD_SAFE_DIRECTORY={folder}.",
    )
    return False


def _is_called_safe(folder: Path) -> bool:
    safe = resolve("safe_directory")
    return "*" in safe or any(Path(name).expanduser().absolute() == folder for name in safe)


def _is_safe_file(path: Path) -> bool:
    """Return whether a settings file may be read: owned by this user, root or its directory's owner, and not open to all."""
    if owner := stranger(path, path.parent):
        notices.once(
            f"owner:{path}",
            f"{path} belongs to another user ({owner}) than its directory, so it is not read and its settings "
            "have no effect. Copy the file to make it yours, or remove it.",
        )
    elif path.stat().st_mode & 0o002:
        notices.once(
            f"mode:{path}",
            f"everybody on this machine can write to {path}, so it is not read and its settings have no effect. "
            f"Run: chmod o-w {path}",
        )
    else:
        return True
    return False


def stranger(path: Path, folder: Path) -> str:
    """Return the user something in a folder belongs to, unless it is this user, root, the folder's owner, or all are trusted."""
    strangers = _owners(path) - {os.geteuid(), 0, folder.stat().st_uid}
    return _user(min(strangers)) if strangers and not _is_called_safe(folder.absolute()) else ""


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a user of a container, or of another machine
        return f"user id {uid}"


def cache_directory() -> Path:
    """Return the user's cache folder for derived data, and create it, private to them.

    Inside a folder that belongs to somebody else, or to which others can write, it is a folder of this user's own: answers are
    read from the cache, and the operator probe's library is loaded from it.
    """
    given = resolve("cache_dir")
    if given:
        base = Path(given).expanduser().absolute()
    else:
        home = os.environ.get("XDG_CACHE_HOME")
        base = (Path(home) if home else Path.home() / ".cache") / "fanfold"
    if not hasattr(os, "geteuid"):
        return base
    own = base / f"user-{os.geteuid()}"
    for folder in (base, own):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not folder.exists():
            return folder  # callers find out that it cannot be created
        if _is_private(folder):
            return folder
    notices.once(
        f"cache:{own}",
        f"{own} is not a folder that only you can write to; another user may have made it. Nothing is cached, so listing runs is "
        "slower. Remove it, or set FANFOLD_CACHE_DIR to a folder of yours.",
    )
    return Path(os.devnull) / "fanfold"


def _is_private(folder: Path) -> bool:
    """Return whether a folder is this user's own, and nobody else can write to it."""
    return _owners(folder) <= {os.geteuid(), 0} and folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o022


def changeable_by_others(path: Path) -> Path | None:
    """Return the folder through which another user could replace what is at a path: the path itself, or one above it."""
    for folder in (path, *path.parents):
        if folder.exists():
            mode = folder.stat().st_mode
            if _owners(folder) - {os.geteuid(), 0} or (mode & 0o002 and not mode & stat.S_ISVTX):
                return folder
    return None
