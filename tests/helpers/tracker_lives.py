"""A tracker killed repeatedly: for adapters that must survive more than the contract's single kill."""

from __future__ import annotations

from pathlib import Path

from fanfold.testing import Seen, TrackerContract


def three_lives(contract: TrackerContract, folder: Path, key: str, *, before: str = "", first: str = "pass") -> Seen:
    """Write 3000 points in three processes that settle every 100, the first two killed by SIGKILL; return what was delivered.

    `before` runs in each process before the tracker starts, `first` after that, in the first process only.
    """
    body = f"""
        begin = (tracker.counts() or {{}}).get({key!r}, 0)
        if not begin:
            {first}
        for i in range(begin, begin + 1000):
            tracker.write([Point({{{key!r}: float(i)}}, i)])
            if i % 100 == 99:
                tracker.settle()
        print("\\n", begin, flush=True)
        if begin < 2000:
            os.kill(os.getpid(), 9)
        tracker.close("finished")
    """
    lives = [contract.started(folder, body, before=before) for _ in range(3)]
    assert [life.returncode for life in lives] == [-9, -9, 0], lives[-1].stderr
    assert [life.stdout.split()[-1] for life in lives[:2]] == ["0", "1000"]
    return contract.seen(folder)
