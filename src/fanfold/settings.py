"""Every FANFOLD_* variable: one table, and one resolver (argument, environment, settings file, default).

The settings file is `settings.toml` in the runs' directory. Nothing is read at import.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SettingError, notices

DIRECTORY_NAME = ".fanfold"
FILE_NAME = "settings.toml"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("one of 1, true, yes, on, 0, false, no, off")


def _boolean_or_json(text: str) -> bool | dict[str, Any]:
    if not text.strip().startswith("{"):
        return _boolean(text)
    import json

    try:
        found: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"a JSON object, true or false ({error})") from error
    return found


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError("a whole number") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError("a number") from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError("one of " + ", ".join(words))
        return text

    return parse


@dataclass(frozen=True)
class Setting:
    """One row of the table: how a setting is spelled, read and explained."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str

    @property
    def variable(self) -> str:
        return f"FANFOLD_{self.name.upper()}"


_ROWS = (
    Setting("cache_dir", str, None, "Where derived data lives: catalogue and indexes. Safe to delete at any time."),
    Setting("console", _boolean, False, "Keep what the process prints with the run."),
    Setting("dir", str, None, "Where runs live. Default: .fanfold, found upward like git, created when missing."),
    Setting("durability", _choice("process", "power"), "process", "What log() survives before it returns: "
            "the death of the process, or also a power cut (each write waits for the disk)."),
    Setting("energy", _boolean, False, "Record energy, emissions and power of each node, with CodeCarbon."),
    Setting("group", str, None, "A name that several runs share, such as a sweep."),
    Setting("hold", _number, None, "How many seconds a step waits for device values, media and slow ranks before it goes to "
            "trackers. Default: 10, or 90 on a network filesystem."),
    Setting("mode", _choice("on", "disabled", "online", "offline"), "on", "disabled: every call works and nothing is recorded. "
            "online and offline are wandb's words for on."),
    Setting("name", str, None, "The run's name. Default: two words and a number derived from its id."),
    Setting("node", str, None, "This node's name. Default: the host name."),
    Setting("notes", str, None, "A sentence about the run."),
    Setting("ops", _boolean_or_json, False, "Profile PyTorch's operators and record which of its APIs are used; a JSON object "
            "sets window, every, sampling, inputs."),
    Setting("oidc_secret", str, None, "The gateway's secret at the OpenID Connect provider."),
    Setting("project", str, "default", "The project a run belongs to."),
    Setting("quiet", _boolean, False, "Print nothing at init and finish; warnings still go to the logger."),
    Setting("rank", _whole, None, "This process's rank, where no launcher says it."),
    Setting("resume", _choice("never", "allow", "must", "auto"), "allow",
            "What to do when the run exists: refuse, continue, require it, or look for the last unfinished one."),
    Setting("run_id", str, None, "The run's id; every process that has it joins the same run."),
    Setting("safe_directory", _names, (), "Comma-separated folders that may be used although another user owns them; * for all."),
    Setting("server", str, None, "The gateway that runs go to, such as https://runs.example.org; init() starts a forwarder."),
    Setting("server_ca", str, None, "A file of certificates that sign the gateway's; default: the system's."),
    Setting("server_token", str, None, "What the forwarder shows the gateway."),
    Setting("session_secret", str, None, "What a gateway signs logins with; the same for all that stand behind one address."),
    Setting("spool", _choice("auto", "always", "never"), "auto", "Write journals to a node-local spool first: "
            "on network filesystems, always, or never."),
    Setting("spool_dir", str, None, "The node-local spool. Default: a folder of the user's in the system's temporary directory."),
    Setting("stamp", _boolean, False, "Write into every model file saved while the run is active which run it comes from."),
    Setting("strict", _boolean, False, "Raise instead of warning when a value cannot be logged."),
    Setting("system", _boolean, True, "Record CPU, memory, disk, network and GPU figures every 10 s."),
    Setting("tags", _names, (), "Comma-separated tags."),
    Setting("token", str, None, "The token of `fanfold ui`. "
            "Default: made up at each start."),
    Setting("world_size", _whole, None, "How many processes the run has, where no launcher says it."),
)  # fmt: skip
TABLE: Mapping[str, Setting] = {row.name: row for row in _ROWS}
# Variables that are no settings: they mean something to the command line, or stand in for a launcher's.
_OTHERS = ("FANFOLD_CLICKHOUSE_PASSWORD", "FANFOLD_DEBUG", "FANFOLD_LOCAL_RANK", "FANFOLD_LOCAL_WORLD_SIZE")


def resolve(name: str, argument: Any = None, *, file: Mapping[str, Any] | None = None) -> Any:
    """Return a setting: the argument if given, else the environment, else the settings file, else the default."""
    setting = TABLE[name]
    if argument is not None:
        return _checked(setting, argument, f"init({name}=…)")
    text = os.environ.get(setting.variable)
    if text is not None:
        return _parsed(setting, text, setting.variable)
    if file and name in file:
        return _checked(setting, file[name], f"{FILE_NAME}: {name}")
    return setting.default


def unknown_variables() -> dict[str, str | None]:
    """Return the FANFOLD_* variables that nothing reads, each with the nearest one that something does."""
    known = [*(row.variable for row in _ROWS), *_OTHERS]
    found = sorted(name for name in os.environ if name.startswith("FANFOLD_") and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, 1, cutoff=0.8)), None) for name in found}


def _parsed(setting: Setting, text: str, origin: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError as error:
        raise SettingError(
            f"{origin} is {text!r}, which cannot be understood. The run was not started. {setting.meaning} Give {error}."
        ) from error


def _checked(setting: Setting, value: Any, origin: str) -> Any:
    """Let a value that is no text pass; text goes through the same parser as the environment."""
    return _parsed(setting, value, origin) if isinstance(value, str) else value


def read_file(directory: Path) -> dict[str, Any]:
    """Read `settings.toml` in `directory`; an unknown name is an error that lists the known ones."""
    path = directory / FILE_NAME
    if not path.is_file() or not _is_safe_file(path):
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not valid TOML: {error}. The run was not started. Mend or remove the file.") from error
    unknown = sorted(set(found) - set(TABLE))
    if unknown:
        raise SettingError(
            f"{path} has unknown settings: {', '.join(unknown)}. The run was not started. Known: {', '.join(TABLE)}."
        )
    return found


def is_address(given: object) -> bool:
    """Return whether a text names a store on a server rather than a directory."""
    return isinstance(given, str) and "://" in given


def store_address(argument: str | os.PathLike[str] | None = None) -> str | os.PathLike[str] | None:
    """Return what names the store of runs: the argument, else FANFOLD_DIR, else nothing."""
    return argument if argument is not None else os.environ.get(TABLE["dir"].variable)


def find_directory(argument: str | os.PathLike[str] | None = None, *, writing: bool = False) -> Path:
    """Find the directory of runs: the argument, FANFOLD_DIR, else the nearest .fanfold upward, else ./.fanfold.

    The address of a store on a server is refused; `stores.open_store` opens it for reading.
    """
    given = store_address(argument)
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
    folders = [folder / DIRECTORY_NAME for folder in (here, *here.parents)]
    found = [folder for folder in folders if os.path.isdir(folder)]  # noqa: PTH112 - Path.is_dir raises where a parent is closed
    return next(filter(_is_safe_directory, found), here / DIRECTORY_NAME)


def _owners(path: Path) -> set[int]:
    """Return who owns a path, and the link that it may be."""
    return {path.stat().st_uid, path.lstat().st_uid}


def _is_safe_directory(folder: Path) -> bool:
    """Return whether a folder found upward may be used: it is this user's or root's, or FANFOLD_SAFE_DIRECTORY names it."""
    strangers = _owners(folder) - {os.geteuid(), 0}
    safe = resolve("safe_directory")
    if not strangers or "*" in safe or any(Path(name).expanduser().absolute() == folder for name in safe):
        return True
    notices.once(
        f"owner:{folder}",
        f"{folder} belongs to another user ({_user(min(strangers))}), so it is not used: its settings could send your runs "
        f"elsewhere. To use it, set FANFOLD_DIR={folder} or FANFOLD_SAFE_DIRECTORY={folder}.",
    )
    return False


def _is_safe_file(path: Path) -> bool:
    """Return whether a settings file may be read: it is this user's, root's, or the one's who owns the directory it is in."""
    strangers = _owners(path) - {os.geteuid(), 0, path.parent.stat().st_uid}
    if not strangers:
        return True
    notices.once(
        f"owner:{path}",
        f"{path} belongs to another user ({_user(min(strangers))}) than its directory, so it is not read and its settings "
        "have no effect. Copy the file to make it yours, or remove it.",
    )
    return False


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container's user, or one of another machine
        return f"user id {uid}"


def cache_directory() -> Path:
    """Return the user's cache folder for derived data."""
    given = resolve("cache_dir")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fanfold"
