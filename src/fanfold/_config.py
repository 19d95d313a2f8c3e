"""A run's config: a dict that is also read by attribute, and that tells the journal when it changes."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import os
from collections.abc import Callable, Mapping
from typing import Any

from .errors import outcome
from .values import clean_text

MAX_DEPTH = 32


def plain(value: Any, depth: int = 0) -> Any:
    """Return a copy made of dicts, lists, texts, numbers and None, whatever came in; never raise for a value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, enum.Enum):
        return plain(value.value, depth + 1)
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else str(value)
    if isinstance(value, str):
        return clean_text(str(value))
    if depth > MAX_DEPTH:
        return "…"
    return _plain_container(value, depth)


def _plain_container(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return {clean_text(str(key)): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, depth + 1) for item in value), key=str)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name), depth + 1) for item in dataclasses.fields(value)}
    if isinstance(value, os.PathLike):
        return clean_text(os.fsdecode(value))
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
        return str(value)
    return _plain_object(value, depth)


def _plain_object(value: Any, depth: int) -> Any:
    """Turn arrays into numbers and lists, and everything else into a short text."""
    if hasattr(value, "tolist") and getattr(value, "size", None) is not None and hasattr(value, "dtype"):
        count = value.numel() if callable(getattr(value, "numel", None)) else value.size
        device = getattr(getattr(value, "device", None), "type", "cpu")
        if count <= 1024 and device == "cpu":
            return plain(value.tolist(), depth + 1)
        return f"<{type(value).__name__} {tuple(value.shape)} {value.dtype}>"
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value)} bytes>"
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}".lstrip(".")
    text, error = outcome(lambda: str(value))
    return f"<{type(value).__name__}>" if error or text is None else clean_text(text)[:4096]


def as_mapping(config: Any) -> dict[str, Any]:
    """Accept what people have: a mapping, a namespace, a dataclass, an object with to_dict()."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
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


class Config(dict[str, Any]):
    """The run's configuration. `config.lr`, `config["lr"]`, `config.update(...)`; each change is journalled at once."""

    def __init__(self, values: Mapping[str, Any], changed: Callable[[Config], None]) -> None:
        super().__init__(values)
        object.__setattr__(self, "_changed", changed)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"config has no {name!r}; it has: {', '.join(self) or 'nothing'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._changed(self)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._changed(self)

    def update(self, *args: Any, allow_val_change: bool | None = None, **kwargs: Any) -> None:
        """Set many values at once. `allow_val_change` is wandb's; here a value may always change."""
        del allow_val_change
        super().update(*(as_mapping(arg) for arg in args), **kwargs)
        self._changed(self)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]
