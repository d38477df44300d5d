"""Initial weights that do not depend on how a model is split: each tensor is drawn from (seed, name)."""

import itertools
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
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    kept = {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items() if not tensor.is_meta}
    first_names = {id(tensor): name for name, tensor in tensors.items()}
    tied = [
        (module, key, first_names[id(parameter)])
        for module in model.modules()
        for key, parameter in module.named_parameters(recurse=False)
    ]
    model.to_empty(device=device)
    for module, key, name in tied:  # to_empty gives each module a parameter of its own
        setattr(module, key, model.get_parameter(name))
    with torch.no_grad():
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            tensor.copy_(kept[name] if name in kept else _draw(model, name, tensor, run_seed))
    return model


def _draw(model: Any, wrapped_name: str, parameter: torch.Tensor, run_seed: int) -> torch.Tensor:
    name = keymap.canonical(wrapped_name)
    generator = torch.Generator().manual_seed(int(seed.mix(run_seed, seed.INIT, zlib.crc32(name.encode()))))
    return keymap.part_of(model.initial(name, parameter.shape, generator), parameter)
