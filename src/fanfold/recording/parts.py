"""What a run is made of, in this process: a journal with its recorder, the delivery to trackers, and an ending."""

from __future__ import annotations

from ..errors import notices
from .delivery import Delivery
from .ending import Ending
from .forking import ForkPoint, parent_of
from .history import RunHistory
from .join import Membership, open_writer
from .options import RunOptions
from .recorder import Recorder


class RunParts:
    """The parts of one run. Creating them opens the journal; nothing else is started."""

    def __init__(self, member: Membership, options: RunOptions) -> None:
        self.member = member
        self.history = RunHistory(member.path, member.me.rank, member.attempt, resumed=member.resumed)
        self.known = self.history.facts()  # a resumed run starts with its earlier facts and adds to them
        if options.fork is not None:
            self._fork(options, options.fork)
        member.name = options.name or self.known.get("name") or member.name
        self.writer = open_writer(member, options)
        self.recorder = Recorder(member, self.writer, strict=options.strict)
        self.delivery = Delivery(member)
        self.ending = Ending(member, self.writer, self.recorder, self.delivery, quiet=options.quiet or member.inside)

    def _fork(self, options: RunOptions, point: ForkPoint) -> None:
        """Begin with the parent's config, after the step of the fork. A resumed run stays what it was."""
        member = self.member
        if not member.resumed:
            member.fork, config = parent_of(options.root, member.project, member.run_id, point)
            member.first_step = point.step + 1
            self.known = {"config": config}
        elif member.fork is None:
            notices.once(
                f"fork:{member.run_id}",
                f"run {member.run_id} exists already and was not forked, so init(fork=…) is ignored. It continues as it was. "
                "To fork it, start a run with another id.",
            )
