"""torch's grouped product of rows of several experts with their matrices, for `common.workloads.moe`."""

from typing import Any

import torch
from torch.nn import functional as F


def is_fast(x: torch.Tensor) -> bool:
    """Whether torch's grouped product is more than a loop over groups there: in bfloat16, on Hopper and Blackwell.

    Elsewhere it is right, but copies the matrices for nothing, and waits for the device in each of its products, as
    `_grouped_mm_cuda` in torch's GroupedBlas.cpp reads; no GPU has run it. GeForce's generation 12 has no such kernel.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.version.hip:
        return False
    return torch.cuda.get_device_properties(x.device).major in (9, 10)


class Product(torch.autograd.Function):
    """The product of each expert's rows with the transpose of its matrix, of all experts at once.

    The matrices lie beside each other during a pass alone. What autograd keeps is each of them as it is, which FSDP may
    free in between: a copy would keep the experts of all layers until the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ends: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
        """Map (n, in) to (n, out), by matrices of (out, in)."""
        ctx.save_for_backward(rows, ends, *matrices)
        return F.grouped_mm(rows, torch.stack(matrices).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Two products more; the second one only if a matrix learns."""
        rows, ends, *matrices = ctx.saved_tensors
        grad = grad.contiguous()
        of_rows = F.grouped_mm(grad, torch.stack(matrices), offs=ends)
        if not any(ctx.needs_input_grad[2:]):
            return of_rows, None, *[None] * len(matrices)
        return of_rows, None, *F.grouped_mm(grad.mT, rows, offs=ends).unbind()
