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


def _stamping(save: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a hook of `save(stamper, original, *args)`, which is called in the place of `original` while there is a stamper."""

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            stamper = current()
            return original(*args, **kwargs) if stamper is None else save(stamper, original, *args, **kwargs)

        return call

    return hook


@_stamping
def _torch_save(stamper: Stamper, original: Callable[..., Any], target: Any) -> Any:
    wanted = getattr(_announced, "buffer", False) or _is_file(target)
    writer = original(target)  # last: a writer that is dropped before it is closed aborts the process
    _announced.buffer = False  # only for this buffer, not for those filled while pickling its content
    return _ZipWriter(writer, stamper, target) if wanted else writer


@_stamping
def _lightning(stamper: Stamper, original: Callable[..., Any], checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    """Stamp a checkpoint that is written to memory first, since its destination may be a bucket."""
    _announced.buffer = True
    try:
        result = original(checkpoint, path, *args, **kwargs)
    finally:
        _announced.buffer = False
    stamper.saved(path)
    return result


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


@_stamping
def _torch_save_old(_stamper: Stamper, original: Callable[..., Any], content: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    if _is_file(target):
        notices.once(
            "stamp:old torch.save",
            "torch.save writes a file of its old kind, which has no room for a stamp. It is saved without one, and the run "
            "does not list it. Leave _use_new_zipfile_serialization=False away, or call fanfold.stamp(path) after saving.",
        )
    return original(content, target, *args, **kwargs)


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


@_stamping
def _safetensors(
    stamper: Stamper, original: Callable[..., Any], tensors: Any, *rest: Any, metadata: Any = None, **kwargs: Any
) -> Any:
    if rest and metadata is None and isinstance(rest[-1], dict):
        *rest, metadata = rest  # type: ignore[assignment]
    with guard("stamp a safetensors file"):
        metadata = dict(metadata or {})
        metadata[NAME] = stamper.text(str(metadata.get(NAME, "")).encode()).decode()
    result = original(tensors, *rest, metadata=metadata, **kwargs)
    if rest:
        stamper.saved(rest[0])
    return result


@_stamping
def _jit_save(
    stamper: Stamper, original: Callable[..., Any], self: Any, file: Any, given: Any = None, *rest: Any,
    _extra_files: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    with _with_stamp(stamper, given or _extra_files) as extra:
        result = original(self, file, extra, *rest, **kwargs)
    stamper.saved(file)
    return result


@_stamping
def _jit_buffer(
    stamper: Stamper, original: Callable[..., Any], self: Any, given: Any = None, *rest: Any,
    _extra_files: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    with _with_stamp(stamper, given or _extra_files) as extra:
        return original(self, extra, *rest, **kwargs)


@contextlib.contextmanager
def _with_stamp(stamper: Stamper, given: Any) -> Iterator[Any]:
    """Yield the extra files of a TorchScript archive, including the stamp; the caller's own file of that name wins."""
    extra = given or {}
    theirs = NAME in extra
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


@_stamping
def _archive_close(stamper: Stamper, original: Callable[..., Any], self: Any, *error: Any) -> Any:
    if not error or error[0] is None:
        with guard("stamp a .pt2 archive"):
            if not self.has_record(MEMBER):
                self.write_bytes(MEMBER, stamper.text())
    result = original(self, *error)
    stamper.saved(getattr(self, "_fanfold_target", None))
    return result


@_stamping
def _onnx_bytes(stamper: Stamper, original: Callable[..., Any], content: bytes, target: Any, *rest: Any) -> Any:
    result = original(content, target, *rest)
    binary = content[:1] == b"\x08"  # it can also be saved as text, which has no room for a stamp
    if binary and isinstance(target, (str, os.PathLike)) and Path(target).is_file():
        with guard("stamp an ONNX file"):  # in the file: the model's bytes, perhaps gigabytes, are not copied in memory
            path = Path(target).resolve()
            with path.open("rb") as file:
                inherited = onnx.read(file, path)[1]
            with path.open("r+b", buffering=0) as file:
                onnx.write(path, stamper.text(inherited), file)
        stamper.saved(target)
    return result


@_stamping
def _keras(stamper: Stamper, original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(model, filepath, *args, **kwargs)
    if isinstance(filepath, (str, os.PathLike)) and Path(filepath).is_file():
        if Path(filepath).suffix != ".json":  # the index of sharded weights, which is a text file
            with guard("stamp a file that Keras saves"):
                write(Path(filepath), stamper.text())
        stamper.saved(filepath)
    return result


@_stamping
def _skops_bytes(stamper: Stamper, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stamp the archive while it is in memory: it is then written to a file, or returned to the caller as bytes."""
    buffer = original(*args, **kwargs)
    with guard("stamp a file that skops saves"):
        hide(buffer, stamper.text())
    return buffer


@_stamping
def _skops_file(stamper: Stamper, original: Callable[..., Any], obj: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(obj, file, *args, **kwargs)
    stamper.saved(file)
    return result


@_stamping
def _gguf_values(stamper: Stamper, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the stamp to the values of each shard, just before they are counted and written."""
    result = original(self, *args, **kwargs)
    with guard("stamp a GGUF file"):
        from gguf.gguf_writer import GGUFValue, GGUFValueType

        for values in self.kv_data:
            inherited = getattr(values.get(gguf.KEY), "value", None)
            text = stamper.text(str(inherited).encode() if inherited else None).decode()
            values[gguf.KEY] = GGUFValue(text, GGUFValueType.STRING)
        self._fanfold_stamper = stamper
    return result


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


@_stamping
def _dcp_async(stamper: Stamper, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass the current stamp to the thread that saves: it may finish at a later step, or after the run."""
    with guard("stamp a sharded checkpoint"):
        self._executor.submit(stamper.take_thread)  # it has a single thread, created for this save
    future = original(self, *args, **kwargs)
    for hook in _DCP_ENDS:
        hook.keep_for(future)
    return future


@_stamping
def _dcp_finish(stamper: Stamper, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    folder = getattr(self, "path", None)
    if isinstance(folder, (str, os.PathLike)) and Path(folder).is_dir():
        with guard("stamp a sharded checkpoint"):
            write_beside(Path(folder), stamper.text())
        stamper.saved(folder)
    return result


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
