"""Python bindings of the native library: find it, bind it to the installed torch, and test it before relying on it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import Any

from ...errors import outcome
from ...settings import cache_directory, changeable_by_others
from . import build

OLDEST, NEWEST = (2, 11), (2, 15)  # torch versions whose layout abi.cpp was compiled against
_TEXT, _INT, _U32, _U64, _I64, _DOUBLE = (
    ctypes.c_char_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_double,
)  # fmt: skip
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ff_version": (_INT, ()),
    "ff_error": (_TEXT, ()),
    "ff_block": (ctypes.c_void_p, ()),
    "ff_rows_offset": (_I64, ()),
    "ff_init": (_INT, ()),
    "ff_bind_c10": (_INT, (_TEXT,)),
    "ff_bind_cpu": (_INT, (_TEXT,)),
    "ff_bind_cuda": (_INT, (_TEXT,)),
    "ff_describe": (None, (ctypes.c_void_p,)),
    "ff_start": (_INT, (_TEXT, _TEXT, ctypes.c_int32, _U32, _U64, _U64, _U64, _DOUBLE, _INT)),
    "ff_stop": (None, ()),
    "ff_detach": (None, ()),
    "ff_child": (None, ()),
    "ff_window": (None, (_INT,)),
    "ff_steps": (_U64, ()),
    "ff_step_turn": (None, ()),
    "ff_moment": (None, (_U32,)),
    "ff_stamp_time": (None, ()),
    "ff_label_id": (_U32, (_TEXT,)),
    "ff_usage_watch": (_INT, ()),
    "ff_usage_take": (_I64, (ctypes.c_char_p, _I64)),
    "ff_export_file": (_INT, (_TEXT, ctypes.c_char_p, _I64)),
}
# These affect only the calling thread and return at once: releasing the GIL would cost more than the call.
_QUICK: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ff_label_set": (_INT, (_U32,)),
    "ff_label_now": (_U32, ()),
    "ff_compiling": (None, (_INT,)),
    "ff_step": (_INT, ()),
    "ff_wait_begin": (None, (_U64, _TEXT)),
    "ff_wait_end": (None, (_U64,)),
}


class NativeUnavailable(Exception):
    """The native library cannot be used here; the message says why."""


_lock = threading.Lock()
_loaded: Any = None
_bound = False
_refused: NativeUnavailable | None = None


def supported(version: str) -> bool:
    """Return whether a torch version is on the allow-list."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return False
    return OLDEST <= (major, minor) <= NEWEST


def torch_folder() -> Path | None:
    """Find torch's libraries without importing it."""
    spec = importlib.util.find_spec("torch")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    folder = Path(places[0]) / "lib" if places else None
    return folder if folder is not None and (folder / "libc10.so").is_file() else None


def torch_version() -> str:
    """Read torch's version without importing it."""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def current() -> Any:
    """Return the library if it is in use in this process, else None."""
    return _loaded


def load(*, force: bool = False) -> Any:
    """Return the library, bound only to libc10; torch need not be imported yet. Raise NativeUnavailable with the reason."""
    global _loaded  # noqa: PLW0603 - one library per process
    with _lock:
        if _loaded is None:
            folder = _checked(force)
            library = _open()
            if not library.ff_init():
                raise NativeUnavailable("no memory could be mapped for its table")
            if not library.ff_bind_c10(os.fsencode(folder / "libc10.so")):
                raise NativeUnavailable(f"torch {torch_version()} differs from what it knows ({library.ff_error().decode()})")
            _loaded = library
        return _loaded


def _checked(force: bool) -> Path:
    if not sys.platform.startswith("linux"):
        raise NativeUnavailable(f"it is built for Linux, and this is {sys.platform}")
    folder = torch_folder()
    if folder is None:
        raise NativeUnavailable("torch is not installed, or has no shared libraries of its own")
    version = torch_version()
    if not supported(version) and not force:
        known = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        raise NativeUnavailable(f"torch {version or '(unknown)'} is not among the versions it was proved with ({known})")
    return folder


def _open() -> Any:
    """Open the prebuilt library, else one built earlier, else build it now."""
    reasons = []
    for find in (build.beside, lambda: _cached() / build.library_name(), lambda: build.build(_cached())):
        try:
            path = find()
            if path.is_file():
                return _declared(path)
        except (OSError, AttributeError, build.BuildError, NativeUnavailable) as error:  # AttributeError: it lacks a function
            reasons.append(str(error))
    raise NativeUnavailable(f"its library could not be loaded or built: {'; '.join(dict.fromkeys(reasons))}")


def _cached() -> Path:
    """Return the folder of libraries built earlier. What is in it runs as this user, so nobody else may put anything there."""
    folder = cache_directory() / "native"
    if (place := changeable_by_others(folder)) is not None:
        raise NativeUnavailable(f"another user could replace it in {place}; set FANFOLD_CACHE_DIR to a folder of yours")
    return folder


def _declared(path: Path) -> Any:
    build.check(path)
    library, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    for source, table in ((library, _FUNCTIONS), (quick, _QUICK)):
        for name, (result, arguments) in table.items():
            function = getattr(source, name)
            function.restype, function.argtypes = result, list(arguments)
            setattr(library, name, function)
    return library


def bind(*, force: bool = False) -> Any:
    """Return the library, bound to the imported torch and tested on it; raise NativeUnavailable with the reason."""
    global _bound, _refused  # noqa: PLW0603 - once per process
    if _refused is not None:
        raise _refused
    library = load(force=force)
    with _lock:
        if not _bound:
            try:
                _bind(library)
            except NativeUnavailable as error:
                _refused = error
                raise
            _bound = True
    return library


def _bind(library: Any) -> None:
    import torch

    folder = torch_folder()
    if folder is None or not library.ff_bind_cpu(os.fsencode(folder / "libtorch_cpu.so")):
        raise NativeUnavailable(f"torch {torch.__version__} differs from what it knows ({library.ff_error().decode()})")
    wrong, error = outcome(self_test, library)
    if wrong is not None or error is not None:
        reason = wrong if error is None else f"{type(error).__name__}: {error}"
        raise NativeUnavailable(f"its self-test on torch {torch.__version__} failed: {reason}") from error
    if torch.version.cuda:  # is_available() would initialize the driver, and forked children could no longer use it
        library.ff_bind_cuda(os.fsencode(folder / "libtorch_cuda.so"))


def self_test(library: Any) -> str | None:
    """Profile a few known operators, a range and a label, in memory only; return what is wrong, if anything."""
    import torch

    from .. import op_table

    library.ff_start(b"", b"", 0, op_table.MAX_ROWS, 1, 1, 0, 0.0, 0)  # enough rows for what other threads do meanwhile
    before = library.ff_label_now()
    library.ff_label_set(library.ff_label_id(b"self-test"))
    try:
        with torch.no_grad(), torch.autograd.profiler.record_function("self-test"):
            for _ in range(3):
                torch.zeros(2).cosh()
    finally:
        library.ff_label_set(before)
        library.ff_stop()
        table = op_table.take(library)
        library.ff_detach()
    rows = op_table.parse(table).rows
    found = [(row["count"], row["label"], row["scope"]) for row in rows if row["op"] == "aten::cosh"]
    if [row for row in found if row[1] == "self-test"] != [(3, "self-test", "forward")]:
        return f"of three calls of aten::cosh it saw {found}"
    if [row["scope"] for row in rows if row["op"] == "self-test"] != ["user"]:
        return "it took a range for an operator"
    return None


def describe_inputs(library: Any, wanted: bool) -> None:
    """Turn the recording of shapes and dtypes on or off; this part is built once, against torch's headers."""
    library.ff_describe(_describer() if wanted else None)


def _describer() -> int:
    import torch
    from torch.utils.cpp_extension import include_paths

    # Without NDEBUG, the headers' RecordFunction has one member more than the library's.
    flags = ("-std=c++20", "-O1", "-fPIC", "-shared", "-DNDEBUG", *(f"-I{path}" for path in include_paths()))
    name = f"libfanfold_inputs-{build.digest('inputs.cpp', extra=torch.__version__)}.so"
    target = _cached() / name
    try:
        if not build.intact(target):
            build.compile_to(target, ["inputs.cpp"], flags)
        found = ctypes.CDLL(str(target)).ff_describe_inputs
    except (OSError, build.BuildError) as error:
        raise NativeUnavailable(f"inputs=True needs a part built against torch's headers, and {error}") from error
    address = ctypes.cast(found, ctypes.c_void_p).value
    assert address is not None
    return address
