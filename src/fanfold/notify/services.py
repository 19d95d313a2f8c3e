"""Where messages go: a command, a webhook, or one of the services of Apprise. `Service.send` raises if it did not arrive."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import shlex
import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .._version import __version__
from ..errors import FanfoldError, describe, missing_extra, notices, outcome
from .message import Message
from .names import service_name

SECONDS = 30.0  # for one message
_CALLS = re.compile(r"@(?=everyone|here|channel|all\b)")  # what a run says must not call a whole channel


class NotSent(FanfoldError):
    """A message that did not arrive; its text has no secrets."""


class Service:
    """One address. `name` identifies it without revealing it, so that it may be stored with a run."""

    def __init__(self, address: str) -> None:
        self.scheme = address.partition(":")[0].lower()
        self.name = service_name(address)

    def send(self, message: Message) -> None:
        raise NotImplementedError


class Absent(Service):
    """A service that was given to init() of another process: its address is not known here."""

    def __init__(self, name: str) -> None:
        self.scheme, self.name = "", name

    def send(self, message: Message) -> None:
        del message
        raise NotSent(
            f"{self.name} was named in init(), and its address is not stored. Put it into FANFOLD_NOTIFY or your settings file"
        )


class Command(Service):
    """A program that gets the message as JSON on stdin. No shell reads the line."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.words = shlex.split(address.partition(":")[2])

    def send(self, message: Message) -> None:
        try:
            done = subprocess.run(
                self.words, input=json.dumps(message.facts).encode(), timeout=SECONDS, check=False, capture_output=True
            )
        except subprocess.TimeoutExpired as error:
            raise NotSent(f"{self.name}: the command took longer than {SECONDS:g} s") from error
        except OSError as error:
            raise NotSent(f"{self.name}: {error.strerror or error}") from error
        if done.returncode:
            why = done.stderr.decode("utf-8", "replace").strip()[-200:]
            raise NotSent(f"{self.name}: exit code {done.returncode}{f' ({why})' if why else ''}")


class Webhook(Service):
    """A POST of the message as JSON. Redirects are not followed: the address may contain a password."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.url = urlsplit(address)
        if not self.url.hostname:
            raise NotSent(f"{self.name}: the address has no host")

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self.url.hostname or "", self.url.port
        if self.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=SECONDS)
        return http.client.HTTPSConnection(host, port, timeout=SECONDS, context=ssl.create_default_context())

    def send(self, message: Message) -> None:
        connection = self._connection()
        headers = {"content-type": "application/json", "user-agent": f"fanfold/{__version__}", "idempotency-key": message.id}
        if self.url.username:
            import base64

            pair = f"{self.url.username}:{self.url.password or ''}".encode()
            headers["authorization"] = "Basic " + base64.b64encode(pair).decode()
        target = (self.url.path or "/") + (f"?{self.url.query}" if self.url.query else "")
        try:
            connection.request("POST", target, json.dumps(message.facts).encode(), headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise NotSent(f"{self.name}: {describe(error)}") from error
        finally:
            connection.close()
        if not 200 <= status < 300:
            raise NotSent(f"{self.name}: the server answered {status}")


class AppriseService(Service):
    """A service of the Apprise library."""

    def __init__(self, address: str, plugin: Any) -> None:
        super().__init__(address)
        self.secrets = _secrets(address)
        self.plugin = plugin

    def send(self, message: Message) -> None:
        import apprise

        kinds = {"error": apprise.NotifyType.FAILURE, "warning": apprise.NotifyType.WARNING}
        with contextlib.ExitStack() as stack:
            attached = None
            picture = message.picture if getattr(self.plugin, "attachment_support", False) else None
            if picture:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fanfold-"))
                file = Path(folder) / "metric.png"
                file.write_bytes(picture)
                attached = apprise.AppriseAttachment(str(file))
            log = stack.enter_context(apprise.LogCapture(level=logging.WARNING, fmt="%(message)s"))
            kind = kinds.get(message.level, apprise.NotifyType.INFO)
            title, body = (_CALLS.sub("@\u200b", text) for text in (message.title, message.text or message.title))
            said = {"body": body, "title": title, "notify_type": kind}
            done, error = outcome(lambda: self.plugin.notify(**said, body_format=apprise.NotifyFormat.TEXT, attach=attached))
            why = describe(error) if error is not None else str(log.getvalue()).strip()[-300:]
        if not done:
            raise NotSent(f"{self.name}: {self._clean(why) or 'it was not accepted'}")

    def _clean(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return " ".join(text.split())


def open_service(address: str) -> Service:
    """Return the service at an address, or raise NotSent or MissingExtra."""
    scheme = address.partition(":")[0].lower()
    if scheme == "cmd":
        return Command(address)
    plugin = _plugin(address, needed=scheme not in ("http", "https"))
    if plugin is None:
        return Webhook(address)
    return AppriseService(address, plugin)


def _plugin(address: str, *, needed: bool) -> Any:
    """Return Apprise's object for an address; a webhook of Slack, Discord and others is recognised by its host."""
    try:
        import apprise
    except ImportError as error:
        if needed:
            raise missing_extra("apprise", "notify", f"a notification to {address.partition(':')[0]}://") from error
        return None
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # its messages may contain parts of addresses
    plugin, _ = outcome(apprise.Apprise.instantiate, address, suppress_exceptions=True)
    if plugin is None and needed:
        raise NotSent(f"{Service(address).name}: Apprise does not know this address, or a part of it is missing")
    return plugin


def open_services(addresses: Sequence[str]) -> tuple[list[Service], list[str]]:
    """Open all services that work; warn once for each that does not, and return why."""
    found: list[Service] = []
    wrong: list[str] = []
    for address in addresses:
        service, error = outcome(open_service, address)
        if service is not None:
            found.append(service)
            continue
        why = str(error) if isinstance(error, FanfoldError) else type(error).__name__
        wrong.append(why)
        notices.once(f"notify:{why}", f"{why}. Nothing is sent there; training and the other notifications continue.")
    return found, wrong


def _secrets(address: str) -> list[str]:
    """Return the parts of an address that must not appear in a message, longest first."""
    parts = re.split(r"[/:@?&=#]+", address.partition(":")[2])
    return sorted((part for part in parts if len(part) >= 4), key=len, reverse=True)
