"""Sessions as signed cookies: who is logged in, and until when. Gateways store none, so any of several can read them.

A session names a token by its id, or a person; their permissions are looked up at every request. A signature made for one
purpose is not valid for another.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..errors import SettingError

HOURS = 12.0
MAX_COOKIE = 3800  # browsers allow 4096 bytes, including the name
SHORTEST_SECRET = 32
T = TypeVar("T", bound=msgspec.Struct)


class LoginSession(msgspec.Struct, forbid_unknown_fields=True):
    """A logged-in user: with a token (its id), or by name."""

    until: float
    token: str = ""
    user: str = ""
    groups: list[str] = []


class Errand(msgspec.Struct, forbid_unknown_fields=True):
    """A login in progress at a provider."""

    until: float
    state: str


_PURPOSES: dict[type[msgspec.Struct], str] = {LoginSession: "Session", Errand: "Errand"}  # in signatures and cookie names


class Sessions:
    """Signer and reader of cookies. Without a secret it generates one, and no other gateway can read its cookies."""

    def __init__(self, secret: str | None = None, *, hours: float = HOURS, clock: Callable[[], float] = time.time) -> None:
        if secret is not None and len(secret) < SHORTEST_SECRET:
            raise SettingError(
                f"FANFOLD_SESSION_SECRET has {len(secret)} characters, fewer than {SHORTEST_SECRET}. The gateway was not "
                "started, since sessions could be forged. Make one with: openssl rand -hex 32"
            )
        self.shared = secret is not None
        self.seconds = hours * 3600
        self.clock = clock
        self._key = hashlib.sha256(f"fanfold session {secret or secrets.token_hex(32)}".encode()).digest()

    def derive(self, purpose: str, text: str) -> str:
        """Return a secret for one purpose and text, which only gateways with this key can derive."""
        return _letters(hmac.digest(self._key, f"{purpose}\0{text}".encode(), "sha256"))

    def sign(self, note: msgspec.Struct) -> str:
        body = _letters(msgspec.json.encode(note))
        return f"{body}.{self.derive(_PURPOSES[type(note)], body)}"

    def read(self, text: str, kind: type[T]) -> T | None:
        """Return a signed note, if it was signed for this purpose and has not expired."""
        body, _, signature = text.partition(".")
        if not hmac.compare_digest(signature.encode(), self.derive(_PURPOSES[kind], body).encode()):
            return None
        try:
            note = msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=kind)
        except (ValueError, msgspec.MsgspecError):
            return None
        until: float = getattr(note, "until", 0.0)
        return note if until > self.clock() else None

    # Cookies. Over TLS, the name's prefix makes browsers refuse a cookie set by another host or over plain HTTP.

    def put(self, response: Response, note: msgspec.Struct, *, secure: bool) -> None:
        """Set a note as a cookie."""
        text = self.sign(note)
        if len(text) > MAX_COOKIE:
            raise SettingError("the login names too many groups for a cookie. You are not logged in. Grant fewer groups.")
        left = max(0, int(getattr(note, "until", 0.0) - self.clock()))
        response.set_cookie(_name(type(note), secure), text, max_age=left, path="/", httponly=True, samesite="lax", secure=secure)

    def take(self, request: Request, kind: type[T], *, secure: bool) -> T | None:
        """Return the note in a request's cookie."""
        return self.read(request.cookies.get(_name(kind, secure), ""), kind)

    def drop(self, response: Response, kind: type[msgspec.Struct], *, secure: bool) -> None:
        """Delete a note's cookie."""
        response.delete_cookie(_name(kind, secure), path="/", httponly=True, samesite="lax", secure=secure)


def _name(kind: type[msgspec.Struct], secure: bool) -> str:
    return f"{'__Host-' if secure else ''}fanfold-{_PURPOSES[kind].lower()}"


def _letters(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
