"""Opening the browser at an address with a token, without showing the token to other users of the machine.

A browser's command line can be read by everybody (`ps`). So it is given a file of this user's, which leads to the address.
"""

from __future__ import annotations

import contextlib
import html
import platform
import secrets
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

from ..errors import notices
from ..journal.files import create

WAIT_SECONDS = 0.3  # for the server to be up
READ_SECONDS = 60.0  # how long the browser may take to read the file
PAGE = """<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>fanfold</title>
<meta http-equiv="refresh" content="0;url={0}"><a href="{0}">fanfold</a>
"""


@contextlib.contextmanager
def opening(address: str) -> Iterator[None]:
    """Open an address in the browser soon; what that needs is gone with the context, or a minute later."""
    file: Path | None = None
    of_windows = "microsoft" in platform.release().lower()  # in WSL; such a browser finds no file of ours
    if "token=" in address and not of_windows:
        try:
            file = _written(address)
        except OSError as error:
            notices.once("browser", f"the browser is not opened: {error}. The dashboard runs; open the address that it printed.")
            yield
            return
    place = address if file is None else file.as_uri()
    timers = [Timer(WAIT_SECONDS, webbrowser.open, [place])]
    if file is not None:
        timers.append(Timer(READ_SECONDS, file.unlink, [True]))
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        if file is not None:
            file.unlink(missing_ok=True)


def _written(address: str) -> Path:
    """Write the file into the home folder, by a name without a dot first: browsers in a sandbox read nothing else."""
    file = Path.home() / f"fanfold-{secrets.token_hex(6)}.html"
    with create(file) as opened:
        opened.write(PAGE.format(html.escape(address)).encode())
    return file
