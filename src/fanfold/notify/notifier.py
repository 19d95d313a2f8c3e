"""The notifier of one run: applies the rules, finds what happened, and tells each service about each event once.

It works from the whole run every time, so nothing is missed however often it is restarted. What has been told is in the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from ..errors import FanfoldError, notices
from ..store.changes import Changes
from ..store.rules import SAME_SECONDS, Crossing, Rule, RuleError, parse
from ..store.run import StoredRun
from .events import GRACE_SECONDS, RunEvent, crossing_id, happened
from .ledger import Ledger
from .message import compose
from .options import LEVELS, NotifyOptions
from .services import NotSent, Service

BURST = 5  # messages about alerts that a service gets one by one within BURST_SECONDS; further ones are sent together
BURST_SECONDS = 60.0
MOST_CROSSINGS = 100  # of one rule in one run that become alerts
STALLED = "stalled 30m"  # the rule that holds unless another says when a run has stalled


def parse_rules(texts: Sequence[str], *, stalled: bool = True) -> list[Rule]:
    """Parse rules; warn once about each that has a mistake, and continue without it."""
    rules: list[Rule] = []
    for text in dict.fromkeys(texts):
        try:
            rules.append(parse(text))
        except RuleError as error:
            notices.once(f"rule:{text}", f"{error}\nThis rule is not applied. The run and the other rules continue.")
    if stalled and not any(rule.stalled for rule in rules):
        rules.append(parse(STALLED))
    return rules


class Notifier:
    """The notifications of one run."""

    def __init__(
        self, ledger: Ledger, services: Sequence[Service], options: NotifyOptions, changes: Changes, since: Mapping[str, float],
        *, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.ledger = ledger
        self.services = services
        self.options = options
        self.changes = changes
        self.since = since  # by service: earlier events are not sent
        self.clock = clock
        self._noticed: dict[str, float] = {}  # when an end was first seen while other ranks were running

    def look(self, run: StoredRun, rules: Sequence[tuple[Rule, float]], *, over: bool = False) -> bool:
        """Report what is new, and return whether something is held back for later. Raise NotSent if a service cannot be reached.

        `rules` come with the time from which on they apply. `over`: the run has ended, so there is nothing to wait for.
        """
        fired = [self._apply(rule, since, run) for rule, since in rules]
        if any(fired):
            run.refresh()
        found = [event for event in happened(run, resumed=self.options.resumed) if self._is_wanted(event)]
        events = [event for event in found if not self._is_early(event)]
        held, failed = len(events) < len(found), []
        for service in self.services:
            try:
                held = self._tell(service, run, events, over) or held
            except NotSent as error:
                failed.append(str(error))
        if failed:
            raise NotSent("; ".join(failed))
        return held

    # Rules

    def _apply(self, rule: Rule, since: float, run: StoredRun) -> bool:
        """Add an alert for each time a rule fired that has none yet; return whether there was any."""
        known = [alert for alert in run.alerts if alert.get("rule") == rule.text]
        ids = {crossing_id(rule.text, alert.get("key"), alert["t"]) for alert in known}
        new = False
        for one in rule.crossings(run, now=self.clock()):
            when = round(one.time * 1e6) * 1000
            if one.time < since or crossing_id(rule.text, one.key or None, when) in ids:
                continue
            several = len(run.ranks) > 1
            if several and any(a.get("key") == (one.key or None) and abs(a["t"] - when) < SAME_SECONDS * 1e9 for a in known):
                continue  # another rank was first
            if len(known) >= MOST_CROSSINGS:
                notices.once(
                    f"crossings:{run.id}:{rule.text}",
                    f"the rule {rule.text!r} fired {MOST_CROSSINGS} times in run {run.id}; further times are not recorded. "
                    "Write `for` and a number of points after it to make it calmer.",
                )
                break
            alert = self._alert(rule, one, when, several)
            self.changes.add_alert(run, alert)
            known.append(alert)
            new = True
        return new

    def _alert(self, rule: Rule, one: Crossing, when: int, several: bool) -> dict[str, object]:
        broken = any(word in rule.words for word in ("nan", "inf", "finite"))
        text = one.text + (f" (rank {one.rank})" if several and one.key else "")
        return {"t": when, "title": rule.text, "text": text, "level": "error" if broken else "warning",
                "s": one.step if one.step is not None and one.step >= 0 else None,
                "rule": rule.text, "key": one.key or None}  # fmt: skip

    # Telling

    def _is_wanted(self, event: RunEvent) -> bool:
        return LEVELS.index(event.level) >= LEVELS.index(self.options.level)

    def _is_early(self, event: RunEvent) -> bool:
        """Return whether the other ranks get a moment to end, too."""
        return event.unsure and self.clock() - self._noticed.setdefault(event.id, self.clock()) < GRACE_SECONDS

    def _tell(self, service: Service, run: StoredRun, events: Sequence[RunEvent], over: bool) -> bool:
        """Send a service what it has not been told; return whether something is held back."""
        self._send_again(service, run, events)
        told = self.ledger.told.get(service.name, set())
        first = self.since.get(service.name, 0.0) - 1.0
        due = [event for event in events if event.id not in told and event.time >= first]
        local = datetime.fromtimestamp(self.clock()).astimezone()
        quiet = self.options.is_quiet(local.hour * 60 + local.minute)
        now = [event for event in due if event.urgent or not quiet]
        held = len(now) < len(due)
        alone = [event for event in now if event.is_end]
        rest = [event for event in now if not event.is_end]
        recent = [at for at in self.ledger.times.get(service.name, ()) if self.clock() - at < BURST_SECONDS]
        if len(rest) > max(0, BURST - len(recent)):
            if len(recent) >= BURST and not over:
                held = True
            else:
                self._send(service, run, rest)
        else:
            alone = sorted([*alone, *rest], key=lambda event: (event.time, event.is_end))
        for event in alone:
            self._send(service, run, [event])
        return held

    def _send_again(self, service: Service, run: StoredRun, events: Sequence[RunEvent]) -> None:
        """Send messages again that were on their way when the notifier died: nobody knows whether they arrived."""
        by_id = {event.id: event for event in events}
        for (name, _), intent in list(self.ledger.open.items()):
            meant = [by_id[id] for id in map(str, intent.get("events") or ()) if id in by_id]
            if name == service.name and meant:
                self._send(service, run, meant, again=True)

    def _send(self, service: Service, run: StoredRun, events: Sequence[RunEvent], *, again: bool = False) -> None:
        message = compose(run, events, again=again)
        known = {"to": service.name, "message": message.id}
        self.ledger.write("intent", **known, events=list(message.events), level=message.level, title=message.title)
        try:
            service.send(message)
        except FanfoldError as error:
            self.ledger.write("failed", **known, why=str(error)[:300])
            raise
        self.ledger.write("sent", **known)
