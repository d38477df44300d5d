"""SyncBatchNorm that also runs on CPU: batch statistics over the samples of all ranks.

torch's own (https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html) refuses CPU tensors, so a
recipe that uses it could not be tried or tested without GPUs. This one computes the same as nn.BatchNorm on the whole
batch, however the batch is divided, also if a rank has one sample or none.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _BatchNormOverRanks(torch.autograd.Function):
    """weight * (x - mean) / sqrt(var + eps) + bias, with mean and variance over all ranks' values of a channel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output (N, C, ...), mean (C,), biased variance (C,) and count () over all ranks, in the weight's type."""
        dims = [dim for dim in range(x.ndim) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
        # Two all-reduces, mean first: computing E[x^2] - E[x]^2 with one would lose half of the digits.
        totals = torch.cat([x.sum(dims), x.new_full((1,), x.numel() / x.shape[1])])
        dist.all_reduce(totals, group=group)
        count = totals[-1]
        mean = totals[:-1] / count
        centred = x - mean.view(shape)
        squares = centred.square().sum(dims)
        dist.all_reduce(squares, group=group)
        var = squares / count
        scale = torch.rsqrt(var + eps)
        normalised = centred * scale.view(shape)
        ctx.save_for_backward(normalised, weight * scale, count)
        ctx.dims = dims
        ctx.shape = shape
        ctx.group = group
        ctx.mark_non_differentiable(mean, var, count)
        return normalised * weight.view(shape) + bias.view(shape), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradient of BatchNorm (Ioffe and Szegedy 2015, section 3, https://arxiv.org/abs/1502.03167).

        Its two sums are this rank's gradients of bias and weight; summed over all ranks, they enter the gradient of x.
        """
        normalised, scale, count = ctx.saved_tensors
        grad_bias = grad.sum(ctx.dims)
        grad_weight = (grad * normalised).sum(ctx.dims)
        sums = torch.stack([grad_bias, grad_weight])
        dist.all_reduce(sums, group=ctx.group)
        mean_grad, mean_product = ((row / count).view(ctx.shape) for row in sums)
        grad_x = (grad - mean_grad - normalised * mean_product) * scale.view(ctx.shape)
        return grad_x, grad_weight, grad_bias, None, None


class SyncBatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm1d, 2d or 3d with training statistics over all ranks of a group (all ranks take part)."""

    group: dist.ProcessGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x, (N, C, ...); N may differ between the ranks."""
        if x.ndim < 2:
            raise ValueError(f"expected (N, C, ...), got {tuple(x.shape)}")
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        # Cast outside of the autograd function: a cast inside gives wrong gradients under torch.compile of torch 2.11.
        x_param_dtype = x.to(self.weight.dtype)
        out, mean, var, count = _BatchNormOverRanks.apply(x_param_dtype, self.weight, self.bias, self.eps, self.group)
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        with torch.no_grad():
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(var * count / (count - 1).clamp(min=1), momentum)
        return out.to(x.dtype)


def convert(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Replace each affine BatchNorm that has running statistics; parameters, buffers and names stay the same.

    On GPUs this uses torch's own nn.SyncBatchNorm, whose kernels are fused.

    Args:
        model: the plain model, on its training device.
        group: the ranks whose samples form one batch.
    """
    if any(parameter.is_cuda for parameter in model.parameters()):
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    converted = model
    if isinstance(model, BATCH_NORMS) and model.affine and model.track_running_stats:
        converted = SyncBatchNorm(model.num_features, model.eps, model.momentum)
        converted.group = group
        converted.train(model.training)
        converted.weight = model.weight  # the same tensors
        converted.bias = model.bias
        converted.running_mean = model.running_mean
        converted.running_var = model.running_var
        converted.num_batches_tracked = model.num_batches_tracked
    for name, child in model.named_children():
        converted.add_module(name, convert(child, group))
    return converted


def min_samples(model: nn.Module) -> int:
    """Samples that a rank needs in a micro-batch: 2 if a BatchNorm takes their variance on each rank alone, else 1."""
    return 2 if any(isinstance(m, BATCH_NORMS) and not is_synchronized(m) for m in model.modules()) else 1


def is_synchronized(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm over several ranks."""
    return isinstance(module, SyncBatchNorm | nn.SyncBatchNorm)


def is_over_all_ranks(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm whose running statistics are the same on all ranks."""
    group = module.group if isinstance(module, SyncBatchNorm) else getattr(module, "process_group", None)
    return is_synchronized(module) and dist.get_world_size(group) == dist.get_world_size()
