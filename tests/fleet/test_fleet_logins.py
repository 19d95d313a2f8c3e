"""Logins by a provider, and lines that are encrypted: a certified OpenID Connect server, a browser, and answers that lie."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import http.server
import ipaddress
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, urlsplit

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from playwright import sync_api
from starlette.testclient import TestClient

import fanfold
from fanfold.cli import main
from fanfold.errors import SettingError
from fanfold.fleet.audit import FILE_NAME as AUDIT
from fanfold.fleet.audit import AuditFile
from fanfold.fleet.grants import Grants
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.oidc import Oidc
from fanfold.fleet.sessions import Sessions
from fanfold.fleet.tokens import FILE_NAME, Tokens
from fanfold.server.gateway import app
from fanfold.server.login import Logins
from fanfold.store.query import LocalStore
from fleet_tools import Gateway, arrived, write_run
from paths import CHROMIUM, ROOT, TESTS

SECRET = "a secret of the tests, long enough"
PUBLIC = "https://runs.example.org"
CALLBACK = f"{PUBLIC}/ui/oidc/callback"


# A provider that says whatever a test wants it to say


class Liar:
    """An OpenID Connect provider of our own, whose answers can be wrong in one place."""

    def __init__(self) -> None:
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.claims: dict = {}
        self.info: dict = {}
        self.found: dict = {}
        self.raw = b""  # the whole answer of the token endpoint, if any
        self.exchanges = 0
        self.algorithm, self.signer, self.kid = "RS256", self.key, "k1"
        self.challenge = self.sent = self.authorization = ""
        liar = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(liar.get(self.path))

            def do_POST(self) -> None:
                form = self.rfile.read(int(self.headers["content-length"])).decode()
                liar.exchanges += 1
                if liar.raw:
                    self.wfile.write(liar.raw)
                    return
                self._answer(liar.exchange(dict(parse_qsl(form)), self.headers["authorization"]))

            def _answer(self, value: dict) -> None:
                self.send_response(200 if value else 400)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True)
        self._thread.start()

    def get(self, path: str) -> dict:
        if path == "/info":
            return self.info
        if path.endswith("openid-configuration"):
            ways = {"authorization_endpoint": "/auth", "token_endpoint": "/token", "jwks_uri": "/keys"}
            ways |= {"userinfo_endpoint": "/info"} if self.info else {}
            return {"issuer": self.url, **{name: self.url + way for name, way in ways.items()}, **self.found}
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        return {"keys": [{**public, "kid": "k1", "use": "sig", "alg": "RS256"}]}

    def exchange(self, form: dict[str, str], authorization: str) -> dict:
        self.authorization = authorization
        verifier = form.get("code_verifier", "").encode()
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier).digest()).rstrip(b"=").decode()
        if form.get("code") != "good" or not hmac.compare_digest(challenge, self.challenge) or form["redirect_uri"] != CALLBACK:
            return {}
        now = int(time.time())
        right = {"iss": self.url, "aud": "fanfold", "sub": "1", "iat": now, "exp": now + 60, "nonce": self.sent,
                 "email": "ann@example.org", "email_verified": True, "groups": ["research"]}  # fmt: skip
        claims = {name: value for name, value in {**right, **self.claims}.items() if value is not None}
        return {"id_token": jwt.encode(claims, self.signer, self.algorithm, headers={"kid": self.kid}), "access_token": "x"}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("recorded")
    write_run(root, 5)
    return root


@pytest.fixture
def store(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "store"))


def visitor(store: Path, url: str, **options) -> TestClient:
    sessions = Sessions(SECRET)
    oidc = Oidc(url, "fanfold", sessions, secret="s3:cret", **options)
    grants = Grants(["group:research=llm:read", "user:1=llm:read"])
    logins = Logins(Tokens(store / FILE_NAME), sessions, grants, oidc=oidc, public_url=PUBLIC)
    served = app(DirectoryIntake(store), store=LocalStore(store), audit=AuditFile(store / AUDIT), logins=logins)
    return TestClient(served, base_url=PUBLIC, follow_redirects=False)


def begin(client: TestClient, liar: Liar) -> dict[str, str]:
    """Go to the provider; return what it was asked."""
    place = client.get("/ui/oidc/start").headers["location"]
    asked = {name: values[0] for name, values in parse_qs(urlsplit(place).query).items()}
    assert place.startswith(f"{liar.url}/auth?")
    liar.challenge, liar.sent = asked["code_challenge"], asked["nonce"]
    return asked


def come_back(client: TestClient, **answer: str):
    return client.get("/ui/oidc/callback", params=answer)


def test_a_login_by_a_provider_opens_what_groups_are_granted(store, liar):
    client = visitor(store, liar.url)
    asked = begin(client, liar)
    assert (asked["response_type"], asked["code_challenge_method"], asked["redirect_uri"]) == ("code", "S256", CALLBACK)
    answer = come_back(client, code="good", state=asked["state"], iss=liar.url)
    assert (answer.status_code, answer.headers["location"]) == (303, "../")
    assert base64.b64decode(liar.authorization.split()[1]) == b"fanfold:s3%3Acret"
    seen = client.get("/ui/api/projects").json()
    assert (seen["user"], [row["name"] for row in seen["projects"]], seen["write"]) == ("user ann@example.org", ["llm"], False)
    assert "chess" not in client.cookies["__Host-fanfold-session"]
    again = come_back(client, code="good", state=asked["state"])  # the note is used up
    assert again.status_code == 403
    (login, refused) = AuditFile(store / AUDIT).read()
    assert (login.action, login.by, refused.action) == ("login", "user ann@example.org", "login refused")


@pytest.mark.parametrize("in_token", [{}, {"email": "ann@example.org"}], ids=["address elsewhere", "the same address"])
def test_a_verified_address_may_come_from_userinfo(store, liar, in_token):
    liar.claims = {"email": None, "email_verified": None, **in_token}
    liar.info = {"sub": "1", "email": "ann@example.org", "email_verified": True}
    client = visitor(store, liar.url, groups_claim="roles" if in_token else "groups")
    assert come_back(client, code="good", state=begin(client, liar)["state"], iss=liar.url).status_code == 303
    assert client.get("/ui/api/projects").json().get("user", "user ann@example.org") == "user ann@example.org"


def wrong(claims: dict | None = None, **settings) -> dict:
    return {"claims": claims or {}, **settings}


PAST = int(time.time()) - 3600
OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
LIES = {
    "another audience": wrong({"aud": "somebody-else"}),
    "a second audience": wrong({"aud": ["fanfold", "somebody-else"]}),
    "a token issued to another client": wrong({"azp": "somebody-else"}),
    "another issuer": wrong({"iss": "https://evil.example"}),
    "over": wrong({"exp": PAST}),
    "no expiry": wrong({"exp": None}),
    "made later than now": wrong({"iat": PAST + 9000}),
    "no subject": wrong({"sub": None}),
    "another nonce": wrong({"nonce": "x"}),
    "no nonce": wrong({"nonce": None}),
    "a nonce that is no text": wrong({"nonce": "\ud800"}),
    "an address nobody vouches for": wrong({"email_verified": False}),
    "an address without a word on it": wrong({"email_verified": None}),
    "no address": wrong({"email": None}),
    "an address that is none": wrong({"email": "a\nb"}),
    "another key": wrong(signer=OTHER_KEY),
    "an unknown key": wrong(signer=OTHER_KEY, kid="k2"),
    "no signature": wrong(signer=None, algorithm="none"),
    "a shared key": wrong(signer="s3:cret" * 8, algorithm="HS256"),
    "a provider under another name": wrong(found={"issuer": "https://evil.example"}),
    "a place that is not encrypted": wrong(found={"token_endpoint": "http://evil.example/token"}),
    "an address of its own with another one's word": wrong(
        {"email": "boss@example.org", "email_verified": None, "groups": None},
        info={"sub": "1", "email": "eve@example.org", "email_verified": True, "groups": ["research"]},
    ),
    "a word on no address with an address from elsewhere": wrong(
        {"email": None, "email_verified": True, "groups": None},
        info={"sub": "1", "email": "boss@example.org", "groups": ["research"]},
    ),
    "a key that is a file": wrong(found={"jwks_uri": "file:///etc/passwd"}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_provider_s_answer_that_is_wrong_in_one_place_logs_nobody_in(store, liar, lie):
    for name, value in LIES[lie].items():
        setattr(liar, name, value)
    client = visitor(store, liar.url)
    if liar.found:
        assert client.get("/ui/oidc/start").status_code == 502
    else:
        answer = come_back(client, code="good", state=begin(client, liar)["state"])
        assert answer.status_code == 403, lie
        assert "You are not logged in" in answer.text
    assert client.get("/ui/api/projects").status_code == 401


@pytest.mark.parametrize("raw", [b"not HTTP\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 900_000], ids=["not HTTP", "too deep"])
def test_a_provider_that_answers_nonsense_is_a_failed_login_not_an_error_of_ours(store, liar, raw):
    liar.raw, liar.found = raw, {"token_endpoint_auth_methods_supported": 3}
    client = visitor(store, liar.url)
    answer = come_back(client, code="good", state=begin(client, liar)["state"])
    assert (answer.status_code, "You are not logged in" in answer.text) == (403, True)


def test_odd_keys_of_a_provider_are_a_failed_login_not_an_error_of_ours(store, liar):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 900_000)

        threading.Thread(target=speak, daemon=True).start()
        liar.found = {"jwks_uri": f"http://127.0.0.1:{listener.getsockname()[1]}/keys"}
        client = visitor(store, liar.url)
        answer = come_back(client, code="good", state=begin(client, liar)["state"])
        assert (answer.status_code, "You are not logged in" in answer.text) == (403, True)


def test_a_stranger_cannot_flood_the_provider_with_invented_codes(store, liar):
    client = visitor(store, liar.url)
    state = begin(client, liar)["state"]
    codes = [come_back(client, code=f"invented {number}", state=state).status_code for number in range(100)]
    assert set(codes) == {403, 429}
    assert liar.exchanges < 50


def test_a_login_that_was_not_begun_here_or_was_refused_there_logs_nobody_in(store, liar):
    client, elsewhere = visitor(store, liar.url), visitor(store, liar.url)
    state = begin(client, liar)["state"]
    assert come_back(elsewhere, code="good", state=state).status_code == 403  # another browser
    assert come_back(client, code="good", state=state[:-1]).status_code == 403
    assert come_back(client, code="bad", state=state).status_code == 403
    assert come_back(client, code="good", state=state, iss="https://evil.example").status_code == 403
    said = come_back(client, error="access_denied", error_description="<b>no</b>", state=state)
    assert (said.status_code, "&lt;b&gt;no&lt;/b&gt;" in said.text) == (403, True)
    liar.challenge = "of another login"
    assert come_back(client, code="good", state=state).status_code == 403
    assert client.get("/ui/api/projects").status_code == 401
    assert visitor(store, "http://127.0.0.1:9").get("/ui/oidc/start").status_code == 502
    away = visitor(store, liar.url)
    liar.found = {"issuer": "https://evil.example"}
    assert "calls itself" in away.get("/ui/oidc/start").text
    liar.found = {}
    assert "a moment ago" in away.get("/ui/oidc/start").text  # and nothing was asked
    liar.claims = {"email": None}
    named = visitor(store, liar.url, user_claim="sub")
    assert come_back(named, code="good", state=begin(named, liar)["state"]).status_code == 303
    assert named.get("/ui/api/projects").json()["user"] == "user 1"


def test_settings_of_a_login_that_cannot_work_stop_the_gateway(store, capsys, monkeypatch):
    with pytest.raises(SettingError, match="https"):
        Oidc("http://id.example.org", "fanfold", Sessions(SECRET))
    start = ["serve", "--store", str(store), "--port", "0"]
    issuer = ["--oidc-issuer", "https://id.example.org"]
    for words, said in (
        (issuer, "--public-url"),
        ([*issuer, "--oidc-client", "x"], "--public-url"),
        (["--public-url", "runs.example.org"], "https://name"),
        (["--public-url", "https://[::1"], "https://name"),
        (["--trust-header", "X-Forwarded-User"], "--trusted-proxy"),
        (["--grant", "ann=llm:read"], "user:NAME"),
        (["--grants", str(store / "nothing")], "Restore"),
        (["--session-hours", "0"], "above 0"),
    ):
        assert main([*start, *words]) == 2, words
        assert said in capsys.readouterr().err
    monkeypatch.setenv("FANFOLD_SESSION_SECRET", "short")
    assert main(start) == 2
    assert "openssl rand" in capsys.readouterr().err


@pytest.mark.parametrize("trusted", ["127.0.0.1", "::/0", "10.0.0.0/8"])
def test_a_gateway_says_that_users_of_its_machine_can_speak_as_its_proxy(store, trusted):
    Tokens(store / FILE_NAME).create("x", projects=["llm"], scopes=["read"])
    words = ("--trusted-proxy", trusted, "--trust-header", "X-Remote-User", "--grant", "user:ann=llm:read")
    gateway = Gateway(store, *words, log=store / "gateway.log")
    try:
        request = urllib.request.Request(f"{gateway.url}/ui/api/projects", headers={"x-remote-user": "ann"})
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request) as answer:
            assert (json.load(answer)["user"], trusted) == ("user ann", "127.0.0.1")
    finally:
        gateway.close()
    assert ("They can log in as anybody" in gateway.log.read_text()) == (trusted != "10.0.0.0/8")


# A certified provider, a browser


@contextlib.contextmanager
def provider(redirect: str, secret: str) -> Iterator[str]:
    """Run the provider of tests/oidc; its packages are fetched once, into build/."""
    place = ROOT / "build" / "oidc"
    source = TESTS / "oidc"
    wanted = (source / "package.json").read_bytes()
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "provider.mjs", place)
    if not (place / "node_modules").is_dir() or (place / "package.json").read_bytes() != wanted:
        (place / "package.json").write_bytes(wanted)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=place, check=True, timeout=300, capture_output=True)
    command = ["node", "provider.mjs", redirect, secret]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(20)
        process.stdout.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.skipif(not (CHROMIUM and shutil.which("npm")) and not os.environ.get("CI"), reason="no Chromium or no npm here")
def test_a_person_logs_in_by_a_certified_provider_and_by_a_token_in_a_browser(store, monkeypatch):
    fanfold.init("secret", dir=store, id="s1", system=False, quiet=True).finish()
    _, word = Tokens(store / FILE_NAME).create("guest", projects=["secret"], scopes=["read"])
    secret, port = "a client's secret", free_port()
    home = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("FANFOLD_OIDC_SECRET", secret)
    monkeypatch.setenv("FANFOLD_SESSION_SECRET", SECRET)
    with provider(f"{home}/ui/oidc/callback", secret) as issuer, sync_api.sync_playwright() as driver:
        words = ("--oidc-issuer", issuer, "--oidc-client", "fanfold", "--oidc-scopes", "openid email groups",
                 "--public-url", home, "--grant", "group:research=llm:read")  # fmt: skip
        gateway = Gateway(store, *words, port=port)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            by_provider(browser.new_page(), home, "ann")
            page = browser.new_page()  # of another visitor
            by_provider(page, home, "bob", sees=False)
            page.get_by_role("button", name="Log out").click()
            page.get_by_label("Token").fill(word)
            page.get_by_role("button", name="Log in with a token").click()
            page.wait_for_url(f"{home}/ui/**")
            page.locator("#project").wait_for(timeout=30_000)
            assert page.locator("#project option").all_inner_texts() == ["secret"]
            page.goto(f"{home}/ui/login")
            page.get_by_text("You are logged in as token").wait_for()
            by_provider(browser.new_page(), home, "eve", said="does not vouch for eve@example.org")
        finally:
            browser.close()
            assert gateway.terminate() == 0
    actions = [(entry.action, entry.by) for entry in AuditFile(store / AUDIT).read()]
    assert actions[0] == ("login", "user ann@example.org")
    assert actions[-1] == ("login refused", "nobody we know")
    assert word not in gateway.log.read_text()


def by_provider(page, home: str, name: str, *, sees: bool = True, said: str = "") -> None:
    """Log in at the provider's own pages: a name, any password, and consent."""
    page.set_default_timeout(30_000)
    page.goto(f"{home}/ui/")
    page.get_by_role("link", name="Log in").click()
    page.locator("input[name=login]").fill(name)
    page.locator("input[name=password]").fill("any")
    page.get_by_role("button", name="Sign-in").click()
    page.get_by_role("button", name="Continue").click()
    if said:
        page.get_by_text(said).wait_for()
        return
    if not sees:
        page.get_by_text("No project is open to you").wait_for()
        return
    page.locator("#project").wait_for()
    assert page.url.startswith(f"{home}/ui/")
    assert page.locator("#project option").all_inner_texts() == ["llm"]
    assert all(cookie["httpOnly"] for cookie in page.context.cookies(home))


# TLS


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Make an authority of our own and a certificate it signs for this machine; return authority, certificate, key."""
    now = datetime.datetime.now(datetime.timezone.utc)

    def made(name: str, issuer: str, key, signer, *extensions) -> x509.Certificate:
        builder = x509.CertificateBuilder(
            issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]),
            subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(hours=1),
            not_valid_after=now + datetime.timedelta(hours=1),
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=True)
        return builder.sign(signer, hashes.SHA256())

    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = made("authority", "authority", authority_key, authority_key, x509.BasicConstraints(ca=True, path_length=0))
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = made("localhost", "authority", key, authority_key, names)
    plain = serialization.NoEncryption()
    files = {
        "ca.pem": authority.public_bytes(serialization.Encoding.PEM),
        "cert.pem": certificate.public_bytes(serialization.Encoding.PEM),
        "key.pem": key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder / "ca.pem", folder / "cert.pem", folder / "key.pem"


def test_over_tls_a_forwarder_ships_only_to_a_gateway_its_authority_vouches_for(tmp_path, monkeypatch, capsys):
    node, store = tmp_path / "node", tmp_path / "fleet"
    write_run(node, 50)
    authority, certificate, key = certificates(tmp_path)
    _, word = Tokens(store / FILE_NAME).create("x", projects=["llm"], scopes=["read", "write"])
    monkeypatch.setenv("FANFOLD_SERVER_TOKEN", word)
    monkeypatch.setattr("fanfold.fleet.forwarder.ONCE_TRIES", 1)
    gateway = Gateway(store, "--tls-cert", str(certificate), "--tls-key", str(key))
    try:
        assert gateway.url.startswith("https://")
        ship = ["forward", "--once", "--dir", str(node), "--to", gateway.url]
        assert main(ship) == 1  # the system does not know the authority
        assert "certificate" in capsys.readouterr().err
        assert not (store / "llm").exists()
        assert main([*ship, "--ca", str(tmp_path / "nothing.pem")]) == 2
        assert main([*ship, "--ca", str(authority)]) == 0
        assert arrived(store, node)
        trusting = ssl.create_default_context(cafile=authority)
        form = urllib.request.Request(f"{gateway.url}/ui/login", f"token={word}".encode())
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trusting), urllib.request.HTTPCookieProcessor())
        with opener.open(form) as page:
            assert page.url == f"{gateway.url}/ui/"
        with opener.open(f"{gateway.url}/ui/api/projects") as answer:
            assert [row["name"] for row in json.load(answer)["projects"]] == ["llm"]
        write_run(node, 5, id="r2")
        monkeypatch.setenv("FANFOLD_SERVER_CA", str(authority))
        assert main(ship) == 0
        assert arrived(store, node)
    finally:
        gateway.close()
