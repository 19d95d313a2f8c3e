"""inspect(): what a model file says of itself, read without torch, without its weights and in bounded memory."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import FanfoldError
from . import onnx, safetensors, zips
from .record import MAX_BYTES, NAME, decode

MAX_FILES = 1000
MAX_ENTRIES = 20_000  # a checkpoint has hundreds; a folder that also holds a data set may have millions
MODEL_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pt2", ".onnx", ".torchscript")

Reader = Callable[[BinaryIO, Path], tuple[str, bytes | None, dict[str, Any]]]


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a model file or a checkpoint directory says: its format, its size, its stamp if it has one, a few facts.

    Keys: `path`, `format`, `size`, `stamp` (None without one), `facts`; for a directory also `files`.
    """
    file = Path(path)
    try:
        mode = file.stat().st_mode
        if stat.S_ISDIR(mode):
            return _directory(file)
        if not stat.S_ISREG(mode):
            raise FanfoldError(f"{file} is neither a file nor a directory. Nothing was read. Give the path of a model file.")
        return _file(file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FanfoldError(f"{file} cannot be read: {reason}. Give the path of a model file or checkpoint directory.") from error


def _file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        reader = reader_of(file.read(16), path, size)
        name, stamp, facts = reader(file, path) if reader else ("unknown", None, {})
    return {"path": str(path), "format": name, "size": size, "stamp": _stamp(stamp, sidecar(path)), "facts": facts}


def reader_of(head: bytes, path: Path, size: int) -> Reader | None:
    """Choose by content how a file is read; None for a format that holds no stamp."""
    if zips.is_zip(head):
        return zips.read
    if safetensors.is_safetensors(head, size):
        return safetensors.read
    if onnx.is_onnx(head, path):
        return onnx.read
    if head[:2] in (b"\x80\x02", b"\x80\x04", b"\x80\x05"):
        return _pickle
    return None


def _pickle(_file: BinaryIO, _path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    return "pickle", None, {}  # torch.save before the zip format: never loaded here, since a pickle runs code


def _stamp(inside: bytes | None, beside: Path) -> dict[str, Any] | None:
    found = decode(inside) if inside else None
    return found or _read_sidecar(beside)


def sidecar(path: Path) -> Path:
    """Return where the stamp of a file lies whose format has no room for one, or of a directory."""
    return path / NAME if path.is_dir() else path.with_name(f"{path.name}.{NAME}")


def _read_sidecar(path: Path) -> dict[str, Any] | None:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
        return None
    return decode(path.read_bytes())


def model_files(folder: Path) -> list[Path]:
    """Return the model files of a directory, a level or two deep."""
    found = []
    for pattern in ("*", "*/*"):
        for item in folder.glob(pattern):
            if item.suffix in MODEL_SUFFIXES and item.is_file() and not item.is_symlink():
                found.append(item)
            if len(found) >= MAX_FILES:
                return sorted(found)
    return sorted(found)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of the files in a directory (of the first twenty thousand, links left out)."""
    if not path.is_dir():
        return path.stat().st_size
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(item.lstat().st_size for item in itertools.islice(files, MAX_ENTRIES) if not item.is_symlink())


def directory_format(folder: Path) -> str:
    """Name what wrote a checkpoint directory."""
    if (folder / ".metadata").is_file() and any(folder.glob("*.distcp")):
        return "DCP checkpoint"
    if (folder / "trainer_state.json").is_file():
        return "Transformers checkpoint"
    if (folder / "config.json").is_file() and model_files(folder):
        return "Transformers model"
    return "directory"


def _directory(folder: Path) -> dict[str, Any]:
    files: list[dict[str, Any]] = []
    for item in model_files(folder):
        try:
            files.append(_file(item))
        except FanfoldError as error:  # one broken shard does not hide the others
            files.append({"path": str(item), "format": "broken", "error": str(error), "stamp": None, "size": item.stat().st_size})
    stamp = _read_sidecar(sidecar(folder)) or next((entry["stamp"] for entry in files if entry["stamp"]), None)
    return {
        "path": str(folder),
        "format": directory_format(folder),
        "size": size_of(folder),
        "stamp": stamp,
        "facts": {"model_files": len(files)},
        "files": files,
    }
