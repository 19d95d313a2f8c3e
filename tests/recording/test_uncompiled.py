"""log() inside a function that torch.compile compiles: right values, one graph break, and none of our code compiled."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
{early}
import fanfold
run = fanfold.init("p", dir="runs", quiet=True, system=False)
import torch
from torch._dynamo.utils import counters

def step(x):
    y = x * 2
    {call}({{"y": y, "mean": y.mean(), "count": 3}}, step=int(count))
    return y + 1

compiled = torch.compile(step, backend="eager")
for count in range({steps}):
    assert float(compiled(torch.tensor(float(count)))) == 2 * count + 1
frames = counters["frames"]["total"]
run.finish()
print(frames, [float(v) for v in fanfold.open(run.id, dir="runs").series("y").values] == [2.0 * n for n in range({steps})])
"""


@pytest.mark.parametrize("call", ["run.log", "fanfold.log"])
def test_log_in_a_compiled_function_is_not_compiled(tmp_path, call):
    frames, right = outcome(tmp_path, call=call, early="import torch", steps=12)
    assert right == "True"
    assert int(frames) <= 16  # the user's function, and what follows the break


def test_where_torch_comes_after_init_values_are_right_too(tmp_path):
    assert outcome(tmp_path, call="run.log", early="", steps=2)[1] == "True"  # the first call is compiled, which takes its time


def outcome(folder, **parts):
    code = SCRIPT.format(**parts)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
