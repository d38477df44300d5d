"""Seams of what scales a step: float16's loss scale, and the schedule of the rate."""

import functools
from typing import Any

import torch
from torch.optim import lr_scheduler

from tools.judge.record import num


def install(record: Any, place: Any) -> None:
    """Patch them."""
    _scaler(record)
    _schedules(record)


def _scaler(record: Any) -> None:
    scaler: Any = torch.amp.GradScaler
    scale, unscale = scaler.scale, scaler.unscale_
    step = scaler.step

    @functools.wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        if self.is_enabled() and torch.is_tensor(outputs):
            record.scaled, record.pending = (result, num(outputs)), True
        return result

    @functools.wraps(unscale)
    def unscaled(self: Any, optimizer: Any) -> None:
        record.pending = False
        unscale(self, optimizer)

    @functools.wraps(step)
    def stepped(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, optimizer, *args, **kwargs)
        record.pending = False
        return result

    init = scaler.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.is_enabled():
            record.log("scaler")

    scaler.__init__ = made
    scaler.scale, scaler.unscale_, scaler.step = scaled, unscaled, stepped


def _schedules(record: Any) -> None:
    quiet = [0]  # inside of one: a schedule of schedules makes their steps, also while it is made
    for name in ("LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"):
        _schedule(record, getattr(lr_scheduler, name), quiet)


def _schedule(record: Any, kind: Any, quiet: list[int]) -> None:
    init, step = kind.__init__, kind.step

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        quiet[0] += 1
        try:
            init(self, *args, **kwargs)
        finally:
            quiet[0] -= 1
        record.log("schedule", id=id(self), kind=type(self).__name__) if not quiet[0] else None

    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> None:
        if not quiet[0]:
            record.log(
                "schedule step",
                id=id(self),
                backwards=max([one.backwards for one in record.optimizers], default=0),
                direct=record.direct(),
            )
        quiet[0] += 1
        try:
            step(self, *args, **kwargs)
        finally:
            quiet[0] -= 1

    kind.__init__, kind.step = made, stepped
