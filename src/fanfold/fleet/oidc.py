"""Logins through an OpenID Connect provider: authorization code with PKCE, and an ID token whose claims are all checked.

The nonce and PKCE's verifier are derived from the state, a random string signed into the visitor's cookie: any gateway
with the same secret can finish a login that another one started.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from ..errors import FanfoldError, SettingError, missing_extra
from ..process import LOOPBACK
from ..settings import split_address
from .sessions import Errand, Sessions

SCOPES = "openid email profile"
USER_CLAIM, GROUPS_CLAIM = "email", "groups"
ERRAND_SECONDS = 600.0
TIMEOUT = 10.0
FRESH_SECONDS, FAILED_SECONDS = 3600.0, 5.0
MAX_ANSWER = 1 << 20
LEEWAY = 60.0  # clocks differ
# Asymmetric algorithms only: with a shared key, anyone who can verify a token could also forge one.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class LoginFailed(FanfoldError):
    """A failed login; the message is shown to the visitor."""


class LoginIdentity(NamedTuple):
    """Who logged in."""

    user: str
    groups: list[str]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that refuses redirects: a provider has no reason to send us elsewhere, least of all with the client secret."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the interface
        return None


class Oidc:
    """One provider, with this gateway as its client. Thread-safe."""

    def __init__(
        self, issuer: str, client: str, sessions: Sessions, *, secret: str | None = None, scopes: str = SCOPES,
        user_claim: str = USER_CLAIM, groups_claim: str = GROUPS_CLAIM,
    ) -> None:  # fmt: skip
        try:
            import jwt
        except ImportError as error:
            raise missing_extra("PyJWT", "oidc", "A login by OpenID Connect") from error
        _check_address(issuer, "--oidc-issuer", SettingError)
        self.issuer, self.client, self.scopes = issuer, client, scopes
        self.user_claim, self.groups_claim = user_claim, groups_claim
        self._secret, self._sessions = secret, sessions
        self._jwt: Any = jwt
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._lock = threading.Lock()
        self._found: Mapping[str, Any] = {}
        self._keys: Any = None
        self._fresh_until = self._failed_until = 0.0

    # The two steps

    def start(self, redirect: str) -> tuple[str, Errand]:
        """Return the URL to redirect a visitor to, and the errand to store in their cookie."""
        state = secrets.token_urlsafe(24)
        asked = {
            "response_type": "code",
            "client_id": self.client,
            "redirect_uri": redirect,
            "scope": self.scopes,
            "state": state,
            "nonce": self._sessions.derive("nonce", state),
            "code_challenge": _challenge(self._sessions.derive("verifier", state)),
            "code_challenge_method": "S256",
        }
        place = str(self._discovered()["authorization_endpoint"])
        joint = "&" if urlsplit(place).query else "?"
        return f"{place}{joint}{urlencode(asked, quote_via=quote)}", Errand(self._sessions.clock() + ERRAND_SECONDS, state)

    def finish(self, errand: Errand | None, answer: Mapping[str, str], redirect: str) -> LoginIdentity:
        """Return who logged in, according to the provider."""
        if errand is None or not hmac.compare_digest(errand.state.encode(), answer.get("state", "").encode()):
            raise LoginFailed("This login was not begun here, or took too long. You are not logged in. Begin again.")
        if "error" in answer:
            why = answer.get("error_description") or answer["error"]
            raise LoginFailed(f"The provider refused: {why[:300]}. You are not logged in. Begin again, or ask whoever runs it.")
        if answer.get("iss", self.issuer) != self.issuer:
            raise LoginFailed("The answer is another provider's. You are not logged in. Begin again.")
        tokens = self._exchange(answer.get("code", ""), self._sessions.derive("verifier", errand.state), redirect)
        claims = self._verified(tokens.get("id_token"), self._sessions.derive("nonce", errand.state))
        if self.user_claim not in claims or self.groups_claim not in claims:
            claims = _joined(claims, self._user_info(tokens, claims["sub"]))
        return self._identity(claims)

    def _identity(self, claims: Mapping[str, Any]) -> LoginIdentity:
        user, groups = claims.get(self.user_claim), claims.get(self.groups_claim, [])
        if not isinstance(user, str) or not user.strip() or len(user) > 200 or not user.isprintable():
            raise LoginFailed(f"The provider does not send {self.user_claim!r}. You are not logged in. Ask whoever runs this.")
        if self.user_claim == "email" and claims.get("email_verified") is not True:
            raise LoginFailed(f"The provider does not vouch for {user}. You are not logged in. Confirm the address there first.")
        listed = groups if isinstance(groups, list) else [groups]
        return LoginIdentity(user, [group for group in listed if isinstance(group, str)])

    # Requests to the provider

    def _discovered(self) -> Mapping[str, Any]:
        """Return the provider's discovery document; fetched once an hour."""
        with self._lock:
            if time.monotonic() < self._fresh_until:
                return self._found
            if time.monotonic() < self._failed_until:  # repeated attempts must not tie up threads until a timeout
                raise LoginFailed("The provider could not be reached a moment ago. You are not logged in. Try again later.")
            try:
                self._discover()
            except LoginFailed:
                self._failed_until = time.monotonic() + FAILED_SECONDS
                raise
            return self._found

    def _discover(self) -> None:
        found = self._ask(f"{self.issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != self.issuer:
            name = str(found.get("issuer"))[:200]
            raise LoginFailed(f"The provider calls itself {name!r}. You are not logged in. --oidc-issuer has to say the same.")
        for name in _ENDPOINTS:
            _check_address(found.get(name), f"the provider's {name}", LoginFailed)
        self._found = found
        self._keys = self._jwt.PyJWKClient(str(found["jwks_uri"]), lifespan=FRESH_SECONDS, timeout=TIMEOUT)
        self._fresh_until = time.monotonic() + FRESH_SECONDS

    def _exchange(self, code: str, verifier: str, redirect: str) -> Mapping[str, Any]:
        found = self._discovered()
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect, "code_verifier": verifier}
        listed = found.get("token_endpoint_auth_methods_supported")
        methods = listed if isinstance(listed, list) and listed else ["client_secret_basic"]
        headers = {}
        if self._secret and "client_secret_basic" in methods:
            pair = f"{quote(self.client, safe='')}:{quote(self._secret, safe='')}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": self.client, **({"client_secret": self._secret} if self._secret else {})}
        return self._ask(str(found["token_endpoint"]), urlencode(form).encode(), headers)

    def _verified(self, token: Any, nonce: str) -> Mapping[str, Any]:
        """Return an ID token's claims after checking signature, issuer, audience, expiry and nonce."""
        try:
            key = self._keys.get_signing_key_from_jwt(token)
            claims: Mapping[str, Any] = self._jwt.decode(
                token, key, algorithms=list(ALGORITHMS), audience=self.client, issuer=self.issuer, leeway=LEEWAY,
                options={"require": ["iss", "sub", "aud", "exp", "iat"]},
            )  # fmt: skip
        except (self._jwt.PyJWTError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise LoginFailed(f"The provider's answer cannot be trusted: {error}. You are not logged in. Begin again.") from error
        audience = claims["aud"]
        several = isinstance(audience, list) and len(audience) > 1
        foreign = claims.get("azp", None if several else self.client) != self.client  # issued to another client
        if foreign or not hmac.compare_digest(ascii(claims.get("nonce", "")), ascii(nonce)):
            raise LoginFailed("The provider's answer is for another login. You are not logged in. Begin again.")
        return claims

    def _user_info(self, tokens: Mapping[str, Any], subject: str) -> Mapping[str, Any]:
        """Fetch claims that are not in the ID token; a response about another subject is ignored."""
        place, word = self._discovered().get("userinfo_endpoint"), tokens.get("access_token")
        if not place or not isinstance(word, str):
            return {}
        _check_address(place, "the provider's userinfo_endpoint", LoginFailed)
        found = self._ask(str(place), headers={"authorization": f"Bearer {word}"})
        return found if found.get("sub") == subject else {}

    def _ask(self, url: str, form: bytes | None = None, headers: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        request = urllib.request.Request(url, form, {"accept": "application/json", **(headers or {})})  # noqa: S310 - checked
        try:
            with self._opener.open(request, timeout=TIMEOUT) as response:
                found = json.loads(response.read(MAX_ANSWER))
        except urllib.error.HTTPError as error:
            with error:
                raise LoginFailed(
                    f"The provider answers {error.code}. You are not logged in. Begin again, or ask whoever runs it."
                ) from error
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise LoginFailed("The provider cannot be reached. You are not logged in. Try again later.") from error
        if not isinstance(found, dict):
            raise LoginFailed("The provider's answer cannot be read. You are not logged in. Ask whoever runs it.")
        return found


def _joined(claims: Mapping[str, Any], more: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge claims from userinfo into an ID token's claims; `email_verified` applies only to the address it came with."""
    joined = {**more, **claims}
    if "email" in claims and claims["email"] != more.get("email"):
        joined["email_verified"] = claims.get("email_verified")
    elif "email" not in claims:
        joined["email_verified"] = more.get("email_verified")
    return joined


def _challenge(verifier: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _check_address(url: Any, what: str, kind: type[FanfoldError]) -> None:
    """Refuse an address that would carry the client secret or a login unencrypted."""
    parts = split_address(url if isinstance(url, str) else "")
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme != "http" or parts.hostname not in LOOPBACK:
        raise kind(f"{what} is {str(url)[:200]!r}, which is not an https:// address. Nobody can log in by it. Correct it.")
