"""Several optimizers as one: each steps as it would alone, all skip the same update, and one schedule changes all."""

import pytest
import torch
from common import private_api
from common.workloads import several
from torch import nn


def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9, fused=True)
    return model, [sgd, torch.optim.AdamW(model[1].parameters(), lr=0.01, fused=True)]


def test_each_steps_as_alone_at_the_rate_of_one_schedule() -> None:
    together, parts = make()
    joined = several.Several(*parts)
    schedule = torch.optim.lr_scheduler.LambdaLR(joined, lambda step: 1 / (step + 1))
    alone, apart = make()
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (step + 1)) for one in apart]
    for step in range(4):
        for model, optimizers, rates in ((together, [joined], [schedule]), (alone, apart, schedules)):
            model(torch.full((5, 3), 0.1 * step)).square().sum().backward()
            for one in (*optimizers, *rates):
                one.step()
            model.zero_grad()
    assert all(map(torch.equal, together.parameters(), alone.parameters()))
    assert len(joined.state) == 4
    assert [group["lr"] for group in joined.param_groups] == [
        group["lr"] for one in apart for group in one.param_groups
    ]


def test_all_skip_an_update() -> None:
    model, parts = make()
    joined = several.Several(*parts)
    before = [one.clone() for one in model.parameters()]
    model(torch.ones(5, 3)).sum().backward()
    private_api.skip_update_if(joined, torch.ones(()))
    joined.step()
    assert all(map(torch.equal, model.parameters(), before))
    private_api.skip_update_if(joined, torch.zeros(()))
    joined.step()
    assert not any(map(torch.equal, model.parameters(), before))


def test_fused_only_if_all_are() -> None:
    model, parts = make()
    assert several.Several(*parts).defaults["fused"]
    adam = torch.optim.Adam(model[1].parameters())
    assert not several.Several(parts[0], adam).defaults["fused"]


def test_no_parameter_twice() -> None:
    model, parts = make()
    with pytest.raises(ValueError, match="more than one parameter group"):
        several.Several(*parts, torch.optim.Adam(model.parameters()))


def test_one_after_the_other() -> None:
    """As a GAN's script has it: the second network steps with what the first has become."""
    networks = {}
    for joins in (True, False):
        model, parts = make()
        optimizers = several.Several(*parts).optimizers if joins else parts
        for _ in range(3):
            for network, optimizer in zip(model, optimizers, strict=True):
                model(torch.ones(5, 3)).square().sum().backward(inputs=[*network.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        networks[joins] = model
    assert all(map(torch.equal, networks[True].parameters(), networks[False].parameters()))
