"""Forwarded headers: honored when they come from a trusted proxy, removed when they come from anyone else."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import SettingError

PROTO, FOR = b"x-forwarded-proto", b"x-forwarded-for"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Proxies:
    """The trusted proxies, and the headers in which they name user and groups. Without a user header, they log nobody in."""

    def __init__(self, trusted: Iterable[str] = (), *, user: str | None = None, groups: str | None = None) -> None:
        self.networks = [_network(text) for text in trusted]
        self.user = user.lower() if user else None
        self.groups = groups.lower() if groups else None
        if (user or groups) and not self.networks:
            raise SettingError(
                "--trust-header names a header that anybody could send, and no proxy is trusted. The gateway was not started. "
                "Add --trusted-proxy with the proxy's address or network."
            )

    def trusts(self, peer: str) -> bool:
        if not self.networks:
            return False
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:10.0.0.1, where one socket serves both families
        return any(one in network for network in self.networks for one in (address, mapped) if one is not None)

    def read(self, headers: Sequence[tuple[bytes, bytes]], name: str | None) -> str:
        """Return a header that occurs exactly once: of two, one may come from the visitor."""
        wanted = name.encode("latin-1") if name else None
        found = [value for key, value in headers if key == wanted]
        return found[0].decode("utf-8", "replace").strip() if len(found) == 1 else ""

    def caller(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Return the client address reported by a trusted proxy: the last in the list that is not a proxy itself."""
        named = [part for key, value in headers if key == FOR for part in value.decode("latin-1").split(",")]
        found = peer
        for one in map(_address, reversed(named)):
            if not one:  # nothing that could be limited: count it for the proxy that said it
                return found
            found = one
            if not self.trusts(one):
                return one
        return peer


class Proxied:
    """The outermost middleware: applies forwarded headers of trusted proxies, and removes them from all requests."""

    def __init__(self, app: ASGIApp, *, proxies: Proxies) -> None:
        self.app = app
        self.proxies = proxies
        self.names = {PROTO, FOR, *(name.encode("latin-1") for name in (proxies.user, proxies.groups) if name)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = self._judged(scope)
        await self.app(scope, receive, send)

    def _judged(self, scope: Scope) -> Scope:
        peer = scope["client"][0] if scope.get("client") else ""
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        said: dict[str, Any] = {}
        trusted = self.proxies.trusts(peer)
        if not trusted and not any(key in self.names for key, _ in headers):
            return scope
        if trusted:
            proto = self.proxies.read(headers, PROTO.decode())
            said = {"scheme": proto} if proto in ("http", "https") else {}
            said["client"] = (self.proxies.caller(peer, headers), 0)
            said["state"] = {
                **scope.get("state", {}),
                "user": self.proxies.read(headers, self.proxies.user),
                "groups": _split(self.proxies.read(headers, self.proxies.groups)),
            }
        return {**scope, **said, "headers": [(key, value) for key, value in headers if key not in self.names]}


def _address(text: str) -> str:
    """Return the address in a part of X-Forwarded-For, in which some proxies write the port, too; empty if there is none."""
    text = text.strip()[:100]
    host = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0] if text.count(":") == 1 else text
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return ""


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise SettingError(
            f"--trusted-proxy {text!r} is not an address or network: {error}. The gateway was not started. "
            "Write 10.0.0.7 or 10.0.0.0/8."
        ) from error
