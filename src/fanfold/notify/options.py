"""Who is notified, and of what: from init(notify=…), FANFOLD_NOTIFY, or the user's own settings file.

Addresses contain secrets. They are never read from a directory of runs, and never written to one.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import SettingError, notices, outcome, shown, suggestion
from ..settings import read_toml
from . import VARIABLE, settings_file

LEVELS = ("info", "warning", "error")
MOST_ADDRESSES = 50
MOST_RULES = 200
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-3]):([0-5]\d)")
_BETWEEN = re.compile(
    r"\s+(?=[A-Za-z][A-Za-z0-9+.-]*:)"
)  # before the next address; an argument of a command has no colon so early


@dataclass(frozen=True)
class NotifyOptions:
    """The addresses, the lowest level they get, the hours in which only errors are sent, and rules that raise alerts."""

    to: tuple[str, ...] = ()
    level: str = "info"
    quiet: str = ""  # 22:00-07:00, in local time
    resumed: bool = False  # whether to report that a run was resumed
    rules: tuple[str, ...] = ()

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NotifyOptions:
        return checked(json.loads(text), "the notifier's settings")

    def is_quiet(self, minutes: int) -> bool:
        """Return whether a time of day, in minutes since midnight, is in the quiet hours."""
        match = _CLOCK.fullmatch(self.quiet)
        if match is None:
            return False
        start, stop = (int(match[n]) * 60 + int(match[n + 1]) for n in (1, 3))
        return start <= minutes < stop if start <= stop else not stop <= minutes < start


def read_options(argument: Any = None, *, file: Path | None = None) -> NotifyOptions:
    """Return what is configured; the argument's addresses replace those of the environment, and these those of the file.

    An argument is an address, a list of them, or a dict with any of the options. False or an empty list turns notifications off.
    `file` replaces the user's settings file, and then counts more than the environment.
    """
    found = _from_file(file or settings_file(), needed=file is not None)
    text = os.environ.get(VARIABLE)
    if text is not None and file is None:
        found = replace(found, to=checked({"to": _split(text)}, VARIABLE).to)
    if argument is None:
        return found
    if isinstance(argument, Mapping):
        given = checked(argument, "init(notify=…)")
        return replace(found, **{name: getattr(given, name) for name in argument})
    return replace(found, to=checked({"to": argument or []}, "init(notify=…)").to)


def checked(given: Mapping[str, Any], origin: str) -> NotifyOptions:
    """Return options, or raise SettingError. The message never contains an address, because addresses contain secrets."""
    known = tuple(asdict(NotifyOptions()))
    for name in given:
        if name not in known:
            raise SettingError(f"{origin} has an unknown option {shown(name)}. Nobody is notified.{suggestion(str(name), known)}")
    options = NotifyOptions(
        _texts(given.get("to", ()), f"{origin}: `to`", MOST_ADDRESSES),
        given.get("level", "info"),
        given.get("quiet") or "",
        given.get("resumed", False),
        _texts(given.get("rules", ()), f"{origin}: `rules`", MOST_RULES),
    )
    if options.level not in LEVELS:
        raise SettingError(f"{origin}: the level is {shown(options.level)}. Nobody is notified. Known: {', '.join(LEVELS)}.")
    if not isinstance(options.quiet, str) or (options.quiet and _CLOCK.fullmatch(options.quiet) is None):
        raise SettingError(f"{origin}: the quiet hours are {shown(options.quiet)}. Nobody is notified. Write 22:00-07:00.")
    if not isinstance(options.resumed, bool):
        raise SettingError(f"{origin}: `resumed` is {shown(options.resumed)}. Nobody is notified. Write true or false.")
    for number, address in enumerate(options.to, 1):
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", address) is None or not address.partition(":")[2].strip("/ "):
            raise SettingError(
                f"{origin}: address {number} is not an address. Nobody is notified. Write for example slack://…, "
                "mailto://…, https://… or cmd:…"
            )
    return options


def _texts(value: Any, origin: str, most: int) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(one, str) for one in listed):
        raise SettingError(f"{origin} is a {type(value).__name__}. Nobody is notified. Give a text or a list of texts.")
    if len(listed) > most:
        raise SettingError(f"{origin} has {len(listed)} entries. Nobody is notified. At most {most} are allowed.")
    return tuple(dict.fromkeys(one.strip() for one in listed if one.strip()))


def _split(text: str) -> Any:
    """Return the addresses in an environment variable: a JSON list, or texts separated by spaces or lines."""
    if text.lstrip().startswith("["):
        found, error = outcome(json.loads, text)
        if error is not None:
            raise SettingError(f"{VARIABLE} begins with [ and is not valid JSON. Nobody is notified. Correct it.") from None
        return found
    return [one for one in _BETWEEN.split(text.strip()) if one]


def _from_file(path: Path, *, needed: bool = False) -> NotifyOptions:
    try:
        facts = path.stat() if needed else path.lstat()  # a file the user names may be a link: Kubernetes mounts secrets as links
    except OSError as error:
        if needed:
            raise SettingError(f"{path} cannot be read: {error.strerror}. Nobody is notified.") from error
        return NotifyOptions()
    strange = facts.st_uid != os.geteuid() or facts.st_mode & 0o022
    if not needed and (not stat.S_ISREG(facts.st_mode) or strange):
        notices.once(
            f"settings:{path}",
            f"{path} is not a plain file that only you can write to, so it is not read and notifications in it are not sent. "
            f"Run: chmod 600 {path}",
        )
        return NotifyOptions()
    table = read_toml(path, ["notify"], "Nobody is notified.").get("notify", {})
    if not isinstance(table, dict):
        raise SettingError(f'{path}: notify is not a table. Nobody is notified. Write [notify] and below it to = ["…"].')
    return checked(table, str(path))
