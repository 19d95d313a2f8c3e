"""A small multi-rank training in which something fails, or is only slow: `blackbox_train.py FAULT RANK`."""

import ctypes
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import fanfold

FAULT, RANK, SECONDS = sys.argv[1], int(sys.argv[2]), float(os.environ.get("SLOW_SECONDS", "600"))
AT = 5
PAIRS = []


class Stuck(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, place):
        if FAULT == "loader" and place == 30 and int(os.environ["RANK"]) == RANK:
            time.sleep(600)  # a dataset that waits for a server
        return torch.ones(4)


lock = threading.Lock()


def sleeps():
    time.sleep(600)  # MARK sleep


def deadlocks():
    with lock:
        lock.acquire()  # MARK lock


def diverges():
    dist.broadcast(torch.ones(3), src=0)  # MARK diverge


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)  # MARK kill


def crashes():
    ctypes.string_at(0)  # MARK segv


def holds_the_gil():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # MARK gil


def save_checkpoint():
    time.sleep(SECONDS)  # a slow filesystem


def computes():
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        sorted(range(3_000_000), key=lambda n: -n)


def sleeps_or_waits():
    if dist.get_rank() == RANK:
        time.sleep(600)  # MARK other
    dist.all_reduce(torch.ones(2), group=PAIRS[dist.get_rank() // 2])  # MARK pair


FAULTS = {
    "sleep": sleeps, "lock": deadlocks, "diverge": diverges, "kill": is_killed, "segv": crashes, "gil": holds_the_gil,
    "pair": sleeps_or_waits, "checkpoint": save_checkpoint, "compute": computes,
}  # fmt: skip


def train():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    PAIRS.extend(dist.new_group(pair) for pair in ([0, 1], [2, 3]) if FAULT == "pair")
    chosen = {"blackbox": {"hang": float(os.environ["HANG_SECONDS"])}} if "HANG_SECONDS" in os.environ else {}
    run = fanfold.init("box", id="boxed", system=False, quiet=True, **chosen)
    model = torch.nn.Linear(4, 4)
    forward = torch.compile(model) if FAULT == "compile" and rank == RANK else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(DataLoader(Stuck(), batch_size=2, num_workers=1, multiprocessing_context="fork")):  # MARK loader
        if FAULT in FAULTS and (rank == RANK or FAULT == "pair") and step == AT:
            FAULTS[FAULT]()
        forward(batch).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # MARK reduce
        optimizer.step()
        run.log({"loss": 1.0})
        time.sleep(0.1)
        if step == 20:
            break
    run.finish()
    dist.destroy_process_group()


train()
