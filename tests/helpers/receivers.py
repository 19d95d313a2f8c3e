"""Real local receivers of notifications: an HTTP server, an SMTP server, and a program that stores its input."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Receiver:
    """An HTTP server that stores every request. `before(body)` runs before it responds with `status`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.status = 200
        self.before: Callable[[bytes], None] = lambda body: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                status = outer.status
                if status < 300:
                    outer.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                outer.before(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def messages(self) -> list[dict]:
        return [json.loads(body) for _, _, body in list(self.requests)]

    def told(self, *kinds: str) -> list[str]:
        """Return the events of all messages in order: their kinds, or for alerts their titles."""
        found = [event for message in self.messages for event in message["events"]]
        named = [event["title"] if event["event"] in ("alert", "rule") else event["event"] for event in found]
        return [name for name in named if not kinds or name in kinds]

    def wait(self, done: Callable[[], bool], seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < until, self.messages
            time.sleep(0.05)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()


def keeper(folder: Path, name: str = "kept") -> tuple[str, Path]:
    """Return the address of a program that appends each message to a file, and that file."""
    file = folder / f"{name}.jsonl"
    program = folder / f"{name}.py"
    program.write_text(f"import sys\nopen({str(file)!r}, 'a').write(sys.stdin.read() + '\\n')\n")
    return f"cmd:{sys.executable} {program}", file


def notifiers(run: Path) -> list[int]:
    """Return the process ids of a run's notifiers, which own its cursor."""
    try:
        owner = json.loads((run / "relay" / "notify.cursor").read_text()).get("owner")
    except (OSError, ValueError):
        return []
    return [owner["pid"]] if owner else []


def kill(pid: int) -> None:
    """Kill a process and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")
