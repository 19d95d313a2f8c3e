"""Share links: a token that reads one project, made from the dashboard's own token and project name, so that nothing is stored.

It goes into the address of an embedded chart (`embed?share=…`). It is valid for as long as the dashboard's token is.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error

MOST_CHARACTERS = 4096


def share_token(token: str, project: str) -> str:
    """Return the token that reads one project."""
    name = project.encode("utf-8", "surrogatepass")
    return f"{_text(name)}.{_text(_proof(token, name))}"


def shared_project(token: str, word: str) -> str | None:
    """Return the project that a share token reads; None if it is not one."""
    name, _, proof = word.partition(".")
    if not proof or len(word) > MOST_CHARACTERS:
        return None
    try:
        project, given = _bytes(name), _bytes(proof)
        return project.decode("utf-8", "surrogatepass") if hmac.compare_digest(given, _proof(token, project)) else None
    except (Error, ValueError):
        return None


def _proof(token: str, project: bytes) -> bytes:
    return hmac.new(token.encode(), b"share\0" + project, "sha256").digest()


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
