"""Logins to a gateway's dashboard, from the options of `fanfold server start`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingError
from ..process import LOOPBACK
from ..settings import resolve, split_address
from . import output

if TYPE_CHECKING:
    from ..fleet.tokens import TokenBook
    from ..server.login import Logins


def arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logins to the dashboard (tokens always work)")
    group.add_argument("--public-url", metavar="URL", help="the public address, if the gateway is behind a proxy")
    group.add_argument("--session-hours", type=float, default=12.0, metavar="N", help="how long a login lasts (default: 12)")
    group.add_argument("--grant", action="append", default=[], metavar="WHO=PROJECT:SCOPE",
                       help="grant access: WHO is user:NAME, group:NAME or *; SCOPE read or write (repeatable)")  # fmt: skip
    group.add_argument("--grants", metavar="FILE", help="the same as TOML; read again whenever it changes")
    group.add_argument("--trusted-proxy", action="append", default=[], metavar="NETWORK", help="trust X-Forwarded-… from here")
    group.add_argument("--trust-header", metavar="NAME", help="the header with the user name, such as X-Forwarded-User")
    group.add_argument("--trust-groups", metavar="NAME", help="the header with the user's groups, comma-separated")
    group.add_argument("--oidc-issuer", metavar="URL", help="log in with this OpenID Connect provider")
    group.add_argument("--oidc-client", metavar="ID", help="the client id; the secret is read from FANFOLD_OIDC_SECRET")
    group.add_argument("--oidc-scopes", default="openid email profile", metavar="WORDS", help="default: openid email profile")
    group.add_argument("--oidc-user", default="email", metavar="CLAIM", help="the claim that names the user (default: email)")
    group.add_argument("--oidc-groups", default="groups", metavar="CLAIM", help="the claim that names groups (default: groups)")


def people_log_in(args: argparse.Namespace) -> bool:
    """Return whether anybody can log in without a token."""
    return bool(args.oidc_issuer or args.trust_header)


def logins(args: argparse.Namespace, tokens: TokenBook | None) -> Logins:
    """Return the ways to log in to the dashboard."""
    from ..fleet.grants import Grants
    from ..fleet.proxy import Proxies
    from ..fleet.sessions import Sessions
    from ..server.login import Logins

    sessions = Sessions(resolve("session_secret"), hours=args.session_hours)
    if tokens is not None and not sessions.shared:
        output.remark(args, "FANFOLD_SESSION_SECRET is not set: logins end with this process and are valid here only.")
    oidc = None
    if args.oidc_issuer:
        from ..fleet.oidc import Oidc

        names = {"scopes": args.oidc_scopes, "user_claim": args.oidc_user, "groups_claim": args.oidc_groups}
        oidc = Oidc(args.oidc_issuer, args.oidc_client, sessions, secret=resolve("oidc_secret"), **names)
    proxies = Proxies(args.trusted_proxy, user=args.trust_header, groups=args.trust_groups)
    if args.trust_header and any(map(proxies.trusts, LOOPBACK)):
        output.remark(
            args,
            f"a proxy on this machine is trusted to name people, and any user of this machine can send {args.trust_header}, too. "
            "They can log in as anybody. If others work here, use --oidc-issuer, or a proxy with an address of its own.",
        )
    grants = Grants(args.grant, Path(args.grants).expanduser() if args.grants else None)
    return Logins(tokens, sessions, grants, proxies, oidc, args.public_url)


def check(args: argparse.Namespace) -> None:
    """Raise for options that cannot work together."""
    place = split_address(args.public_url or "")
    if args.public_url and (place.scheme not in ("http", "https") or not place.hostname or place.query or place.username):
        raise SettingError(f"--public-url {args.public_url!r} is not a URL. The gateway was not started. Write https://name.")
    if bool(args.oidc_issuer) != bool(args.oidc_client) or (args.oidc_issuer and not args.public_url):
        raise SettingError(
            "a login by OpenID Connect needs --oidc-issuer, --oidc-client and --public-url. The gateway was not started. Give "
            "all three; the provider sends people back to PUBLIC-URL/ui/oidc/callback."
        )
    if args.session_hours <= 0:
        raise SettingError("--session-hours must be above 0. The gateway was not started: every login would expire at once.")
