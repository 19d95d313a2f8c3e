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
    parser.add_argument("action", choices=("create", "list", "revoke"), help="what to do")
    parser.add_argument("name", nargs="?", help="create: what it is for; revoke: its id")
    parser.add_argument("--for", dest="projects", action="append", default=[], metavar="PROJECT", help="repeatable; '*': all")
    parser.add_argument("--scope", action="append", choices=("read", "write"), default=[], help="what it allows (repeatable)")
    parser.add_argument("--days", type=float, metavar="N", help="expires after this many days (default: never)")
    places.arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ..fleet.audit import CREATED, REVOKED, local, unsafe

    tokens, audit = places.books(args)
    if args.action == "list":
        titles, empty = ("id", "name", "access"), "there are no tokens."
        code = output.listed(args, tokens.all(), titles, lambda one: [one.id, one.name, _access(one)], facts=_facts, empty=empty)
        return 0 if args.json else code
    if not args.name:
        raise SettingError(f"`fanfold server token {args.action}` needs a name. Nothing was changed. Try --help.")
    if args.action == "revoke":
        gone = tokens.revoke(args.name)
        audit.write(local(REVOKED, id=gone.id, name=gone.name))
        output.remark(args, f"revoked {gone.id} ({gone.name}). Gateways refuse it from now on.")
        return 0
    projects = [*args.projects, *([args.project] if args.project else [])]
    seconds = None if args.days is None else args.days * 86400
    first = not tokens.used()
    token, word = tokens.create(args.name, projects=projects, scopes=args.scope, seconds=seconds)
    try:
        audit.write(local(CREATED, **{name: value for name, value in _facts(token).items() if name != "created"}))
    except OSError as error:
        tokens.revoke(token.id)
        raise unsafe(error) from error
    if args.json:
        output.print_json({**_facts(token), "token": word})
    else:
        print(word)
        output.remark(args, f"It is shown only this once. {token.id}: {_access(token)}. Nodes read it from FANFOLD_SERVER_TOKEN.")
        if first:
            output.remark(args, "A gateway that was started without tokens still lets everyone on its machine in. Restart it.")
    return 0


def _access(token: Any) -> str:
    until = "" if token.expires is None else f", until {time.strftime('%Y-%m-%d', time.localtime(token.expires))}"
    return f"{' and '.join(token.scopes)} {', '.join(token.projects)}{until}{' (expired)' if token.expired else ''}"


def _facts(token: Any) -> dict[str, Any]:
    return {name: getattr(token, name) for name in ("id", "name", "projects", "scopes", "created", "expires")}
