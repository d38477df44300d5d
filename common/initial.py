"""Initial weights that do not depend on how a model is split: each tensor is drawn from (seed, name)."""

import zlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from common import UserError, keymap, seed


def materialize(model: Any, run_seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move a model to its device, and draw its initial weights if it was built on the meta device.

    Weights are drawn one tensor at a time, and each rank keeps only its part, so no rank ever holds the whole model.
    They are drawn on the CPU, so that every kind of device starts from the same numbers.

    Args:
        model: if it is on meta, its method `initial(name, size, generator)` draws the whole tensor of a name.
        run_seed: decides, with the name, the values.
        device: where the weights are stored.
        dtype: the type they are stored in.

    Raises:
        UserError: the model is on meta and has no method `initial`.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(device, dtype)
    if not callable(getattr(model, "initial", None)):
        raise UserError(
            'make_model builds this model under torch.device("meta"), so it needs a method'
            " initial(name, size, generator) that returns the first value of a parameter;"
            " or build it without meta, after seed.everything(args.seed, seed.INIT)"
        )
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
