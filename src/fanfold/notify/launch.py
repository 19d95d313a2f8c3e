"""Starting the notifier of a run from init(): a relay process, which gets addresses on stdin and outlives training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import notices
from . import NAME, configured
from .names import service_name
from .options import read_options

if TYPE_CHECKING:
    from ..relay.process import Relay


def checked_rules(texts: Sequence[str], *, strict: bool = False) -> list[str]:
    """Return the rules that can be parsed; warn once about each of the others, or raise if `strict`."""
    if not texts:
        return []
    from ..store.rules import RuleError, parse

    found = []
    for text in texts:
        try:
            found.append(parse(text).text)
        except RuleError as error:
            if strict:
                raise
            notices.once(f"rule:{text}", f"{error}\nThis rule is not applied. The run and the other rules continue.")
    return list(dict.fromkeys(found))


def start(run: Path, argument: Any, rules: Sequence[str]) -> Relay | None:
    """Start the notifier, if anybody is to be told or there is a rule to apply."""
    if argument is None and not rules and not configured():
        return None
    options = read_options(argument)
    if not (options.to or options.rules or rules):
        return None
    _check_extra(options.to)
    from ..relay.process import Relay
    from .ledger import LEDGER, FilePages, Ledger

    # Already here: if this process and the notifier are both killed now, `fanfold sync` still knows who was to be told.
    Ledger(FilePages(run / "relay" / LEDGER)).begin(time.time(), [service_name(address) for address in options.to])
    relay = Relay(run, NAME, {"secrets": options.as_json()}, {})
    relay.start()
    return relay


def _check_extra(addresses: Sequence[str]) -> None:
    """Warn here if Apprise is needed and missing: nobody reads the notifier's own log."""
    from importlib.util import find_spec

    schemes = {address.partition(":")[0].lower() for address in addresses} - {"cmd", "http", "https"}
    if schemes and find_spec("apprise") is None:
        notices.once(
            "notify:apprise",
            f"notifications to {', '.join(f'{one}://' for one in sorted(schemes))} need apprise, which is not installed. "
            "They are not sent; training continues. Run: pip install 'fanfold[notify]'",
        )
