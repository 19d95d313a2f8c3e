"""A learning rate that is set from outside applies at once, and its schedule continues from it."""

import pytest

import fanfold
from fanfold.callbacks import learning_rate

torch = pytest.importorskip("torch")
schedules = torch.optim.lr_scheduler

SCHEDULES = {
    "lambda": lambda one: schedules.LambdaLR(one, lambda step: 0.9**step),
    "cosine": lambda one: schedules.CosineAnnealingLR(one, 50),
    "one cycle": lambda one: schedules.OneCycleLR(one, max_lr=[0.4, 0.04], total_steps=50),
    "cyclic": lambda one: schedules.CyclicLR(one, [0.1, 0.01], [0.4, 0.04], step_size_up=7, cycle_momentum=False),
    "sequence": lambda one: schedules.SequentialLR(
        one, [schedules.ConstantLR(one, 0.5, 100), schedules.ExponentialLR(one, 0.9)], [5]
    ),
    "none": lambda one: None,
}


def trained(make, factor, tmp_path, at=10, steps=30):
    """Train, and multiply the learning rate by a factor after a step; return the rates of both groups at each step."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.01}], lr=0.1)
    scheduler, rates = make(optimizer), []
    run = fanfold.init("p", dir=tmp_path, system=False, quiet=True)
    names = learning_rate.make_adjustable(run.control, optimizer, scheduler, None, None)
    assert names == ["lr", "lr/0", "lr/1"]
    for step in range(steps):
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if step == at and factor != 1:
            assert run.control.should_stop is False
            fanfold.open(run.path).tell("set", wait=False, lr=float(run.control.knob("lr", 0.0)) * factor)
            run.control.look()
            assert run.control.should_stop is False
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert factor == 1 or [one["state"] for one in fanfold.open(run.path).requests] == ["done"]
    run.finish()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_continues_from_the_new_rate(name, tmp_path):
    plain = trained(SCHEDULES[name], 1, tmp_path)
    told = trained(SCHEDULES[name], 3.0, tmp_path)
    for step, (before, after) in enumerate(zip(plain, told, strict=True)):
        factor = 3.0 if step >= 10 else 1.0
        assert after == pytest.approx([rate * factor for rate in before], rel=1e-6)


def test_one_group_alone_can_be_set(tmp_path):
    run = fanfold.init("p", dir=tmp_path, system=False, quiet=True)
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.5))
    learning_rate.make_adjustable(run.control, optimizer, None, 0.0, 1.0)
    assert run.control.should_stop is False
    fanfold.open(run.path).tell("set", wait=False, **{"lr/1": 0.25})
    fanfold.open(run.path).tell("set", wait=False, lr=2.0)
    run.control.look()
    assert run.control.should_stop is False
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]
    assert [(one["state"], one["why"]) for one in fanfold.open(run.path).requests] == [
        ("done", ""), ("refused", "lr cannot be 2.0: it is between 0 and 1"),
    ]  # fmt: skip
    run.finish()
