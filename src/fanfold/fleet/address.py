"""The parsed and validated address of a gateway. Separate from the client, so that init() need not import it."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import SettingError
from ..settings import split_address

_ODD = re.compile(r"[^A-Za-z0-9.:/\[\]%_~+=,-]")


class GatewayAddress(NamedTuple):
    """Where a gateway is; `url` is its normalized form, used to name locks and notes."""

    secure: bool
    host: str
    port: int | None
    path: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port else ""
        return f"{'https' if self.secure else 'http'}://{host}{port}{self.path}"


def parse(url: str) -> GatewayAddress:
    """Parse an address; one that contains a password is refused, since addresses are displayed and logged."""
    parts = split_address(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    odd = _ODD.search(url)  # our messages contain commands with the address in it, to be copied to a shell
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or port == 0 or odd:
        shown = url.rpartition("@")[2].partition("?")[0]
        raise SettingError(
            f"{shown!r} is not the address of a gateway. Nothing is forwarded. Write https://name:port, without a password or a "
            "query; the token belongs in FANFOLD_SERVER_TOKEN."
        )
    return GatewayAddress(parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/"))
