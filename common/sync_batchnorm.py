"""SyncBatchNorm that also runs on CPU: batch statistics over the samples of all ranks.

torch's own (https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html) refuses CPU tensors,
so a recipe that uses it could not be tried, or tested, without GPUs. This one gives the numbers of
nn.BatchNorm over the whole batch, for any division of it, also with ranks of one sample or none.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps), mean and variance over all ranks' values of a channel."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, eps: float, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the normalised x (N, C, ...), and mean (C,), biased variance (C,) and count () over all ranks."""
        dims = [dim for dim in range(x.ndim) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
        wide = x.double() if x.dtype == torch.float64 else x.float()
        channels = x.shape[1]
        count = wide.new_full((1,), x.numel() / channels)
        # Two passes, mean first: E[x^2] - E[x]^2 loses half of the digits.
        totals = torch.cat([wide.sum(dims), count])
        dist.all_reduce(totals, group=group)
        count = totals[-1]
        mean = totals[:-1] / count
        centred = wide - mean.view(shape)
        var = centred.square().sum(dims)
        dist.all_reduce(var, group=group)
        var = var / count
        scale = torch.rsqrt(var + eps)
        normalised = centred * scale.view(shape)
        ctx.save_for_backward(normalised, scale, count)
        ctx.dims, ctx.shape, ctx.group = dims, shape, group
        ctx.mark_non_differentiable(mean, var, count)
        return normalised.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None, None]:
        """The gradient of BatchNorm (Ioffe and Szegedy 2015, section 3), its two sums taken over all ranks."""
        normalised, scale, count = ctx.saved_tensors
        wide = grad.to(normalised.dtype)
        sums = torch.stack([wide.sum(ctx.dims), (wide * normalised).sum(ctx.dims)])
        dist.all_reduce(sums, group=ctx.group)
        along_one, along_x = (sums / count).unbind()
        result = (wide - along_one.view(ctx.shape) - normalised * along_x.view(ctx.shape)) * scale.view(ctx.shape)
        return result.to(grad.dtype), None, None


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d whose training statistics are those of all ranks of a group (all ranks take part)."""

    group: dist.ProcessGroup

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 (torch's name)
        if input.ndim < 2:
            raise ValueError(f"expected (N, C, ...), got {tuple(input.shape)}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x, (N, C, ...); N may differ between the ranks."""
        if not self.training:
            return super().forward(x)
        normalised, mean, var, count = _Normalise.apply(x, self.eps, self.group)
        if self.running_mean is not None:
            self.num_batches_tracked.add_(1)
            momentum = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                unbiased = var * (count / (count - 1).clamp(min=1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        if self.weight is None:
            return normalised
        shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
        return normalised * self.weight.view(shape).to(x.dtype) + self.bias.view(shape).to(x.dtype)


def convert(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Replace each BatchNorm of a model; parameters, buffers and names stay.

    On GPUs torch's own nn.SyncBatchNorm is used, whose kernels are fused.

    Args:
        model: the plain model, on the device it will train on.
        group: the ranks whose samples make one batch.
    """
    if any(parameter.is_cuda for parameter in model.parameters()):
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    converted = model
    if isinstance(model, _BatchNorm):
        converted = SyncBatchNorm(
            model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats
        )
        converted.group = group
        converted.train(model.training)
        converted._parameters, converted._buffers = model._parameters, model._buffers  # the same tensors
    for name, child in model.named_children():
        converted.add_module(name, convert(child, group))
    return converted
