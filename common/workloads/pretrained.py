"""Pretrained weights in one file of torch.save, or of torchvision; `state/start.py` fits them into a model."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import torch

from common import UserError, keymap, ranks

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


def _torchvision(name: str) -> Any:
    """The newest weights of a model; the first process of a machine that wants them fetches them for the others."""
    from torchvision import models

    weights = models.get_model_weights(name).DEFAULT
    place = Path(torch.hub.get_dir()) / "checkpoints"
    place.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place / f"{name}.lock", timeout=WAIT_S):  # the system releases it if its holder dies
        return weights.get_state_dict(check_hash=True)
