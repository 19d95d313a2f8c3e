"""The address of a ClickHouse store: clickhouse://user@host:8123/database?cluster=NAME&replicated=1."""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from ..errors import SettingError
from ..settings import split_address

SCHEMES = {"clickhouse": False, "clickhouses": True}
PASSWORD = "FANFOLD_CLICKHOUSE_PASSWORD"  # noqa: S105 - the name of a variable
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}")
_OPTIONS = ("cluster", "replicated", "ttl_days", "ca")


class ClickHouseAddress(NamedTuple):
    """Where the database is, and how its tables are created. `cluster` shards them, `replicated` replicates them."""

    secure: bool
    host: str
    port: int
    user: str
    password: str
    database: str
    cluster: str = ""
    replicated: bool = False
    ttl_days: int = 0
    ca: str = ""

    @property
    def shown(self) -> str:
        """The address without its password, for messages and cache names."""
        return self._written(self.user)

    @property
    def text(self) -> str:
        """The full address with its password, to open the store again. Never displayed, and never part of a command line."""
        options = {name: getattr(self, name) for name in _OPTIONS if getattr(self, name)}
        secret = f":{quote(self.password, safe='')}" if self.password else ""
        return f"{self._written(quote(self.user, safe='') + secret)}?{urlencode(options)}"

    def _written(self, user: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"clickhouse{'s' if self.secure else ''}://{user}@{host}:{self.port}/{self.database}"


def parse(text: str) -> ClickHouseAddress:
    """Parse an address. The password may be in FANFOLD_CLICKHOUSE_PASSWORD instead, hidden from process listings."""
    parts = split_address(text)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    try:
        port = parts.port
        ttl = int(options.get("ttl_days") or 0)
    except ValueError as error:
        raise _wrong(parts.hostname, str(error)) from error
    unknown = sorted(set(options) - set(_OPTIONS))
    database, cluster = parts.path.strip("/") or "fanfold", options.get("cluster", "")
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise _wrong(parts.hostname, "it names no host")
    if unknown:
        raise _wrong(parts.hostname, f"unknown options {', '.join(unknown)}; known: {', '.join(_OPTIONS)}")
    if not _NAME.fullmatch(database) or (cluster and not _NAME.fullmatch(cluster)):
        raise _wrong(parts.hostname, "database and cluster are letters, digits and underscores")
    secure = SCHEMES[parts.scheme]
    password = unquote(parts.password) if parts.password is not None else os.environ.get(PASSWORD, "")
    replicated = options.get("replicated", "") not in ("", "0", "false", "no")
    return ClickHouseAddress(
        secure, parts.hostname, port or (8443 if secure else 8123), unquote(parts.username or "default"), password, database,
        cluster, replicated, ttl, options.get("ca", ""),
    )  # fmt: skip


def _wrong(host: str | None, why: str) -> SettingError:
    return SettingError(
        f"the address of the store at {host or 'no host'} cannot be used: {why}. Nothing was opened. "
        "Write clickhouse://user@host:8123/database, and the password in FANFOLD_CLICKHOUSE_PASSWORD."
    )
