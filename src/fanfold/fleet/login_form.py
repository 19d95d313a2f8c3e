"""The login page: plain HTML without scripts. Anything from outside is escaped as text."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from starlette.responses import HTMLResponse, Response

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { display: grid; place-items: center; min-height: 90vh; margin: 1rem; }
main { width: min(24rem, 100%); }
label, input, button, .provider { display: block; width: 100%; box-sizing: border-box; font: inherit; }
input, button, .provider { padding: .5rem .75rem; margin: .25rem 0 1rem; border: 1px solid; border-radius: .4rem; }
button, .provider { text-align: center; text-decoration: none; color: inherit; background: transparent; cursor: pointer; }
[role=alert] { border-left: .25rem solid #d33; padding-left: .75rem; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
# With the dashboard's `no-referrer`, browsers send a form's origin as "null", and such a request is refused.
HEADERS = {"content-security-policy": POLICY, "referrer-policy": "same-origin", "cache-control": "no-store"}


def form(*, who: str, nothing: bool, provider: bool, tokens: bool, said: str, status: int, base: str) -> Response:
    """Return the page: for a logged-in user, who they are and a logout button; otherwise the ways to log in."""
    parts = [f"<p role=alert>{escape(said)}</p>" if said else "", *(_known(who, nothing, base) if who else [])]
    if not who:
        parts += [f'<a class=provider href="{base}oidc/start">Log in</a>'] if provider else []
        parts += [_token_form(base)] if tokens else []
    text = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Log in · fanfold</title><style>{STYLE}</style><main><h1>fanfold</h1>{''.join(parts)}</main></html>"
    )
    return HTMLResponse(text, status, headers=HEADERS)


def _known(who: str, nothing: bool, base: str) -> list[str]:
    said = " No project is open to you: ask whoever runs this gateway." if nothing else ""
    return [
        f"<p>You are logged in as {escape(who)}.{said}</p>",
        f'<a class=provider href="{base}">To the runs</a>',
        f'<form method=post action="{base}logout"><button>Log out</button></form>',
    ]


def _token_form(base: str) -> str:
    return (
        f'<form method=post action="{base}login"><label for=token>Token</label>'
        "<input id=token name=token type=password required autocomplete=current-password spellcheck=false>"
        "<button>Log in with a token</button></form>"
    )
