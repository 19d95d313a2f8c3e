"""Create, list and revoke the tokens of a gateway. A token is shown once; the file keeps its hash."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ..errors import SettingError
from . import output, places

EXAMPLE = """examples:
  fanfold server token create cluster-a --store /data/runs --for llm --for vision --scope write
  fanfold server token create grafana --for '*' --scope read --days 90
  fanfold server token list
  fanfold server token revoke 1f2e3d4c"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("create", "list", "revoke"))
    parser.add_argument("name", nargs="?", help="create: what it is for; revoke: its id")
    parser.add_argument("--for", dest="projects", action="append", default=[], metavar="PROJECT",
                        help="a project it gives access to (repeatable; '*': all)")  # fmt: skip
    parser.add_argument("--scope", action="append", choices=("read", "write"), default=[], help="what it allows (repeatable)")
    parser.add_argument("--days", type=float, metavar="N", help="expires after this many days (default: never)")
    places.arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ..fleet.audit import CREATED, REVOKED, local, unsafe

    tokens, audit = places.books(args)
    if args.action == "list":
        return _list(args, tokens)
    if not args.name:
        raise SettingError(
            f"`fanfold server token {args.action}` needs a name. Nothing was changed. See fanfold server token --help."
        )
    if args.action == "revoke":
        gone = tokens.revoke(args.name)
        audit.write(local(REVOKED, id=gone.id, name=gone.name))
        output.remark(args, f"revoked {gone.id} ({gone.name}). Gateways refuse it from now on.")
        return 0
    projects = [*args.projects, *([args.project] if args.project else [])]
    seconds = None if args.days is None else args.days * 86400
    token, word = tokens.create(args.name, projects=projects, scopes=args.scope, seconds=seconds)
    try:
        audit.write(local(CREATED, **{name: value for name, value in _row(token).items() if name != "created"}))
    except OSError as error:
        tokens.revoke(token.id)
        raise unsafe(error) from error
    if args.json:
        output.print_json({**_row(token), "token": word})
    else:
        print(word)
        output.remark(
            args, f"This is the only time it is shown. {token.id}: {_what(token)}. Nodes find it in FANFOLD_SERVER_TOKEN."
        )
    return 0


def _list(args: argparse.Namespace, tokens: Any) -> int:
    found = tokens.all()
    if args.json:
        output.print_json([_row(token) for token in found])
        return 0
    for token in found:
        print(f"{token.id}  {token.name}  {_what(token)}")
    if not found:
        output.remark(args, "there are no tokens.")
    return 0 if found else 1


def _what(token: Any) -> str:
    until = "" if token.expires is None else f", until {time.strftime('%Y-%m-%d', time.localtime(token.expires))}"
    return f"{' and '.join(token.scopes)} {', '.join(token.projects)}{until}{' (over)' if token.expired else ''}"


def _row(token: Any) -> dict[str, Any]:
    names = ("id", "name", "projects", "scopes", "created", "expires")
    return {name: getattr(token, name) for name in names}
