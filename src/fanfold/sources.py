"""Sources for deployments that ship only .pyc files: torch.jit.script and inspect.getsource need the source text.

A zip holds the sources, and a loader serves them. `fanfold doctor --deploy PATH --sources FILE` reports which modules need
them, and creates the zip.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import marshal
import os
import sys
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .atomic import replacing
from .errors import FanfoldError, notices

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same sources always give the same zip


def install(archive: str | os.PathLike[str]) -> None:
    """Serve sources from the zip for modules loaded from .pyc only, including modules that are already loaded.

    A source that does not match its .pyc is ignored, and logged as a warning once.
    """
    finder = _Finder(_Archive(Path(archive)))
    sys.meta_path[:] = [other for other in sys.meta_path if other != finder]
    sys.meta_path.insert(0, finder)
    for module in list(sys.modules.values()):
        _repair(finder.archive, module)
    linecache.checkcache()


def pack(root: Path, files: Iterable[Path], archive: Path) -> None:
    """Write the sources to a zip, with paths relative to `root`; the zip is written completely or not at all."""
    with replacing(archive) as written, zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as target:
        for file in sorted(files):
            entry = zipfile.ZipInfo(file.relative_to(root).as_posix(), _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(entry, file.read_bytes())


class _Archive:
    """The zip of sources. It is opened for each read, which is rare: an open file would be shared with forked workers."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            with zipfile.ZipFile(self.path) as file:
                self.names = frozenset(file.namelist())
        except (OSError, zipfile.BadZipFile) as error:
            raise FanfoldError(
                f"{path} cannot be read as a zip of sources: {error}. The code runs from its .pyc files alone. "
                "Make the zip with: fanfold doctor --deploy PATH --sources FILE"
            ) from error
        self.tops = frozenset(name.partition("/")[0].removesuffix(".py") for name in self.names)

    def source(self, member: str, compiled: Path) -> str | None:
        """Return a source as text if its .pyc was compiled from it."""
        with zipfile.ZipFile(self.path) as file:
            data = file.read(member)
        if not _belong(data, compiled):
            notices.once(
                f"sources:{member}",
                f"{member} in {self.path} is not what {compiled} was compiled from. Its source stays unknown, and what needs "
                "it fails. Make the zip and the .pyc files from the same tree, and compile it with the Python that runs it.",
            )
            return None
        return importlib.util.decode_source(data)


def _belong(data: bytes, compiled: Path) -> bool:
    """Return whether a .pyc was compiled from this source: by the hash in its head, else by length and then by code."""
    pyc = compiled.read_bytes()
    if int.from_bytes(pyc[4:8], "little") & 1:
        return pyc[8:16] == importlib.util.source_hash(data)
    if pyc[12:16] != (len(data) & 0xFFFFFFFF).to_bytes(4, "little"):
        return False
    return _compiles_to(data, marshal.loads(pyc[16:]))  # noqa: S302 - the .pyc that is being run


def _compiles_to(data: bytes, code: CodeType) -> bool:
    """Return whether a source compiles to this code at any optimisation level (a .pyc records none), ignoring file names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown when the .pyc was made
        try:
            return any(compile(data, "", "exec", dont_inherit=True, optimize=level) == code for level in (0, 1, 2))
        except (SyntaxError, ValueError):
            return False


class _Loader(importlib.machinery.SourcelessFileLoader):
    """Python's loader for a .pyc without source, which also knows the source."""

    def __init__(self, name: str, path: str, archive: _Archive, member: str) -> None:
        super().__init__(name, path)
        self.archive, self.member = archive, member

    def get_source(self, fullname: str) -> str | None:  # type: ignore[override]
        del fullname  # `python main.pyc` uses another name
        return self.archive.source(self.member, Path(self.path))


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that locates modules as Python does, and swaps the loader of those whose sources are in the zip."""

    def __init__(self, archive: _Archive) -> None:
        self.archive = archive

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Finder) and other.archive.path == self.archive.path

    def __hash__(self) -> int:
        return hash(self.archive.path)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name.partition(".")[0] not in self.archive.tops:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = _swapped(self.archive, spec.loader) if spec is not None else None
        if spec is None or loader is None:
            return None
        spec.loader = loader
        return spec


def _repair(archive: _Archive, module: ModuleType) -> None:
    """Swap the loader of a module that is already loaded."""
    loader = _swapped(archive, getattr(module, "__loader__", None))
    if loader is not None:
        module.__loader__ = loader
        if module.__spec__ is not None:
            module.__spec__.loader = loader


def _swapped(archive: _Archive, loader: Any) -> _Loader | None:
    """Return a loader that knows the source, to replace one that does not; None if the zip lacks it."""
    if not isinstance(loader, importlib.machinery.SourcelessFileLoader):
        return None
    stem = Path(loader.path).stem
    place = stem if loader.name == "__main__" else loader.name.replace(".", "/") + ("/__init__" if stem == "__init__" else "")
    member = f"{place}.py"
    return _Loader(loader.name, loader.path, archive, member) if member in archive.names else None
