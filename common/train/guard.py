"""Skip updates whose gradient is not finite, and stop a training with too many of them in a row."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common import BadStateError, keymap, private_api, ranks
from common.train import metrics, sampler

FIRST_SCALE = 2.0**16  # of float16's loss
GROWTH_STEPS = 2000  # after so many steps without a skip, the scale doubles


class FiniteGuard:
    """Skips updates whose gradient is not finite, and stops a training with too many of them in a row.

    The gradient norm is the same on all ranks, so all skip the same update. A tensor can make a fused optimizer's step
    change nothing (`private_api.skip_update_if`), so no rank waits for its device to find out. Any other optimizer gets
    no gradients for such a step, and each step waits for the norm.

    In float16, a scale keeps small gradients from vanishing: it multiplies the loss, and divides the gradients again. A
    gradient that is not finite halves it, and GROWTH_STEPS steps without one double it (Micikevicius et al. 2018,
    section 3.2, https://arxiv.org/abs/1710.03740).

    Attributes:
        loss_scale: (), on the device; the number 1 for other types, whose range is float32's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: sampler.Plan,
        most: int,
        dtype: torch.dtype = torch.float32,
        progress: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin, and create a fused optimizer's state, because its first update may be one to skip (all ranks).

        Args:
            model: its buffers, such as BatchNorm's statistics, are restored after a bad forward pass.
            optimizer: the optimizer of its parameters.
            plan: the samples of each step, to name them in an error.
            most: updates in a row that may be skipped.
            dtype: what the model computes in. In float16, updates that are skipped to lower the scale do not count.
            progress: the manifest of the checkpoint that the run continues from, which has the scale's state;
                None for a new run.
        """
        self._fused = bool(optimizer.defaults.get("fused"))
        if self._fused:
            keymap.create_state(optimizer)
            private_api.skip_update_if(optimizer, torch.zeros(()))  # also for a recipe that asks for no skips
        else:
            ranks.print0(f"note: {type(optimizer).__name__} is not fused: each step waits for the gradient norm")
            keymap.optimizer_tensors(model, optimizer)  # says now what of it no checkpoint can hold
        self._optimizer = optimizer
        self._plan = plan
        self._most = most
        self._model = model
        self._looked = False
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        self._kept = [_Kept(buffers) for buffers in by_type.values()]
        device = next(model.parameters()).device
        scale, steps = (progress or {}).get("loss_scale") or (FIRST_SCALE, 0)
        self.loss_scale = torch.tensor(float(scale), device=device) if dtype == torch.float16 else 1
        self._since_change = torch.tensor(float(steps), device=device)  # steps since the scale has changed
        self._bad = torch.zeros((), dtype=torch.bool, device=device)
        self._since_report: dict[int, torch.Tensor] = {}  # by step: whether its update was skipped, and to what end
        self._in_a_row = 0

    def unscale_gradients(self, sums: metrics.Sums) -> None:
        """Divide the gradients by the loss scale, before anything looks at them.

        Where forward returns "weight", the loss becomes the mean over the weight of the whole step: one all-reduce of
        two numbers, and a division of each gradient (all ranks).
        """
        divisor = self.loss_scale
        if "weight" in sums:  # the gradients are divided by the samples so far
            divisor = divisor * metrics.weight_per_sample(sums)
        if isinstance(divisor, torch.Tensor):
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)

    def scale_state(self) -> list[float]:
        """What a checkpoint saves of the loss scale; empty for other types than float16."""
        return [self.loss_scale.item(), self._since_change.item()] if isinstance(self.loss_scale, torch.Tensor) else []

    def skip_if_not_finite(self, grad_norm: torch.Tensor) -> None:
        """Make the next optimizer step do nothing if the global gradient norm, (), is not finite."""
        if not self._looked:
            self._looked = True
            self._name_unreached()
        bad = ~grad_norm.isfinite()
        self._bad = self._bad | bad  # of all updates of this step, where several take turns
        if self._fused:
            private_api.skip_update_if(self._optimizer, bad)
        elif bad:
            self._optimizer.zero_grad(set_to_none=True)

    def _name_unreached(self) -> None:
        """Warn of parameters without a gradient after the first backward pass (all ranks)."""
        mine = [
            keymap.canonical(name)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        everyone = ranks.gather(mine)
        if names := sorted({name for part in everyone for name in part}):
            ranks.print0(
                f"warning: the loss of the first step does not reach {ranks.listed(names)}: use them in forward, or "
                "freeze them with requires_grad_(False); if only some steps use them, DistributedDataParallel needs "
                "find_unused_parameters=True in parallelize"
            )

    def restore_if_skipped(self, step: int) -> None:
        """After `step`: restore the buffers to their values before it, if its update was skipped; adapt the loss scale.

        No rank waits for its device.
        """
        bad = self._bad
        for kept in self._kept:
            now = torch.cat([buffer.flatten() for buffer in kept.buffers])
            torch.where(bad, kept.copy, now, out=kept.copy)
            private_api.copy_each(kept.buffers, kept.parts)
        self._bad = lowered = torch.zeros_like(bad)
        if isinstance(self.loss_scale, torch.Tensor):
            lowered = bad & (self.loss_scale > 1)
            steps = torch.where(bad, 0, self._since_change + 1)
            grown = steps == GROWTH_STEPS
            self._since_change = torch.where(grown, 0, steps)
            self.loss_scale.mul_(torch.where(lowered, 0.5, torch.where(grown, 2.0, 1.0)))
        self._since_report[step] = torch.stack((bad & ~lowered, lowered))

    def report(self) -> int:
        """Print how many updates were skipped (all ranks). Call it where the loop waits for the device anyway.

        Returns:
            The first step since the last report whose update was skipped; 0 if there was none.

        Raises:
            BadStateError: more updates in a row were skipped than allowed; names their steps and samples.
        """
        if not self._since_report:
            return 0
        figures = torch.stack([*self._since_report.values()]).long()  # (steps, 2)
        if dist.is_initialized():  # a rank whose norm alone was wrong must not act alone
            dist.all_reduce(figures, dist.ReduceOp.MAX)
        found = dict(zip(self._since_report, figures.tolist(), strict=True))
        self._since_report.clear()
        if lowered := sum(lowered for _, lowered in found.values()):
            updates = f"{lowered} update{'s' * (lowered > 1)}"
            ranks.print0(f"note: skipped {updates} to lower float16's loss scale to {float(self.loss_scale):g}")
        for step, (bad, _) in found.items():
            self._in_a_row = self._in_a_row + 1 if bad else 0
            if self._in_a_row > self._most:
                raise self._too_many(step)
        if skipped := [step for step, (bad, _) in found.items() if bad]:
            updates = f"{len(skipped)} update{'s' * (len(skipped) > 1)}"
            ranks.print0(f"warning: skipped {updates} because the gradient was not finite")
        return min(skipped, default=0)

    def _too_many(self, last: int) -> BadStateError:
        steps = range(last - self._most, last + 1)
        message = f"the gradient was not finite in steps {steps[0]} to {last}, more than --max-skips "
        message += f"{self._most} allows: lower --lr, set --max-grad-norm"
        if self._plan.num_samples:  # otherwise samples are generated, and have no indices
            ends = [(self._plan.position(step - 1), self._plan.position(step)) for step in steps]
            read = "; ".join(str(self._plan.samples(start, stop)[1].tolist()) for start, stop in ends)
            message += f", or check the samples of these steps: {read}"
        return BadStateError(message, last)


class _Kept:
    """Buffers of one type, and a copy of them: of all, one behind the other.

    A GPU takes longer to begin with each buffer than to copy it, and a processor to be asked for each.
    """

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers = buffers
        self.copy = torch.cat([buffer.flatten() for buffer in buffers])
        parts = self.copy.split([buffer.numel() for buffer in buffers])
        self.parts = [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]
