"""A C++ operator of one's own appears in the operator profile beside torch's, with nothing added to it.

python examples/custom_op/run.py        (needs a C++ compiler)
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

import fanfold


def build() -> Path:
    if shutil.which("g++") is None:
        sys.exit("There is no g++ here, so the operator cannot be built. Install a C++ compiler.")
    target = Path(tempfile.mkdtemp()) / "swish.so"
    places = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    command = ["g++", "-std=c++20", "-O2", "-fPIC", "-shared", *places, "-o", str(target)]
    subprocess.run([*command, str(Path(__file__).with_name("swish.cpp")), "-ltorch_cpu", "-ltorch"], check=True)
    return target


torch.ops.load_library(build())
with fanfold.init(project="custom-op", ops={"every": 1}, system=False) as run:
    for _ in range(50):
        y = torch.ops.example.swish(torch.randn(64, 64), 1.0)
    run.log({"mean": y.mean()})

rows = {row["op"]: row for row in fanfold.open(run.path).ops()}
mine = rows["example::swish"]
print(f"example::swish: {mine['count']} calls, half of them below {mine['p50_ns'] / 1000:.0f} µs")
