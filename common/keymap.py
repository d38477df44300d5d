"""Checkpoint mapping: one canonical name for each tensor, whatever wraps the model. Pure dict to dict.

Parameters and buffers keep their names in the plain model; optimizer state is named `optimizer.<parameter>.<key>`.
No name depends on the order of the parameters or on how they are split.
"""

import re
from collections.abc import Mapping

import torch
from torch import nn

# At the start of a name: nn.DataParallel, DistributedDataParallel, torch.compile, and a pipeline's stages, whose layers
# keep the plain model's names. Around a submodule: torch.compile, and activation checkpointing.
WRAPPERS = re.compile(r"^((module|_orig_mod)\.)*(stages\.\d+\.)?|(_orig_mod|_checkpoint_wrapped_module)\.")
OPTIMIZER = "optimizer."
NO_WEIGHTS = (OPTIMIZER, "rollout.")  # the second: state of the environments that generate training data


def canonical(name: str) -> str:
    """Name of a tensor in the plain model: `_orig_mod.module.conv1.weight` is `conv1.weight`."""
    return WRAPPERS.sub("", name)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by canonical name; share memory with the model."""
    return {canonical(name): tensor for name, tensor in model.state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer state by canonical parameter name; shares memory with the optimizer, so a load fills it."""
    if not optimizer.state:
        _materialise(optimizer)
    return {
        f"{OPTIMIZER}{canonical(name)}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of model and optimizer that this rank holds, by canonical name: its part of a checkpoint."""
    return model_tensors(model) | optimizer_tensors(model, optimizer)


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, as zeros: a fresh optimizer starts from these."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def differences(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], most: int = 5
) -> list[str]:
    """List the first `most` differences between two sets of names and shapes, one line each.

    Args:
        wanted: the model's shapes by name.
        found: the checkpoint's shapes by name.
        most: differences to list; the rest is counted.
    """
    lines = []
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        in_model, in_checkpoint = wanted.get(name), found.get(name)
        if in_model is None or in_checkpoint is None:
            lines.append(f"{name}: only in the {'checkpoint' if in_model is None else 'model'}")
        elif tuple(in_model) != tuple(in_checkpoint):
            lines.append(f"{name}: {tuple(in_checkpoint)} in the checkpoint, {tuple(in_model)} in the model")
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]
