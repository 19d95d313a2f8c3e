"""The options of init(), each checked once, against the settings table or the one below, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import describe, outcome, suggestion
from ..settings import Setting, parsed, read_file, resolve
from .config import as_mapping
from .forking import ForkPoint, fork_point

RELAYS = ("process", "thread")
REINITS = ("default", "return_previous", "finish_previous", "create_new")


class RunOptions(NamedTuple):
    """The options of a run: from arguments, then the environment, then the settings file, then defaults."""

    root: Path
    file: Mapping[str, Any]
    project: str
    id: str | None
    name: str | None
    group: str | None
    notes: str | None
    tags: tuple[str, ...]
    config: dict[str, Any]
    trackers: Any
    tracker_kwargs: Mapping[str, Mapping[str, Any]]
    fold: Mapping[str, str] | str | None
    relay: str
    resume: str
    durability: str
    console: bool
    system: bool
    energy: bool
    blackbox: bool | Mapping[str, Any] | None
    goodput: bool
    ops: bool | Mapping[str, Any]
    stamp: bool
    strict: bool
    quiet: bool
    server: str | None
    spool: str
    spool_dir: str | None
    notify: Any = None
    alerts: Any = None
    fork: ForkPoint | None = None


def _config(value: Any) -> dict[str, Any]:
    found, error = outcome(as_mapping, value)
    if found is None:
        why = "" if isinstance(error, TypeError) or error is None else f" (reading it raised {describe(error)})"
        raise ValueError(f"a dict, an argparse.Namespace or a dataclass{why}") from error
    return found


def _keywords(value: Any) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
        raise ValueError('a dict of dicts, one for each tracker, such as {"wandb": {"entity": "team"}}')
    return value


def _fold(value: Any) -> Mapping[str, str] | str:
    if not isinstance(value, (str, Mapping)):
        raise TypeError('a text such as "mean", or a dict such as {"loss": "mean"}')
    return value


def _notify(value: Any) -> Any:
    if not isinstance(value, (str, list, tuple, Mapping)) and value is not False:
        raise TypeError("an address, a list of them, or a dict such as {'to': ['slack://…'], 'level': 'warning'}")
    return value


def _rules(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(one, str) for one in listed):
        raise TypeError("a text such as 'loss is nan', or a list of them")
    return tuple(listed)


def _relay(value: Any) -> str:
    if value not in RELAYS:
        raise ValueError(f"one of them.{suggestion(str(value), RELAYS)}".rstrip("."))
    return str(value)


def _reinit(value: Any) -> Any:
    if not isinstance(value, bool) and value not in REINITS:
        raise ValueError(f"True, False or one of {', '.join(REINITS)}")
    return value


# Options that only init() has. The others are in the settings table.
ARGUMENTS = {
    row.name: row
    for row in (
        Setting("alerts", _rules, (), "Rules that raise an alert, such as 'loss is nan'."),
        Setting("config", _config, {}, "The run's config."),
        Setting("fold", _fold, None, "Which metrics go to trackers as one number over all ranks."),
        Setting("fork", fork_point, None, "The run that this one continues, and from which step: RUN@STEP."),
        Setting("notify", _notify, None, "Who is told about alerts and the end of the run."),  # see notify/options.py
        Setting("reinit", _reinit, None, "create_new keeps several runs of a notebook open."),
        Setting("relay", _relay, "process", "Where trackers are served from: processes of their own, or a thread of this one."),
        Setting("tracker_kwargs", _keywords, {}, "Arguments for trackers, by name."),
        Setting("trackers", lambda value: value, None, "Where else the run goes."),  # see relay/attach.py
    )
}


def read_argument(name: str, value: Any) -> Any:
    """Return the checked value of an option that only init() has."""
    row = ARGUMENTS[name]
    return row.default if value is None else parsed(row, value, f"init({name}=…)")


def read_options(root: Path, given: Mapping[str, Any], *, file: Mapping[str, Any] | None = None) -> RunOptions:
    """Check every option of init() and fill in those left out; `file` replaces the settings file of the directory."""
    file = read_file(root) if file is None else file
    values: dict[str, Any] = {"root": root, "file": file}
    for name in (field for field in RunOptions._fields if field not in values):
        value = given.get(name)
        if name in ARGUMENTS:
            values[name] = read_argument(name, value)
        else:
            one_tag = name == "tags" and isinstance(value, str)  # commas separate tags in the environment only
            values[name] = resolve("run_id" if name == "id" else name, (value,) if one_tag else value, file=file)
    return RunOptions(**values)
