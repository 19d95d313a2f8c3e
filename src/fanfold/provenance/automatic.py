"""Stamp whatever is saved while a run is active, by hooks inside the savers that also reach functions imported by name.

Each hook replaces a name that the saver looks up at the moment it saves, so `from safetensors.torch import save_file` before
init() makes no difference. Libraries that are not imported yet get theirs when they are. All are taken off at the end.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import io
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import guard
from ..probes import ops
from ..probes.native import library as native
from . import onnx
from .record import NAME, decode, encode, make, of_process, step_of
from .write import note, write_beside
from .zips import MEMBER

_inside = threading.local()  # a saver that calls another one stamps its own file, not the parts


class Stamper:
    """The stamps of one run: what the hooks ask for."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def text(self, inherited: bytes | None = None) -> bytes:
        """Return the stamp of a file that is being saved now; one its content carries already names what it was made from."""
        return encode(make(self.run, {}, parent=decode(inherited) if inherited else None))

    def saved(self, path: Any) -> None:
        """List a file on the run, when it is one on a disk."""
        with guard("list a saved file on its run"):
            if isinstance(path, (str, os.PathLike)) and Path(path).exists():
                note(self.run, Path(path), step_of(self.run))


class Hook:
    """One name inside a saver, replaced while any run stamps."""

    def __init__(self, module: str, path: str, make_wrapper: Callable[[Any], Callable[..., Any]]) -> None:
        self.module, self.path, self.make_wrapper = module, path, make_wrapper
        self.owner: Any = None
        self.kept: Any = None  # what stood in the owner's table: torch's classes hold descriptors there, not functions
        self.wrapper: Any = None

    def put_on(self, module: ModuleType) -> None:
        *owners, name = self.path.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        original = getattr(owner, name, None)
        if owner is None or original is None or self.wrapper is not None:
            return  # another version of the library: nothing to hook here
        self.owner, self.kept = owner, vars(owner).get(name, original)
        self.wrapper = functools.wraps(original)(self.make_wrapper(original))
        setattr(owner, name, self.wrapper)

    def take_off(self) -> None:
        """Put the original back, unless somebody has wrapped ours since: then it stays, and does nothing but pass on."""
        name = self.path.rpartition(".")[2]
        if self.wrapper is not None and getattr(self.owner, name, None) is self.wrapper:
            setattr(self.owner, name, self.kept)
        self.owner = self.kept = self.wrapper = None


_active: list[Stamper] = []


def _stamper() -> Stamper | None:
    return _active[-1] if _active and not getattr(_inside, "busy", False) else None


def _torch_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def open_writer(target: Any) -> Any:
        stamper = _stamper()
        writer = original(target)
        return _ZipWriter(writer, stamper, target) if stamper is not None and _is_file(target) else writer

    return open_writer


def _is_file(target: Any) -> bool:
    """Tell a file from a buffer: what goes through memory is somebody's message, not a model on a disk."""
    if isinstance(target, (str, os.PathLike)):
        return True
    return isinstance(target, (io.BufferedWriter, io.BufferedRandom)) and isinstance(target.name, str) and target.tell() == 0


class _ZipWriter:
    """torch's own writer, with one record more before it closes."""

    def __init__(self, writer: Any, stamper: Stamper, target: Any) -> None:
        self.writer, self.stamper, self.target = writer, stamper, target

    def __enter__(self) -> Any:
        self.archive = self.writer.__enter__()
        return self.archive

    def __exit__(self, *error: object) -> Any:
        if error[0] is None:
            with guard("stamp a file that torch.save writes"):
                data = self.stamper.text()
                self.archive.write_record(MEMBER, data, len(data))
        done = self.writer.__exit__(*error)
        if error[0] is None:
            self.stamper.saved(getattr(self.target, "name", self.target))
        return done


def _safetensors(original: Callable[..., Any]) -> Callable[..., Any]:
    def serialize(tensors: Any, *rest: Any, metadata: Any = None, **kwargs: Any) -> Any:
        if rest and (metadata is None) and isinstance(rest[-1], dict):
            *rest, metadata = rest  # type: ignore[assignment]
        stamper = _stamper()
        if stamper is not None:
            with guard("stamp a safetensors file"):
                metadata = dict(metadata or {})
                metadata[NAME] = stamper.text(str(metadata.get(NAME, "")).encode()).decode()
        result = original(tensors, *rest, metadata=metadata, **kwargs)
        if stamper is not None and rest:
            stamper.saved(rest[0])
        return result

    return serialize


def _jit_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(self: Any, file: Any, given: Any = None, *rest: Any, _extra_files: Any = None, **kwargs: Any) -> Any:
        stamper = _stamper()
        extra = _with_stamp(stamper, given or _extra_files)
        result = original(self, file, extra, *rest, **kwargs)
        if stamper is not None:
            stamper.saved(file)
        return result

    return save


def _jit_buffer(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(self: Any, given: Any = None, *rest: Any, _extra_files: Any = None, **kwargs: Any) -> Any:
        return original(self, _with_stamp(_stamper(), given or _extra_files), *rest, **kwargs)

    return save


def _with_stamp(stamper: Stamper | None, extra: Any) -> Any:
    """Return the extra files of a TorchScript archive with ours among them; the caller's own of that name wins."""
    if stamper is not None:
        with guard("stamp a TorchScript file"):
            if not _export_natively(None if NAME in (extra or {}) else stamper):
                return {NAME: stamper.text(), **(extra or {})}
    return extra or {}


def _export_natively(stamper: Stamper | None) -> bool:
    """Let torch's own export hook write the stamp (None: nothing): it also reaches what C++ saves. False: no native library."""
    library = native.current()
    if library is None:
        return False
    text = stamper.text() if stamper is not None else b""
    return bool(library.ff_export_file(NAME.encode() if stamper is not None else b"", text, len(text)))


def _refresh() -> None:
    """Bring the stamp that is exported natively up to the run's step."""
    if _active:
        _export_natively(_active[-1])


def _archive_open(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_writer(self: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        original(self, target, *args, **kwargs)
        self._fanfold_target = target

    return make_writer


def _archive_close(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, *error: Any) -> Any:
        stamper = _stamper()
        if stamper is not None and (not error or error[0] is None):
            with guard("stamp a .pt2 archive"):
                if not self.has_record(MEMBER):
                    self.write_bytes(MEMBER, stamper.text())
        result = original(self, *error)
        if stamper is not None:
            stamper.saved(getattr(self, "_fanfold_target", None))
        return result

    return leave


def _onnx_bytes(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_bytes(content: bytes, target: Any, *rest: Any) -> Any:
        stamper = _stamper()
        result = original(content, target, *rest)
        binary = content[:1] == b"\x08"  # it can also be saved as text, which has no place for a stamp
        if stamper is not None and binary and isinstance(target, (str, os.PathLike)) and Path(target).is_file():
            with guard("stamp an ONNX file"):  # behind the model: its bytes, which may be gigabytes, are not copied
                path = Path(target).resolve()
                with path.open("rb") as file:
                    inherited = onnx.read(file, path)[1]
                onnx.write(path, stamper.text(inherited))
            stamper.saved(target)
        return result

    return save_bytes


def _quietly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a saver's inner saves pass unstamped: a sharded checkpoint calls torch.save for every tensor."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_inside, "busy", False)
        _inside.busy = True
        try:
            return original(*args, **kwargs)
        finally:
            _inside.busy = before

    return inner


def _dcp_finish(original: Callable[..., Any]) -> Callable[..., Any]:
    def finish(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        stamper = _stamper()
        folder = getattr(self, "path", None)
        if stamper is not None and isinstance(folder, (str, os.PathLike)) and Path(folder).is_dir():
            with guard("stamp a sharded checkpoint"):
                write_beside(Path(folder), stamper.text())
            stamper.saved(folder)
        return result

    return finish


HOOKS = [
    Hook("torch.serialization", "_open_zipfile_writer", _torch_save),
    Hook("safetensors.torch", "serialize_file", _safetensors),
    Hook("safetensors.torch", "serialize", _safetensors),
    Hook("safetensors.numpy", "serialize_file", _safetensors),
    Hook("safetensors.numpy", "serialize", _safetensors),
    # Where every TorchScript save ends: modules, traces and functions, through torch.jit.save or their own methods.
    Hook("torch._C", "ScriptModule.save", _jit_save),
    Hook("torch._C", "ScriptModule.save_to_buffer", _jit_buffer),
    Hook("torch._C", "ScriptModule._save_for_mobile", _jit_save),
    Hook("torch._C", "ScriptModule._save_to_buffer_for_mobile", _jit_buffer),
    Hook("torch._C", "ScriptFunction.save", _jit_save),
    Hook("torch._C", "ScriptFunction.save_to_buffer", _jit_buffer),
    Hook("torch.export.pt2_archive._package", "PT2ArchiveWriter.__init__", _archive_open),
    Hook("torch.export.pt2_archive._package", "PT2ArchiveWriter.__exit__", _archive_close),
    Hook("onnx", "_save_bytes", _onnx_bytes),
    Hook("torch.onnx._internal.torchscript_exporter.onnx_proto_utils", "_export_file", _onnx_bytes),
    Hook("torch.distributed.checkpoint.filesystem", "_write_item", _quietly),
    Hook("torch.distributed.checkpoint.filesystem", "FileSystemWriter.finish", _dcp_finish),
]


class _Later(importlib.abc.MetaPathFinder):
    """Put the hooks on a library when it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if not any(hook.module == name for hook in HOOKS):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Another loader, and the hooks when it is done."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        _put_on(module.__name__)


_later = _Later()


def _put_on(name: str) -> None:
    for hook in HOOKS:
        if hook.module == name and _active:
            with guard(f"hook {name} to stamp what it saves"):
                hook.put_on(sys.modules[name])


def start(run: Any) -> Callable[[float], None]:
    """Stamp everything saved from now on with `run`; return what ends that."""
    stamper = Stamper(run)
    _active.append(stamper)
    if _export_natively(stamper):
        ops.refreshers.append(_refresh)
    for name in {hook.module for hook in HOOKS}:
        if name in sys.modules:
            _put_on(name)
    if _later not in sys.meta_path:
        sys.meta_path.insert(0, _later)
    # git may take a second in a large repository: it is asked now, beside training, and not by the first checkpoint.
    threading.Thread(target=of_process, name="fanfold-stamp", daemon=True).start()
    return lambda _timeout: _stop(stamper)


def _stop(stamper: Stamper) -> None:
    if stamper in _active:
        _active.remove(stamper)
    _export_natively(_active[-1] if _active else None)
    if _refresh in ops.refreshers:
        ops.refreshers.remove(_refresh)
    if not _active:
        for hook in HOOKS:
            hook.take_off()
        if _later in sys.meta_path:
            sys.meta_path.remove(_later)
