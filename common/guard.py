"""Checks of the numbers during training: gradients are finite, and replicas are equal."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common import UserError, keymap, private_api, ranks, sampler


class FiniteGuard:
    """Skips updates whose gradient is not finite, and stops a training with too many of them in a row.

    A tensor can make a fused optimizer's step change nothing (`private_api.skip_update_if`). The gradient norm is the
    same on all ranks, so all skip the same update, and no rank waits for its device to find out.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: sampler.Plan, most: int) -> None:
        """Begin, and create the optimizer's state, because its first update may be one to skip.

        Args:
            model: its buffers, such as BatchNorm's statistics, are restored after a bad forward pass.
            optimizer: a fused optimizer.
            plan: the samples of each step, to name them in an error.
            most: updates in a row that may be skipped.

        Raises:
            UserError: the optimizer is not fused.
        """
        if not optimizer.defaults.get("fused"):
            raise UserError(
                f"{type(optimizer).__name__} is not fused, and only torch's fused optimizers can skip a step whose "
                "gradient is not finite: in make_optimizer, use one of them with fused=True"
            )
        keymap.optimizer_tensors(model, optimizer)
        private_api.skip_update_if(optimizer, torch.zeros(()))  # also for a recipe that asks for no skips
        self._optimizer = optimizer
        self._plan = plan
        self._most = most
        self._buffers = list(model.buffers())
        self._kept = [buffer.clone() for buffer in self._buffers]
        device = next(model.parameters()).device
        self._in_a_row, self._total, self._tripped_at = torch.zeros(3, dtype=torch.long, device=device).unbind()
        self._reported = 0

    def skip_if_not_finite(self, grad_norm: torch.Tensor) -> None:
        """Make the next optimizer step do nothing if the global gradient norm, (), is not finite."""
        private_api.skip_update_if(self._optimizer, ~grad_norm.isfinite())

    def restore_if_skipped(self, step: int) -> None:
        """After `step`: restore the buffers to their values before it, if its update was skipped."""
        bad = private_api.update_skipped(self._optimizer)
        for buffer, kept in zip(self._buffers, self._kept, strict=True):
            torch.where(bad, kept, buffer, out=buffer)
        private_api.copy_all(self._kept, self._buffers)
        self._total += bad
        self._in_a_row.copy_(torch.where(bad, self._in_a_row + 1, 0))
        trips = (self._in_a_row > self._most) & (self._tripped_at == 0)
        self._tripped_at.copy_(torch.where(trips, step, self._tripped_at))

    def report(self) -> None:
        """Print how many updates were skipped (all ranks). Call it where the loop waits for the device anyway.

        Raises:
            UserError: more updates in a row were skipped than allowed; names their steps and samples.
        """
        total, tripped_at = torch.stack((self._total, self._tripped_at)).tolist()
        if total > self._reported:
            count = total - self._reported
            ranks.print0(f"warning: skipped {count} update{'s' * (count > 1)} because the gradient was not finite")
            self._reported = total
        if tripped_at:
            steps = range(tripped_at - self._most, tripped_at + 1)
            message = f"the gradient was not finite in steps {steps[0]} to {steps[-1]}, more than --max-skips "
            message += f"{self._most} allows: lower --lr, set --max-grad-norm"
            plan = self._plan
            if plan.num_samples:  # otherwise samples are generated, and have no indices
                ends = [(plan.position(step - 1), plan.position(step)) for step in steps]
                read = "; ".join(str(plan.samples(start, stop)[1].tolist()) for start, stop in ends)
                message += f", or check the samples of these steps: {read}"
            raise UserError(message)


def check_replicas(model: nn.Module, step: int) -> None:
    """Compare a hash of each parameter over the ranks that should hold the same values (all ranks take part).

    A split parameter is compared between the ranks that hold the same part of it. The hash is an XOR of the bits: it
    finds changed elements, but not elements that have changed places.

    Raises:
        UserError: on all ranks; names the first parameter that differs, and the ranks that differ from the majority.
    """
    mine = {}
    for name, parameter in model.named_parameters():
        local = parameter.detach()
        part = ""
        if isinstance(local, DTensor):
            mesh = local.device_mesh
            coordinate = mesh.get_coordinate() or ()
            split = [i for i, placement in enumerate(local.placements) if not placement.is_replicate()]
            part = f" {[(mesh.size(i), coordinate[i]) for i in split]}"
            local = local.to_local()
        empty = local.new_zeros((), dtype=torch.uint64)  # a rank may hold no element of a small parameter
        mine[keymap.canonical(name) + part] = torch.hash_tensor(local) if local.numel() else empty
    hashes = torch.stack([value.view(torch.int64) for value in mine.values()]).tolist()
    everyone = ranks.gather(dict(zip(mine, hashes, strict=True)))
    for key in {key: None for one in everyone for key in one}:
        holders = {rank: one[key] for rank, one in enumerate(everyone) if key in one}
        values = list(holders.values())
        if len(set(values)) == 1:
            continue
        majority = max(values, key=values.count)  # between two ranks, the lower one's
        different = [rank for rank, value in holders.items() if value != majority]
        others = f"rank {min(holders)}" if len(holders) == 2 else f"most of its {len(holders)} ranks"
        raise UserError(
            f"replicas differ at step {step}: {key} on rank {', '.join(map(str, different))} differs from {others}. "
            "A device or its memory may be faulty: exclude it, and --resume an earlier checkpoint"
        )
