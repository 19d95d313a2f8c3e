"""A training with planned kills, slow checkpoints, evaluations and data stalls, which records its own timings.

python goodput_job.py DIR CLOCK KILL_AT(0: never)
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import fanfold

STEP, BATCH, STALL, SAVE, EVALUATE, SETUP, END = 0.1, 0.02, 0.7, 0.8, 0.6, 1.0, 1.2
STEPS, EVERY, STALL_AT = 40, 10, 15


def main(folder: Path, clock: Path, kill_at: int) -> None:
    with clock.open("a", buffering=1) as file:

        def spend(kind: str, seconds: float, step: int | None = None) -> None:
            begin = time.time_ns()
            time.sleep(seconds)
            file.write(json.dumps({"kind": kind, "step": step, "begin": begin, "end": time.time_ns()}) + "\n")

        run = fanfold.init("p", dir=folder, id="planned", quiet=True, system=False)
        loop = fanfold.Loop(
            run,
            max_steps=STEPS,
            eval_steps=EVERY,
            save_steps=EVERY,
            output_dir=folder / "checkpoints",
            evaluate=lambda: [spend("evaluation", EVALUATE), {"loss": 1.0}][1],
            save=lambda _folder: spend("checkpoint", SAVE),
            load=lambda _folder: None,
        )

        class Loader:
            def __len__(self) -> int:
                return STEPS

            def __iter__(self):
                for number in range(first, STEPS):
                    spend("data", STALL if number == STALL_AT else BATCH)
                    yield number

        found = loop.resume()
        first = loop.state.global_step if found else 0
        time.sleep(SETUP)
        with loop:
            for _ in loop.epochs():
                for _ in loop.steps(Loader(), skip=lambda loader, _count: iter(loader)):
                    step = loop.state.global_step + 1
                    if step == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    spend("step", STEP, step)
                    loop.log({"loss": 1.0 / step})
        begin = time.time_ns()
        time.sleep(END)
        run.finish()
        file.write(json.dumps({"kind": "idle", "step": None, "begin": begin, "end": time.time_ns()}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
