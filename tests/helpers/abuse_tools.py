"""Helpers of the abuse tests: counters, a real server under observation, raw requests, and hostile values for every route."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fault_table
from fleet_tools import Gateway, Process
from forged import MISSING, mutated

BUSY_SECONDS = 2.0  # CPU time: on a busy machine, wall time would blame the server for the load
GROWTH = 512 << 10  # KiB that a server may grow

TEXTS = [
    "", " ", "x", "llm", "r1", "r1" * 2000, "*" * 40 + "b", "?*" * 40 + "b", "(" * 3000, ")" * 3000, "not " * 3000 + "x", "loss > 0", "loss >",
    "config.lr > 1e999", "config.lr in (" + "1," * 3000 + "1)", "loss > 0 and " * 500 + "loss > 1", "name ~ '" + "a*" * 60 + "b'", "'; DROP TABLE points; --",
    '" OR 1=1 --', "../../../etc/passwd", "/etc/passwd", "..%2f..%2fetc", "\x00", "a\x00b", "é🙂", "\u202e\u200b", "\ud800", "9" * 5000, "-1", "1e3", "٣", "nan",
    "inf", "-0", "1" * 20, "[" * 3000, '{"a":' * 500, "%s%n%d", "{0.__class__}", "${jndi:ldap://x}", "<script>alert(1)</script>", "a" * 30_000, "\r\nx-evil: 1",
    "ab" * 32, "step", "metric:" + "*" * 40, "config:" + "a." * 500,
]  # fmt: skip
HEADERS = [
    ("authorization", "Bearer"), ("authorization", "Bearer " + "a" * 8000), ("authorization", "Basic Og=="), ("authorization", "\xff\xfe"),
    ("cookie", "a" * 8000), ("cookie", ";;;=;=" * 500), ("content-length", "-1"), ("content-length", "9" * 50), ("content-length", "1e3"),
    ("transfer-encoding", "chunked"), ("transfer-encoding", "chunked, chunked"), ("content-encoding", "gzip"), ("content-type", "application/x-msgpack"),
    ("host", "evil.example"), ("host", ""), ("host", "localhost:99999999"), ("origin", "null"), ("origin", "http://evil.example"), ("range", "bytes=-1"),
    ("range", "bytes=0-" + "9" * 400), ("range", "bytes=" + "0-1," * 2000 + "0-1"), ("if-none-match", '"' * 4000), ("accept-encoding", "gzip;q=nan"),
    ("upgrade", "websocket"), ("expect", "100-continue"), ("last-event-id", "9" * 400), ("x-fanfold-length", "-1"), ("x-fanfold-length", "9" * 30),
    ("x-forwarded-for", "1.2.3.4, " * 900), ("x-forwarded-proto", "https"), ("forwarded", "for=::1"), ("accept-language", "a" * 8000),
]  # fmt: skip
SAMPLES: dict[str, Any] = {  # a valid value for each field of the API's request bodies
    "project": "llm", "runs": ["r1"], "keys": ["loss"], "n": 50, "x": "step", "fold": "mean", "rank": 0, "lo": 0.0, "hi": 9.0, "log": False,
    "names": ["metric:loss", "config:lr"], "ids": ["absent"], "name": "n", "notes": "n", "tags": ["a"], "archived": False, "fragment": "x=1",
    "add_tags": ["a"], "remove_tags": ["b"], "metric": "loss", "key": "t", "row": 0, "column": "a", "value": "1", "id": "r1", "action": "set",
    "values": {"lr": 0.1}, "to": "elsewhere", "rule": "loss > 2", "remove": False,
}  # fmt: skip


class Count:
    """The counts of hostile inputs and their outcomes, for one row of the table."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.inputs = self.crashes = self.hangs = self.memory = self.invented = 0
        self.notes: list[Any] = []

    def crash(self, *note: Any) -> None:
        self.crashes += 1
        self.notes.append(("crash", *note))

    def hang(self, *note: Any) -> None:
        self.hangs += 1
        self.notes.append(("hang", *note))

    def invent(self, *note: Any) -> None:
        self.invented += 1
        self.notes.append(("invented", *note))

    def close(self) -> None:
        """Add the row to the table, and check that every count but the inputs is 0."""
        counts = {"crashes": self.crashes, "hangs": self.hangs, "memory": self.memory, "invented": self.invented}
        fault_table.abuse(self.what, inputs=self.inputs, **counts)
        assert not any(counts.values()), (counts, [str(note)[:400] for note in self.notes[:10]])
        assert self.inputs


@contextlib.contextmanager
def counting(what: str) -> Iterator[Count]:
    count = Count(what)
    yield count
    count.close()


class Dashboard(Process):
    """A real `fanfold ui`."""

    def __init__(self, folder: Path, *words: str, log: Path | None = None) -> None:
        super().__init__("ui", "--dir", str(folder), "--port", "0", "--json", *words, log=log or folder.with_name("ui.log"))
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.log.read_text()
        base, _, self.token = json.loads(line)["address"].partition("?token=")
        self.port = int(base.rstrip("/").rpartition(":")[2])


class Watched:
    """A server under abuse: requests are raw bytes, and its CPU time, memory, responses and log are checked."""

    def __init__(self, server: Dashboard | Gateway, count: Count, token: str = "") -> None:
        self.server, self.count = server, count
        self.headers = {
            "host": f"localhost:{server.port}",
            "connection": "close",
            **({"authorization": f"Bearer {token}"} if token else {}),
        }
        self._peak = self._status("VmHWM")

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.server.popen.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.server.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ask(self, method: str, path: str, body: bytes = b"", *extra: tuple[str, str], note: Any = None) -> int | None:
        """Send one request and return the status of the response; None if there was none."""
        before = self.cpu()
        headers = {**self.headers, **({"content-length": str(len(body))} if body or method != "GET" else {})}
        headers.update(extra)
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
        status = answer_to(self.server.port, head + body)
        self.count.inputs += 1
        where = (method, path[:200], body[:200], extra, note)
        if status is not None and status >= 500 and status != 503:
            self.count.crash(status, *where)
        if self.cpu() - before > BUSY_SECONDS:
            self.count.hang(self.cpu() - before, *where)
        assert self.server.popen.poll() is None, (where, self.server.log.read_text()[-3000:])
        return status

    def close(self, path: str) -> None:
        """Check that the server is alive, logged no traceback, and stayed within its memory limit."""
        assert self.ask("GET", path) == 200
        log = self.server.log.read_text(errors="replace")
        if "Traceback" in log:
            self.count.crash(log[max(0, log.index("Traceback") - 300) :][:3000])
        if self._status("VmHWM") - self._peak > GROWTH:
            self.count.memory += 1
            self.count.notes.append(("memory", self._peak, self._status("VmHWM")))


def answer_to(port: int, request: bytes, timeout: float = 60.0) -> int | None:
    """Send raw bytes to a local port, and return the status of the response; None if the connection closes without one."""
    answer = b""
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=timeout) as line:
        with contextlib.suppress(ConnectionError):  # it may respond and close before it has read everything
            line.sendall(request)
        line.settimeout(timeout)
        with contextlib.suppress(TimeoutError):
            while b"\r\n" not in answer and (block := line.recv(1 << 16)):
                answer += block
    words = answer.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


def quoted(text: str) -> str:
    return urllib.parse.quote(text, errors="surrogatepass", safe="")


def as_json(body: Any) -> bytes:
    return json.dumps(body, default=repr).encode("utf-8", "surrogatepass")


def queries(names: list[str], chance: random.Random) -> Iterator[str]:
    """Yield query strings: each argument hostile in turn, then random ones, with arguments repeated or missing."""
    good = {
        name: str(SAMPLES.get(name, "r1" if name in ("id", "ids", "run") else "loss" if name == "key" else "0")) for name in names
    }
    yield "?"
    for name in names:
        for text in TEXTS:
            yield "?" + "&".join(f"{one}={quoted(text if one == name else value)}" for one, value in good.items())
    for _ in range(20):
        some = chance.choices([*names, "x", "token"], k=chance.randrange(1, 6))
        yield "?" + "&".join(f"{one}={quoted(chance.choice(TEXTS))}" for one in some)
    yield "?" + "&" * 5000
    yield "?" + "&".join(f"{one}=%ff%fe%" for one in names)


def bodies(form: dict[str, Any], chance: random.Random) -> Iterator[bytes]:
    """Yield bodies for a schema of the API: each field with each type, hostile strings, and bytes that are not JSON."""
    good = {name: SAMPLES[name] for name in form["properties"]}
    yield from (as_json(body) for body in mutated(good) if body is not MISSING)
    for name, value in good.items():
        for text in TEXTS:
            if isinstance(value, (str, list)):
                yield as_json({**good, name: [text] if isinstance(value, list) else text})
    yield from (
        b"",
        b"{",
        b"[" * 50_000,
        b"\xff\xfe",
        b'{"project": "\\ud800"}',
        chance.randbytes(3000),
        as_json({**good, "more": 1}),
    )
    yield as_json(
        {name: [*value, *(f"k{n}" for n in range(20_000))] if isinstance(value, list) else value for name, value in good.items()}
    )


def fuzz_api(watched: Watched, prefix: str, openapi: dict[str, Any], chance: random.Random) -> None:
    """Send hostile requests to every route of an OpenAPI description."""
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            names = [one["name"] for one in operation.get("parameters", [])]
            if names:
                for query in queries(names, chance):
                    watched.ask("GET", f"{prefix}{path}{query}")
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                form = openapi["components"]["schemas"][reference.rpartition("/")[2]]
                for body in bodies(form, chance):
                    watched.ask("POST", f"{prefix}{path}", body, ("content-type", "application/json"))
            for header in HEADERS:
                body = b"5\r\nhello\r\n0\r\n\r\n" if header[0] == "transfer-encoding" else b""
                watched.ask(method.upper(), f"{prefix}{path}?project=llm&id=r1", body, header)
            for other in ("PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "get", "\x00"):
                watched.ask(other, f"{prefix}{path}")


def fuzz_paths(watched: Watched, prefix: str) -> None:
    """Request paths that are not routes, and media and pages with hostile names."""
    for text in TEXTS:
        for path in ("/", "/api/", "/media/", "/assets/"):
            watched.ask("GET", f"{prefix}{path}{quoted(text)}")
        watched.ask("GET", f"{prefix}/media?project=llm&run=r1&blob={quoted(text)}")
        watched.ask("GET", f"{prefix}/html?project=llm&run=r1&key=loss&n={quoted(text)}")
    for raw in (
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//evil.example/",
        "/" + "a/" * 4000,
        "/%",
        "/%zz",
        "/\xff",
        "*",
        "http://evil/",
    ):
        watched.ask("GET", raw if raw[0] != "/" else prefix + raw)
