"""What a server's connections send, and when: answers in one go, streams at once, everything in order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from fanfold.fleet.client import Client
from fanfold.server.connections import Connections
from fanfold.server.listen import listen


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """Serve an ASGI app as gateway and dashboard are; yield its port."""
    listeners = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, http=Connections().protocol(), lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": listeners})
    thread.start()
    try:
        yield listeners[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


async def plain(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    body = scope["path"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


def told(port: int, request: bytes, *, ends: bytes) -> list[bytes]:
    """Send bytes, and return what comes back, part by part, until it ends so (nothing: until the server closes)."""
    parts: list[bytes] = []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as line:
        line.sendall(request)
        while not (ends and b"".join(parts).endswith(ends)) and (part := line.recv(1 << 16)):
            parts.append(part)
    return parts


def test_an_answer_comes_in_one_part():
    with serving(plain) as port:
        (answer,) = told(port, b"GET /here HTTP/1.1\r\nhost: x\r\n\r\n", ends=b"/here")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


def test_answers_to_requests_sent_at_once_come_in_order():
    with serving(plain) as port:
        asked = b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % at for at in range(20))
        found = b"".join(told(port, asked, ends=b"/19"))
    assert [part.partition(b"HTTP/1.1 ")[0] for part in found.split(b"\r\n\r\n")[1:]] == [b"/%d" % at for at in range(20)]


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_a_connection_that_closes_has_sent_everything(method):
    with serving(plain) as port:
        found = b"".join(told(port, method + b" /here HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", ends=b""))
    assert found.startswith(b"HTTP/1.1 200 OK\r\n")
    assert found.partition(b"\r\n\r\n")[2] == (b"/here" if method == b"GET" else b"")


def test_a_stream_shows_its_head_before_it_has_anything_to_say():
    said = threading.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while not said.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await send({"type": "http.response.body", "body": b"second"})

    with serving(stream) as port, socket.create_connection(("127.0.0.1", port), timeout=30) as line:
        try:
            line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert line.recv(1 << 16).endswith(b"\r\n\r\n")
        finally:
            said.set()
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            rest += line.recv(1 << 16)
        assert rest == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"


def test_a_forwarder_sends_a_request_in_one_part():
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hear() -> None:
            line, _ = listener.accept()
            with line:
                heard.append(line.recv(1 << 16))
                line.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n{"missing":{}}')

        hearing = threading.Thread(target=hear)
        hearing.start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert client.missing("llm", "r1", ["a"]) == {}
        client.close()
        hearing.join(30)
    assert heard[0].startswith(b"POST /v1/missing?") and heard[0].endswith(b'\r\n\r\n["a"]')
