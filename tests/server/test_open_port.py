"""What strangers can do at a port of ours: other users of the machine, pages of other sites, slow and half requests, odd servers."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright import sync_api
from starlette.testclient import TestClient

import fanfold
from abuse_tools import Dashboard
from answers import HALF
from browser import CHROMIUM, FLAGS
from fanfold.cli import main
from fanfold.errors import SettingError
from fanfold.fleet.client import Client, Unreachable
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.tokens import FILE_NAME, Tokens
from fanfold.fleet.wire import Piece
from fanfold.server import app
from fanfold.server.gateway import app as gateway_app
from fanfold.server.login import Logins
from fanfold.store.query import LocalStore
from fleet_tools import Gateway, until

# The dashboard's token


@contextlib.contextmanager
def dashboard(folder: Path, *options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "fanfold", "ui", "--dir", str(folder), "--port", "0", "--json", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(server.stdout.readline())["address"]
    finally:
        server.terminate()
        server.communicate(timeout=20)


def status(url: str, method: str = "GET", **headers: str) -> int:
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_on_loopback_a_token_is_asked_for_too(runs_dir):
    fanfold.init("llm", system=False).finish()
    with dashboard(runs_dir, "--write") as address:
        base, _, token = address.partition("?token=")
        assert base.startswith("http://localhost:") and len(token) >= 24
        for path in ("", "api/projects", "api/live", "api/openapi.json", "media?x=1", "?token=guess"):
            assert status(base + path) == 401, path
        assert status(base + "api/delete", "POST") == 401
        assert status(base + "api/projects", authorization=f"Bearer {token}") == 200
        port = base.rstrip("/").rpartition(":")[2]
        assert status(base + "api/projects", cookie=f"fanfold-{port}={token}") == 200


@pytest.fixture
def chromium() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def test_cookies_of_other_programs_lock_nobody_out(runs_dir):
    with dashboard(runs_dir) as address:
        base, _, token = address.partition("?token=")
        port = urlsplit(base).port
        for odd in ('a={"b": 1, "c": [2]}', "x y=z", "=", 'q="open', "lang=de,en", "é=1".encode().decode("latin-1")):
            for cookie in (f"{odd}; fanfold-{port}={token}", f"fanfold-{port}={token}; {odd}"):
                assert status(base + "api/projects", cookie=cookie) == 200, cookie


def test_the_address_works_as_a_link_in_another_page(runs_dir, chromium, tmp_path):
    fanfold.init("llm", system=False).finish()
    with dashboard(runs_dir) as address:
        wiki = tmp_path / "wiki.html"
        wiki.write_text(f'<a href="{address}">our runs</a>')
        page = chromium.new_context().new_page()
        page.goto(wiki.as_uri())
        with page.expect_response(lambda answer: answer.status == 200 and "token" not in answer.url):
            page.click("a")
        page.wait_for_selector("text=llm", state="attached")


def test_each_start_has_a_token_of_its_own_unless_one_is_set(runs_dir, monkeypatch):
    with dashboard(runs_dir) as one, dashboard(runs_dir) as other:
        assert one.partition("?token=")[2] != other.partition("?token=")[2]
    monkeypatch.setenv("FANFOLD_TOKEN", "sesame")
    with dashboard(runs_dir) as address:
        assert address.endswith("/?token=sesame")


def test_no_token_has_to_be_asked_for_and_works_on_loopback_only(runs_dir, capsys):
    with dashboard(runs_dir, "--no-token") as address:
        assert "token" not in address and status(address + "api/projects") == 200
    assert main(["ui", "--dir", str(runs_dir), "--host", "0.0.0.0", "--no-token"]) != 0
    assert "--no-token does not go with --host" in capsys.readouterr().err


@contextlib.contextmanager
def embedded_server(folder: Path) -> Iterator[str]:
    """The dashboard of a notebook; yield its address."""
    page = fanfold.ui(dir=folder)
    try:
        yield page.url
    finally:
        page.stop()


@contextlib.contextmanager
def taken_at_ipv6() -> Iterator[int]:
    """Another user's server at ::1; yield its port."""
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_localhost_is_ours_at_both_of_its_addresses(runs_dir):
    """Browsers try ::1 first: whoever listens there on our port would be sent the token."""
    with dashboard(runs_dir) as address, embedded_server(runs_dir) as embedded:
        for place in (address, embedded):
            port, token = urlsplit(place).port, place.partition("?token=")[2]
            for host in ("127.0.0.1", "[::1]"):
                assert status(f"http://{host}:{port}/api/projects") == 401
                assert status(f"http://{host}:{port}/api/projects", authorization=f"Bearer {token}") == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_that_somebody_else_has_at_localhost_is_not_used(host, runs_dir, capsys):
    with taken_at_ipv6() as port:
        assert main(["ui", "--dir", str(runs_dir), "--host", host, "--port", str(port)]) != 0
        assert "which is also called localhost" in capsys.readouterr().err
        assert main(["server", "start", "--store", str(runs_dir), "--host", "localhost", "--port", str(port)]) != 0


def test_two_dashboards_are_open_in_one_browser_side_by_side(runs_dir, chromium):
    fanfold.init("llm", system=False).finish()
    with dashboard(runs_dir) as one, dashboard(runs_dir) as other:
        context = chromium.new_context()
        pages = [context.new_page() for _ in range(2)]
        for page, address in zip(pages, (one, other), strict=True):
            page.goto(address)
            assert "token" not in page.url
        for page in pages:  # the second cookie did not take the place of the first
            assert page.reload().status == 200


def test_a_notebook_at_another_name_of_this_machine_shows_the_frame(runs_dir, chromium):
    run = fanfold.init("llm", system=False)
    run.log({"loss": 1.0})
    run.finish()
    shown = fanfold.ui(run, height=500)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(f'<iframe src="{shown.url}" width="900" height="600"></iframe>'.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        try:
            page = chromium.new_page()
            page.goto(f"http://127.0.0.1:{server.server_port}/")  # to the browser, localhost is another site
            page.frame_locator("iframe").get_by_text("lowest loss").first.wait_for(state="attached", timeout=30_000)
        finally:
            server.shutdown()
            shown.stop()


@pytest.mark.parametrize(
    "headers", [{}, {"sec-fetch-mode": "navigate"}, {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}]
)
def test_another_site_may_link_to_the_dashboard_but_not_post_to_it(tmp_path, headers):
    client = TestClient(app(tmp_path, write=True), base_url="http://localhost:8642")
    foreign = {"sec-fetch-site": "cross-site", **headers}
    assert client.post("/api/delete", json={"project": "p", "ids": []}, headers=foreign).status_code == 403
    assert client.get("/", headers=foreign).status_code == (200 if headers else 403)


@pytest.mark.parametrize("origin", ["http://[", "http://]", "http://[::1", "http://[x]y", "null", "//", "javascript:alert(1)"])
def test_an_origin_that_is_not_an_address_is_another_site(tmp_path, origin):
    client = TestClient(app(tmp_path), base_url="http://localhost:8642")
    assert client.get("/api/projects", headers={"origin": origin}).status_code == 403


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "1e3", "٣", "x", ""])
def test_a_number_no_page_sends_is_refused_politely(tmp_path, number):
    run = fanfold.init("llm", dir=tmp_path, system=False, quiet=True)
    run.log({"page": fanfold.Html("<b>hi</b>")})
    run.finish()
    client = TestClient(app(tmp_path), base_url="http://localhost")
    assert client.get("/html", params={"project": "llm", "run": run.id, "key": "page", "n": number}).status_code in (400, 404)
    assert client.get("/html", params={"project": "llm", "run": run.id, "key": "page", "n": "0"}).status_code == 200


# A gateway's tokens


def test_when_the_last_token_is_revoked_nobody_gets_in(tmp_path, ends):
    store = tmp_path / "store"
    tokens = Tokens(store / FILE_NAME)
    token, word = tokens.create("only", projects=["*"], scopes=["read", "write"])
    tokens.revoke(token.id)
    gateway = ends(Gateway(store))
    for headers in ({}, {"authorization": f"Bearer {word}"}):
        assert status(gateway.url + "/v1/runs?project=llm", **headers) == 401
        assert status(gateway.url + "/ui/api/projects", **headers) == 401
    assert status(gateway.url + "/healthz") == 200


def test_a_public_address_needs_tokens_even_behind_loopback(tmp_path, capsys):
    assert main(["serve", "--store", str(tmp_path), "--port", "0", "--public-url", "https://runs.example.org"]) != 0
    assert "there are no tokens" in capsys.readouterr().err


# Slow, half and many requests


BODY = b"POST /ui/login HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000\r\n\r\ntoken="
STREAM = b"GET /ui/api/live HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n\r\n"


@pytest.mark.parametrize("kind", ["head", "body", "stream", "nothing"])
def test_held_connections_do_not_take_the_gateway_away(tmp_path, kind):
    store = tmp_path / "store"
    word = Tokens(store / FILE_NAME).create("reader", projects=["other"], scopes=["read"])[1]
    sent = {"head": HALF, "body": BODY, "stream": STREAM % word.encode(), "nothing": b""}[kind]
    serve = [sys.executable, "-m", "fanfold", "serve", "--store", str(store), "--port", "0", "--json"]
    command = ["sh", "-c", 'ulimit -n 400; exec "$@"', "sh", *serve]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines: list[socket.socket] = []
    try:
        address = json.loads(server.stdout.readline())["address"]
        port = int(address.rpartition(":")[2])
        for count in range(600):
            if kind == "stream" and count == 60:
                time.sleep(2.5)  # streams that have only begun are let be
            line = socket.create_connection(("127.0.0.1", port), timeout=10)
            with contextlib.suppress(OSError):
                line.send(sent)
            lines.append(line)
        time.sleep(2.5)
        for _ in range(5):
            assert status(address + "/healthz") == 200
            assert status(address + "/v1/runs?project=other", authorization=f"Bearer {word}") == 200
    finally:
        for line in lines:
            line.close()
        server.terminate()
        server.wait(20)


def test_a_head_without_end_is_cut_off(tmp_path, ends):
    gateway = ends(Gateway(tmp_path / "store"))
    line = socket.create_connection(("127.0.0.1", gateway.port), timeout=20)
    line.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n")
    sent = 0
    with pytest.raises(OSError):
        while sent < 4 << 20:
            line.sendall(b"x-filler: " + b"a" * 1000 + b"\r\n")
            sent += 1012
            time.sleep(0)
    assert sent < 4 << 20
    line.close()
    assert status(gateway.url + "/healthz") == 200


def test_a_request_that_is_never_finished_is_closed(tmp_path, monkeypatch):
    code = """
import sys
from fanfold.server import connections
connections.HEAD_SECONDS = connections.BODY_SECONDS = 0.5
from fanfold.cli import main
sys.exit(main(["serve", "--store", sys.argv[1], "--port", "0", "--json"]))
"""
    server = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        address = json.loads(server.stdout.readline())["address"]
        port = int(address.rpartition(":")[2])
        body = b"POST /ui/login HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\ntoken="
        for begun in (b"", b"G", HALF, body):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as line:
                line.sendall(begun)
                with contextlib.suppress(ConnectionResetError):
                    assert not line.recv(1 << 16) or begun == body, begun  # closed by the server, not by our timeout
        with socket.create_connection(("127.0.0.1", port), timeout=30) as line:  # an answered one may be used again
            for _ in range(2):
                line.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                answer = b""
                while not answer.endswith(b"ok\n"):
                    answer += line.recv(1 << 16) or pytest.fail("the connection was closed")
                time.sleep(1.2)
    finally:
        server.terminate()
        server.wait(20)


def test_one_machine_with_many_ipv6_addresses_is_one_stranger(tmp_path):
    Tokens(tmp_path / FILE_NAME).create("reader", projects=["*"], scopes=["read"])
    served = gateway_app(DirectoryIntake(tmp_path), store=LocalStore(tmp_path), logins=Logins(Tokens(tmp_path / FILE_NAME)))

    def tried(peer: str) -> list[int]:
        client = TestClient(served, client=(peer, 1))
        form = client.post("/ui/login", content="token=guess").status_code
        return [form, client.get("/v1/runs?project=p", headers={"authorization": "Bearer guess"}).status_code]

    codes = [code for number in range(60) for code in tried(f"2001:db8:1:2:{number:x}::{number:x}")]
    assert codes[0] == 401 and 429 in codes and codes[-1] == 429
    assert tried("2001:db8:1:3::1") == [401, 401]
    assert [code for number in range(60) for code in tried("::ffff:192.0.2.1")][-1] == 429
    assert tried("192.0.2.1") == [429, 429]  # the same machine, seen by a socket for both families
    assert tried("192.0.2.2") == [401, 401]


# A server that is no gateway, from a forwarder's side

ODD = [b"", b"[]", b"{}", b"null", b"1", b'"x"', b"<html>", b"\xff", b'{"offset": null}', b'{"offset": "7"}', b'{"offset": -1}',
       b'{"offset": 1.5}', b'{"offset": true}', b'{"offset": 1e400}', b'{"offset": 99999999999999999999}', b'{"offset": [1]}',
       b'{"missing": null}', b'{"missing": [1]}', b'{"missing": {"a": "b"}}', b'{"missing": {"a": -1}}', b'{"pieces": null}',
       b'{"pieces": []}', b'{"pieces": [null]}', b'{"pieces": [{}]}', b'{"pieces": [{"status": 200}]}',
       b'{"pieces": [{"status": "200", "offset": 1}]}', b'{"pieces": [{"status": 200, "offset": "1"}]}',
       b'{"pieces": [{"status": 200, "offset": -5}]}', b'{"pieces": [{"status": 409}]}', b'{"pieces": [1, 2, 3]}',
       b'{"pieces": {"status": 200}}', b'{"pieces": [{"status": 400, "error": 7}]}', b"[" * 100_000]  # fmt: skip


@pytest.fixture(scope="module")
def odd() -> Iterator[tuple[str, list[tuple[int, bytes]]]]:
    answers: list[tuple[int, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.do_GET()

        def do_GET(self) -> None:
            code, body = answers[-1]
            self.send_response(code)
            self.send_header("retry-after", "9" * 400)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", answers
        server.shutdown()


@pytest.mark.parametrize("code", [200, 409, 503])
def test_an_answer_no_gateway_gives_is_a_gateway_out_of_reach(odd, code):
    url, answers = odd
    client = Client(url, timeout=20)
    piece = Piece("r", "0-0123456789abcdef", 0, 0, b"x")
    asks = [
        lambda: client.offset("p", "r", "j"),
        lambda: client.missing("p", "r", ["a"]),
        lambda: client.append("p", [piece]),
        lambda: client.blob("p", "r", "n", offset=0, total=1, data=b"x"),
    ]
    for body in ODD:
        answers.append((code, body))
        for ask in asks:
            with pytest.raises(Unreachable):
                ask()
    client.close()


BROWSER = """#!/bin/sh
echo "$@" > {0}.words
file="${{1#file://}}"
stat -c '%a' "$file" > {0}.mode
cat "$file" > {0}.page.part && mv {0}.page.part {0}.page
"""


def test_the_browser_is_not_given_the_token_on_its_command_line(tmp_path, ends, monkeypatch):
    """Every user of the machine can read the words of every process."""
    home, browser = tmp_path / "home", tmp_path / "browser"
    home.mkdir()
    browser.write_text(BROWSER.format(browser))
    browser.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("BROWSER", str(browser))
    server = ends(Dashboard(tmp_path / "runs", "--open"))
    page = browser.with_name("browser.page")
    assert until(page.exists)
    words = browser.with_name("browser.words").read_text()
    assert server.token not in words
    assert words.startswith(f"file://{home}/fanfold-")
    assert browser.with_name("browser.mode").read_text() == "600\n"
    assert f"url=http://localhost:{server.port}/?token={server.token}" in page.read_text()
    server.terminate()
    assert list(home.glob("*.html")) == []


def test_an_empty_token_is_no_token_that_everybody_has(tmp_path):
    for hosts in ((), None):
        with pytest.raises(SettingError, match="everybody"):
            app(tmp_path, token="", hosts=hosts)
