"""Loggable values, and how a call is split: numbers, texts, media, and numbers still on a device.

Reading a value may do anything (raise, recurse into itself, lie about its type). Each is read separately, so that a bad
value is rejected alone and the other values of the call are recorded.

Nothing heavy is imported: numpy, torch and JAX values are recognised by their type's module, and those libraries are
already loaded when such a value arrives.
"""

from __future__ import annotations

import itertools
import numbers
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from .errors import ValueRefused, clean_text, describe, notices, outcome, reading, type_name

LONG_TEXT = 1 << 16
MAX_DEPTH = 64  # levels of nested mappings
MAX_VALUES = 1 << 19  # per call
_I64 = range(-(1 << 63), 1 << 63)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_short = reprlib.Repr().repr
_SINGLE = re.compile(r"(torch\.)?(float32|float16|bfloat16|float[468]_\w+)")
_codes: dict[type, str | None] = {float: "d", int: "q", bool: "?"}


def code_of(kind: type) -> str | None:
    """Return the packing code of a number type: d (f64), f (f32), q (i64), ? (bool); None if it is not a plain number."""
    if kind not in _codes:
        _codes[kind] = _find_code(kind)
    return _codes[kind]


def _find_code(kind: type) -> str | None:
    if issubclass(kind, bool) or (kind.__name__ in ("bool_", "bool") and kind.__module__ == "numpy"):
        return "?"
    if issubclass(kind, numbers.Integral):
        return "q"
    if kind.__module__ in ("numpy", "ml_dtypes") and (code := code_of_dtype(kind.__name__)):
        return code
    if issubclass(kind, numbers.Real) or kind.__module__ == "decimal":
        return "d"
    if kind.__module__ == "ml_dtypes" and hasattr(kind, "__float__"):
        return "q" if "int" in kind.__name__ else "d"
    return None


def code_of_dtype(dtype: Any) -> str | None:
    """Return "f" if every number of this dtype is also a float32, else None."""
    return "f" if _SINGLE.fullmatch(str(dtype)) else None


class Parts:
    """The values of one call, grouped by kind."""

    def __init__(self) -> None:
        self.numbers: dict[str, Any] = {}
        self.types: list[str] = []
        self.texts: dict[str, str] = {}
        self.media: dict[str, Any] = {}
        self.device: dict[str, Any] = {}
        self.plain = True  # only numbers under their own keys: the fast path can take the next such call
        self.direct = True  # every value is under its original key: nothing nested, renamed or rejected
        self.signature: tuple[Any, ...] = ()  # the keys and value types, as the fast path looks them up

    def add_number(self, key: str, value: Any, code: str) -> None:
        if code == "q":
            value = int(value)
            if value not in _I64:
                self.plain = False
                notices.once(
                    f"int64:{key}",
                    f"{key!r} is an integer beyond 64 bits. It is logged as a float, which may round it.",
                )
                code, value = "d", _float(value)
        elif code in "df":
            value = _float(value)
        self.numbers[key] = value
        self.types.append(code)

    def drop_earlier(self, key: str) -> None:
        """Keep only the last value if a call contains a key twice: {"a/b": 1, "a": {"b": 2}}."""
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


def text_of(value: Any) -> str:
    """Return str(value) as a plain str that can be encoded as UTF-8; the name of its type if that fails."""
    # A container that contains itself repeatedly would give an endless text.
    text, error = reading(lambda: clean_text("".join((_short(value) if isinstance(value, _CONTAINERS) else str(value),))))
    return f"<{type_name(value)}>" if error or text is None else text


class Leaf(NamedTuple):
    """One value of a call; `refused` is the reason it cannot be logged."""

    key: str
    value: Any
    direct: bool = False
    refused: str = ""


def leaves(items: list[tuple[Any, Any]]) -> Iterator[Leaf]:
    """Yield the values of a call; keys of nested mappings are joined by `/`."""
    left = MAX_VALUES
    stack: list[tuple[str, Iterator[tuple[Any, Any]], Any]] = [("", iter(items), None)]
    while stack and left:
        prefix, rest, _ = stack[-1]
        key, value = next(rest, (stack, None))
        if key is stack:  # the end of this mapping
            stack.pop()
            continue
        left -= 1
        name = key if type(key) is str else text_of(key)
        nested, _ = outcome(isinstance, value, Mapping)
        if not nested:
            yield Leaf(prefix + name, value, direct=not prefix and name is key)
        elif any(value is mapping for _, _, mapping in stack):
            yield Leaf(prefix + name, value, refused="it contains itself")
        elif len(stack) > MAX_DEPTH:
            yield Leaf(prefix + name, value, refused=f"it is nested more than {MAX_DEPTH} levels deep")
        else:
            inner, error = outcome(items_of, cast("Mapping[Any, Any]", value))
            if error is not None or inner is None:
                yield Leaf(prefix + name, value, refused=f"reading it raised {describe(error) if error else 'nothing'}")
            else:
                stack.append((prefix + name + "/", iter(inner), value))
    if stack:
        yield Leaf(stack[-1][0] + "…", None, refused=f"one call holds at most {MAX_VALUES:,} values")


def flatten(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) pairs of nested mappings, keys joined by `/`."""
    return ((leaf.key, leaf.value) for leaf in leaves(items_of(values)))


def check_mapping(values: Any) -> None:
    """Raise TypeError if log() was not given a dict."""
    if not outcome(isinstance, values, Mapping)[0]:
        raise TypeError(
            f"log() takes a dict of values, not {type_name(values).removeprefix('builtins.')}. Nothing was logged. "
            "Write run.log({'name': value})."
        ) from None


def items_of(values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return a snapshot of a mapping's items: another thread may be changing it, and it may be endless."""
    for _ in range(3):
        found, error = outcome(lambda: list(itertools.islice(values.items(), MAX_VALUES)))
        if not isinstance(error, RuntimeError):  # it changed size while being read
            break
    if error is not None or found is None:
        raise error or TypeError("a mapping without items")
    return [(key, value) for key, value in found]


def split(values: Mapping[Any, Any], *, strict: bool = False) -> Parts:
    """Split a call. A value that cannot be logged gives one warning per (key, type), or raises under `strict`."""
    check_mapping(values)
    items = items_of(values)
    parts = Parts()
    parts.signature = (*(key for key, _ in items), *(type(value) for _, value in items))
    for name, value, direct, refused in leaves(items):
        key = clean_text(name)
        parts.direct = parts.direct and direct and key is name
        if not parts.direct or key in parts.numbers:
            parts.drop_earlier(key)
        kind = type(value)
        if kind is float or kind is int:
            parts.add_number(key, value, "d" if kind is float else "q")
            continue
        why: str | None = refused
        if not why:
            why, error = reading(lambda key=key, value=value: _sort(parts, key, value))  # type: ignore[misc]
            why = f"looking at it raised {describe(error)}" if error is not None else why
        if why:
            parts.plain = parts.direct = False
            _refuse(key, value, why, strict)
    parts.plain = parts.plain and parts.direct and len(items) == len(parts.numbers)
    return parts


def _sort(parts: Parts, key: str, value: Any) -> str:
    """Add a value to its group; return the reason if it cannot be logged."""
    code = code_of(type(value))
    if code is not None:
        parts.add_number(key, value, code)
        return ""
    parts.plain = False
    if isinstance(value, str):
        _sort_text(parts, key, value)
        return ""
    family = str(type(value).__module__).partition(".")[0]
    if family == "torch" and hasattr(value, "device"):
        return _sort_tensor(parts, key, value)
    if family in ("jax", "jaxlib") and hasattr(value, "aval"):
        return _sort_jax(parts, key, value)
    if family in ("numpy", "cupy") and getattr(value, "size", 0) == 1:
        return _sort_item(parts, key, value.item(), value.dtype)
    return _sort_media(parts, key, value)


def _sort_text(parts: Parts, key: str, value: str) -> None:
    text = clean_text("".join((value,)))
    if len(text) > LONG_TEXT:
        from .media import Text

        parts.media[key] = Text(text)
    else:
        parts.texts[key] = text


def _sort_item(parts: Parts, key: str, item: Any, dtype: Any) -> str:
    code = code_of(type(item))
    if code is None:
        return "it is not a real number"
    parts.add_number(key, item, (code == "d" and code_of_dtype(dtype)) or code)
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
        return "it is not a real number"
    if value.device.type != "cpu":
        parts.device[key] = value
        return ""
    try:
        return _sort_item(parts, key, value.item(), value.dtype)
    except RuntimeError as error:  # functorch and fake tensors have no value
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
    from .media.arrays import is_array

    try:
        found = coerce(value)
    except (TypeError, ValueError) as error:
        return str(error)
    if found is None and isinstance(value, (list, tuple)) and any(is_array(one) for one in value[:MAX_VALUES]):
        return (
            "a list of arrays may be images, or data: one array by itself is a histogram. "
            "For images, write [fanfold.Image(one) for one in arrays]; for one histogram, join the arrays"
        )
    if found is None:
        return "its type is not supported"
    parts.media[key] = found
    return ""


def _refuse(key: str, value: Any, why: str, strict: bool) -> None:
    kind = type_name(value)
    message = (
        f"{key!r} of type {kind} was not logged: {why}. The other values of the call were. "
        "Log a number, a string, or wrap it: fanfold.Image, Histogram, Table, Html, Text, …"
    )
    if strict:
        raise ValueRefused(message)
    notices.once(f"refused:{key}:{kind}", message)
