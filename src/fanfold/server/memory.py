"""The memory of a gateway: freed memory is kept for the next batch, and garbage is looked for seldom.

A batch takes tens of megabytes, several times a second. By default, the C library and Arrow return them to the kernel each time;
getting them back, zeroed page by page, took a tenth of a gateway's CPU.
"""

from __future__ import annotations

import contextlib
import gc
import os

KEPT = 256 << 20  # bytes of free memory that are not returned
LARGE = 32 << 20  # bytes; larger pieces are always returned
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep() -> None:
    """Have freed memory kept, where the C library can (glibc); call it before anything large is imported."""
    import ctypes

    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # so that the C library decides about its memory, too
    with contextlib.suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, KEPT)
        libc.mallopt(_MMAP_THRESHOLD, LARGE)


def settle() -> None:
    """Call this when everything is loaded: what is there now stays, and most of what comes holds no cycles.

    With the usual threshold, looking for garbage costs half as much as decoding.
    """
    gc.freeze()
    gc.set_threshold(25_000, 10, 10)
