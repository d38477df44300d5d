"""Initial weights that do not depend on how a model is split: each tensor is drawn from (seed, name)."""

import zlib
from typing import Any

import torch
from torch import nn

from common import UserError, keymap, seed


def materialize(model: Any, run_seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move a model to its device, and initialise its weights if it was built on the meta device.

    Weights are drawn one tensor at a time, and each rank keeps only its part, so no rank ever holds the whole model.
    They are drawn on the CPU, so that every kind of device starts from the same numbers.

    Args:
        model: if it has parameters on meta, its method `initial(name, size, generator)` draws the whole tensor of a
            name. What is not on meta keeps its values; tied weights stay tied.
        run_seed: decides, with the name, the values.
        device: where the weights are stored.
        dtype: the type they are stored in.

    Raises:
        UserError: a buffer is on meta, which nothing would fill, or a parameter is and there is no method `initial`.
    """
    if on_meta := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise UserError(
            f'make_model builds this model under torch.device("meta"), and nothing would fill its buffer {on_meta[0]}: '
            "build it under accelerate.init_empty_weights(), which leaves only the parameters empty"
        )
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(device, dtype)
    if not callable(getattr(model, "initial", None)):
        raise UserError(
            'make_model builds this model under torch.device("meta"), so it needs a method'
            " initial(name, size, generator) that returns the first value of a parameter;"
            " or build it without meta, after seed.everything(args.seed, seed.INIT)"
        )
    model.to(dtype)
    filled = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            value = torch.empty_like(parameter, device=device, requires_grad=False)
            value.copy_(_draw(model, name, value, run_seed))
            filled[parameter] = nn.Parameter(value, parameter.requires_grad)
    for module in model.modules():  # tied weights have several
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, key, filled.get(parameter, parameter))
    return model.to(device)


def _draw(model: Any, wrapped_name: str, parameter: torch.Tensor, run_seed: int) -> torch.Tensor:
    name = keymap.canonical(wrapped_name)
    generator = torch.Generator().manual_seed(int(seed.mix(run_seed, seed.INIT, zlib.crc32(name.encode()))))
    return keymap.part_of(model.initial(name, parameter.shape, generator), parameter)


def leave(model: Any) -> None:
    """Let `materialize` initialise nothing, because a checkpoint will fill the model, which holds NaN until then.

    Else each rank would draw every tensor as a whole, on one thread, for nothing.
    """
    model.initial = lambda name, size, generator: torch.full((), torch.nan).expand(size)
