"""Send a test message to every address in FANFOLD_NOTIFY or ~/.config/fanfold/settings.toml, and report whether it arrived.

exit codes: 0 all of them accepted it, 1 there is no address, 2 at least one did not.
"""

from __future__ import annotations

import argparse
import secrets
import time

from ..errors import FanfoldError
from ..notify import settings_file
from ..notify.message import VERSION, Message
from ..notify.options import NotifyOptions, read_options
from ..notify.services import Service, open_service
from . import output

EXAMPLE = """examples:
  FANFOLD_NOTIFY='ntfy://my-topic' fanfold notify test
  fanfold notify test --json"""

TEXT = "This is a test of fanfold's notifications. If you can read it, they work."


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> int:
    options = read_options()
    if not options.to:
        output.remark(args, f"nobody is notified. Set FANFOLD_NOTIFY, or write [notify] and to = […] in {settings_file()}.")
        if args.json:
            output.print_json([])
        return 1
    found = [_sent(number, options) for number in range(len(options.to))]
    output.listed(
        args,
        found,
        ("TO", "OUTCOME", "SECONDS", "WHY"),
        lambda one: [str(one["to"]), str(one["outcome"]), f"{one['seconds']:.2f}", str(one["why"] or "")],
        facts=dict,
        whole=["TO", "OUTCOME"],
        empty="",
    )
    return 0 if all(one["outcome"] == "sent" for one in found) else 2


def _sent(number: int, options: NotifyOptions) -> dict[str, object]:
    id = f"test-{secrets.token_hex(6)}"
    facts = {"version": VERSION, "id": id, "event": "test", "level": "info", "title": "fanfold: test", "text": TEXT,
             "run": None, "events": [], "count": 0, "repeat": False}  # fmt: skip
    began, why = time.monotonic(), None
    name = Service(options.to[number]).name
    try:
        open_service(options.to[number]).send(Message(id, "info", "fanfold: test", TEXT, (), facts))
    except FanfoldError as error:
        why = str(error).removeprefix(f"{name}: ")
    return {"to": name, "outcome": "failed" if why else "sent", "seconds": time.monotonic() - began, "why": why}
