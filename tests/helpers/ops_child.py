"""Run a program that profiles itself, and read what it recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fanfold
import warm_python
from fanfold.probes.native import build

HEAD = """
import json, os, sys, threading
import fanfold
def begin(ops, **more):
    return fanfold.init("p", ops=ops, system=False, quiet=True, **more)
"""

# A fake device that only provides timing: half a millisecond for everything. It answers event queries in relaxed capture mode only,
# the first one with "not ready", and keeps the last error like CUDA. Calls on a thread without a context count as mistakes.
DEVICE = """
static int mode, asked, last, mistakes, calls;
static void* here = &mode;
static int answer(int error) { ++calls; if (!here) ++mistakes; return error ? last = error : 0; }
extern "C" {
int cuCtxGetCurrent(void** now) { *now = here; return 0; }
int cudaGetLastError() { int error = last; last = 0; return error; }
void lay_down(int awake) { here = awake ? &mode : 0; }
int called() { return calls; }
int left() { return last ? last : mistakes; }
int cudaGetDevice(int* device) { *device = 0; return answer(0); }
int cudaEventCreateWithFlags(void** event, unsigned) { *event = &mode; return answer(0); }
int cudaEventRecord(void*, void*) { return answer(0); }
int cudaEventQuery(void*) { return answer(mode != 2 ? 900 : asked++ ? 0 : 600); }
int cudaEventElapsedTime(float* ms, void*, void*) { *ms = 0.5f; return answer(0); }
int cudaStreamIsCapturing(void*, int* state) { *state = 0; return answer(0); }
int cudaThreadExchangeStreamCaptureMode(int* other) { int old = mode; mode = *other; *other = old; return 0; }
int aoti_torch_get_current_cuda_stream(int, void** stream) { *stream = 0; return 0; }
}
"""
BIND_DEVICE = """
import ctypes
from fanfold.probes.native import library
device = ctypes.CDLL({path!r})
assert library.bind().ff_bind_cuda({path!r}.encode())
"""


def with_device(tmp_path: Path, code: str) -> str:
    """Build the fake device, and return the program bound to it."""
    (tmp_path / "device.cpp").write_text(DEVICE)
    path = tmp_path / "libdevice.so"
    subprocess.run([build.compiler(), "-shared", "-fPIC", "-o", str(path), str(tmp_path / "device.cpp")], check=True)
    return BIND_DEVICE.format(path=str(path)) + code


def program(tmp_path: Path, code: str) -> Path:
    """Write a program to a file, because TorchScript reads sources."""
    path = tmp_path / f"program{len(list(tmp_path.glob('program*')))}.py"
    path.write_text(HEAD + code)
    return path


def start(path: Path, *launcher: str, imports: bool = False, **env: str) -> subprocess.Popen:
    """Start a program, which finds torch imported unless its own import of it is what matters."""
    command = [sys.executable, *launcher, str(path)]
    how = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, "OMP_NUM_THREADS": "1", **env},
    }
    return subprocess.Popen(command, **how) if imports else warm_python.Popen(command, libraries="torch", **how)


def run(path: Path, *launcher: str, imports: bool = False, timeout: float = 150, **env: str) -> tuple[str, str]:
    """Run a program to completion and return its output."""
    process = start(path, *launcher, imports=imports, **env)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"the program hangs: {process.communicate()}") from None
    assert process.returncode == 0, err
    return out, err


def stored(runs_dir: Path):
    (found,) = fanfold.runs(dir=runs_dir)
    return found


def count(rows, op, **where) -> int:
    return sum(row["count"] for row in rows if row["op"] == op and all(row[name] == value for name, value in where.items()))


def said(err: str, what: str) -> int:
    return err.count(what)


def last_json(out: str):
    return json.loads(out.strip().splitlines()[-1])
