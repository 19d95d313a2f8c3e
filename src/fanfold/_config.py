"""A run's config: a dict that can also be read by attribute, and whose changes go to the journal."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

from .errors import clean_text, guard, reading, type_name
from .values import items_of, text_of

MAX_DEPTH = 32
MAX_ITEMS = 1 << 17


class Plain:
    """Turns one object into plain data. It counts what it visits, so that nothing nested without end takes for ever."""

    def __init__(self) -> None:
        self.left = MAX_ITEMS
        self.path: list[Any] = []  # the containers we are inside of

    def of(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if kind is str:
            return clean_text(value)
        if kind is int and -(1 << 63) <= value < 1 << 63:
            return value
        self.left -= 1
        if depth > MAX_DEPTH or self.left < 0 or any(value is outer for outer in self.path):
            return "…"
        self.path.append(value)
        found, error = reading(lambda: self._of(value, depth))
        self.path.pop()
        return found if error is None else f"<{type_name(value)}>"

    def _of(self, value: Any, depth: int) -> Any:
        if isinstance(value, float):
            return float(value)
        if isinstance(value, enum.Enum):
            return self.of(value.value, depth + 1)
        if isinstance(value, int):
            whole = int(value)
            if -(1 << 63) <= whole < 1 << 64:
                return whole
            return str(whole) if whole.bit_length() < 4096 else f"<an integer of {whole.bit_length()} bits>"
        if isinstance(value, str):
            return text_of(value)
        if isinstance(value, Mapping):
            return {text_of(key): self.of(item, depth + 1) for key, item in items_of(value)}
        if isinstance(value, (list, tuple, set, frozenset)):
            items = [self.of(item, depth + 1) for item in itertools.islice(value, max(self.left, 0))]
            items += ["…"] if len(value) > len(items) else []
            return sorted(items, key=str) if isinstance(value, (set, frozenset)) else items
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {item.name: self.of(getattr(value, item.name), depth + 1) for item in dataclasses.fields(value)}
        if isinstance(value, os.PathLike):
            return clean_text(os.fsdecode(value))
        return self._of_object(value, depth)

    def _of_object(self, value: Any, depth: int) -> Any:
        """Turn arrays into numbers and lists, and everything else into a short text."""
        if hasattr(value, "tolist") and getattr(value, "size", None) is not None and hasattr(value, "dtype"):
            count = value.numel() if callable(getattr(value, "numel", None)) else value.size
            device = getattr(getattr(value, "device", None), "type", "cpu")
            if count <= 1024 and device == "cpu":
                return self.of(value.tolist(), depth + 1)
            return f"<{type(value).__name__} {tuple(value.shape)} {value.dtype}>"
        if isinstance(value, (bytes, bytearray)):
            return f"<{len(value)} bytes>"
        if isinstance(value, type) or callable(value):
            return text_of(f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}".lstrip("."))
        text, error = reading(lambda: str(value))
        return f"<{type(value).__name__}>" if error or text is None else text_of(text)[:4096]


def plain(value: Any) -> Any:
    """Return a copy made of dicts, lists, texts, numbers and None, whatever came in; never raise for a value."""
    return Plain().of(value)


def as_mapping(config: Any) -> dict[str, Any]:
    """Accept what people have: a mapping, a namespace, a dataclass, an object with to_dict()."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(items_of(config))
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    if callable(getattr(config, "to_dict", None)):
        return dict(config.to_dict())
    if hasattr(config, "__dict__"):
        return {key: value for key, value in vars(config).items() if not key.startswith("_")}
    raise TypeError(
        f"config is a {type(config).__name__}, which has no named values. The run was not started. "
        "Pass a dict, an argparse.Namespace or a dataclass."
    )


def _nobody(_config: Config) -> None:
    """Hear of a change to a copy of a config, which belongs to no run."""


class Config(dict[str, Any]):
    """The run's configuration. `config.lr`, `config["lr"]`, `config.update(...)`; each change is journalled at once.

    A change that cannot be made is a warning, as everywhere in a run; looking up a key that is missing raises, as in any dict.
    """

    def __init__(self, values: Mapping[str, Any], changed: Callable[[Config], None] = _nobody, *, strict: bool = False) -> None:
        super().__init__(values)
        object.__setattr__(self, "_changed", changed)
        object.__setattr__(self, "_strict", strict)

    def _change(self, action: Callable[[], Any]) -> Any:
        """Make a change and record it. One that is interrupted is undone, or its value would spoil every later change."""
        before, found, done = dict(self), None, False
        try:
            with guard("change the config", strict=self._strict):
                found = action()
                self._changed(self)
            done = True
        finally:
            if not done:
                super().clear()
                super().update(before)
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"config has no {name!r}; it has: {', '.join(map(text_of, self)) or 'nothing'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        self._change(lambda: super(Config, self).__setitem__(key, value))

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._change(lambda: None)

    def __ior__(self, other: Any) -> Config:  # type: ignore[override,misc]
        self.update(other)
        return self

    def update(self, *args: Any, allow_val_change: bool | None = None, **kwargs: Any) -> None:
        """Set many values at once. `allow_val_change` is wandb's; here a value may always change."""
        del allow_val_change
        self._change(lambda: super(Config, self).update(*(as_mapping(arg) for arg in args), **kwargs))

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self.get(key, default)

    def pop(self, *args: Any) -> Any:
        found = super().pop(*args)
        self._change(lambda: None)
        return found

    def popitem(self) -> tuple[str, Any]:
        found = super().popitem()
        self._change(lambda: None)
        return found

    def clear(self) -> None:
        self._change(lambda: super(Config, self).clear())

    def __reduce__(self) -> tuple[Any, ...]:
        return Config, (dict(self),)  # a copy, pickled or not, is no longer the run's
