"""Initial weights that do not depend on who holds what: each tensor is drawn from (seed, its name)."""

import zlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from common import keymap, seed


def materialize(model: Any, run_seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Put a model on its device. One that was built on the meta device gets its initial weights there.

    Those are drawn one tensor after the other, of which each rank keeps its part, so that no rank ever holds the
    whole model; and on the CPU, so that every kind of device starts from the same numbers.

    Args:
        model: if it is on meta, it has `initial(name, size, generator)`, which draws the whole tensor of a name.
        run_seed: with the name, decides the values.
        device: where the weights go.
        dtype: what they are stored in.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(device, dtype)
    model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for wrapped_name, parameter in model.named_parameters():
            name = keymap.canonical(wrapped_name)
            generator = torch.Generator().manual_seed(int(seed.mix(run_seed, seed.INIT, zlib.crc32(name.encode()))))
            value = model.initial(name, parameter.shape, generator).to(device, dtype)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)
    return model
