"""Console capture: stores what the process prints with the run, and still shows it unchanged.

Capturing happens at the file descriptor level, so C libraries and child processes are included. A helper process copies
and journals the bytes: a thread in this process would need the GIL, and C code that prints while holding the GIL would
deadlock.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..facts.mask import mask_text
from ..journal import Kind, Writer
from ..process import module_command, same_modules

MAX_HELD = 64 << 10  # longest unfinished line held back
PAUSE_SECONDS = 1.0
MAX_BYTES = 64 << 20  # per stream of one process; later output is shown but not stored
_STREAMS = {1: "stdout", 2: "stderr"}


class ConsoleCapture:
    """A redirection of descriptors 1 and 2, each through its own helper process, until stopped."""

    def __init__(self, run: Path, header: Mapping[str, Any]) -> None:
        self.run = run
        self.header = dict(header)
        self._saved: dict[int, int] = {}
        self._helpers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Put a helper between the process and its terminal, for both streams."""
        for fd in _STREAMS:
            self._divert(fd)

    def _divert(self, fd: int) -> None:
        _flush(fd)
        read, write = _channel(fd)
        original = os.dup(fd)
        setup = (str(self.run / "journal"), _STREAMS[fd])
        helper = subprocess.Popen(
            module_command("fanfold.recording.console", *setup),
            stdin=subprocess.PIPE,
            stdout=original,
            stderr=subprocess.DEVNULL,
            pass_fds=[read],
            start_new_session=True,  # Ctrl-C is for the training process; the helper ends when the stream does
            env={**os.environ, **same_modules()},
        )
        assert helper.stdin is not None
        from ..journal.format import pack

        helper.stdin.write(pack({"fd": read, "header": self.header}))
        helper.stdin.close()
        os.close(read)
        os.dup2(write, fd)
        os.close(write)
        self._saved[fd] = original
        self._helpers.append(helper)

    def stop(self, timeout: float) -> None:
        """Restore the streams and let the helpers read to the end."""
        for fd, original in self._saved.items():
            _flush(fd)
            os.dup2(original, fd)
            os.close(original)
        self._saved = {}
        deadline = time.monotonic() + min(timeout, 2.0)
        for helper in self._helpers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.wait(max(0.0, deadline - time.monotonic()))
            helper.returncode = helper.returncode if helper.returncode is not None else 0  # a child may hold the stream open
        self._helpers = []


def _flush(fd: int) -> None:
    stream = sys.stdout if fd == 1 else sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()


def _channel(fd: int) -> tuple[int, int]:
    """Return (read end, write end): a terminal stays a terminal for the program; anything else becomes a pipe."""
    if not os.isatty(fd):
        return os.pipe()
    import fcntl
    import pty
    import termios
    import tty

    master, slave = pty.openpty()
    tty.setraw(slave)  # pass every byte unchanged; the real terminal has its own line discipline
    with contextlib.suppress(OSError):
        fcntl.ioctl(slave, termios.TIOCSWINSZ, fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8))
    return master, slave


class StreamRecord:
    """The journal record of one stream, up to MAX_BYTES. Secrets are masked line by line, so that none is cut in two."""

    def __init__(self, writer: Writer, stream: str) -> None:
        self._writer = writer
        self._stream = stream
        self._kept = 0
        self.held = b""

    def add(self, chunk: bytes) -> None:
        """Write complete lines, and hold back the last one until it ends."""
        self.held += chunk
        end = max(self.held.rfind(b"\n"), self.held.rfind(b"\r")) + 1
        key = self.held.rfind(b"-----BEGIN ", 0, end)
        if key >= 0 and b"-----END " not in self.held[key:end]:
            end = key  # a private key spans many lines
        if len(self.held) - end > MAX_HELD:
            end = len(self.held)
        self._write(self.held[:end])
        self.held = self.held[end:]

    def flush(self) -> None:
        """Write the held-back line: the stream has ended or pauses, for example at a prompt."""
        held, self.held = self.held, b""
        self._write(held)

    def _write(self, data: bytes) -> None:
        if not data or self._kept >= MAX_BYTES:
            return
        text = data[: MAX_BYTES - self._kept].decode("utf-8", "surrogateescape")
        masked = mask_text(text).encode("utf-8", "surrogateescape")
        self._append(masked)
        self._kept += len(data)
        if self._kept >= MAX_BYTES:
            self._append(f"\n[fanfold: {self._stream} passed {MAX_BYTES >> 20} MB; the rest is shown but not kept]\n".encode())

    def _append(self, data: bytes) -> None:
        self._writer.append((Kind.CONSOLE, {"t": time.time_ns(), "stream": self._stream, "b": data}))


def copy(source: int, target: int, writer: Writer, stream: str) -> None:
    """Copy bytes from one descriptor to another until the end, and journal them."""
    record = StreamRecord(writer, stream)
    try:
        while chunk := _read(source):
            _write(target, chunk)
            record.add(chunk)
            if record.held and not select.select([source], [], [], PAUSE_SECONDS)[0]:
                record.flush()
    finally:
        record.flush()


def _read(source: int) -> bytes:
    try:
        return os.read(source, 1 << 16)
    except OSError:  # a terminal whose other end was closed raises instead of reporting end of file
        return b""


def _write(target: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    with contextlib.suppress(OSError):  # the terminal is gone; output is still recorded
        while view:
            view = view[os.write(target, view) :]


def main() -> None:
    """Run as the helper: set-up on stdin, the stream to copy on the descriptor named there, the original stream on stdout."""
    from ..journal.format import unpack

    directory, stream = sys.argv[1:]
    setup = unpack(sys.stdin.buffer.read())
    writer = Writer(Path(directory), {**setup["header"], "pid": os.getpid()})
    try:
        copy(setup["fd"], 1, writer, stream)
    finally:
        writer.close({"t": time.time_ns(), "status": "finished"})


if __name__ == "__main__":
    main()
