"""What an adopter may bring, and Brigade has none of its own."""

from collections.abc import Iterable
from typing import Any

import torch


class OddOptimizer(torch.optim.Optimizer):
    """Counts in Python's numbers and in its groups, and starts from what is not zero, as some outside torch do."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "weight": 0.0, "named": "nothing", "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["weight"] += group["lr"] ** 0.5
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, start=parameter.clone(), momentum=torch.ones_like(parameter), nothing=None)
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["momentum"], alpha=group["lr"] / (1 + state["step"]))
                parameter.lerp_(state["start"], group["decay"] * group["weight"] / (1 + group["count"]))
