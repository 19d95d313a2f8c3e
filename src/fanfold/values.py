"""What may be logged, and how a call is taken apart: numbers, texts, media, and numbers still on a device.

Nothing heavy is imported: a numpy, torch or JAX value is known by its type's module, and those libraries are in the
process already when one arrives.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ValueRefused, notices

LONG_TEXT = 1 << 16
_I64 = range(-(1 << 63), 1 << 63)
_codes: dict[type, str | None] = {float: "d", int: "q", bool: "?"}


def code_of(kind: type) -> str | None:
    """Return how a number of this type is packed: d (f64), q (i64), ? (bool); None if it is no plain number."""
    if kind not in _codes:
        _codes[kind] = _find_code(kind)
    return _codes[kind]


def _find_code(kind: type) -> str | None:
    if issubclass(kind, bool) or (kind.__name__ in ("bool_", "bool") and kind.__module__ == "numpy"):
        return "?"
    if issubclass(kind, numbers.Integral):
        return "q"
    if issubclass(kind, numbers.Real) or kind.__module__ == "decimal":
        return "d"
    if kind.__module__ == "ml_dtypes" and hasattr(kind, "__float__"):
        return "q" if "int" in kind.__name__ else "d"
    return None


@dataclass
class Parts:
    """One call's values by what they are."""

    numbers: dict[str, Any] = field(default_factory=dict)
    types: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    media: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    plain: bool = True  # numbers under their own keys and nothing else: the fast path can take the next such call
    direct: bool = True  # every value stands under its own key as it came: nothing nested, renamed or refused

    def add_number(self, key: str, value: Any, code: str) -> None:
        if code == "q":
            value = int(value)
            if value not in _I64:
                self.plain = False
                notices.once(
                    f"int64:{key}",
                    f"{key!r} is an integer beyond 64 bits; it is logged as a float, which may round it.",
                )
                code, value = "d", _float(value)
        elif code == "d":
            value = _float(value)
        self.numbers[key] = value
        self.types.append(code)

    def drop_earlier(self, key: str) -> None:
        """Let the last value count where a call spells a key twice: {"a/b": 1, "a": {"b": 2}}."""
        places: tuple[dict[str, Any], ...] = (self.numbers, self.texts, self.media, self.device)
        if not any(key in found for found in places):
            return
        notices.once(f"twice:{key}", f"{key!r} is twice in one log() call; the last value counts. Rename one of them.")
        if key in self.numbers:
            del self.types[list(self.numbers).index(key)]
        for found in places:
            found.pop(key, None)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    except ValueError:  # a signalling NaN of Decimal
        return float("nan")


def clean_text(text: str) -> str:
    """Return text that UTF-8 can hold: a lone surrogate becomes its escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, leaf) of nested mappings, keys joined by `/`."""
    for key, value in values.items():
        name = prefix + (key if type(key) is str else str(key))
        if isinstance(value, Mapping):
            yield from flatten(value, name + "/")
        else:
            yield name, value


def split(values: Mapping[Any, Any], *, strict: bool = False) -> Parts:
    """Take a call apart. A value of an unknown kind is said once per (key, type), or raised under `strict`."""
    if not isinstance(values, Mapping):
        raise TypeError(
            f"log() takes a dict of values, not {type(values).__name__}. Nothing was logged. Write run.log({{'name': value}})."
        )
    parts = Parts()
    for name, value in flatten(values):
        key = clean_text(name)
        code = code_of(type(value))
        parts.direct = parts.direct and values.get(key) is value
        if not parts.direct:
            parts.drop_earlier(key)
        if code is not None:
            parts.add_number(key, value, code)
        else:
            parts.plain = False
            _sort(parts, key, value, strict)
    parts.plain = parts.plain and parts.direct
    return parts


def _sort(parts: Parts, key: str, value: Any, strict: bool) -> None:
    if isinstance(value, str):
        _sort_text(parts, key, value)
        return
    family = type(value).__module__.partition(".")[0]
    why = ""
    if family == "torch" and hasattr(value, "device"):
        why = _sort_tensor(parts, key, value)
    elif family in ("jax", "jaxlib") and hasattr(value, "aval"):
        why = _sort_jax(parts, key, value)
    elif family in ("numpy", "cupy") and getattr(value, "size", 0) == 1:
        why = _sort_item(parts, key, value.item())
    else:
        why = _sort_media(parts, key, value)
    if why:
        parts.direct = False
        _refuse(key, value, why, strict)


def _sort_text(parts: Parts, key: str, value: str) -> None:
    text = clean_text(value)
    if len(text) > LONG_TEXT:
        from .media import Text

        parts.media[key] = Text(text)
    else:
        parts.texts[key] = text


def _sort_item(parts: Parts, key: str, item: Any) -> str:
    code = code_of(type(item))
    if code is None:
        return "it is no real number"
    parts.add_number(key, item, code)
    return ""


def _sort_tensor(parts: Parts, key: str, value: Any) -> str:
    if type(value).__name__ == "DTensor":
        if not all(placement.is_replicate() for placement in value.placements):
            return "it is sharded over ranks, and fanfold never calls a collective: log .full_tensor() or the local part"
        value = value.to_local()
    if value.device.type == "meta":
        return "it is on the meta device and has no value"
    if value.numel() != 1:
        return _sort_media(parts, key, value)
    if value.is_complex():
        return "it is no real number"
    if value.device.type != "cpu":
        parts.device[key] = value
        return ""
    try:
        return _sort_item(parts, key, value.item())
    except RuntimeError as error:  # functorch and fake tensors have no value to give
        return f"it has no value now ({error})".replace("\n", " ")


def _sort_jax(parts: Parts, key: str, value: Any) -> str:
    if any(base.__name__ == "Tracer" for base in type(value).__mro__):
        return "it is a tracer inside a jit-compiled function: return it from the function and log it outside"
    if not value.is_fully_addressable and not value.is_fully_replicated:
        return "it is sharded over processes, and fanfold never calls a collective: log a replicated value or a local part"
    if value.size != 1:
        return _sort_media(parts, key, value)
    parts.device[key] = value
    return ""


def _sort_media(parts: Parts, key: str, value: Any) -> str:
    from .media import coerce

    try:
        found = coerce(value)
    except (TypeError, ValueError) as error:
        return str(error)
    if found is None:
        return "it is no number, text or media, and nothing known converts it"
    parts.media[key] = found
    return ""


def _refuse(key: str, value: Any, why: str, strict: bool) -> None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    message = (
        f"{key!r} of type {kind} was not logged: {why}. The other values of the call were. "
        "Log a number, a string, or wrap it: fanfold.Image, Histogram, Table, Html, Text, …"
    )
    if strict:
        raise ValueRefused(message)
    notices.once(f"refused:{key}:{kind}", message)
