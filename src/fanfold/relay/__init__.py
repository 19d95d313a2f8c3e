"""The relay: carries frames to one tracker, at its own pace, with a durable cursor."""

from .cursor import Cursor, Owned, cursors, settled
from .process import Relay, serve
from .worker import Worker

__all__ = ["Cursor", "Owned", "Relay", "Worker", "cursors", "serve", "settled"]
