"""Logging in to a gateway's dashboard: who the caller is, the login form, and the OpenID Connect redirects.

Callers are identified by a token in the header, by the session of an earlier login, or by a trusted proxy.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from anyio import CapacityLimiter, to_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ..fleet import audit as record
from ..fleet.grants import Anybody, Grants, Holder, Person
from ..fleet.limits import Rates, party
from ..fleet.login_form import form
from ..fleet.oidc import LoginFailed, Oidc
from ..fleet.proxy import Proxies
from ..fleet.responses import peer_of, read_body
from ..fleet.sessions import Errand, LoginSession, Sessions
from ..fleet.tokens import TokenBook
from ..fleet.wire import Rejected

if TYPE_CHECKING:
    from .gateway import Gateway

logger = logging.getLogger("fanfold.gateway")
MAX_FORM = 4096
TOO_LONG = "the form is too long. You are not logged in."
PROVIDER_THREADS = 4  # a slow provider must not block every thread
REFUSALS, REFUSALS_BURST = 0.2, 100.0  # audit entries about refused logins, per second and at once: they must not fill the disk


@dataclass
class Logins:
    """How people log in to the dashboard. With `tokens=None` anyone who reaches the gateway may do everything."""

    tokens: TokenBook | None
    sessions: Sessions = field(default_factory=Sessions)
    grants: Grants = field(default_factory=Grants)
    proxies: Proxies = field(default_factory=Proxies)
    oidc: Oidc | None = None
    public_url: str | None = None

    @property
    def by_form(self) -> bool:
        """Return whether the form accepts tokens, which it does even where a proxy logs people in."""
        return self.tokens is not None

    def secure(self, request: Request) -> bool:
        """Return whether the browser uses TLS, to us or to a proxy in front of us."""
        return request.url.scheme == "https" or (self.public_url or "").startswith("https://")

    def caller(self, request: Request) -> Holder | None:
        """Return the caller, or None if unknown."""
        if self.tokens is None:
            return Anybody()
        kind, _, word = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self.tokens.find(word.strip())
        if user := getattr(request.state, "user", ""):  # set only for requests from a trusted proxy
            return self.grants.person(user, request.state.groups)
        session = self.sessions.take(request, LoginSession, secure=self.secure(request))
        return self.of(session) if session is not None else None

    def of(self, session: LoginSession) -> Holder | None:
        """Return the holder of a session, with their current permissions."""
        if session.token:
            return self.tokens.get(session.token) if self.tokens is not None else None
        return self.grants.person(session.user, session.groups)

    def address(self, request: Request, path: str) -> str:
        """Return the public URL of a dashboard path, as browser and provider see it."""
        base = self.public_url or str(request.base_url)
        place = urlsplit(base)
        prefix = place.path.rstrip("/").removesuffix("/ui")
        return f"{place.scheme}://{place.netloc}{prefix}/ui/{path}"


class Entrance:
    """The handlers of the login routes."""

    def __init__(self, gateway: Gateway, logins: Logins) -> None:
        self.gateway = gateway
        self.logins = logins
        self._threads = CapacityLimiter(PROVIDER_THREADS)
        self._lines = Rates(REFUSALS, REFUSALS_BURST)
        self._unsaid = 0

    async def show(self, request: Request) -> Response:
        """Show the form, or who is logged in."""
        return self._form(await run_in_threadpool(self.logins.caller, request))

    async def log_in(self, request: Request) -> Response:
        """Start a session for the token sent in the form."""
        peer = peer_of(request)
        self.gateway.strangers.check(party(peer), "what this address tries")
        given = dict(parse_qsl((await read_body(request, MAX_FORM, TOO_LONG)).decode("utf-8", "replace")))
        word = given.get("token", "").strip()
        tokens = self.logins.tokens
        found = await run_in_threadpool(tokens.find, word) if tokens is not None else None
        if found is None:
            self.gateway.strangers.take(party(peer), 1.0)
            await self._refused(peer, "a token that is none")
            return self._form(None, "This token is not valid, or no longer valid. You are not logged in.", 401)
        return await self._welcome(request, found, LoginSession(self._until(), token=found.id))

    async def log_out(self, request: Request) -> Response:
        answer = RedirectResponse("./login", 303)
        self.logins.sessions.drop(answer, LoginSession, secure=self.logins.secure(request))
        return answer

    async def start(self, request: Request) -> Response:
        """Redirect to the provider."""
        oidc = self._oidc()
        try:
            address = self.logins.address(request, "oidc/callback")
            place, errand = await to_thread.run_sync(oidc.start, address, limiter=self._threads)
        except LoginFailed as error:
            return await self._failed(request, error, 502)
        answer = RedirectResponse(place, 303)
        self.logins.sessions.put(answer, errand, secure=self.logins.secure(request))
        return answer

    async def finish(self, request: Request) -> Response:
        """Complete a login when the provider redirects back."""
        oidc, sessions, secure = self._oidc(), self.logins.sessions, self.logins.secure(request)
        self.gateway.strangers.check(party(peer_of(request)), "what this address tries")  # each code is a request to the provider
        errand = sessions.take(request, Errand, secure=secure)
        redirect = self.logins.address(request, "oidc/callback")
        try:
            answer = dict(request.query_params)
            who = await to_thread.run_sync(oidc.finish, errand, answer, redirect, limiter=self._threads)
        except LoginFailed as error:
            self.gateway.strangers.take(party(peer_of(request)), 1.0)
            return await self._failed(request, error, 403)
        groups = self.logins.grants.known(who.groups)
        person = self.logins.grants.person(who.user, groups)
        welcome = await self._welcome(request, person, LoginSession(self._until(), user=who.user, groups=groups), "../")
        sessions.drop(welcome, Errand, secure=secure)
        return welcome

    async def _welcome(self, request: Request, who: Holder, session: LoginSession, home: str = "./") -> Response:
        await self._record(record.LOGIN, who.label, peer_of(request), {})
        answer = RedirectResponse(home, 303)
        self.logins.sessions.put(answer, session, secure=self.logins.secure(request))
        return answer

    async def _failed(self, request: Request, error: LoginFailed, status: int) -> Response:
        logger.warning("%s", error, extra={"event": "login", "peer": peer_of(request)})
        await self._refused(peer_of(request), str(error))
        return self._form(None, str(error), status, up=True)

    def _form(self, who: Holder | None, said: str = "", status: int = 200, *, up: bool = False) -> Response:
        known = None if who is None or isinstance(who, Anybody) else who
        return form(
            who=known.label if known else "",
            nothing=isinstance(known, Person) and not known.rights,
            provider=self.logins.oidc is not None,
            tokens=self.logins.by_form,
            said=said,
            status=status,
            base="../" if up else "./",
        )

    def _oidc(self) -> Oidc:
        if self.logins.oidc is None:
            raise Rejected(404, "this gateway has no login provider. You are not logged in. Use a token.")
        return self.logins.oidc

    def _until(self) -> float:
        return self.logins.sessions.clock() + self.logins.sessions.seconds

    # Audit log

    async def _refused(self, peer: str, why: str) -> None:
        """Record a refused login; of a flood, only some, with the number left out."""
        if self._lines.left("") <= 0:
            self._unsaid += 1
            return
        self._lines.take("", 1.0)
        detail: dict[str, Any] = {"why": why[:300], **({"and_more": self._unsaid} if self._unsaid else {})}
        self._unsaid = 0
        await self._record(record.REFUSED, "nobody we know", peer, detail)

    async def _record(self, action: str, by: str, peer: str, detail: dict[str, Any]) -> None:
        if self.gateway.audit is None:
            return
        try:
            await run_in_threadpool(self.gateway.audit.write, record.AuditEntry(time.time(), action, by, peer, detail=detail))
        except OSError as error:
            logger.error("the audit log cannot be written: %s", error, extra={"event": "storage"})  # noqa: TRY400 - no trace
