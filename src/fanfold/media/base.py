"""The interface of all media: snapshot in the caller, encode elsewhere, decode from untrusted bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from fanfold.errors import JournalError, clean_text

if TYPE_CHECKING:
    from typing_extensions import Self

E = TypeVar("E", TypeError, ValueError)

# Errors that parsers raise on malformed bytes; listed here because a blob may hold anything.
UNREADABLE: tuple[type[Exception], ...] = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, SyntaxError, TypeError,
    ValueError, struct.error, zlib.error,
)  # fmt: skip


class Encoded(NamedTuple):
    """The form written to disk: `data` becomes a blob, `meta` goes into the frame that names it."""

    data: bytes | memoryview
    ext: str
    meta: dict[str, object]


class Media:
    """Base class of everything that can be logged besides numbers and strings.

    The constructor copies what the caller may change and encodes nothing; `encode()` runs later, in another thread.
    """

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Media]]] = {}
    pending: Any = None  # a tensor still on its device; resolve() supplies the copy

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" in cls.__dict__:
            Media.kinds[cls.kind] = cls

    def encode(self) -> Encoded:
        """Encode the snapshot as bytes, with small facts about them."""
        raise NotImplementedError

    @classmethod
    def decode(cls, meta: Mapping[str, Any], data: bytes) -> Self:
        """Rebuild from the result of encode(); raise JournalError for malformed bytes."""
        media = cls.__new__(cls)
        media.restore(meta, data)
        return media

    def restore(self, meta: Mapping[str, Any], data: bytes) -> None:
        """Restore the state from the result of encode(), trusting neither argument."""
        raise NotImplementedError

    def snapshot(self) -> Media:
        """Return an object that stays unchanged while the caller continues: itself, unless it can grow."""
        return self

    def waiting(self) -> list[Media]:
        """Return the parts whose `pending` tensor has not been resolved: itself, or cells of a table."""
        return [self] if self.pending is not None else []

    def resolve(self, array: Any) -> None:
        """Set the host copy of `pending`."""
        raise TypeError(f"{type(self).__name__} has nothing on a device. Nothing changes. Call resolve() on waiting().")


def decode(kind: str, meta: Mapping[str, Any], data: bytes) -> Media:
    """Rebuild media of `kind` from its frame's facts and its blob."""
    found = Media.kinds.get(kind)
    if found is None:
        known = ", ".join(sorted(Media.kinds))
        raise JournalError(
            f"Media of kind {str(kind)[:80]!r} is not known to this version (known: {known}). "
            "Only this value cannot be shown; the rest of the run can. Upgrade fanfold to read it."
        )
    if not isinstance(meta, Mapping):
        raise broken(kind, "its facts are not a mapping")
    return found.decode(meta, data)


def refused(error: type[E], what: str, fix: str) -> E:
    """Return the error for a value that cannot be converted to media."""
    return error(f"{what}. Nothing is recorded for this value. {fix}.")


def broken(kind: str, detail: object) -> JournalError:
    """Return the error for a blob that does not match its frame."""
    return JournalError(
        f"{kind.capitalize()} could not be read back: {str(detail)[:300]}. Only this value is lost; the rest of the "
        "run can be read. The blob is damaged or was changed: copy the run directory again from where it was written."
    )


def caption_of(caption: object) -> str | None:
    """Check a caption."""
    if caption is None or isinstance(caption, str):
        return None if caption is None else clean_text(str(caption))
    raise refused(TypeError, f"caption= is a {type(caption).__name__}, not a string", "Pass caption=str(...)")


def text_fact(meta: Mapping[str, Any], name: str) -> str | None:
    """Read an optional string from untrusted facts."""
    value = meta.get(name)
    return value if isinstance(value, str) else None


def number_fact(meta: Mapping[str, Any], name: str) -> float | None:
    """Read an optional number from untrusted facts."""
    value = meta.get(name)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
