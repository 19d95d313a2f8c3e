"""One interface for all destinations: `Tracker` turns any `Destination` into a tracker for Accelerate and its users."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any, ClassVar, cast

from .. import media
from .base import GeneralTracker, Identity, on_main_process
from .destination import Destination

_SHARED = ("name", "requires_logging_directory", "main_process_only", "delivery", "delivery_online", "layouts", "unusable")


class Tracker(GeneralTracker):
    """A tracker for Accelerate and its users, wrapping a destination; arguments and attributes are the destination's.

    Each built-in system has a subclass under its name in Accelerate, with the methods only that system offers.
    """

    destination_class: ClassVar[type[Destination]]
    destination: Destination

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "destination_class" in cls.__dict__:
            for name in _SHARED:
                setattr(cls, name, getattr(cls.destination_class, name))
            cls.__doc__ = cls.__doc__ or cls.destination_class.__doc__
        made = vars(cls).get("__init__")
        cls.__signature__ = inspect.signature(functools.partial(made, None) if made else cls.destination_class)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.face(self.destination_class(*args, **kwargs))

    def face(self, destination: Destination) -> None:
        """Wrap a destination."""
        vars(self).update(destination=destination, _opened_for=(None, None))

    def __getattr__(self, name: str) -> Any:
        if name in ("destination", "__setstate__"):  # not set yet
            raise AttributeError(name)
        return getattr(self.destination, "run" if name == self.destination.own_name else name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.destination, name, value)

    @property
    def tracker(self) -> Any:
        return self.destination.tracker

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        """Open the destination through a subclass's own methods; used if it overrides any."""
        self._opened_for = identity, remote
        self.start()

    @on_main_process
    def start(self) -> None:
        self.destination.open(*self._opened_for)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.destination.set_config(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values immediately. Values the system will never accept are left out with a warning; the others are recorded."""
        self.destination.warn_refused(self.destination.record(values, step, kwargs))

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record a list of images under each key."""
        image = self._media("Image")
        self.log({key: [image(one) for one in images] for key, images in values.items()}, step, **kwargs)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str] | None = None, data: list[list[Any]] | None = None, dataframe: Any = None,
        step: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Record a table of columns and rows, or a data frame."""
        table = self._media("Table")(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step, **kwargs)

    def _media(self, name: str) -> Any:
        """Return the media class for users' calls: the library's own where it accepts more than ours."""
        return getattr(self.destination.library if name in self.destination.own_media else media, name)

    @on_main_process
    def finish(self) -> None:
        self.destination.finish()


@functools.cache
def _face_of(cls: Any) -> type[Tracker]:
    facts = {"destination_class": cls, "shared": True, "__module__": cls.__module__}
    return type(f"{cls.__name__}Tracker", (Tracker,), facts)


def tracker_class(cls: Any) -> Any:
    """Return a tracker class: a destination class is wrapped in the shared interface, any other is returned as it is."""
    plain = isinstance(cls, type) and issubclass(cls, Destination)  # apart, or mypy asks whether such a class can be hashed
    return _face_of(cls) if plain else cls


def tracker_of(item: Any) -> Any:
    """Return a tracker object: a destination is wrapped, anything else is returned as it is."""
    if not isinstance(item, Destination):
        return item
    tracker: Tracker = object.__new__(tracker_class(type(item)))
    tracker.face(item)
    return tracker


def destination_of(tracker: Any) -> Destination | None:
    """Return the destination the relay serves behind a tracker; None for a user-written GeneralTracker."""
    if not isinstance(tracker, Tracker):
        return None
    return cast("Destination", tracker) if _changed(type(tracker)) else tracker.destination


def _changed(cls: type[Tracker]) -> bool:
    """Return whether a subclass of a tracker overrides methods that a relay calls; those are then used."""
    derived = itertools.takewhile(lambda one: "destination_class" not in vars(one), cls.__mro__)
    replaced = {name for one in derived for name in vars(one) if not name.startswith("_")}
    return bool(replaced & {*dir(Destination), "start"})


def own_class(cls: Any) -> Any:
    """Return the class its author wrote: the destination's if its tracker class was generated here."""
    return cls.destination_class if "shared" in vars(cls) else cls
