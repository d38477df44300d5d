"""What a run starts from: its folder and the checkpoint that it continues, weights of another model, or nothing."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from common import UserError, keymap, manifest, ranks
from common.state import checkpoint
from common.store import place
from common.train import initial
from common.workloads import fitting, pretrained


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run starts from, if any.

    Attributes:
        place: the run's own: a `Disk` or, in an object store, a `Keeper`; see `common.store.place`.
        fingerprint: the facts of this run that give a position in the data its meaning, such as the seed.
        path: the checkpoint to load; None for a new run.
        progress: its manifest, with "step" and "samples"; empty for a new run.
        newest: the newest committed step of the run's own folder at that time, damaged or not; -1 for none.
    """

    place: Any
    fingerprint: dict[str, Any]
    path: Path | None
    progress: dict[str, Any]
    newest: int = -1


def find(out: str, name: str, resume: str, model: nn.Module | None = None, **fingerprint: Any) -> Found:
    """Choose the run's folder, and the checkpoint to start from; every rank gets the same ones (all ranks take part).

    1. A run that has checkpoints continues from its newest undamaged one, even if `resume` is given, so that the same
       command can be run again.
    2. Otherwise it starts from `resume`: a run's folder or one checkpoint.
    3. Without `resume`, it starts from scratch.

    Args:
        out: folder that holds the runs.
        name: of this run.
        resume: the flag; "" for none.
        model: the plain model, with or without weights, which the checkpoint must fit. What it has on the meta device
            is then not initialised, as `restore` fills it.
        **fingerprint: facts that give a position in the data its meaning, such as the seed. They must be the same on
            all ranks; rank 0 prints a note if the checkpoint was written with others.

    Raises:
        UserError: the folder cannot be used, all checkpoints are damaged or cannot be read, `resume` names no
            checkpoint, the checkpoint is of another model, or the fingerprint differs between ranks.
    """
    run = place.choose(out, name)
    ranks.check_same(data=fingerprint, version=ranks.versions())  # now with those of the data's packages
    newest = checkpoint.newest(run.path)
    if newest >= 0:
        path, progress = checkpoint.choose(run.path, own=True)
    elif resume:
        path, progress = checkpoint.choose(place.at("--resume", resume), "--resume ")
    else:
        return Found(run, fingerprint, None, {})
    ranks.print0(f"resuming from step {progress['step']} of {path}")
    for key, value in fingerprint.items():
        if (was := progress.get(key, value)) != value:
            ranks.print0(f"note: the checkpoint was written with {key} {was!s:.80}, this run has {key} {value}")
    if model is not None:
        checkpoint.check_fits(path, model)
        initial.leave(model)
    return Found(run, fingerprint, path, progress, newest)


def check_newest(found: Found, order: Any = None) -> Found:
    """Look again, now that no other job can save in the run's folder (all ranks).

    Returns:
        The same, with what the training set's own order adds to the facts that checkpoints keep.

    Raises:
        UserError: another job has saved there since `find`: this one would overwrite what that one has recorded.
    """
    newest = checkpoint.newest(found.place.path)
    if newest != found.newest:
        raise UserError(
            f"--name {found.place.path.name}: another job has saved step {newest} in {found.place.path} while this one "
            "was starting: start this one again, and it resumes from there"
        )
    return dataclasses.replace(found, fingerprint=found.fingerprint | order.facts()) if order else found


def restore(
    path: Path | None, init: str, model: nn.Module, optimizer: Optimizer, more: keymap.Tensors | None = None
) -> None:
    """Fill model and optimizer from a checkpoint of any number of ranks; or, in a new run, the model from `init`.

    All ranks take part.

    Args:
        path: a checkpoint that `find` returned; None for a new run.
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
    keymap.create_state(optimizer, keymap.sparse_parameters(model))
    if not optimizer.defaults.get("fused"):  # then it has no state of a parameter that no gradient has reached
        with_state = {name.rpartition(".")[0] for name in checkpoint.tensors_in(path)}
        for name, parameter in model.named_parameters():
            if f"{keymap.OPTIMIZER}{keymap.canonical(name)}" not in with_state:
                optimizer.state.pop(parameter, None)
    tensors = keymap.tensors(model, optimizer)
    checkpoint.load(path, {**tensors, **(more or {})})
    keymap.set_numbers(model, optimizer, tensors)
    if not keymap.has_strategy(model):
        return
    # What only the same strategy on as many ranks can resume from; see `keymap.to_save`.
    strategy: Any = model.strategy
    own = {name: one for name, one in strategy.to_checkpoint(tensors).items() if name.startswith(keymap.STRATEGY)}
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
            or .bin file that torch.save has written, FILE:KEY for one of several dicts in it, or "torchvision:NAME" for
            torchvision's weights of a model.
        model: the model under its strategy. A part of it may have a method `names_in(config)`, which returns the
            model's names of the tensors of a Hugging Face folder by theirs, and refuses one of another kind.

    Raises:
        UserError: there are no such weights, or none that fits, or they are packed or not finite.
    """
    with contextlib.ExitStack() as stack:
        saved, load = _open(init, model, stack)
        tensors = keymap.model_tensors(model)
        # Over all ranks: a stage of a pipeline has a part of the model.
        wanted: dict[str, list[int | str]] = {}
        for part in ranks.gather({name: fitting.size_of(tensor) for name, tensor in tensors.items()}):
            wanted |= part
        theirs = fitting.fit(init, saved, {name: tuple(size) for name, size in wanted.items()})
        filled = {name: tensor for name, tensor in tensors.items() if name in theirs}
        load({theirs[name]: tensor for name, tensor in filled.items()})
    fitting.check_filled(init, model, filled, wanted.keys() - theirs.keys())


def _open(
    init: str, model: nn.Module, stack: contextlib.ExitStack
) -> tuple[dict[str, fitting.Size], Callable[[keymap.Tensors], None]]:
    """The sizes of the weights by the model's names, and a function that fills tensors by name (all ranks)."""
    stored = place.STORES.match(init)
    if not stored and pretrained.is_one_file(init):
        weights = pretrained.read(init)
        sizes = {name: fitting.size_of(one) for name, one in weights.items()}
        return sizes, functools.partial(fitting.fill, weights)
    path = place.at("--init", init) if stored else pretrained.folder_of(init, stack)
    if stored or (path / manifest.NAME).exists() or (path / "checkpoints").exists():
        path, _ = checkpoint.choose(path, "--init ")
    names = {} if stored else pretrained.names_in(init, path, model)
    theirs = {ours: name for name, ours in names.items()}

    def load(tensors: keymap.Tensors) -> None:
        checkpoint.load(path, {theirs.get(name, name): tensor for name, tensor in tensors.items()})

    return {names.get(name, name): fitting.size_of(one) for name, one in checkpoint.tensors_in(path).items()}, load
