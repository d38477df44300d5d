"""SyncBatchNorm that also runs on CPU: batch statistics over the samples of all ranks.

torch's own (https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html) refuses CPU tensors, so a
recipe that uses it could not be tried or tested without GPUs. This one computes the same as nn.BatchNorm on the whole
batch, however the batch is divided, also if a rank has one sample or none; and the same on every device.

On GPUs, the host never waits for it; in each layer and pass, torch's waits until it knows which ranks have samples. But
this one reads and writes the activations several times where torch's fused kernels do so once, and keeps them in
float32 for the backward pass. Which of the two is faster on a GPU was not measured.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from common import keymap

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors; each rank's gradient is the sum of all ranks' gradients (all ranks take part)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sum over the group."""
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum over the group."""
        return _SumOverRanks.apply(grad, ctx.group), None


class SyncBatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm1d, 2d or 3d with training statistics over all ranks of a group (all ranks take part)."""

    process_group: dist.ProcessGroup
    sum_over_ranks: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x, (N, C, ...); N may differ between the ranks."""
        if x.ndim < 2:
            raise ValueError(f"expected (N, C, ...), got {tuple(x.shape)}")
        if not self.training:
            own = self.running_mean is None  # without running statistics, those of this rank's batch
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, own, eps=self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, -1)  # (N, ..., C)
        dims = [*range(x.ndim - 1)]
        # Two all-reduces, mean first: computing E[x^2] - E[x]^2 with one would lose half of the digits.
        totals = torch.cat([wide.sum(dims), wide.new_full((1,), x.numel() / x.shape[1])])
        totals = self.sum_over_ranks(totals, self.process_group)
        count = totals[-1].detach()
        mean = totals[:-1] / count
        centred = wide - mean
        var = self.sum_over_ranks(centred.square().sum(dims), self.process_group) / count
        scale = torch.rsqrt(var + self.eps)
        out = torch.addcmul(self.bias, centred, scale * self.weight) if self.affine else centred * scale
        self._track(mean.detach(), (var * count / (count - 1).clamp(min=1)).detach())
        return out.transpose(1, -1).to(x.dtype)

    def _track(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        """Move the running statistics, if there are any, towards a batch's; without momentum, they are the mean."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # A tensor, because a number would make the host wait for the device.
        mean_of_all = self.num_batches_tracked.to(mean.dtype).reciprocal()
        momentum = mean_of_all if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(var, momentum)


def convert(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Replace each BatchNorm; parameters, buffers and names stay the same.

    Args:
        model: the plain model.
        group: the ranks whose samples form one batch.
    """
    # torch 2.11's compiler gives it another gradient, silently.
    sum_over_ranks = torch.compiler.disable(_SumOverRanks.apply)
    for module in model.modules():
        if isinstance(module, (*BATCH_NORMS, nn.SyncBatchNorm)):
            module.__class__ = SyncBatchNorm
            module.process_group = group
            module.sum_over_ranks = sum_over_ranks
    return model


def min_samples(model: nn.Module) -> int:
    """Samples that a rank needs in a micro-batch: 2 if a BatchNorm takes their variance on each rank alone, else 1."""
    return 2 if any(isinstance(m, BATCH_NORMS) and not is_synchronized(m) for m in model.modules()) else 1


def is_synchronized(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm over several ranks."""
    return isinstance(module, SyncBatchNorm | nn.SyncBatchNorm)


def statistics(model: nn.Module) -> dict[str, nn.Module]:
    """The buffers of every BatchNorm and SyncBatchNorm by canonical name, each with its module."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (*BATCH_NORMS, nn.SyncBatchNorm)):
            found |= {keymap.canonical(f"{name}.{key}"): module for key, _ in module.named_buffers(recurse=False)}
    return found


def is_over_all_ranks(module: Any) -> bool:
    """Whether a module is a BatchNorm whose running statistics are the same on all ranks."""
    return is_synchronized(module) and dist.get_world_size(module.process_group) == dist.get_world_size()
