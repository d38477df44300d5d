"""Checkpoint mapping: one canonical name for each tensor, whatever wraps the model. Pure dict to dict.

Parameters and buffers keep their names in the plain model; optimizer state is named `optimizer.<parameter>.<key>`.
No name depends on the order of the parameters or on how they are split.
"""

import collections
import copy
import re
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from common import UserError, ranks

# At the start of a name: nn.DataParallel, DistributedDataParallel, torch.compile, and a pipeline's stages, whose layers
# keep the plain model's names. Around a submodule: torch.compile, and activation checkpointing.
WRAPPERS = re.compile(r"^((module|_orig_mod)\.)*(stages\.\d+\.)?|(_orig_mod|_checkpoint_wrapped_module)\.")
OPTIMIZER = "optimizer."
# What a strategy keeps beside, of use to the same strategy on as many ranks only: others begin without it.
STRATEGY = "strategy."
AVERAGE = "average."  # of the weights over many steps
# Beside the weights: the third is the state of the environments that generate training data, the fourth an adopter's
# own.
NO_WEIGHTS = (OPTIMIZER, AVERAGE, "rollout.", "extra.", STRATEGY)
Tensors = Mapping[str, torch.Tensor]
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_counters_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[str]] = weakref.WeakKeyDictionary()


def canonical(name: str) -> str:
    """Name of a tensor in the plain model: `_orig_mod.module.conv1.weight` is `conv1.weight`."""
    return WRAPPERS.sub("", name)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by canonical name; share memory with the model.

    One that the model has under several names, as tied weights are, appears under the first of them: it is saved once,
    and a load fills it everywhere.

    Raises:
        UserError: a module has state that is not a tensor.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():  # the parameters themselves
        if not isinstance(tensor, torch.Tensor):  # what get_extra_state returns
            raise UserError(f"the model keeps a {type(tensor).__name__} in {name}, which no checkpoint can hold")
        found.setdefault(id(tensor), (canonical(name), tensor.detach()))
    return dict(found.values())


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer state by canonical parameter name; shares memory with the optimizer, so a load fills it.

    Numbers become tensors of no dimension, which do not share memory: `set_numbers` writes them back.

    Raises:
        UserError: the state is of another kind, or a plain tensor beside a parameter that is split over ranks.
    """
    return {name: value for name, *_, value in _state(model, optimizer)}


def set_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """After a load: give the optimizer the numbers that `optimizer_tensors` had to copy."""
    for name, place, key, _ in _state(model, optimizer):
        if isinstance(place[key], int | float):
            place[key] = type(place[key])(tensors[name].item())


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """All tensors of model and optimizer that this rank holds, by canonical name: its part of a checkpoint.

    Args:
        model: under its strategy.
        optimizer: of its parameters; None if nothing is trained.
    """
    # The model's first: FSDP then puts this rank's parts in the place of gathered parameters, for which an optimizer
    # has no state.
    return model_tensors(model) | (optimizer_tensors(model, optimizer) if optimizer else {})


def to_save(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """What this rank gives to a checkpoint (all ranks take part).

    A strategy whose ranks hold different numbers under one name has an object `model.strategy` with two methods:
    `to_checkpoint(tensors)` returns what stands for them under the plain names, and the rest under STRATEGY;
    `from_checkpoint(tensors)` is called once a load has filled the latter. For --ema it has two more: `end_step()` ends
    what a step does to the weights, and `agree(tensors)` gives all ranks their mean.
    """
    found = tensors(model, optimizer)
    return model.strategy.to_checkpoint(found) if has_strategy(model) else found  # type: ignore[operator, union-attr]


def has_strategy(model: nn.Module) -> bool:
    """Whether the model has an object as `to_save` describes it."""
    return hasattr(getattr(model, "strategy", None), "to_checkpoint")


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Each value of an optimizer's state: its canonical name, the dict that holds it and its key there, a tensor."""
    for name, parameter in model.named_parameters():
        split = not all(one.is_replicate() for one in getattr(parameter, "placements", ()))
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if value is None:
                continue
            full = f"{OPTIMIZER}{canonical(name)}.{key}"
            tensor = _as_tensor(optimizer, full, value)
            if split and tensor.ndim and not hasattr(tensor, "placements"):
                raise UserError(
                    f"{type(optimizer).__name__} keeps {full} as a plain tensor, although each rank has "
                    "its own part of the parameter: use an optimizer that works on DTensors"
                )
            yield full, state, key, tensor
    for i, (part, group) in enumerate((one, group) for one in parts_of(optimizer) for group in one.param_groups):
        for key in sorted(_counters(part)):
            yield f"{OPTIMIZER}groups.{i}.{key}", group, key, torch.tensor(group[key], dtype=NUMBERS[type(group[key])])


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that it stands for, as `several.Several` does; else itself."""
    return getattr(optimizer, "optimizers", (optimizer,))


def _as_tensor(optimizer: torch.optim.Optimizer, name: str, value: Any) -> torch.Tensor:
    """A value of an optimizer's state as a checkpoint holds it.

    Raises:
        UserError: it is neither a tensor nor a number.
    """
    tensor = torch.tensor(value, dtype=NUMBERS[type(value)]) if type(value) in NUMBERS else value
    if isinstance(tensor, torch.Tensor):
        return tensor
    raise UserError(
        f"{type(optimizer).__name__} keeps a {type(value).__name__} in {name}, which no "
        "checkpoint can hold: use an optimizer whose state is tensors and numbers"
    )


def _counters(optimizer: torch.optim.Optimizer) -> set[str]:
    """Numbers of parameter groups that each step changes, as schedule-free optimizers have them.

    All others are the user's: a flag that has changed since the checkpoint must hold.
    """
    if optimizer.defaults.get("fused"):  # torch's, which have none
        return set()
    if optimizer not in _counters_of:
        name = type(optimizer).__name__
        try:
            _counters_of[optimizer], lost = _find_counters(optimizer)
            why = f"a step of {name} changes"
        except UserError:
            raise
        except Exception as error:  # its step may need more than a small matrix
            _counters_of[optimizer] = set()
            places = (*optimizer.param_groups, vars(optimizer))
            # The schedule sets the rate.
            lost = {key for one in places for key in one if type(one[key]) in (int, float) and key != "lr"}
            why = f"small matrices are not enough for {name} ({type(error).__name__}: {error}), whose steps may change"
        if lost:
            ranks.print0(
                f"note: {why} {ranks.listed(sorted(lost), 20)}, which no checkpoint holds: after a resume, what has "
                "changed is as at the start again; only the state of a parameter is sure to be saved"
            )
    return _counters_of[optimizer]


def _find_counters(optimizer: torch.optim.Optimizer) -> tuple[set[str], set[str]]:
    """Let a copy of the optimizer make two steps with small matrices, and see what changes.

    Returns:
        Numbers of its groups; and what no checkpoint holds: numbers of its own, and states that are of no parameter.
    """
    # Of its attributes, torch copies state and groups alone: through others, such as an optimizer, a step could reach
    # the model.
    probe = copy.copy(optimizer)
    vars(probe).update({key: one for key, one in vars(optimizer).items() if isinstance(one, int | float | str | None)})
    probe.state = collections.defaultdict(dict)
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    weights = [nn.Parameter(torch.zeros(2, 2, device=device)) for _ in optimizer.param_groups]
    groups = [{**group, "params": [weight]} for group, weight in zip(optimizer.param_groups, weights, strict=True)]
    probe.param_groups = [{**group} for group in groups]
    sparse = isinstance(optimizer, torch.optim.SparseAdam)  # which takes no others
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight).to_sparse() if sparse else torch.ones_like(weight)
        probe.step()
    for key, value in [pair for weight in weights for pair in probe.state[weight].items()]:
        if value is not None:
            _as_tensor(optimizer, f"the state of a parameter, {key!r}", value)
    others = {f"state[{key!r}]" for key in probe.state if not isinstance(key, torch.Tensor)}
    counters = set[str]().union(*map(_changed, groups, probe.param_groups))
    return counters, _changed(vars(optimizer), vars(probe)) | others


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Keys of numbers that differ."""
    return {key for key, value in after.items() if type(value) in NUMBERS and value != before.get(key)}


def create_state(optimizer: torch.optim.Optimizer, sparse: Collection[nn.Parameter] = ()) -> None:
    """Create the state that the first step would create, as zeros: torch's fused optimizers start from these.

    Of another optimizer, it is for a load to fill.

    Args:
        optimizer: without state.
        sparse: parameters whose gradients are sparse; see `sparse_parameters`.
    """
    if optimizer.state:
        return
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                if any(parameter is one for one in sparse):
                    parameter.grad = parameter.grad.to_sparse()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.update(before)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights of embeddings with `sparse=True`."""
    return [module.weight for module in model.modules() if getattr(module, "sparse", False) is True]  # type: ignore[misc]


def part_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """What of a whole tensor this rank holds, if it holds one of the same shape as `like`: a DTensor, or all of it."""
    whole = whole.to(like.device, like.dtype)
    if not hasattr(like, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor  # slow to import

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def differences(wanted: Tensors, found: Tensors, most: int = 5) -> list[str]:
    """List the first `most` differences between two sets of names and shapes, one line each.

    Args:
        wanted: the model's tensors by name; their shapes count, and whether they are floats.
        found: the checkpoint's.
        most: differences to list; the rest is counted.
    """
    lines = []
    for name in {**wanted, **found}:
        if name not in wanted or name not in found:
            lines.append(f"{name}: only in the {'model' if name in wanted else 'checkpoint'}")
        elif wanted[name].shape != found[name].shape:
            lines.append(
                f"{name}: {tuple(found[name].shape)} in the checkpoint, {tuple(wanted[name].shape)} in the model"
            )
        elif wanted[name].is_floating_point() != found[name].is_floating_point():
            lines.append(f"{name}: {found[name].dtype} in the checkpoint, {wanted[name].dtype} in the model")
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]
