"""What must stay true of the numbers: finite gradients, and replicas that are equal."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from common import UserError, keymap, ranks, sampler


class FiniteGuard:
    """Leaves no trace of an update whose gradient is not finite, and ends a training that has too many in a row.

    A fused optimizer changes nothing when its `found_inf` is 1, and the gradient norm is the same on all ranks,
    so they all leave the same update out, and nobody waits for a device to know.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: sampler.Plan, most: int) -> None:
        """Begin, with the optimizer's state in place: its first update may be the one to leave out.

        Args:
            model: whose buffers, such as BatchNorm's statistics, a bad forward pass spoils as well.
            optimizer: a fused one.
            plan: which samples each step reads, to name them.
            most: updates in a row that may be left out.

        Raises:
            UserError: the optimizer is not fused.
        """
        if not optimizer.defaults.get("fused"):
            raise UserError(
                f"{type(optimizer).__name__} is not fused: only torch's fused optimizers skip a step whose gradient is "
                "not finite without a wait. In make_optimizer, use one of these, with fused=True"
            )
        keymap.optimizer_tensors(model, optimizer)
        self._optimizer: Any = optimizer
        self._plan, self._most = plan, most
        self._buffers = list(model.buffers())
        self._kept = [buffer.clone() for buffer in self._buffers]
        device = next(model.parameters()).device
        self._in_a_row, self._total, self._tripped_at = torch.zeros(3, dtype=torch.long, device=device).unbind()
        self._reported = 0

    def skip_if_not_finite(self, grad_norm: torch.Tensor) -> None:
        """Before the optimizer's step: it is left out if the global gradient norm, (), is not finite."""
        self._optimizer.found_inf = (~grad_norm.isfinite()).float()

    def restore_if_skipped(self, step: int) -> None:
        """Once `step` is done: undo what it did to the buffers, if its update was left out."""
        bad = self._optimizer.found_inf.bool()
        for buffer, kept in zip(self._buffers, self._kept, strict=True):
            torch.where(bad, kept, buffer, out=buffer)
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)
        self._total += bad
        self._in_a_row.copy_(torch.where(bad, self._in_a_row + 1, 0))
        trips = (self._in_a_row > self._most) & (self._tripped_at == 0)
        self._tripped_at.copy_(torch.where(trips, step, self._tripped_at))

    def report(self) -> None:
        """Now that the device is waited for anyway: tell what was left out (all ranks).

        Raises:
            UserError: more in a row than allowed; names their steps and samples.
        """
        total, tripped_at = torch.stack((self._total, self._tripped_at)).tolist()
        if total > self._reported:
            ranks.print0(f"warning: left out {total - self._reported} update(s) whose gradient was not finite")
            self._reported = total
        if tripped_at:
            steps = range(tripped_at - self._most, tripped_at + 1)
            told = f"no finite gradient in steps {steps[0]} to {steps[-1]} (--max-skips {self._most})"
            told += ": look at --lr, --max-grad-norm"
            plan = self._plan
            if plan.num_samples:  # else they are made anew for each step, and have no numbers
                ends = [(plan.position(step - 1), plan.position(step)) for step in steps]
                read = "; ".join(str(plan.samples(start, stop)[1].tolist()) for start, stop in ends)
                told += f", and at the samples of these steps: {read}"
            raise UserError(told)


def check_replicas(model: nn.Module, step: int) -> None:
    """Compare, over all ranks, the bits of what they should hold alike: equal parts of equal parameters.

    A parameter that is split is compared between the ranks that hold the same part of it. The hash is an XOR of
    the bits: it finds what has changed, not elements that have changed places.

    Raises:
        UserError: on all ranks; names the first parameter, and the ranks that have not what most have.
    """
    mine = {}
    for name, parameter in model.named_parameters():
        local = parameter.detach()
        part = ""
        if isinstance(local, DTensor):
            mesh, coordinate = local.device_mesh, local.device_mesh.get_coordinate() or ()
            split = [i for i, placement in enumerate(local.placements) if not placement.is_replicate()]
            part = f" {[(mesh.size(i), coordinate[i]) for i in split]}"
            local = local.to_local()
        empty = local.new_zeros((), dtype=torch.uint64)  # a rank may hold nothing of a small parameter
        mine[keymap.canonical(name) + part] = torch.hash_tensor(local) if local.numel() else empty
    hashes = torch.stack([value.view(torch.int64) for value in mine.values()]).tolist()
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(zip(mine, hashes, strict=True)))
    for key in {key: None for one in everyone for key in one}:
        holders = {rank: one[key] for rank, one in enumerate(everyone) if key in one}
        values = list(holders.values())
        if len(set(values)) == 1:
            continue
        usual = max(values, key=values.count)  # of two, the lower rank's
        odd = [rank for rank, value in holders.items() if value != usual]
        usual_one = f"rank {min(holders)} has" if len(holders) == 2 else f"most of its {len(holders)} ranks have"
        raise UserError(
            f"the replicas have drifted apart by step {step}: {key} of rank {', '.join(map(str, odd))} is not what "
            f"{usual_one}. A device or its memory may be broken; go on from a checkpoint of an earlier step"
        )
