"""A run that is killed and goes on: python examples/resume.py

The second process gives the same id and continues after the last step, as a job does that a scheduler preempted. Points
that the second attempt logs again hide the first attempt's; nothing is deleted.
"""

import os
import signal
import subprocess
import sys

import fanfold


def train(run_id: str, start: int, die_at: int | None) -> None:
    run = fanfold.init("resume", id=run_id)
    for step in range(start, 60):
        run.log({"loss": 1 / (step + 1), "attempt": run.attempt}, step=step)
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)  # as hard as it gets: no handler runs, and no point is lost
    run.finish()


if len(sys.argv) > 1:
    _, run_id, start, die_at = sys.argv
    train(run_id, int(start), int(die_at) if die_at else None)
else:
    run_id = f"job-{os.getpid()}"  # in a real job: the scheduler's job id, or FANFOLD_RUN_ID
    subprocess.run([sys.executable, __file__, run_id, "0", "39"], check=False)
    first = fanfold.open(run_id, project="resume")
    print(f"after the kill: {first.status}, last step {first.series('loss').steps[-1]}")
    subprocess.run([sys.executable, __file__, run_id, "30", ""], check=True)  # from a checkpoint at step 30
    both = fanfold.open(run_id, project="resume")
    attempts = both.series("attempt").values
    print(f"after the restart: {both.status}, {len(both.attempts)} attempts, {len(attempts)} steps, "
          f"of which {(attempts == 2).sum()} are the second attempt's")  # fmt: skip
