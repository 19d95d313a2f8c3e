"""Where spans are found without the user's help: in torch's DataLoader and compiler, and in the functions that save models.

Libraries imported after init() are hooked within a second. All hooks are removed when the last run of the process ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..errors import guard
from ..journal import Kind
from ..probes import spans
from ..provenance.hooks import Hook
from .parts import RunParts


def _timed(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with spans.Span(kind):
                return original(*args, **kwargs)

        return call

    return hook


class _TimedWriter:
    """torch's writer of a file, timed while torch.save pickles into it and until it is closed."""

    def __init__(self, writer: Any) -> None:
        self.writer, self.span = writer, spans.Span("checkpoint")

    def __enter__(self) -> Any:
        archive = self.writer.__enter__()
        self.span.begin()
        return archive

    def __exit__(self, *error: object) -> Any:
        try:
            return self.writer.__exit__(*error)
        finally:
            self.span.end()


def _torch_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        writer = original(target, *args, **kwargs)
        # A buffer in memory is a message to another process, or is timed by the library that writes it to a file afterwards.
        return _TimedWriter(writer) if isinstance(target, (str, os.PathLike)) or hasattr(target, "name") else writer

    return call


_SAVE = _timed("checkpoint")
HOOKS = [
    Hook("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__", _timed("data")),
    Hook("torch.serialization", "_open_zipfile_writer", _torch_save),
    Hook("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict", _SAVE),
    Hook("lightning.fabric.plugins.io.torch_io", "_atomic_save", _SAVE),
    Hook("lightning_fabric.plugins.io.torch_io", "_atomic_save", _SAVE),
    Hook("safetensors.torch", "serialize_file", _SAVE),
    Hook("keras.src.saving.saving_lib", "save_model", _SAVE),
    Hook("keras.src.saving.saving_lib", "save_weights_only", _SAVE),
]
_running: list[spans.SpanWriter] = []
_compiling = threading.local()  # span: the compilation this thread is in
_heard: list[Any] = []  # torch's list of compiler callbacks, while ours are on it


def start_spans(parts: RunParts) -> None:
    """Record the spans of a run."""

    def write(facts: Any) -> None:
        with guard("record a span"):
            parts.writer.append((Kind.EVENT, dict(facts)))

    ledger = spans.start(write)
    _running.append(ledger)
    _put_on()

    def tick() -> None:
        _put_on()
        ledger.tick()

    def end(_timeout: float) -> None:
        spans.stop(ledger)
        if ledger in _running:
            _running.remove(ledger)
        if not _running:
            for hook in HOOKS:
                hook.take_off()
            _hear_compiler(False)

    parts.ending.keeper.chores.append(tick)
    parts.ending.stoppers.insert(0, end)  # first: it may be on top of other hooks


def _put_on() -> None:
    for hook in HOOKS:
        module = sys.modules.get(hook.module)
        if module is not None and hook.wrapper is None and _running:
            hook.put_on(module)
    if "torch._dynamo.callback" in sys.modules and not _heard and _running:
        _hear_compiler(True)


def _compile_begins(*_event: Any) -> None:
    _compiling.span = spans.Span("compile")
    _compiling.span.begin()


def _compile_ends(*_event: Any) -> None:
    span = getattr(_compiling, "span", None)
    if span is not None:
        span.end()


def _hear_compiler(on: bool) -> None:
    """Put our callbacks on torch's list, or take them off. torch.compile calls them around each compilation."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None or on == bool(_heard):
        return
    if on:
        handler.register_start_callback(_compile_begins)
        handler.register_end_callback(_compile_ends)
        _heard.append(handler)
        return
    with contextlib.suppress(ValueError):  # torch._dynamo.reset() may have cleared the list
        _heard.pop().remove_start_callback(_compile_begins)
        handler.remove_end_callback(_compile_ends)
