"""Ask a running job to stop, save, evaluate, log, or change a value, and wait for its answer.

All ranks of the job act after the same step. The job must handle requests: it reads run.control, or trains with a callback or
framework that does (docs/tell.md).

exit codes: 0 done (with --no-wait: sent); 1 no such run; 2 the request is wrong; 3 refused, also if the run is not running;
4 expired; 124 not answered yet.
"""

from __future__ import annotations

import argparse

from ..errors import SettingError
from ..journal import requests
from ..journal.requests import Answer, Value
from . import choose, output, remote
from .text import clean

EXAMPLE = """examples:
  fanfold tell quick-otter-42 stop
  fanfold tell - set lr=0.0003
  fanfold tell - save --no-wait
  fanfold tell quick-otter-42 stop --dir https://runs.example.org
  fanfold tell 7f3k2m9qx1ab stop --to https://runs.example.org --project llm"""

CODES = {"done": 0, "refused": 3, "expired": 4, "asked": 124}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=choose.RUN_HELP)
    parser.add_argument("action", metavar="ACTION", help=", ".join(requests.ACTIONS))
    parser.add_argument("values", metavar="KEY=VALUE", nargs="*", help="set: what to change, such as lr=0.001")
    parser.add_argument("--timeout", type=float, default=requests.SECONDS, metavar="S",
                        help=f"how long the request stays valid and to wait (default: {requests.SECONDS:.0f} s)")  # fmt: skip
    parser.add_argument("--to", metavar="URL", help="ask through this gateway; RUN is then the whole id, and --project is needed")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the answer; `fanfold show` has it later")


def run(args: argparse.Namespace) -> int:
    values = dict(_pair(word) for word in args.values)
    requests.new(args.action, values, seconds=args.timeout)  # a mistake is reported before anything else
    answer = _ask_gateway(args, values) if args.to or remote.is_gateway(args) else _ask(args, values)
    if args.json:
        output.print_json({name: getattr(answer, name) for name in answer.__struct_fields__})
    else:
        print(clean(_line(answer)))
    return 0 if args.no_wait and answer.state == "asked" else CODES[answer.state]


def _ask(args: argparse.Namespace, values: dict[str, Value]) -> Answer:
    from ..store.tell import tell

    stored, changes = choose.one(args, args.run), choose.store(args).changes
    return tell(
        stored, args.action, values, wait=not args.no_wait, timeout=args.timeout,
        leave=lambda request: changes.ask(stored, request),
        waiting=lambda: output.remark(args, f"waiting for the end of a step of {stored.name} …"),
    )  # fmt: skip


def _ask_gateway(args: argparse.Namespace, values: dict[str, Value]) -> Answer:
    """Ask through a gateway; with --to, one that may lack MCP, so names cannot be looked up."""
    from ..fleet.gateway_run import ask_job, open_run, reach

    if args.to and not args.project:
        raise SettingError("a gateway needs the name of the project. Nothing was asked. Pass --project.")
    project, id = args.project, args.run
    if not args.to:
        found = open_run(args.dir, args.run, args.project)
        project, id = found.project, found.id
    client = reach(args.to or args.dir)
    return ask_job(client, project, id, args.action, values, wait=not args.no_wait, timeout=args.timeout)


def _line(answer: Answer) -> str:
    given = "".join(f" {name}={value}" for name, value in answer.values.items())
    step = f" after step {answer.step}" if answer.step is not None else ""
    return f"{answer.action}{given}: {answer.state}{step}{f' ({answer.why})' if answer.why else ''}"


def _pair(word: str) -> tuple[str, Value]:
    name, equals, text = word.partition("=")
    if not equals or not name:
        raise SettingError(f"{word!r} is not KEY=VALUE. Nothing was asked. Write for example lr=0.001.")
    return name, requests.parse_value(text)
