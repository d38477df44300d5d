"""recipes/pipeline_gpt/README.md shows a model that is cut by hand inside one process: its code runs here."""

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.harness import runner

README = (runner.ROOT / "recipes" / "pipeline_gpt" / "README.md").read_text()
(CODE,) = re.findall(r"```python\n(class InTwoParts.*?)```", README, re.DOTALL)
CPU = torch.device("cpu")


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, 8, dtype=torch.float64), nn.Tanh()]


def run(code: str) -> Any:
    """Run the code of the page on the CPU twice; returns its names, and those of the same step of a whole model."""
    inputs = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = inputs.repeat(1, 2)
    given = {"nn": nn, "F": F, "torch": torch, "inputs": inputs, "targets": targets, "layers": layers()}
    space = SimpleNamespace(**given)
    exec(re.sub(r'"cuda:[01]"', '"cpu"', code), vars(space))
    whole = nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(whole.parameters())
    loss = F.mse_loss(whole(inputs), targets)
    loss.backward()
    optimizer.step()
    return space, whole, loss


def test_equal_to_the_whole_model() -> None:
    """Loss, gradients and the weights after a step."""
    space, whole, loss = run(CODE)
    assert space.loss == loss
    pairs = list(zip(space.model.parameters(), whole.parameters(), strict=True))
    assert len(pairs) == 4
    assert all(torch.equal(one, other) and torch.equal(one.grad, other.grad) for one, other in pairs)


def test_code_is_short() -> None:
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 20


def test_tensors_travel_to_the_device_of_the_next_part() -> None:
    """On the CPU and the meta device, which refuse each other's tensors as two GPUs do."""
    space, _, _ = run(CODE)
    model = copy.deepcopy(space.model)
    model.part2.to("meta")
    model.second = torch.device("meta")
    assert model(torch.ones(2, 4, dtype=torch.float64)).device.type == "meta"


def test_mutant_that_does_not_move() -> None:
    moved = "self.part2(x.to(self.second))"
    assert CODE.count(moved) == 1
    space, _, _ = run(CODE.replace(moved, "self.part2(x)"))
    space.model.part2.to("meta")
    with pytest.raises(RuntimeError, match="meta"):
        space.model(torch.ones(2, 4, dtype=torch.float64))
