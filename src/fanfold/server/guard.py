"""Checks on every request (host, origin, token), and the security headers of every response.

Any web page can send requests to this machine, and make a domain it owns resolve to it. So a request must name a host we
serve, a browser's request must come from our own page, and every request must carry the token: other users of this machine
can reach its loopback addresses, too.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..fleet.responses import Heads
from ..process import LOOPBACK
from .share import shared_project

COOKIE = "fanfold"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "connect-src 'self'; worker-src 'self'; frame-src 'self'; font-src 'self'; manifest-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors {ancestors}"
)
# For logged media: no scripts, no access to this origin, nothing fetched from anywhere.
MEDIA_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; frame-ancestors 'self'"
# For Plotly figures: scripts run, in an origin of their own, and nothing can be fetched from or sent to anywhere.
PLOT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; frame-ancestors 'self'"
)
# For one chart in a page of any site: it can change nothing, and shows something only with a share link.
EMBED_POLICY = PAGE_POLICY.format(ancestors="*")
LOCAL_PAGES = "'self' http://localhost:* http://127.0.0.1:*"
ALWAYS = ((b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin"))  # whatever an answer says
_ALWAYS = frozenset(name for name, _ in ALWAYS)


def host_of(netloc: str) -> str:
    """Return the host in `host:port`, without brackets; empty if it is invalid."""
    try:
        return (urlsplit(f"//{netloc}").hostname or "").lower()
    except ValueError:
        return ""


def netloc_of(address: str) -> str:
    """Return the `host:port` of a URL; empty if it is invalid."""
    try:
        return urlsplit(address).netloc
    except ValueError:
        return ""


class Guard:
    """The middleware that checks every request. `hosts` are the accepted host names (None: any, safe only with a token).

    `pages`: further host names under which a proxy serves our own page. `public`: paths of files with nothing of any run in
    them, which need no token: a chart in another site's page has none for them.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: Iterable[str] | None, token: str | None, embed: bool, pages: Iterable[str] = (),
        public: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.app = app
        self.hosts = None if hosts is None else LOOPBACK | {name.lower() for name in hosts}
        self.extra = frozenset(name.lower() for name in (*(hosts or ()), *pages)) - LOOPBACK
        self.token = token
        self.public = frozenset(public)
        self.embed = embed
        policy = PAGE_POLICY.format(ancestors=LOCAL_PAGES if embed else "'self'")
        self._otherwise = (  # where an answer does not say something else itself
            (b"content-security-policy", policy.encode("latin-1")),
            (b"cache-control", b"no-cache"),
            (b"referrer-policy", b"no-referrer"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = self._refusal(scope)
        await (answer or self.app)(scope, receive, self._dressed(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Heads(scope)
        host = headers.get("host", "")
        if self.hosts is not None and host_of(host) not in self.hosts:
            return _refused(
                400,
                f"This dashboard does not answer to the name {host_of(host)[:100]!r}. Nothing was read. Open it by the address "
                "`fanfold ui` printed, or start it with --allow-host NAME.",
            )
        if not self._own_page(scope["method"], headers, host):
            return _refused(403, "The request came from another site. Nothing was read. Open the dashboard by its own address.")
        return self._token_answer(scope, headers)

    def _own_page(self, method: str, headers: Headers, host: str) -> bool:
        """Return whether a request comes from our own page or from no page at all; other sites may only link to us."""
        origin = headers.get("origin")
        if origin is not None:
            place = netloc_of(origin)
            return bool(place) and (place.lower() == host.lower() or host_of(place) in self.extra)
        link = method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
        return link or headers.get("sec-fetch-site") not in ("cross-site", "same-site")

    def _token_answer(self, scope: Scope, headers: Headers) -> Response | None:
        """Return None for a valid token, else 401; a token in the URL is moved to a cookie by a redirect."""
        if self.token is None:
            return None
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        if scope["method"] == "GET" and self._is_token(dict(query).get("token", "")):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            answer = RedirectResponse("./" + (f"?{rest}" if rest else ""), 303)
            answer.headers["set-cookie"] = f"{_cookie_name(headers)}={self.token}; HttpOnly; Path=/; {self._cookie_rules(scope)}"
            return answer
        if scope["method"] in ("GET", "HEAD") and scope["path"].removeprefix(scope.get("root_path", "")) in self.public:
            return None
        kind, _, word = headers.get("authorization", "").partition(" ")
        bearer = word if kind.lower() == "bearer" else ""
        if self._is_token(bearer) or (not bearer and self._is_token(_cookie(headers))):
            return None
        project = shared_project(self.token, bearer)
        if project is not None:
            scope.setdefault("state", {})["share"] = project
            return None
        return _refused(401, "A token is needed. Nothing was read. Open the whole address that `fanfold ui` printed.")

    def _cookie_rules(self, scope: Scope) -> str:
        """Return the cookie's attributes: sent with requests of our own page, also inside a notebook's frame.

        To a frame at localhost, a notebook at 127.0.0.1 is another site. A partitioned cookie works there, but not in frames
        of any other page.
        """
        if self.embed:
            return "SameSite=None; Secure; Partitioned"
        # Not Strict: a link in another page (a notebook, a wiki, the file `--open` writes) would then lead to a 401.
        return "SameSite=Lax" + ("; Secure" if scope["scheme"] == "https" else "")

    def _is_token(self, word: str) -> bool:
        return self.token is not None and hmac.compare_digest(word.encode(), self.token.encode())

    def _dressed(self, send: Send) -> Send:
        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": self._headers(message.get("headers", ()))}
            await send(message)

        return dressed

    def _headers(self, said: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        kept = [one for one in said if one[0] not in _ALWAYS]
        names = {name for name, _ in kept}
        return [*kept, *(one for one in self._otherwise if one[0] not in names), *ALWAYS]


def _cookie_name(headers: Headers) -> str:
    """Return the cookie's name: one per port, since browsers send a host's cookies to all of its ports."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}-{port}" if port.isascii() and port.isdecimal() else COOKIE


def _cookie(headers: Headers) -> str:
    """Return our cookie's value. Not by SimpleCookie, which gives up on the whole header if another program's cookie is odd."""
    wanted = _cookie_name(headers)
    for pair in headers.get("cookie", "").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == wanted:
            return value
    return ""


def _refused(code: int, text: str) -> Response:
    return PlainTextResponse(text + "\n", code)
