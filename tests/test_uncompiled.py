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
for count in range(12):
    assert float(compiled(torch.tensor(float(count)))) == 2 * count + 1
frames = counters["frames"]["total"]
run.finish()
print(frames, [float(v) for v in fanfold.open(run.id, dir="runs").series("y").values] == [2.0 * n for n in range(12)])
"""


@pytest.mark.parametrize("call", ["run.log", "fanfold.log"])
@pytest.mark.parametrize(("early", "most"), [("import torch", 16), ("", 60)], ids=["torch first", "torch after init"])
def test_log_in_a_compiled_function_is_not_compiled(tmp_path, call, early, most):
    code = SCRIPT.format(call=call, early=early)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    frames, right = done.stdout.split()
    assert right == "True"
    # The user's function, and what follows the break. Where torch came after init(), the first call is compiled, too.
    assert int(frames) <= most
