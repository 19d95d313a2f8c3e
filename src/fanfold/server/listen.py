"""Listening sockets. A server that is opened as `localhost` takes its port at both of that name's addresses.

Browsers and ssh try ::1 first. If only 127.0.0.1 were taken, another user of this machine could listen at ::1 on the same port,
and would be sent the token.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from ..process import LOOPBACK

V4, V6 = "127.0.0.1", "::1"
_NO_IPV6 = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})
TRIES = 50


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on a port (0: any that is free), also at the other loopback address if `localhost` leads here; raise OSError."""
    for _ in range(0 if port else TRIES):  # a port that is free at one address may be taken at the other
        with contextlib.suppress(OSError):
            return _listen(host, port)
    return _listen(host, port)


def _listen(host: str, port: int) -> list[socket.socket]:
    first = _bound(V4 if host == "localhost" else host, port)
    if host not in LOOPBACK and host != "0.0.0.0":  # noqa: S104 - compared, not bound
        return [first]
    other = V4 if host == V6 else V6
    try:
        return [first, _bound(other, first.getsockname()[1])]
    except OSError as error:
        if error.errno in _NO_IPV6:
            return [first]
        first.close()
        raise OSError(error.errno, f"{error.strerror} ({other}, which is also called localhost)") from error


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)  # from here on a browser may come; it waits until the server is up
    except OverflowError as error:
        listener.close()
        raise OSError(errno.EINVAL, str(error)) from error
    except OSError:
        listener.close()
        raise
    return listener
