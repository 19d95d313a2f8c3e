"""The available trackers: a table of built-in ones, the dict Accelerate uses, and entry points of other packages."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import warnings
from collections import UserDict
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from ..errors import logger, missing_extra, notices
from .base import GeneralTracker, is_tracker, tracker_bases
from .destination import Destination
from .face import tracker_class as with_face
from .face import tracker_of

ENTRY_POINTS = "fanfold.trackers"


class BuiltinTracker(NamedTuple):
    """A built-in tracker: the module of its class, the library it needs, and the extra that installs it."""

    name: str
    module: str
    cls: str
    libraries: tuple[str, ...]  # any one of these suffices; of several words, all are needed
    extra: str


TABLE = tuple(
    sorted(
        (
            BuiltinTracker("aim", "aim", "AimTracker", ("aim",), "aim"),
            BuiltinTracker("azure_ml", "azureml", "AzureMLTracker", ("azureml.core",), "azureml"),
            BuiltinTracker("clearml", "clearml", "ClearMLTracker", ("clearml",), "clearml"),
            BuiltinTracker("comet_ml", "comet", "CometMLTracker", ("comet_ml",), "comet_ml"),
            BuiltinTracker("dagshub", "dagshub", "DagsHubTracker", ("dagshub",), "dagshub"),
            BuiltinTracker("dvclive", "dvclive", "DVCLiveTracker", ("dvclive",), "dvclive"),
            BuiltinTracker("flyte", "flyte", "FlyteTracker", ("flytekit",), "flyte"),
            BuiltinTracker("mlflow", "mlflow", "MLflowTracker", ("mlflow",), "mlflow"),
            BuiltinTracker("neptune", "neptune", "NeptuneTracker", ("neptune",), "neptune"),
            BuiltinTracker("swanlab", "swanlab", "SwanLabTracker", ("swanlab",), "swanlab"),
            BuiltinTracker(
                "tensorboard", "tensorboard", "TensorBoardTracker", ("tensorboardX", "tensorboard torch"), "tensorboard"
            ),
            BuiltinTracker("trackio", "trackio", "TrackioTracker", ("trackio",), "trackio"),
            BuiltinTracker("wandb", "wandb", "WandBTracker", ("wandb",), "wandb"),
        )
    )
)
ROWS = {row.name: row for row in TABLE}


class _Contains(enum.EnumMeta):
    """An enum metaclass that makes `"wandb" in LoggerType` test for a value on every Python version."""

    def __contains__(cls, item: object) -> bool:
        members: list[enum.Enum] = list(cls.__members__.values())
        return any(item in (member, member.value) for member in members)


class LoggerType(enum.Enum, metaclass=_Contains):
    """The trackers by name; `str(LoggerType.WANDB)` is the name."""

    ALL = "all"
    AIM = "aim"
    AZUREML = "azure_ml"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    DAGSHUB = "dagshub"
    DVCLIVE = "dvclive"
    FLYTE = "flyte"
    MLFLOW = "mlflow"
    NEPTUNE = "neptune"
    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"

    def __str__(self) -> str:
        return str(self.value)

    def __eq__(self, other: object) -> bool:
        """Compare equal to Accelerate's member of the same name: scripts compare the two."""
        return self is other or (_is_logger_type(other) and str(other) == self.value)

    def __hash__(self) -> int:
        return hash(self.name)

    @classmethod
    def _missing_(cls, value: object) -> LoggerType | None:
        return cls(str(value)) if _is_logger_type(value) and str(value) in cls else None

    @classmethod
    def list(cls) -> list[str]:
        return [str(member) for member in cls]


def _is_logger_type(value: object) -> bool:
    """Return whether something is a member of a LoggerType, ours or Accelerate's."""
    return isinstance(value, enum.Enum) and type(value).__name__ == "LoggerType"


class _Registry(UserDict[str, Any]):
    """name → class. Built-in classes are imported on first use; entries may be added or replaced."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, BuiltinTracker):
            self[name] = found = getattr(importlib.import_module(f".{found.module}", __package__), found.cls)
        return found


LOGGER_TYPE_TO_CLASS = _Registry(ROWS)


def installed(name: str) -> bool:
    """Return whether a built-in tracker's library can be imported, without importing it."""
    row = ROWS.get(name)
    return row is not None and any(all(map(_found, library.split())) for library in row.libraries)


def _found(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None  # a folder `wandb` left by a run is also found, but has no origin


def get_available_trackers() -> list[LoggerType]:
    """Return the built-in trackers whose library is installed."""
    return [LoggerType(row.name) for row in TABLE if installed(row.name)]


def without_setup(names: Iterable[str], asked: str, known: Mapping[str, str | None] | None = None) -> list[str]:
    """Return the trackers that work without further setup, and log one warning that names the others.

    `asked` is what the user wrote; `known` gives the reasons against some trackers, or None for none.
    """
    why = {name: known[name] if known and name in known else _unusable(name) for name in names}
    if left_out := [f"{name} ({reason})" for name, reason in why.items() if reason]:
        logger.warning("%s leaves out trackers that need setting up first: %s.", asked, ", ".join(left_out))
    return [name for name, reason in why.items() if not reason]


def _unusable(name: str) -> str | None:
    """Return why a tracker cannot be used as things are; a tracker of the user's own cannot tell."""
    reason: str | None = getattr(LOGGER_TYPE_TO_CLASS[name], "unusable", lambda: None)()
    return reason


def load_entry_points() -> None:
    """Add the trackers of other packages: entry points of the group `fanfold.trackers`, name = class."""
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name not in LOGGER_TYPE_TO_CLASS:
            LOGGER_TYPE_TO_CLASS[point.name] = with_face(point.load())


def _known(name: str) -> bool:
    """Return whether there is a tracker of this name, here or in another installed package."""
    if name not in LOGGER_TYPE_TO_CLASS:
        load_entry_points()
    return name in LOGGER_TYPE_TO_CLASS


def find_class(name: str) -> Any:
    """Return a tracker's class by name, or raise an error that lists the known names or what to install."""
    if not _known(name):
        known = list(dict.fromkeys([*LoggerType.list(), *LOGGER_TYPE_TO_CLASS]))
        raise ValueError(f"Unsupported logging capability: {name}. Choose between {known}")
    row = ROWS.get(name)
    found = LOGGER_TYPE_TO_CLASS[name]
    if row is not None and found.__module__.startswith("fanfold.") and not installed(name):
        raise missing_extra(row.libraries[0], row.extra, f"The tracker {name!r}")
    return found


def register_tracker_class(tracker_class: type[GeneralTracker | Destination]) -> None:
    """Make a tracker class, or a destination, usable by its name."""
    tracker_class = with_face(tracker_class)
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, tracker_bases())):
        raise ValueError(f"`tracker_class` must be a subclass of `GeneralTracker`, but got {tracker_class}.")  # noqa: TRY004 - as Accelerate
    name = getattr(tracker_class, "name", None)
    if not name:
        raise ValueError("The tracker class to register must define a non-empty `name` attribute.")
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            "The tracker class to register must define a `requires_logging_directory` class attribute. "
            "Set it to `True` if the tracker needs a logging directory, or `False` otherwise."
        )
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"A tracker with the name '{name}' is already registered and will be overwritten by "
            f"{tracker_class}. This is especially significant when shadowing a built-in tracker.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the usable ones of the requested trackers: names, LoggerType members, tracker objects, or "all"."""
    if log_with is None:
        return []
    wanted = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    if any(item == "all" or (_is_logger_type(item) and str(item) == "all") for item in wanted):
        own = [item for item in wanted if is_tracker(item) or (isinstance(item, str) and item not in {*ROWS, "all"})]
        usual = [item for item in get_available_trackers() if logging_dir is not None or not _needs_directory(str(item))]
        return filter_trackers(own, logging_dir) + usual
    chosen: list[Any] = []
    for item in map(tracker_of, wanted):
        if is_tracker(item):
            chosen.append(item)
        elif (found := _checked(item, logging_dir)) is not None and found not in chosen:
            chosen.append(found)
    return chosen


def _needs_directory(name: str) -> bool:
    return bool(LOGGER_TYPE_TO_CLASS[name].requires_logging_directory)


def _checked(item: Any, logging_dir: Any) -> Any:
    name = str(item) if isinstance(item, (str, enum.Enum)) else None
    if name is None or not _known(name):
        raise ValueError(f"Unsupported logging capability: {item}. Choose between {LoggerType.list()}")
    if name in ROWS and not installed(name):
        row = ROWS[name]
        notices.once(
            f"not installed:{name}",
            f"the tracker {name!r} was requested, but {row.libraries[0]} is not installed. The run continues without it. "
            f"Run: pip install 'fanfold[{row.extra}]'",
        )
        return None
    if _needs_directory(name) and logging_dir is None:
        raise ValueError(f"Logging with `{name}` requires a `logging_dir` to be passed in.")
    return LoggerType(name) if name in ROWS else name
