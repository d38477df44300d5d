"""What a training starts from: the checkpoint that it continues, weights of another model, or nothing."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from common import UserError, checkpoint, keymap, manifest, ranks

TORCHVISION = "torchvision:"
PICKLES = {".bin", ".pt", ".pth"}


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


def begin_with(init: str, model: nn.Module) -> None:
    """Fill what fits of a model from other weights; the rest stays as it was drawn, and is listed (all ranks).

    Args:
        init: a run's folder, a checkpoint, a .safetensors file or a folder of them, a .pth, .pt or .bin file that
            torch.save has written, or "torchvision:NAME" for torchvision's weights of a model.
        model: the model under its strategy.

    Raises:
        UserError: there are no such weights, or none that fits.
    """
    with _as_folder(init) as folder:
        saved = {name: tuple(entry.size) for name, entry in checkpoint.tensors_in(folder).items()}
        tensors = keymap.model_tensors(model)
        fitting = {name: tensor for name, tensor in tensors.items() if saved.get(name) == tuple(tensor.shape)}
        # Over all ranks: a stage of a pipeline has a part of the model.
        wanted: dict[str, list[int]] = {}
        for part in ranks.gather({name: list(tensor.shape) for name, tensor in tensors.items()}):
            wanted |= part
        missing = [name for name, size in wanted.items() if saved.get(name) != tuple(size)]
        if len(missing) == len(wanted):
            raise UserError(
                f"--init {init}: no tensor has the name and shape of one of the model's, such as "
                f"{missing[0]} {tuple(wanted[missing[0]])}; the file has {next(iter(saved.items()), 'nothing')}"
            )
        dcp.load(fitting, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    lines = [f"{name} {tuple(wanted[name])} (there: {saved.get(name, 'none')})" for name in missing]
    drawn = f"; drawn anew: {', '.join(lines[:5])}{f' and {len(lines) - 5} more' * (len(lines) > 5)}" if lines else ""
    ranks.print0(f"init     {len(wanted) - len(missing)} of {len(wanted)} tensors from {init}{drawn}")


@contextlib.contextmanager
def _as_folder(init: str) -> Iterator[Path]:
    """The weights as a folder of safetensors files."""
    path = Path(init).expanduser()
    if path.is_dir() and ((path / manifest.NAME).exists() or (path / "checkpoints").exists()):
        yield checkpoint.choose(path, "--init ")[0]
    elif path.is_dir():
        yield path
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.safetensors"
            if path.suffix == ".safetensors" and path.is_file():
                file.symlink_to(path.resolve())
            else:
                # Copies, because tied weights share memory, which safetensors does not store.
                tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in _read(init)}
                save_file(tensors, file)
            yield Path(folder)


def _read(init: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of torchvision's weights or of a file of torch.save, by canonical name."""
    path = Path(init).expanduser()
    try:
        if init.startswith(TORCHVISION):
            from torchvision import models

            weights = models.get_model_weights(init.removeprefix(TORCHVISION)).DEFAULT
            found: Any = weights.get_state_dict(check_hash=True)
        elif path.suffix in PICKLES:
            found = torch.load(path, map_location="cpu", weights_only=True)  # which runs no code of the file
        else:
            raise UserError(
                f"--init {init}: there is no such folder or file; it may be a run, a checkpoint, a .safetensors or "
                f".pth file, or {TORCHVISION}resnet18"
            )
    except UserError:
        raise
    except Exception as error:  # of pickle, of the network, of torchvision's registry
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"--init {init} cannot be read: {reason}") from error
    for key in ("state_dict", "model"):  # what training scripts wrap it in
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping):
        raise UserError(f"--init {init} holds a {type(found).__name__}, and not a state dict")
    for name, tensor in found.items():
        if isinstance(tensor, torch.Tensor):
            yield keymap.canonical(name), tensor
