"""A library that has calls of its own instead of log(dict), here sqlite3: used by hand, on the main process only.

python examples/by_hand.py, or: torchrun --nproc-per-node=2 examples/by_hand.py
"""

import sqlite3
import tempfile
from pathlib import Path

import fanfold

run = fanfold.init("by-hand")
if fanfold.is_main_process():
    database = sqlite3.connect(Path(tempfile.mkdtemp()) / "losses.db")
    database.execute("create table losses (step, loss)")


@run.on_main_process
def keep(step, loss):
    database.execute("insert into losses values (?, ?)", (step, loss))


for step in range(20):
    loss = 1 / (step + 1)
    run.log({"loss": loss}, step=step)  # every rank
    keep(step, loss)  # the main process; elsewhere the call does nothing

if fanfold.is_main_process():
    ((count, last),) = database.execute("select count(*), min(loss) from losses")
    database.close()
    print(f"by hand: {count} points, the last {last}")
run.finish()
