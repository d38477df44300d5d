"""Pretrained weights: those of torch.save and torchvision, and the names in a folder of Hugging Face.

`state/start.py` fits them into a model.
"""

import contextlib
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import safetensors
import torch
from torch import nn

from common import UserError, keymap, manifest, places, ranks

TORCHVISION = "torchvision:"
FILES = {".bin", ".pt", ".pth"}
WAIT_S = 600.0  # for another process that fetches the same weights


def read(init: str) -> dict[str, torch.Tensor]:
    """The tensors by canonical name. No code of a file is run, and of a large one, only the used part is read.

    Args:
        init: the flag: a file, or "torchvision:NAME".

    Raises:
        UserError: the weights cannot be read, or are no state dict.
    """
    try:
        if init.startswith(TORCHVISION):
            found: Any = _torchvision(init.removeprefix(TORCHVISION))
        else:
            path = Path(init).expanduser()
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # of pickle, of the network, of torchvision's registry
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"--init {init} cannot be read: {reason}") from error
    for key in ("state_dict", "model"):  # what training scripts wrap it in
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            if others := [repr(other) for other in found if other != key]:
                ranks.print0(f"init     {init}: the weights are {key!r}; not read: {ranks.listed(others)}")
            found = found[key]
    if not isinstance(found, Mapping):
        raise UserError(f"--init {init} holds a {type(found).__name__}, and not a state dict")
    return {keymap.canonical(name): one for name, one in found.items() if isinstance(one, torch.Tensor)}


def is_one_file(init: str) -> bool:
    """Whether `read` reads it."""
    path = places.local("--init", init)
    return init.startswith(TORCHVISION) or (path.suffix in FILES and path.is_file())


def folder_of(init: str, stack: contextlib.ExitStack) -> Path:
    """The folder that the flag names; for a .safetensors file one that has it alone, until the stack is left.

    Raises:
        UserError: there is no such folder or file.
    """
    path = Path(init).expanduser()
    if path.suffix == ".safetensors" and path.is_file():  # as a folder, of which each rank reads its own part
        try:
            with safetensors.safe_open(path, "pt"):
                place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        except (OSError, safetensors.SafetensorError) as error:  # which would name the temporary folder
            raise UserError(f"--init {init} cannot be read: {error}") from error
        (place / "model.safetensors").symlink_to(path.resolve())
        return place
    if not path.is_dir():
        raise UserError(
            f"--init {init}: there is no such folder or file; it may be a run, a checkpoint, a .safetensors or "
            f".pth file, a folder of Hugging Face, or {TORCHVISION}resnet18"
        )
    return path


def _torchvision(name: str) -> Any:
    """The newest weights of a model; the first process of a machine that wants them fetches them for the others."""
    from torchvision import models

    weights = models.get_model_weights(name).DEFAULT
    place = Path(torch.hub.get_dir()) / "checkpoints"
    place.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place / f"{name}.lock", timeout=WAIT_S):  # the system releases it if its holder dies
        return weights.get_state_dict(check_hash=True)


def size_of(tensor: torch.Tensor) -> tuple[int | str, ...]:
    """The shape of a tensor of floats, and of another one also its type: the same bits would be other numbers."""
    return (*tensor.shape, *([] if tensor.is_floating_point() else [str(tensor.dtype)]))


def fill(weights: keymap.Tensors, tensors: keymap.Tensors) -> None:
    """Copy whole tensors, each of which this rank may hold a part of."""
    for name, tensor in tensors.items():
        tensor.copy_(keymap.part_of(weights[name], tensor))


def names_in(init: str, folder: Path, model: nn.Module) -> dict[str, str]:
    """The model's names of the tensors of a Hugging Face folder, by theirs; {} for a folder with the model's own."""
    part: Any = next((part for part in model.modules() if callable(getattr(part, "names_in", None))), None)
    if part is None or not (folder / "config.json").exists():
        return {}
    try:
        return part.names_in(manifest.read_json(folder / "config.json"))
    except UserError as error:
        raise UserError(f"--init {init}: {error}") from error
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"--init {init}: its config.json is not a model's: {type(error).__name__}: {error}") from error
