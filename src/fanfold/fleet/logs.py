"""Log output of gateways and forwarders: one JSON object per line on stderr, for log collectors. Never contains a token."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

_KEPT = ("event", "project", "run", "journal", "route", "status", "bytes", "ms", "token", "by", "peer", "offset", "seconds")


class JsonLines(logging.Formatter):
    """A formatter that includes the fields passed in `extra`. Non-ASCII is escaped, so that no name can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= {name: value for name in _KEPT if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@contextlib.contextmanager
def to_stream(level: str = "info", stream: TextIO | None = None) -> Iterator[None]:
    """Send the logs of fanfold and uvicorn to a stream as JSON lines; restore the loggers afterwards."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    loggers = [logging.getLogger(name) for name in ("fanfold", "uvicorn.error")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(level.upper())
    try:
        yield
    finally:
        for logger, (handlers, propagate, was) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(was)
