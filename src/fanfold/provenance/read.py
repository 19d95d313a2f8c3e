"""inspect(): the format, stamp and facts of a model file, read without torch, without its weights and in bounded memory."""

from __future__ import annotations

import importlib
import itertools
import os
import stat
from pathlib import Path
from typing import Any

from ..errors import FanfoldError
from .record import MAX_BYTES, NAME, parse

MAX_FILES = 1000
ENDS = 1 << 16
MAX_ENTRIES = 20_000  # a checkpoint has hundreds; a folder that also holds a dataset may have millions
MODEL_SUFFIXES = (
    ".safetensors",
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".pt2",
    ".onnx",
    ".torchscript",
    ".keras",
    ".h5",
    ".skops",
    ".gguf",
)
TORCH_SUFFIXES = (".pt", ".pth", ".pt2", ".torchscript")  # used only by torch; .bin and .ckpt are used by many programs

BEGINS = {".keras": b"PK", ".skops": b"PK", ".npz": b"PK", ".gguf": b"GGUF"}
_GGUF_VERSIONS = (b"\2\0\0\0", b"\3\0\0\0", b"\0\0\0\2", b"\0\0\0\3")  # version 1 had shorter fields; nobody writes it


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the format, size, stamp and a few facts of a model file or checkpoint directory.

    Keys: `path`, `format`, `size`, `stamp` (None without one), `facts`; for a directory also `files`.

    Args:
        path: A model file or a checkpoint directory. No weight is loaded and nothing in it is executed.

    Returns:
        The facts, as above.

    Raises:
        FanfoldError: There is no such file, or it is damaged.

    Example:
        ```python
        import torch

        import fanfold

        torch.save({"w": torch.zeros(2)}, "model.pt")
        print(fanfold.inspect("model.pt")["format"])
        ```
    """
    file, is_directory = located(path)
    try:
        return _directory(file) if is_directory else _file(file)
    except OSError as error:
        raise _unreached(path, error) from error


def located(path: str | os.PathLike[str]) -> tuple[Path, bool]:
    """Return the path of an existing file or directory, and whether it is a directory; raise for anything else."""
    if not os.fspath(path):  # pathlib would make it the working directory
        raise FanfoldError(
            "the path is empty. Nothing was read or written. Give the path of a model file or checkpoint directory."
        )
    file = Path(path)
    try:
        mode = file.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        raise _unreached(path, error) from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise FanfoldError(f"{file} is neither a file nor a directory. Nothing was done. Give the path of a model file.")
    return file, stat.S_ISDIR(mode)


def _unreached(path: str | os.PathLike[str], error: OSError | ValueError) -> FanfoldError:
    if "://" in os.fspath(path):
        return FanfoldError(f"{path} cannot be read: it is an address. Download the file, and give its path here.")
    reason = getattr(error, "strerror", None) or str(error)
    name = repr(os.fspath(path)) if isinstance(error, ValueError) else str(Path(path))
    return FanfoldError(
        f"{name} cannot be read: {reason}. Nothing was done. Give the path of a model file or checkpoint directory."
    )


def _file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(16)
        module = module_of(head, path, size)
        name, inside, facts = module.read(file, path) if module else (_without_room(head), None, {})
    stamp = None if inside is None else _ours(_parsed(inside, path), facts)
    if stamp is None and (beside := _ours(_read_sidecar(sidecar(path)), facts)) is not None:
        if beside.get("of") in (None, mark(path)):
            stamp = beside
        else:
            facts["beside"] = "a stamp, of another file: this one was saved since"
    return {"path": str(path), "format": name, "size": size, "stamp": stamp, "facts": facts}


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    try:
        return parse(data)
    except ValueError as error:
        from .zips import unreadable

        raise unreadable(path, str(error)) from error


def _ours(stamp: dict[str, Any] | None, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Return our own stamp. Other programs use the same name: what they wrote is added to the facts."""
    if stamp is None or isinstance(stamp.get("stamp"), int):
        return stamp
    facts["producer_info"] = stamp
    return None


def mark(path: Path) -> dict[str, Any]:
    """Return a fingerprint that tells a file from a later one at the same path, without reading all of it: size and both ends."""
    from hashlib import sha256  # imported here, since few stamps are sidecar files

    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        ends = file.read(ENDS)
        file.seek(max(len(ends), size - ENDS))
        return {"size": size, "ends": sha256(ends + file.read(ENDS)).hexdigest()}


def is_file(path: Path) -> bool:
    """Return whether a file exists; False for a name that is too long, as a sidecar's may be."""
    return os.path.isfile(path)  # noqa: PTH113 - pathlib raises if a name is too long


def module_of(head: bytes, path: Path, size: int) -> Any:
    """Return the module for a file's format, detected from its content; None if the format has no room for a stamp."""
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        name = "zips"
    elif head.startswith(b"\x89HDF\r\n\x1a\n"):
        name = "hdf5"
    elif head[:4] == b"GGUF" and head[4:8] in _GGUF_VERSIONS:
        name = "gguf"
    elif not head and path.suffix in MODEL_SUFFIXES:
        raise _broken(path, "it is empty")
    elif path.suffix == ".safetensors" or _has_header(head, size):  # by its name, also a damaged one
        name = "safetensors"
    elif path.suffix == ".onnx" or (len(head) > 2 and head[0] == 0x08 and head[1] < 64 and head[2] == 0x12):
        name = "onnx"  # without the suffix: its first field can only be the format's version
    elif path.suffix in BEGINS and not head.startswith(BEGINS[path.suffix]):
        raise _broken(path, f"it does not begin as a {path.suffix} file does")
    elif path.suffix in TORCH_SUFFIXES and not _is_pickle(head):
        raise _broken(path, f"it is neither an archive nor a pickle, and a file in {path.suffix} is one of them")
    else:
        return None
    return importlib.import_module(f".{name}", __package__)


def _has_header(head: bytes, size: int) -> bool:
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8


def _without_room(head: bytes) -> str:
    """Return the name of a format without a stamp. A pickle (torch.save's old format) is never loaded: it can run code."""
    return "pickle" if _is_pickle(head) else "unknown"


def _is_pickle(head: bytes) -> bool:
    return head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def _broken(path: Path, why: str) -> FanfoldError:
    from .zips import broken  # imported here, since most files are intact

    return broken(path, why)


def sidecar(path: Path) -> Path:
    """Return the path of the stamp of a directory, or of a file whose format has no room for one."""
    return path / NAME if path.is_dir() else path.with_name(f"{path.name}.{NAME}")


def _read_sidecar(path: Path) -> dict[str, Any] | None:
    if not is_file(path) or path.is_symlink():
        return None
    with path.open("rb") as file:
        return _parsed(file.read(MAX_BYTES + 1), path)


def model_files(folder: Path, *, links: bool = False) -> list[Path]:
    """Return the model files of a directory, one or two levels deep; with `links`, also symlinks, which caches consist of."""
    found = []
    for pattern in ("*", "*/*"):
        for item in folder.glob(pattern):
            if item.suffix in MODEL_SUFFIXES and item.is_file() and (links or not item.is_symlink()):
                found.append(item)
            if len(found) >= MAX_FILES:
                return sorted(found)
    return sorted(found)


def size_of(path: Path, *, links: bool = False) -> int:
    """Return the size of a file, or of the files in a directory (the first 20,000)."""
    if not path.is_dir():
        return path.stat().st_size
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    wanted = (item for item in itertools.islice(files, MAX_ENTRIES) if item.is_file() and (links or not item.is_symlink()))
    return sum(item.stat().st_size for item in wanted)


def directory_format(folder: Path) -> str:
    """Return the format of a checkpoint directory."""
    if (folder / ".metadata").is_file() and any(folder.glob("*.distcp")):
        return "DCP checkpoint"
    if (folder / "trainer_state.json").is_file():
        return "Transformers checkpoint"
    if (folder / "config.json").is_file() and model_files(folder, links=True):
        return "Transformers model"
    return "directory"


def _directory(folder: Path) -> dict[str, Any]:
    from .shards import faults

    items = model_files(folder, links=True)
    files: list[dict[str, Any]] = []
    for item in items:
        try:
            files.append(_file(item))
        except FanfoldError as error:  # one broken shard does not hide the others
            files.append(_fault(item, item.stat().st_size, str(error)))
    files += [_fault(*fault) for fault in faults(folder, bare=not items)]
    facts: dict[str, Any] = {"model_files": len(items)}
    own = None
    try:
        own = _ours(_read_sidecar(sidecar(folder)), facts)
    except FanfoldError as error:
        files.append(_fault(sidecar(folder), sidecar(folder).stat().st_size, str(error)))
    stamps = [found for found in (own, *(entry["stamp"] for entry in files)) if found]
    return {
        "path": str(folder),
        "format": directory_format(folder),
        "size": size_of(folder, links=True),
        # The newest: files saved into the folder later do not update the folder's own stamp.
        "stamp": max(stamps, key=lambda stamp: str(stamp.get("time", "")), default=None),
        "facts": facts,
        "files": files,
    }


def _fault(path: Path, size: int, error: str) -> dict[str, Any]:
    return {"path": str(path), "format": "broken", "error": error, "stamp": None, "size": size}
