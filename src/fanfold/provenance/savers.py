"""The hooks inside each saver that stamp the files it saves.

Each replaces a name that the saver looks up when it saves, so that it also works after an early
`from safetensors.torch import save_file`.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import guard, notices
from . import gguf, onnx
from .hooks import Hook
from .record import NAME
from .stamper import Stamper, current, export_natively, quietly
from .write import write, write_beside
from .zips import MEMBER, hide

_announced = threading.local()  # buffer: the next buffer that torch.save fills becomes a file


def _torch_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def open_writer(target: Any) -> Any:
        stamper = current()
        wanted = getattr(_announced, "buffer", False) or _is_file(target)
        writer = original(target)  # last: a writer that is dropped before it is closed aborts the process
        _announced.buffer = False  # only for this buffer, not for those filled while pickling its content
        return _ZipWriter(writer, stamper, target) if stamper is not None and wanted else writer

    return open_writer


def _lightning(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stamp a checkpoint that is written to memory first, since its destination may be a bucket."""

    def save(checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        stamper = current()
        _announced.buffer = stamper is not None
        try:
            result = original(checkpoint, path, *args, **kwargs)
        finally:
            _announced.buffer = False
        if stamper is not None:
            stamper.saved(path)
        return result

    return save


def _is_file(target: Any) -> bool:
    """Return whether the target is a file: a buffer in memory is a message to someone, not a saved model."""
    if isinstance(target, (str, os.PathLike)):
        return True
    try:
        inner = getattr(target, "file", target)  # for a NamedTemporaryFile
        opened = isinstance(inner, (io.BufferedWriter, io.BufferedRandom, io.FileIO)) and isinstance(target.name, str)
        by_fsspec = hasattr(target, "fs") and isinstance(getattr(target, "path", None), str)  # local or in a bucket
        return (opened or by_fsspec) and target.tell() == 0
    except (AttributeError, OSError, ValueError):  # no name, a pipe, closed: torch reports what is wrong
        return False


def _torch_save_old(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(content: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is not None and _is_file(target):
            notices.once(
                "stamp:old torch.save",
                "torch.save writes a file of its old kind, which has no room for a stamp. It is saved without one, and the run "
                "does not list it. Leave _use_new_zipfile_serialization=False away, or call fanfold.stamp(path) after saving.",
            )
        return original(content, target, *args, **kwargs)

    return save


class _ZipWriter:
    """torch's own writer, with one more record before it closes."""

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
        stamper = current()
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
        stamper = current()
        with _with_stamp(stamper, given or _extra_files) as extra:
            result = original(self, file, extra, *rest, **kwargs)
        if stamper is not None:
            stamper.saved(file)
        return result

    return save


def _jit_buffer(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(self: Any, given: Any = None, *rest: Any, _extra_files: Any = None, **kwargs: Any) -> Any:
        with _with_stamp(current(), given or _extra_files) as extra:
            return original(self, extra, *rest, **kwargs)

    return save


@contextlib.contextmanager
def _with_stamp(stamper: Stamper | None, given: Any) -> Iterator[Any]:
    """Yield the extra files of a TorchScript archive, including the stamp; the caller's own file of that name wins."""
    extra = given or {}
    theirs = stamper is not None and NAME in extra
    if stamper is not None:
        with guard("stamp a TorchScript file"):
            if not export_natively(None if theirs else stamper):
                extra = {NAME: stamper.text(), **extra}
    try:
        yield extra
    finally:
        if theirs:  # off for this file only: the next may be saved by C++
            with guard("stamp a TorchScript file"):
                export_natively(current())


def _archive_open(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_writer(self: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        original(self, target, *args, **kwargs)
        self._fanfold_target = target

    return make_writer


def _archive_close(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, *error: Any) -> Any:
        stamper = current()
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
        stamper = current()
        result = original(content, target, *rest)
        binary = content[:1] == b"\x08"  # it can also be saved as text, which has no room for a stamp
        if stamper is not None and binary and isinstance(target, (str, os.PathLike)) and Path(target).is_file():
            with guard("stamp an ONNX file"):  # in the file: the model's bytes, perhaps gigabytes, are not copied in memory
                path = Path(target).resolve()
                with path.open("rb") as file:
                    inherited = onnx.read(file, path)[1]
                with path.open("r+b", buffering=0) as file:
                    onnx.write(path, stamper.text(inherited), file)
            stamper.saved(target)
        return result

    return save_bytes


def _keras(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        stamper = current()
        result = original(model, filepath, *args, **kwargs)
        if stamper is not None and isinstance(filepath, (str, os.PathLike)) and Path(filepath).is_file():
            if Path(filepath).suffix != ".json":  # the index of sharded weights, which is a text file
                with guard("stamp a file that Keras saves"):
                    write(Path(filepath), stamper.text())
            stamper.saved(filepath)
        return result

    return save


def _skops_bytes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stamp the archive while it is in memory: it is then written to a file, or returned to the caller as bytes."""

    def save(*args: Any, **kwargs: Any) -> Any:
        stamper = current()
        buffer = original(*args, **kwargs)
        if stamper is not None:
            with guard("stamp a file that skops saves"):
                hide(buffer, stamper.text())
        return buffer

    return save


def _skops_file(original: Callable[..., Any]) -> Callable[..., Any]:
    def dump(obj: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        stamper = current()
        result = original(obj, file, *args, **kwargs)
        if stamper is not None:
            stamper.saved(file)
        return result

    return dump


def _gguf_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add the stamp to the values of each shard, just before they are counted and written."""

    def add(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        stamper = current()
        if stamper is not None:
            with guard("stamp a GGUF file"):
                from gguf.gguf_writer import GGUFValue, GGUFValueType

                for values in self.kv_data:
                    inherited = getattr(values.get(gguf.KEY), "value", None)
                    text = stamper.text(str(inherited).encode() if inherited else None).decode()
                    values[gguf.KEY] = GGUFValue(text, GGUFValueType.STRING)
                self._fanfold_stamper = stamper
        return result

    return add


def _gguf_close(original: Callable[..., Any]) -> Callable[..., Any]:
    def close(self: Any, *args: Any, **kwargs: Any) -> Any:
        files = list(getattr(self, "fout", None) or [])
        stamper = vars(self).pop("_fanfold_stamper", None)
        result = original(self, *args, **kwargs)
        if stamper is not None:
            for file in files:
                stamper.saved(getattr(file, "name", None))
        return result

    return close


def _dcp_async(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the current stamp to the thread that saves: it may finish at a later step, or after the run."""

    def execute_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        stamper = current()
        if stamper is not None:
            with guard("stamp a sharded checkpoint"):
                self._executor.submit(stamper.take_thread)  # it has a single thread, created for this save
        future = original(self, *args, **kwargs)
        if stamper is not None:
            for hook in _DCP_ENDS:
                hook.keep_for(future)
        return future

    return execute_save


def _dcp_finish(original: Callable[..., Any]) -> Callable[..., Any]:
    def finish(self: Any, *args: Any, **kwargs: Any) -> Any:
        stamper = current()
        result = original(self, *args, **kwargs)
        folder = getattr(self, "path", None)
        if stamper is not None and isinstance(folder, (str, os.PathLike)) and Path(folder).is_dir():
            with guard("stamp a sharded checkpoint"):
                write_beside(Path(folder), stamper.text())
            stamper.saved(folder)
        return result

    return finish


_DCP_ENDS = [
    Hook("torch.distributed.checkpoint.filesystem", "FileSystemWriter.finish", _dcp_finish),
    Hook("torch.distributed.checkpoint.hf_storage", "HuggingFaceStorageWriter.finish", _dcp_finish),
]
HOOKS = [
    Hook("torch.serialization", "_open_zipfile_writer", _torch_save),
    Hook("torch.serialization", "_legacy_save", _torch_save_old),
    # Where both Lightning packages save checkpoints, from Trainer and from Fabric.
    Hook("lightning.fabric.plugins.io.torch_io", "_atomic_save", _lightning),
    Hook("lightning_fabric.plugins.io.torch_io", "_atomic_save", _lightning),
    Hook("safetensors.torch", "serialize_file", _safetensors),
    Hook("safetensors.torch", "serialize", _safetensors),
    Hook("safetensors.numpy", "serialize_file", _safetensors),
    Hook("safetensors.numpy", "serialize", _safetensors),
    # Where every TorchScript save ends up: modules, traces and functions, through torch.jit.save or their own methods.
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
    # Where keras.Model.save, save_weights, keras.saving.save_model and the callbacks end up.
    Hook("keras.src.saving.saving_lib", "save_model", _keras),
    Hook("keras.src.saving.saving_lib", "save_weights_only", _keras),
    Hook("keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5", _keras),
    Hook("skops.io._persist", "_save", _skops_bytes),
    Hook("skops.io", "dump", _skops_file),
    Hook("gguf.gguf_writer", "GGUFWriter.add_shard_kv_data", _gguf_values),
    Hook("gguf.gguf_writer", "GGUFWriter.close", _gguf_close),
    Hook("torch.distributed.checkpoint._async_thread_executor", "_ThreadBasedAsyncCheckpointExecutor.execute_save", _dcp_async),
    Hook("torch.distributed.checkpoint.filesystem", "_write_item", quietly),
    *_DCP_ENDS,
]
