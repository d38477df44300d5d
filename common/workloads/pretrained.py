"""Pretrained weights: those of torch.save and torchvision, and the names in a folder of Hugging Face.

`fitting` finds what of them fits a model, and `state/start.py` fills it.
"""

import argparse
import contextlib
import os
import pathlib
import re
import tempfile
import types
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import safetensors
import torch
from torch import nn

from common import UserError, keymap, manifest, places, ranks
from common.workloads import fitting

TORCHVISION = "torchvision:"
FILES = {".bin", ".ckpt", ".pt", ".pth", ".tar"}
# Where training scripts put the weights; the first that is there is taken, unless the flag names another.
USUAL = ("state_dict", "model", "model_state_dict", "model_state", "net", "network", "params", "weights", "module")
OF_TRAINING = re.compile("optim|lr_sched|sched|scaler|rng|state$|args|config|hyper", re.IGNORECASE)
UNSUPPORTED = re.compile(r"GLOBAL (\S+) was not")  # in torch's refusal, whose first line names neither class nor way
POINTER = b"version https://git-lfs"
# What scripts save beside the weights, and what makes it: no code of theirs.
HARMLESS: list[Any] = [argparse.Namespace, types.SimpleNamespace, pathlib.PosixPath, np.dtype, np.ndarray]
HARMLESS += [one.__reduce__()[0] for one in (np.float64(0), np.zeros(0))]  # functions of NumPy
HARMLESS += {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"}
WAIT_S = 600.0  # for another process that fetches the same weights


def read(init: str) -> dict[str, torch.Tensor]:
    """The tensors by canonical name. No code of a file is run, and of a large one, only the used part is read.

    Args:
        init: the flag: a file, FILE:KEY for one of several dicts in it, or "torchvision:NAME".

    Raises:
        UserError: the weights cannot be read, or are no state dict.
    """
    path, key = _file_and_key(init)
    try:
        if init.startswith(TORCHVISION):
            found: Any = _torchvision(init.removeprefix(TORCHVISION))
        else:
            _refuse_pointer(init, path)
            with torch.serialization.safe_globals(HARMLESS):
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UserError:
        raise
    except Exception as error:  # of pickle, of the network, of torchvision's registry
        text = str(error).strip() or type(error).__name__
        if foreign := UNSUPPORTED.search(text):
            raise UserError(
                f"--init {init} holds an object of {foreign[1]} beside the weights, and to read it could run code: "
                "save the weights alone where they were made, as by torch.save(model.state_dict(), FILE)"
            ) from error
        reason = text.partition("WeightsUnpickler error: ")[2] or text
        raise UserError(f"--init {init} cannot be read: {reason.splitlines()[0]}") from error
    if not isinstance(found, Mapping):
        raise UserError(f"--init {init} holds a {type(found).__name__}, and not a state dict")
    choices = dict(_state_dicts(found))
    if key and key not in choices:
        raise UserError(f"--init {init}: the file has no dict of tensors {key!r}, but {_keys(choices)}")
    if not choices:
        raise UserError(f"--init {init} holds no dict of tensors by name, but {ranks.listed([*map(str, found)])}")
    order = [*(name for name in USUAL if name in choices), *choices]
    chosen = key or ("" if "" in choices else order[0])
    others = [name for name in choices if name != chosen]
    rest = [repr(str(name)) for name in found if name != chosen.partition(".")[0]] if chosen else [*map(repr, others)]
    if chosen or rest:
        parts = [f"the weights are {chosen!r}"] * bool(chosen) + [f"not read: {ranks.listed(rest)}"] * bool(rest)
        way = f" (--init {path}:{others[0]} reads that)" if others else ""
        ranks.print0(f"init     {init}: {'; '.join(parts)}{way}")
    tensors = choices[chosen]
    return {keymap.canonical(name): one for name, one in tensors.items() if isinstance(one, torch.Tensor)}


def _keys(choices: Mapping[str, object]) -> str:
    return ranks.listed([repr(name) for name in choices if name], 20) or "none"


def _state_dicts(found: Mapping[Any, Any], place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each dict of tensors by name in what a training script has saved, by its place: "" or "model.state_dict"."""
    if any(isinstance(one, torch.Tensor) for name, one in found.items() if isinstance(name, str)):
        yield place, found
    for name, one in found.items():
        if isinstance(one, Mapping) and isinstance(name, str) and not OF_TRAINING.match(name):
            yield from _state_dicts(one, f"{place}.{name}" if place else name)


def _file_and_key(init: str) -> tuple[Path, str]:
    """The file that the flag names, and the place in it after a colon, or ""."""
    path = places.local("--init", init)
    name, colon, key = init.rpartition(":")
    if not colon or path.exists() or Path(name).suffix not in FILES:
        return path, ""
    return Path(name).expanduser(), key


def is_one_file(init: str) -> bool:
    """Whether `read` reads it."""
    path, _ = _file_and_key(init)
    return init.startswith(TORCHVISION) or (path.suffix in FILES and path.is_file())


def _refuse_pointer(init: str, path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise UserError(
                f"--init {init}: {path.name} is a pointer of Git LFS, not the weights: `git lfs pull` there"
            )


def folder_of(init: str, stack: contextlib.ExitStack) -> Path:
    """The folder that the flag names; for a .safetensors file one that has it alone, until the stack is left.

    Raises:
        UserError: there is no such folder or file.
    """
    path = Path(init).expanduser()
    for file in path.glob("*.safetensors") if path.is_dir() else [path]:
        if file.is_file():
            _refuse_pointer(init, file)
        elif file != path:  # who opens a pipe waits
            raise UserError(f"--init {init} holds {file.name}, which is not a regular file: remove it")
    if path.is_dir() and (path / ".metadata").is_file():
        raise UserError(
            f"--init {init} is a checkpoint of torch.distributed.checkpoint, whose .metadata is a pickle, and to read "
            "it could run code. If you trust it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{path} weights.pt, and then --init weights.pt"
        )
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


def names_in(init: str, folder: Path, model: nn.Module) -> dict[str, str]:
    """The model's names of the tensors of a Hugging Face folder, by theirs; {} for a folder with the model's own."""
    part: Any = next((part for part in model.modules() if callable(getattr(part, "names_in", None))), None)
    if not os.path.lexists(folder / "config.json"):  # a link to nowhere is there, and cannot be read
        return {}
    try:
        config = manifest.read_json(folder / "config.json")
        if declared := config.get("quantization_config"):
            raise UserError(f"its config.json declares {declared.get('quant_method', declared)}: {fitting.QUANTISED}")
        return part.names_in(config) if part is not None else {}
    except UserError as error:
        raise UserError(f"--init {init}: {error}") from error
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"--init {init}: its config.json is not a model's: {type(error).__name__}: {error}") from error
