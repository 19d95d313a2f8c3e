"""What the abuse tests share: counts of hostile inputs, a real server that is watched, raw requests, and hostile values for every route."""

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

BUSY_SECONDS = 2.0  # of processor time: on a loaded machine, the wall clock would accuse the innocent
GROWTH = 512 << 10  # KiB that a server may take beyond what it had at the start

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
SAMPLES: dict[str, Any] = {  # a good value for each field that a body of the API may have
    "project": "llm", "runs": ["r1"], "keys": ["loss"], "n": 50, "x": "step", "fold": "mean", "rank": 0, "lo": 0.0, "hi": 9.0, "log": False,
    "names": ["metric:loss", "config:lr"], "ids": ["absent"], "name": "n", "notes": "n", "tags": ["a"], "archived": False, "fragment": "x=1",
    "add_tags": ["a"], "remove_tags": ["b"], "metric": "loss", "key": "t", "row": 0, "column": "a", "value": "1", "id": "r1", "action": "set",
    "values": {"lr": 0.1}, "to": "elsewhere", "rule": "loss > 2", "remove": False,
}  # fmt: skip


class Count:
    """Hostile inputs of one line of the table, and what came of them."""

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
        """Enter the line into the table; everything but the inputs has to be 0."""
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
    """A server under abuse: each request is raw bytes; its processor time, memory, answers and log are counted."""

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
        """Send one request and return the status of its answer; None if there was none."""
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
        """Check that the server is alive, said nothing of a traceback, and took no more memory than it may."""
        assert self.ask("GET", path) == 200
        log = self.server.log.read_text(errors="replace")
        if "Traceback" in log:
            self.count.crash(log[max(0, log.index("Traceback") - 300) :][:3000])
        if self._status("VmHWM") - self._peak > GROWTH:
            self.count.memory += 1
            self.count.notes.append(("memory", self._peak, self._status("VmHWM")))


def answer_to(port: int, request: bytes, timeout: float = 60.0) -> int | None:
    """Send raw bytes to a port of this machine, and return the status of the answer; None if the line is closed without one."""
    answer = b""
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=timeout) as line:
        with contextlib.suppress(ConnectionError):  # it may answer and close before it has read everything
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
    """Yield query strings: each argument hostile in turn, then some at random, doubled or left out."""
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
    """Yield bodies for a schema of the API: each field of each type, hostile texts, and bytes that are no JSON."""
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
    """Ask every route of an OpenAPI description for everything hostile."""
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
    """Ask for addresses that are no routes, and for media and pages by hostile names."""
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
