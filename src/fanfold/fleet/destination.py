"""The gateway runs are sent to, and its token: an address and a token that belong together, or none.

The address may come from a settings file, which anybody may have written, and the token from the environment. So an address from
a file is used only when this user has named it before, and a token goes only to the address it was given for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import approvals
from ..errors import SettingError
from ..settings import FILE_NAME, TABLE, resolve
from .address import parse

KIND = "fanfold-gateway"


class Upstream(NamedTuple):
    """A gateway, the token sent to it, and the CA certificates that verify it."""

    url: str
    token: str | None
    ca: str | None


def destination(file: Mapping[str, Any], to: str | None = None) -> Upstream | None:
    """Return the gateway named by `to`, FANFOLD_SERVER or the settings file, if any; raise if it is not approved."""
    named = to or os.environ.get(TABLE["server"].variable)
    given = file.get("server") if named is None else named  # an empty variable disables the file's server
    if not given:
        return None
    url = parse(str(given)).url
    own = file if _names(file, url) else {}  # the file's token and CA belong to the server that the file names
    found = Upstream(url, resolve("server_token", file=own), resolve("server_ca", file=own))
    # A token in the same file as the address belongs to it; one from the environment belongs to the address it was used with.
    secret = os.environ.get(TABLE["server_token"].variable)
    place = {"url": url, **_authority(own)}
    if named:
        approvals.remember(KIND, {"url": url})
        approvals.remember(KIND, {"url": url}, secret=secret)
        approvals.remember(KIND, place, secret=secret)
    elif not approvals.is_approved(KIND, place, secret=secret):
        what = "your FANFOLD_SERVER_TOKEN was never given for it" if secret else "you have not approved it yet"
        raise SettingError(
            f"{FILE_NAME} names the gateway {url}, and {what}. Nothing is sent there. If you trust it, set FANFOLD_SERVER={url} "
            f"or run `fanfold server forward --once --to {url}`: it is remembered."
        )
    return found


def _names(file: Mapping[str, Any], url: str) -> bool:
    return bool(file.get("server")) and parse(str(file["server"])).url == url


def _authority(file: Mapping[str, Any]) -> dict[str, str]:
    """Return the CA that a settings file chooses, as a part of what is approved: whoever signs can stand in for the gateway."""
    if "server_ca" not in file or TABLE["server_ca"].variable in os.environ:
        return {}
    return {"ca": os.path.abspath(str(file["server_ca"]))}  # noqa: PTH100 - links stay
