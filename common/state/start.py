"""What a training starts from: the checkpoint that it continues, weights of another model, or nothing."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import UserError, keymap, manifest, ranks
from common.state import checkpoint
from common.workloads import pretrained


def restore(
    path: Path | None,
    init: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    more: dict[str, torch.Tensor] | None = None,
) -> None:
    """Fill model and optimizer from a checkpoint of any number of ranks; or, in a new run, the model from `init`.

    All ranks take part.

    Args:
        path: a checkpoint that `checkpoint.find` returned; None for a new run.
        init: weights to begin with; see `begin_with`. "" for none.
        model: the model under its strategy.
        optimizer: the optimizer of its parameters.
        more: this rank's other tensors to fill, by canonical name, as `run.save` gets them.

    Raises:
        UserError: as `checkpoint.load` and `begin_with`.
    """
    if path is None:
        if init:
            begin_with(init, model)
        return
    if init:
        ranks.print0(f"note: --init {init} is not used, because the run continues from {path}")
    keymap.create_state(optimizer)
    if not optimizer.defaults.get("fused"):  # then it has no state of a parameter that no gradient has reached
        with_state = {name.rpartition(".")[0] for name in checkpoint.tensors_in(path)}
        for name, parameter in model.named_parameters():
            if f"{keymap.OPTIMIZER}{keymap.canonical(name)}" not in with_state:
                optimizer.state.pop(parameter, None)
    tensors = keymap.tensors(model, optimizer)
    checkpoint.load(path, tensors | (more or {}))
    keymap.set_numbers(model, optimizer, tensors)
    if not keymap.has_strategy(model):
        return
    # What only the same strategy on as many ranks can resume from; see `keymap.to_save`.
    strategy: Any = model.strategy
    every = strategy.to_checkpoint(tensors)
    own = {name: tensor for name, tensor in every.items() if name.startswith(keymap.STRATEGY)}
    saved = {name: one.shape for name, one in checkpoint.tensors_in(path).items()}
    if lacking := [name for name, tensor in own.items() if saved.get(name) != tensor.shape]:
        ranks.print0(
            f"note: {path} has no {lacking[0]} of shape {tuple(own[lacking[0]].shape)}, so it is of another strategy "
            "or number of ranks: this one begins with the weights and the optimizer's state there"
        )
        return
    checkpoint.load(path, own)
    keymap.set_numbers(model, optimizer, tensors)
    strategy.from_checkpoint(own)


def begin_with(init: str, model: nn.Module) -> None:
    """Fill what fits of a model from other weights; the rest keeps its random values, and is listed (all ranks).

    Args:
        init: a run's folder, a checkpoint, a .safetensors file or a folder of them, as Hugging Face has it, a .pth, .pt
            or .bin file that torch.save has written, or "torchvision:NAME" for torchvision's weights of a model.
        model: the model under its strategy. A part of it may have a method `names_in(config)`, which returns the
            model's names of the tensors of a Hugging Face folder by theirs, and refuses one of another kind.

    Raises:
        UserError: there are no such weights, or none that fits.
    """
    with contextlib.ExitStack() as stack:
        saved, load = _open(init, model, stack)
        tensors = keymap.model_tensors(model)
        # Over all ranks: a stage of a pipeline has a part of the model.
        wanted: dict[str, list[int | str]] = {}
        for part in ranks.gather({name: pretrained.size_of(tensor) for name, tensor in tensors.items()}):
            wanted |= part
        missing = [name for name, size in wanted.items() if saved.get(name) != tuple(size)]
        if len(missing) == len(wanted):
            raise UserError(
                f"--init {init}: no tensor has the name and shape of one of the model's, such as "
                f"{missing[0]} {tuple(wanted[missing[0]])}; the file has {next(iter(saved.items()), 'nothing')}"
            )
        load({name: tensor for name, tensor in tensors.items() if name not in missing})
    left = [f"{name} {tuple(wanted[name])} (there: {saved.get(name, 'none')})" for name in missing]
    frozen = {keymap.canonical(name) for name, one in model.named_parameters() if not one.requires_grad}
    stuck = sorted(frozen.union(*ranks.gather(sorted(frozen))) & set(missing))
    unused = [name for name in saved if name not in wanted and not name.startswith(keymap.NO_WEIGHTS)]
    ranks.print0(
        f"init     {len(wanted) - len(missing)} of {len(wanted)} tensors from {init}{_listed('random', left)}"
        f"{_listed('not used', unused)}"
    )
    if stuck:
        ranks.print0(
            f"warning: {ranks.listed(stuck)}: random and frozen: train it, "
            f"as by --rates {stuck[0].partition('.')[0]}=1, or start from weights that have it"
        )


def _listed(what: str, lines: list[str]) -> str:
    """The end of a sentence that lists some of the lines, if there are any."""
    return f"; {what}: {ranks.listed(lines)}" if lines else ""


def _open(
    init: str, model: nn.Module, stack: contextlib.ExitStack
) -> tuple[dict[str, tuple[int | str, ...]], Callable[[keymap.Tensors], None]]:
    """The sizes of the weights by the model's names, and a function that fills tensors by name (all ranks)."""
    if pretrained.is_one_file(init):
        weights = pretrained.read(init)
        sizes = {name: pretrained.size_of(one) for name, one in weights.items()}
        return sizes, functools.partial(pretrained.fill, weights)
    path = pretrained.folder_of(init, stack)
    if (path / manifest.NAME).exists() or (path / "checkpoints").exists():
        path, _ = checkpoint.choose(path, "--init ")
    names = pretrained.names_in(init, path, model)
    theirs = {ours: name for name, ours in names.items()}

    def load(tensors: keymap.Tensors) -> None:
        checkpoint.load(path, {theirs.get(name, name): tensor for name, tensor in tensors.items()})

    return {names.get(name, name): pretrained.size_of(one) for name, one in checkpoint.tensors_in(path).items()}, load
