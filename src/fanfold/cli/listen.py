"""Listening for browsers and nodes: the sockets of `fanfold ui` and `fanfold server start`."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ..errors import FanfoldError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def listen(host: str, ports: Sequence[int], what: str) -> list[socket.socket]:
    """Listen on the first of these ports that is free. Clients may connect right away; they wait until the server answers."""
    from ..server.listen import listen

    reason: OSError | None = None
    for port in ports:
        try:
            return listen(host, port)
        except OSError as error:
            reason = error
    which = f"port {ports[0]}" if len(ports) == 1 else f"any port from {ports[0]} to {ports[-1]}"
    raise FanfoldError(f"cannot listen on {host}, {which}: {reason}. {what} was not started. Try another --port.")


def url(scheme: str, host: str, listeners: Sequence[socket.socket]) -> str:
    """Return the address of listeners under one of their host names."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listeners[0].getsockname()[1]}"
