"""Where a run is delivered to from this process: its trackers, each through a relay, and a gateway through a forwarder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import guard
from . import lifecycle
from .join import Membership
from .options import RunOptions
from .recorder import Recorder

if TYPE_CHECKING:
    from ..fleet.launch import Forwarding
    from ..relay.attach import Attached
    from ..relay.process import Relay

NOTIFY_SECONDS = 5.0  # how long the end of a run waits for its notifications, which are sent by a process that outlives it


def chosen_trackers(options: RunOptions) -> list[Any]:
    """Return the trackers of a run; an unknown name or a missing library raises, before anything is written."""
    if not options.trackers and not options.fold and options.relay == "process":
        return []
    from ..relay.attach import check, resolve

    chosen = resolve(options.trackers)
    check(chosen, options.tracker_kwargs, options.fold, options.relay)
    return chosen


class Delivery:
    """The relays of a run, held by rank 0, and the forwarder of its node; the other ranks only know the trackers' names."""

    def __init__(self, member: Membership) -> None:
        self.attached: Attached | None = None
        self._member = member
        self._forwarding: Forwarding | None = None
        self._notifier: Relay | None = None
        self._wanted: dict[str, Any] = {}

    def attach(self, chosen: Sequence[Any], options: RunOptions, recorder: Recorder) -> None:
        """Start a relay for each tracker, on global rank 0 only."""
        from ..relay.attach import Attached, check_folds

        self._wanted = {item if isinstance(item, str) else item.name: item for item in chosen}
        fold = check_folds(options.fold)
        if not self._member.me.main:
            return
        attached = Attached(self._member.path, list(chosen), options.tracker_kwargs, fold, options.relay, recorder.flush)
        if fold:
            recorder.info({"fold": fold})
        attached.start()
        self.attached = attached
        if attached.here:
            lifecycle.end_before_libraries()

    def forward(self, options: RunOptions) -> None:
        """Start the forwarder to the gateway that the settings name, once per node."""
        if options.server and self._member.me.local_main:
            with guard("start the forwarder", strict=options.strict):
                from ..fleet.destination import destination
                from ..fleet.launch import Forwarding

                gateway = destination(options.file)
                if gateway is not None:
                    self._forwarding = Forwarding(options.root, gateway)

    def notify(self, options: RunOptions, recorder: Recorder) -> None:
        """Start the notifier, if anybody is to be told or there are rules; on global rank 0 only."""
        from .. import notify

        if not self._member.me.main or (options.notify is None and not options.alerts and not notify.configured()):
            return
        from ..notify import launch

        with guard("start the notifier", strict=options.strict):
            rules = launch.checked_rules(options.alerts, strict=options.strict)
            if options.alerts:
                recorder.info({"alerts": rules})
            self._notifier = launch.start(self._member.path, options.notify, rules)

    @property
    def trackers(self) -> list[str]:
        return list(self._wanted)

    @property
    def here(self) -> bool:
        """Whether any tracker is served from this process."""
        return self.attached is not None and self.attached.here

    def get(self, name: str, *, unwrap: bool) -> Any:
        """Return a tracker by name, or the library's own object; on other ranks a stand-in that does nothing."""
        from ..relay.attach import handle

        return handle(name, self._wanted, self.attached, unwrap)

    def look_after(self) -> None:
        """Restart relay processes that died."""
        if self.attached is not None:
            self.attached.look_after()
        if self._notifier is not None:
            with guard("look after the notifier"):
                self._notifier.look_after()

    def hurry(self, *, here: bool = False) -> None:
        """Let the relays (`here`: only those in this process) deliver what is left without pauses: the run has ended."""
        if self.attached is not None:
            self.attached.hurry(here=here)
        if self._notifier is not None and not here:
            self._notifier.hurry()

    def wait(self, deadline: float) -> list[str]:
        """Wait for the trackers and the gateway; return a line for each that has not got everything."""
        lines: list[str] = []
        if self.attached is not None:
            lines += self.attached.wait(max(0.0, deadline - time.monotonic()))
            lines += self.attached.restarted()
        if self._notifier is not None:
            self._notifier.hurry()
            self._notifier.wait(min(NOTIFY_SECONDS, max(0.0, deadline - time.monotonic())))
            if self._notifier.wait_code(0) not in (None, 0):
                lines.append(f"not all notifications were sent. Send them with: fanfold sync {self._member.run_id}")
        if self._forwarding is not None:
            lines += self._forwarding.wait(self._member.path, self._member.me.rank, max(0.0, deadline - time.monotonic()))
        return lines

    def wait_here(self, deadline: float) -> None:
        """Wait for the trackers served from this process."""
        if self.attached is not None:
            self.attached.wait_here(max(0.0, deadline - time.monotonic()))
