"""The smallest run: python examples/hello.py, then `fanfold show -`."""

import fanfold

with fanfold.init("hello", config={"lr": 0.1}) as run:
    for step in range(100):
        run.log({"loss": 1 / (step + 1)}, step=step)
