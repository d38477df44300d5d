"""Seams by which the processor reads a number of the GPU, and waits for all that the GPU has still to do."""

import functools
from typing import Any

import torch

READS = "item tolist cpu __float__ __int__ __bool__ __format__"


def install(record: Any, place: Any) -> None:
    """Patch them. A loss is known to be on the GPU: by its graph, or by its value."""
    tensor: Any = torch.Tensor
    for name in READS.split():
        setattr(tensor, name, _read(record, name, getattr(tensor, name)))
    synchronize = torch.cuda.synchronize

    def waits(*args: Any, **kwargs: Any) -> None:
        if record.direct():
            record.log("wait", what="torch.cuda.synchronize()")
        synchronize(*args, **kwargs)

    torch.cuda.synchronize = waits


def _read(record: Any, name: str, real: Any) -> Any:
    @functools.wraps(real)
    def patched(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if record.direct() and self.numel() == 1 and (self.requires_grad or real_item(self) in record.shown):
            record.log("wait", what=name.strip("_"))
        return real(self, *args, **kwargs)

    return patched


real_item = torch.Tensor.item
