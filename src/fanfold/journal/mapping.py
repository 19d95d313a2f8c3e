"""Memory-mapped files that keep no descriptor: a run of thousands of ranks has as many journals.

Before Python 3.13, `mmap.mmap` duplicates its descriptor and keeps the copy open as long as the map exists. Here an
anonymous map, which has none, reserves the addresses, and the file is then mapped over it.
"""

from __future__ import annotations

import mmap
import os
import sys
from functools import cache
from typing import Any

_MAP_FIXED = 0x10  # on Linux and macOS; the mmap module does not name it


def map_file(fd: int, size: int) -> mmap.mmap:
    """Map the first `size` bytes of a file for reading. The caller may close `fd` immediately."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ, trackfd=False)
    if sys.platform not in ("linux", "darwin"):
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    # Private and read-only: the system reserves no memory for it, however long the file is.
    reserved = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    error = _map_over(reserved, fd, size)
    if error:
        raise OSError(error, os.strerror(error))
    return reserved


def _map_over(reserved: mmap.mmap, fd: int, size: int) -> int:
    """Map a file at the addresses of another map; return the system's error number, or 0."""
    import ctypes

    map_at, get_buffer, release_buffer = _functions()
    buffer = ctypes.create_string_buffer(128)  # a Py_buffer takes 80 bytes
    get_buffer(reserved, buffer, 0)
    address = int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)  # the first field
    release_buffer(buffer)
    done = map_at(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    return 0 if done == address else ctypes.get_errno()


@cache
def _functions() -> tuple[Any, Any, Any]:
    """Return mmap(2), and CPython's functions to get and release the address of a buffer."""
    import ctypes

    map_at = ctypes.CDLL(None, use_errno=True).mmap
    map_at.restype = ctypes.c_void_p
    map_at.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    get_buffer, release_buffer = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    get_buffer.argtypes = (ctypes.py_object, ctypes.c_char_p, ctypes.c_int)
    release_buffer.argtypes = (ctypes.c_char_p,)
    return map_at, get_buffer, release_buffer
