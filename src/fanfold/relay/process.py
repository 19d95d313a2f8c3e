"""A relay in its own process: tracker libraries patch, seed, hook and hang, and none of that reaches training.

Rank 0 starts it in a new session, without GPU or rank in its environment. Its setup arrives on stdin, so no secret is ever in an
argument or on disk. It exits when the run has ended and everything is delivered.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import JournalError, SettingError, guard, notices, outcome
from ..journal import Kind, origin
from ..journal.directory import check_folders, decode_name, journal_files
from ..journal.files import open_to_write
from ..journal.index import open_indexed
from ..journal.spool import is_network
from ..process import module_command, same_modules
from ..settings import find_directory, is_address, read_file, resolve, store_address
from ..trackers.face import own_class, tracker_class
from ..trackers.registry import LOGGER_TYPE_TO_CLASS, ROWS, find_class
from .cursor import Cursor, Owned, cursor_name, public
from .feed import HOLD_SECONDS
from .track import SENT
from .worker import RelayOptions, Worker

if TYPE_CHECKING:
    from ..store import StoredRun

NETWORK_HOLD_SECONDS = 90.0
TURN_SECONDS = 1.0
LOOK_SECONDS = 0.2
RESTARTS = 5  # of a relay that keeps dying; one that ran for RECOVERED_SECONDS starts again from zero
RECOVERED_SECONDS = 600.0
RESTART_SECONDS = 2.0  # before the second restart in a row, doubled each time
GARBAGE = (
    50_000  # new objects between searches for cycles: at Python's 700, what libraries import and hold is searched all the time
)
OWN = {"notify": "fanfold.notify.destination:NotifyDestination"}  # destinations of ours that are not trackers
_RANKS = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "FANFOLD_RANK FANFOLD_WORLD_SIZE FANFOLD_RUN_ID".split()
)
_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MV2_", "TORCHELASTIC_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP")


def check_arguments(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tracker's arguments if they can be sent to another process, else raise."""
    try:
        return dict(json.loads(json.dumps(dict(kwargs))))
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"tracker_kwargs[{name!r}] holds what cannot travel to the relay's process: {error}. The run was not started. "
            "Pass plain values, or relay='thread' to keep the tracker in this process."
        ) from error


def split_options(kwargs: Mapping[str, Any]) -> tuple[RelayOptions, dict[str, Any]]:
    """Split a tracker's arguments into options for the relay and arguments of the tracker itself."""
    options = RelayOptions(bool(kwargs.get("probes")), str(kwargs.get("layout", "fanfold")), bool(kwargs.get("joined")))
    return options, {key: value for key, value in kwargs.items() if key not in RelayOptions._fields}


def address_of(name: str) -> str:
    """Return the address by which another process finds a tracker's class: a built-in's name, or `module:Class`."""
    if name in OWN:
        return OWN[name]
    cls = own_class(find_class(name))
    if name in ROWS and cls.__module__.startswith("fanfold."):
        return name
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise SettingError(
            f"the tracker {name} is a class of the script itself, which the relay's process cannot import. The run was not "
            "started. Put the class into a module of its own, or pass relay='thread' to keep the tracker in this process."
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def learn(address: str) -> str:
    """Register the class at an address, and return its tracker's name."""
    module, colon, path = address.partition(":")
    if not colon:
        try:
            return str(find_class(address).name)
        except ValueError as error:
            raise SettingError(f"{error}. Nothing was sent. A tracker of your own is named by module:Class.") from error
    try:
        found: Any = importlib.import_module(module)
        for word in path.split("."):
            found = getattr(found, word)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            f"there is no tracker at {address}: {error}. Nothing was sent. Write module:Class, as Python would import it here."
        ) from error
    LOGGER_TYPE_TO_CLASS[found.name] = tracker_class(found)
    return str(found.name)


def cursor_of(run: Path, name: str, kwargs: Mapping[str, Any]) -> Cursor:
    """Return a tracker's cursor for a run; secret arguments are kept out of the cursor and its name."""
    kept = public(kwargs)
    cursor = Cursor.load(run / "relay" / f"{cursor_name(name, kept)}.cursor")
    cursor.tracker, cursor.kwargs, cursor.project = name, kept, cursor.project or decode_name(run.parent.name)
    return cursor


def remaining(run: Path, cursor: Cursor) -> int:
    """Return the number of rank 0's values that a tracker has not confirmed."""
    if cursor.tracker in OWN:  # takes no values
        return 0
    total = 0
    for path in journal_files(run):
        if not path.name.startswith("0-"):
            continue
        mark, ahead = cursor.settled.get(path.stem, (0, ()))
        try:
            journal = open_indexed(path)
        except JournalError:
            continue  # the relay warns that it cannot be read
        for rows in journal.rows.values():
            if rows.shape.origin in SENT:
                left = sum(count for _, count in rows.since(mark))
                gone = sum(start <= at < start + count * rows.stride for start, count in rows.since(mark) for at in ahead)
                total += (left - gone) * len(rows.shape.keys)
        texts = (record.data for record in journal.records(Kind.VALUES) if record.offset >= mark and record.offset not in ahead)
        total += sum(len(data.v) for data in texts)
    return total


def has_everything(run: StoredRun, cursor: Cursor) -> bool:
    """Return whether a destination has everything, including how each attempt ended, which may be in the same way."""
    begun = {journal.path.stem for attempt in run.attempts for journal in attempt.mains if journal.header.rank == 0}
    ended = cursor.closed == run.status and cursor.error is None and begun <= set(cursor.through)
    return ended and remaining(run.path, cursor) == 0


def left_line(run: Path, cursor: Cursor, address: str, *, counted: bool = True) -> str:
    """Return a line that says what is undelivered, why, and which command delivers it; `counted=False` skips the slow count."""
    home = not is_address(store_address()) and find_directory() == run.parent.parent
    word = decode_name(run.name) if home else str(run)
    why = f" ({cursor.error})" if cursor.error else ""
    left = remaining(run, cursor) if counted else 2
    what = "1 value is" if left == 1 else f"{left:,} values are" if counted else "some values are"
    what, verb = (f"{what} not delivered yet", "Deliver") if left else ("its run there is not closed yet", "Close")
    it = "them" if left > 1 else "it"
    return f"{cursor.tracker}: {what}{why}. {verb} {it} with: fanfold sync {shlex.quote(word)} --to {address}"


class Relay:
    """The parent's handle of a relay process: starts it, asks for its progress, waits for it."""

    def __init__(self, run: Path, name: str, kwargs: Mapping[str, Any], fold: Mapping[str, str], *, follow: bool = True) -> None:
        self.run = run
        self.name = name
        self.address = address_of(name)
        self.kwargs = check_arguments(name, kwargs)
        self.fold = dict(fold)
        self.follow = follow
        self.restarts = 0
        self._in_a_row = 0
        self._born = self._due = 0.0
        self._gave_up = False
        self._process: subprocess.Popen[bytes] | None = None

    def look_after(self, *, ended: bool = False) -> None:
        """Restart the process if it died during the run, after a pause unless the run has `ended`. Called every second."""
        code = self.wait_code(0)
        if code is None or self._gave_up or not self._died(code):
            return
        now = time.monotonic()
        if self._due <= self._born:  # just noticed
            self._in_a_row = 0 if now - self._born > RECOVERED_SECONDS else self._in_a_row
            self._due = now + (RESTART_SECONDS * 2 ** (self._in_a_row - 1) if self._in_a_row else 0.0)
        if self._in_a_row == RESTARTS:
            self._gave_up = True
            left = self.left(counted=False)
            self._say_died(code, f"It died {RESTARTS} times in a row and is not started again. Nothing is lost. {left}")
        elif ended or now >= self._due:
            log = self.run / "relay" / f"{self.name}.log"
            self._say_died(code, f"It was started again and continues where it was; nothing is lost. Its output is in {log}.")
            self._in_a_row += 1
            self.restarts += 1
            self.start()

    def _died(self, code: int) -> bool:
        """Return whether a relay ended early. One that reported why it cannot work would fail again, so it is not restarted."""
        if code == OWNED or not (self.run / "journal").is_dir():
            return False
        cursor = self.cursor()
        return cursor.closed is None and not (code == 1 and cursor.error)

    def _say_died(self, code: int, effect: str) -> None:
        why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        notices.once(
            f"{self.name}:relay died:{self._gave_up}", f"fanfold: the relay to {self.name} {why} during the run. {effect}"
        )

    def start(self) -> None:
        folder = self.run / "relay"
        check_folders(self.run)
        folder.mkdir(exist_ok=True, mode=0o700)
        cursor = self.cursor()
        if not cursor.path.exists():
            cursor.save()  # if this process and the relay both die now, `fanfold sync` still knows what to deliver
        with os.fdopen(open_to_write(folder / f"{self.name}.log", os.O_APPEND), "ab") as log:
            self._process = subprocess.Popen(
                module_command("fanfold.relay"),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=clean_environment(),
            )
        setup = {
            "run": str(self.run),
            "tracker": self.address,
            "kwargs": self.kwargs,
            "fold": self.fold,
            "follow": self.follow,
            "restarts": self.restarts,
        }
        self._born = time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: its log says why
            self._process.stdin.write(json.dumps(setup).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def hurry(self) -> None:
        """Signal to the relay that the run has ended, by closing its stdin."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def wait(self, timeout: float) -> bool:
        """Wait until everything of rank 0 is delivered; return whether it is. The relay keeps running for ranks still active.

        A relay that dies meanwhile is restarted: it was killed before the wait began, or is killed by what ends the job.
        """
        deadline = time.monotonic() + timeout
        while True:
            code = self.wait_code(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            if code is not None:
                with guard(f"look after the relay to {self.name}"):
                    self.look_after(ended=True)
                self.hurry()
                if self.wait_code(0) is not None:
                    break
            elif self._all_delivered():
                return True
            if time.monotonic() >= deadline:
                return False
        cursor = self.cursor()
        return self.wait_code(0) == 0 and cursor.closed is not None and cursor.error is None

    def _all_delivered(self) -> bool:
        """Return whether the relay only has to wait for other ranks and close."""
        own = [path.stem for path in journal_files(self.run) if path.name.startswith("0-")]
        alone = len(own) == len(journal_files(self.run))
        return not alone and set(own) <= set(self.cursor().through)

    def wait_code(self, timeout: float) -> int | None:
        """Return the process's exit code, or None while it is running."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def cursor(self) -> Cursor:
        return cursor_of(self.run, self.name, self.kwargs)

    def left(self, *, counted: bool = True) -> str:
        """Return a line that says what is undelivered."""
        return left_line(self.run, self.cursor(), self.address, counted=counted)

    def kill(self) -> None:
        """Kill the process; whatever it has settled stays settled."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def clean_environment() -> dict[str, str]:
    """Return our environment without ranks and GPUs, with the same import path: the relay is not part of the job."""
    kept = {name: value for name, value in os.environ.items() if name not in _RANKS and not name.startswith(_PREFIXES)}
    return {
        "OMP_NUM_THREADS": "1",  # it computes nothing; thread pools would only take cores from training
        **kept,
        **origin.environment(),
        "CUDA_VISIBLE_DEVICES": "",
        **same_modules(),
    }


def hold_seconds(run: Path) -> float:
    """Return how long a step waits for late parts and ranks: the setting, else longer on network filesystems."""
    given = resolve("hold", file=read_file(run.parent.parent))
    if given is not None:
        return float(given)
    return NETWORK_HOLD_SECONDS if is_network(run) else HOLD_SECONDS


def serve(
    run: Path, name: str, kwargs: Mapping[str, Any], fold: Mapping[str, str], *, follow: bool,
    hurry: threading.Event | None = None, last: contextlib.ExitStack | None = None, restarts: int = 0,
) -> Cursor:  # fmt: skip
    """Deliver one run to one tracker from this process; raise Owned if another process is delivering it.

    With `follow`, wait for the cursor, deliver until the run ends, and never give up; otherwise deliver only the current
    contents. The cursor is held until `last` closes at process exit: a library may flush its buffers in an exit handler, and a
    relay that took over earlier would query the destination too soon and send the same points again.
    """
    last = last or at_exit()
    gc.set_threshold(GARBAGE)
    options, arguments = split_options(kwargs)
    cursor = cursor_of(run, name, kwargs)
    hurry = hurry or threading.Event()
    with stopped_by_signals(hurry) as stop:
        if not _take_turn(cursor, stop, wait=follow):
            return cursor
        last.callback(cursor.release)
        cursor.restarts += 1 if restarts else 0
        tracker, error = outcome(make, name, arguments, run, cursor.project)
        if error is not None:  # wrong arguments or a missing library: retrying does not help
            cursor.error = f"{type(error).__name__}: {error}"[:500]
            return cursor
        hold = hold_seconds(run)
        Worker(run, tracker, cursor, options, fold=fold, hold=hold, stop=stop, hurry=hurry, follow=follow).serve()
    return cursor


def at_exit() -> contextlib.ExitStack:
    """Return an exit stack that closes after every exit handler registered later."""
    last = contextlib.ExitStack()
    atexit.register(last.close)
    return last


def _take_turn(cursor: Cursor, stop: threading.Event, *, wait: bool) -> bool:
    """Acquire a cursor. Wait for an earlier attempt's relay if it holds it: it might exit before it sees our journal."""
    while not stop.is_set():
        try:
            cursor.acquire()
        except Owned:
            if not wait:
                raise
            stop.wait(TURN_SECONDS)
        else:
            return True
    return False


@contextlib.contextmanager
def stopped_by_signals(hurry: threading.Event) -> Iterator[threading.Event]:
    """Turn the first SIGTERM or Ctrl-C into an event; a second one acts as usual. Handlers are restored afterwards."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def request(number: int, _frame: Any) -> None:
        signal.signal(number, before[number])
        for event in (stop, hurry):  # in a thread: the interrupted code may hold the event's lock
            threading.Thread(target=event.set, daemon=True).start()

    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make(name: str, kwargs: Mapping[str, Any], run: Path, project: str = "") -> Any:
    """Construct a tracker by name for a run: project first (the run's own by default), then its directory if it needs one."""
    cls = find_class(name)
    arguments = dict(kwargs)
    first = next(iter(inspect.signature(cls).parameters), "run_name")  # MLflow's is `experiment_name`
    project = arguments.pop(first, None) or project or decode_name(run.parent.name)
    if cls.requires_logging_directory:
        return cls(project, arguments.pop("logging_dir", None) or str(run / "trackers" / name), **arguments)
    return cls(project, **arguments)


def main() -> int:
    """Run the relay process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    last = at_exit()  # before any tracker library is imported: exit handlers run in reverse order
    setup = json.loads(sys.stdin.buffer.readline())
    hurry = threading.Event()
    threading.Thread(target=_await_end, args=(hurry,), name="fanfold-stdin", daemon=True).start()
    name = learn(setup["tracker"])
    try:
        run = Path(setup["run"])
        how = {"follow": setup["follow"], "restarts": setup.get("restarts", 0)}
        cursor = serve(run, name, setup["kwargs"], setup["fold"], **how, hurry=hurry, last=last)
    except Owned as owned:
        logging.getLogger("fanfold").info("%s", owned)
        return OWNED
    return 1 if cursor.error else 0


OWNED = 3


def _await_end(hurry: threading.Event) -> None:
    """Set `hurry` when the parent has finished or died: from then on, check for the end more often."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    hurry.set()
