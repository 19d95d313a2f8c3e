"""Files and bytes that are already encoded: read once, and identified by their first bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from fanfold.media.base import broken, refused

Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview"

SIGNATURES = (
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"GIF87a", "gif"),
    (0, b"GIF89a", "gif"),
    (8, b"WEBP", "webp"),
    (0, b"BM", "bmp"),
    (0, b"II*\x00", "tiff"),
    (0, b"MM\x00*", "tiff"),
    (8, b"WAVE", "wav"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"),
    (0, b"\xff\xf3", "mp3"),
    (0, b"\xff\xf2", "mp3"),
    (4, b"ftyp", "mp4"),
    (0, b"\x1aE\xdf\xa3", "webm"),
)


def sniff(data: bytes, known: tuple[str, ...]) -> str | None:
    """Return which of the `known` formats the bytes start like, or None."""
    for offset, magic, ext in SIGNATURES:
        if ext in known and data[offset : offset + len(magic)] == magic:
            return ext
    return None


def format_of(data: bytes, known: tuple[str, ...], kind: str) -> str:
    """Return the format of a medium that is read back; raise JournalError if it has none of the `known`."""
    ext = sniff(data, known)
    if ext is None:
        raise broken(kind, f"its {len(data)} bytes are none of {', '.join(known)}")
    return ext


def is_source(value: object) -> bool:
    """Return whether a value is a path or encoded bytes rather than pixels or samples."""
    return isinstance(value, (str, os.PathLike, bytes, bytearray, memoryview))


def read(value: Source, known: tuple[str, ...], what: str) -> tuple[bytes, str]:
    """Return the bytes of a path or buffer, and their format. Files are read at once because they may be overwritten."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        data, name = bytes(value), f"{len(value)} bytes"
    else:
        data, name = read_path(value, what), os.fspath(value)
    ext = sniff(data, known)
    if ext is None:
        raise refused(ValueError, f"{what} got {name}, which is none of {', '.join(known)}", "Convert it to one of these first")
    return data, ext


def read_path(path: str | os.PathLike[str], what: str) -> bytes:
    """Read a file the user named."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise refused(ValueError, f"{what} could not read {os.fspath(path)!r}: {error}", "Check the path") from error
