"""Several optimizers as one, each of its own parameters: Muon for matrices and AdamW for the rest, sparse and dense."""

from typing import Any

from torch.optim import Optimizer


class Several(Optimizer):
    """Optimizers that step together, and that have one schedule and one place in a checkpoint.

    They share its groups and its state. Those that take turns step by themselves, in `train_step`.

    Attributes:
        optimizers: as they were given.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        """Join optimizers that have not made a step.

        Raises:
            ValueError: two of them have the same parameter.
        """
        self.optimizers = optimizers
        groups = [group for one in optimizers for group in one.param_groups]
        super().__init__(groups, {"fused": all(one.defaults.get("fused") for one in optimizers)})
        for one in optimizers:
            one.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let each make its step."""
        for one in self.optimizers:
            one.step()

    def __setattr__(self, name: str, value: Any) -> None:
        """Hand on `found_inf`, by which fused optimizers skip an update."""
        super().__setattr__(name, value)
        if name == "found_inf":
            for one in self.optimizers:
                setattr(one, name, value)
