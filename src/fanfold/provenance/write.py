"""stamp(): write the origin of a model into the model file itself."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..atomic import replacing
from ..errors import FanfoldError, notices
from .read import located, mark, model_files, module_of, sidecar, size_of
from .record import encode, make
from .replace import alone

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def stamp(path: str | os.PathLike[str], run: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Write a run's stamp into a model file, or into every model file of a checkpoint directory; return the stamp."""
    target, is_directory = located(path)
    if not _is_step(extra.get("step")):
        raise FanfoldError(f"step={extra['step']!r} is not a number. Nothing was stamped. Give the step of the weights.")
    told = make(run, extra)
    data = encode(told)
    for file in model_files(target) if is_directory else [target]:
        write(file, data)
    if is_directory:
        write_beside(target, data)
    note(run, target, (told.get("run") or {}).get("step"))
    return told


def _is_step(step: Any) -> bool:
    try:
        return step is None or (not isinstance(step, (str, bytes)) and math.isfinite(step))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last two: a huge int, a tensor with several numbers
        return False


def write(path: Path, data: bytes) -> None:
    """Write a stamp's bytes into a file, or into a sidecar file if its format has no room."""
    try:
        target = path.resolve()  # stamp the target of a symlink, which stays a symlink
        if os.access(target, os.W_OK) or _module(target) is not None:
            with alone(target) as file:
                if (module := _module(target)) is not None:
                    module.write(target, data, file)
                    return
        write_beside(path, encode({**json.loads(data), "of": mark(target)}))
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "Make room" if error.errno in _FULL else "Make it writable"
        raise FanfoldError(f"{path} could not be stamped: {reason}. {remedy}, or stamp a copy elsewhere.") from error
    notices.once(
        f"sidecar:{path.suffix}",
        f"{path.name} is of a format that has no room for a stamp; the stamp is beside the file, in {sidecar(path).name}. "
        "Copy both together, or save as safetensors or with torch.save.",
    )


def _module(path: Path) -> Any:
    """Return the module that writes a stamp into a file; None if its format has no room for one."""
    with path.open("rb") as file:
        return module_of(file.read(16), path, os.fstat(file.fileno()).st_size)


def write_beside(path: Path, data: bytes) -> None:
    """Write a stamp as a sidecar file, atomically."""
    with replacing(sidecar(path)) as file:
        file.write(data)


def note(run: Any, path: Path, step: Any) -> None:
    """List a saved file on its run."""
    recorder = getattr(run, "_recorder", None)
    if recorder is not None:
        name = os.fsencode(path.absolute()).decode("utf-8", "backslashreplace")  # a file name is bytes, and may not be valid text
        listed = recorder.event(
            "saved", {"path": name, "size": size_of(path), "s": int(step) if isinstance(step, (int, float)) else None}
        )
        if not listed:
            notices.once(
                f"stamped late:{run.id}",
                f"{path.name} was stamped after run {run.name} had finished. The stamp leads to the run, but the run does not "
                "list the file. Stamp before run.finish(), and wait for asynchronous saves.",
            )
