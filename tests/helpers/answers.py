"""Requests to a real server, and its decoded responses."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from starlette.testclient import TestClient

from fanfold.server import wire

LOCAL = "http://localhost:8642"


def decode(data: bytes) -> tuple[dict, list]:
    version, length = struct.unpack_from("<II", data)
    assert version == wire.VERSION
    head = json.loads(data[8 : 8 + length])
    types = {"f8": np.float64, "f4": np.float32, "i4": np.int32, "u2": np.uint16}
    for item in head["items"]:
        item["columns"] = {
            name: np.frombuffer(data, types[kind], count, 8 + length + at) for name, (kind, at, count) in item["columns"].items()
        }
    return head, head["items"]


def series(http: TestClient, **query) -> list[dict]:
    answer = http.post("/api/series", json={"project": "llm", **query})
    assert answer.status_code == 200, answer.text
    return decode(answer.content)[1]


SERVER = """
import sys, socket, uvicorn
from fanfold.server import app
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen()
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app(sys.argv[1]), log_level="warning")).run(sockets=[listening])
"""


@contextlib.contextmanager
def serving(root: Path, cache: Path, **options):
    """Run the dashboard's server in its own process, and yield its address."""
    env = {**os.environ, "FANFOLD_CACHE_DIR": str(cache)}
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(root)], stdout=subprocess.PIPE, text=True, env=env, **options)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def asked(address: str, body: dict | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read()


HALF = b"POST /v1/append?project=llm HTTP/1.1\r\nhost: localhost\r\nx-a: "
