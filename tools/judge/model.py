"""Seams of a model and its loss: which module a forward pass goes through, on which samples, with which counts."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tools.judge import replay
from tools.judge.record import fingerprint, num, row_hashes, samples


def install(record: Any, place: Any) -> None:
    """Patch them."""
    _calls(record, place)
    _losses(record)


def _calls(record: Any, place: Any) -> None:
    module: Any = nn.Module
    real = module.__call__
    holds: dict[int, bool] = {}

    @functools.wraps(real)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if record.inside:
            return real(self, *args, **kwargs)
        if id(self) not in holds:
            holds[id(self)] = next(self.parameters(), None) is not None
            record.modules[id(self)] = self  # which also keeps its id from being given again
        if not holds[id(self)]:
            return real(self, *args, **kwargs)
        record.called.add(id(self))
        _note(record, self, args, kwargs)
        record.inside = True
        try:
            if not record.kept and self.training and torch.is_grad_enabled() and not is_meta(self):
                record.kept = True
                replay.keep(record, place, self, args, kwargs)
            return real(self, *args, **kwargs)
        finally:
            record.inside = False
            record.log("forwarded")

    module.__call__ = call


def is_meta(module: nn.Module) -> bool:
    """Whether a model has shapes and no numbers: a script may ask it what it will need."""
    return any(one.is_meta for one in module.parameters())


def _note(record: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
    parts = list(module.modules())
    grad = torch.is_grad_enabled()
    norms = [one for one in parts if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    local = [one for one in norms if one.training and not isinstance(one, nn.SyncBatchNorm)]
    rows = row_hashes([*args, kwargs])
    wrapper = record.inner.get(id(module))
    record.log(
        "forward",
        module=id(module),
        kind=type(module).__name__,
        ddp=isinstance(module, nn.parallel.DistributedDataParallel),
        around=wrapper is not None and grad and module.training,
        train=module.training,
        grad=grad,
        sync=getattr(module, "require_backward_grad_sync", True),
        rows=rows,
        samples=samples([*args, kwargs]),
        batch_norm=bool(local),
        dropout=any(isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0 and one.training for one in parts),
        random=fingerprint([torch.get_rng_state()]),
        statistics=fingerprint(one for norm in local for one in norm.buffers() if one.is_floating_point()),
    )


def _losses(record: Any) -> None:
    functional: Any = F
    for name in (
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    ):
        setattr(functional, name, _loss(record, name, getattr(functional, name)))


def _loss(record: Any, name: str, real: Any) -> Any:
    @functools.wraps(real)
    def patched(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 (torch's name)
        if getattr(record.busy, "loss", False):  # a TorchFunctionMode calls it again
            return real(input, target, *args, **kwargs)
        record.busy.loss = True
        try:
            result = real(input, target, *args, **kwargs)
        finally:
            record.busy.loss = False
        if torch.is_tensor(target) and target.device.type != "meta":
            classes = name in ("cross_entropy", "nll_loss") and not target.is_floating_point()
            ignored = kwargs.get("ignore_index", -100)
            count = int((target != ignored).sum()) if classes else target.numel()
            record.log(
                "loss",
                name=name,
                count=count,
                of=target.numel(),
                value=num(result),
                grad=result.requires_grad,
                reduction=kwargs.get("reduction", "mean"),
                input=list(input.shape),
                target=list(target.shape),
                ignores=classes and count < target.numel(),
            )
        return result

    return patched
