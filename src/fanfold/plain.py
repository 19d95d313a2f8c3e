"""Plain data: dicts, lists, texts, numbers and None, converted from any object a user passes."""

from __future__ import annotations

import enum
import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

from .errors import clean_text, reading, type_name
from .values import items_of, text_of

MAX_DEPTH = 32
MAX_ITEMS = 1 << 17


class Plain:
    """A converter of one object to plain data. It counts the items it visits, so that endless nesting cannot run forever."""

    def __init__(self) -> None:
        self.left = MAX_ITEMS
        self.path: list[Any] = []  # the containers being visited

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
        if hasattr(type(value), "__dataclass_fields__"):
            import dataclasses

            return {item.name: self.of(getattr(value, item.name), depth + 1) for item in dataclasses.fields(value)}
        if isinstance(value, os.PathLike):
            return clean_text(os.fsdecode(value))
        return self._of_object(value, depth)

    def _of_object(self, value: Any, depth: int) -> Any:
        """Convert arrays to numbers and lists, and anything else to a short text."""
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
    """Return a copy made of dicts, lists, texts, numbers and None; never raise, whatever the value."""
    return Plain().of(value)


def json_safe(value: Any) -> Any:
    """Return a value as JSON can hold it: NaN and infinities become their names, bytes their length, other objects text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(name): json_safe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(item) for item in value]
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return json_safe(value.tolist()) if hasattr(value, "tolist") else str(value)


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal; NaN, the one value that differs from itself, equals NaN."""
    return bool(a == b or (a != a and b != b))  # noqa: PLR0124 - true of NaN alone


def from_json(value: Any) -> Any:
    """Return a value of JSON; a text that spells NaN or an infinity, as json_safe() writes them, becomes the number again."""
    return float(value) if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity") else value


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return a nested config flattened to one level, with names joined by dots: model.dim."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{before}{name}."))
        else:
            found[f"{before}{name}"] = value
    return found
