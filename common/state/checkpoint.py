"""Choose an undamaged checkpoint and load it on any number of ranks; `saver` writes them.

A checkpoint is a folder `step_00001000/` with a MANIFEST.json, which lists the size and SHA-256 of each file, and
safetensors files, to which each rank wrote its share of the tensors under canonical names (see `keymap`). Nothing is
pickled. `torch.distributed.checkpoint` reads and writes the tensors, so any number of ranks can load what another
number saved.
"""

import functools
import re
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common import UserError, keymap, manifest, ranks, trust


def folder(run_dir: Path, step: int) -> Path:
    """Folder of a step's checkpoint."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def committed(run_dir: Path) -> list[Path]:
    """Every committed checkpoint of a run, newest first.

    Raises:
        OSError: the folder cannot be listed; `glob` would hide that, and the run would start from scratch.
    """
    try:
        found = [*(run_dir / "checkpoints").iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((path for path in found if re.fullmatch("step_[0-9]+", path.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step of a committed checkpoint, by the name of its folder: numbers from ten digits on do not sort as text."""
    return int(path.name[5:])


def newest(run_dir: Path) -> int:
    """The newest committed step of a run, damaged or not; -1 for none (all ranks)."""
    return ranks.from_rank0(lambda: max(map(step_of, committed(run_dir)), default=-1), run_dir)


def candidates(where: Path, flag: str = "") -> list[Path]:
    """The checkpoint `where` itself, or those of a run, newest first.

    Raises:
        UserError: there is none; `flag` is what named the place.
    """
    place = where.expanduser()
    found = [place] if (place / manifest.NAME).is_file() else committed(place)
    if not found:
        raise UserError(f"{flag}{where}: no checkpoint there; name a run's folder or one of its checkpoints")
    return found


def choose(where: Path, flag: str = "", own: bool = False) -> tuple[Path, dict[str, Any]]:
    """Choose the newest undamaged checkpoint of a run, or the checkpoint `where` itself; returns it and its manifest.

    If there is a process group, all ranks take part: rank 0 lists the folders, each rank verifies some of the files.

    Args:
        where: a run's folder or one checkpoint.
        flag: the flag that named it, for messages.
        own: whether it has to be this user's, as a run's own folder has.

    Raises:
        UserError: there is no checkpoint, all are damaged, or other users can write to one.
    """
    faults: list[str] = []
    found = ranks.from_rank0(lambda: [str(one) for one in candidates(where, flag)], f"{flag}{where}")
    for path in map(type(where), found):
        ranks.from_rank0(functools.partial(trust.refuse_replaceable, path, own), path)
        facts, fault = _verify(path)
        if not fault:
            if faults:
                ranks.print0(f"warning: skipped damaged checkpoints: {'; '.join(faults)}")
            return path, facts
        faults.append(f"{path.name}: {fault}")
    raise UserError(
        f"{flag}{where}: every checkpoint is damaged ({'; '.join(faults)}). "
        "To start over on purpose, use another --name"
    )


def _verify(path: Path) -> tuple[dict[str, Any], str]:
    """`manifest.verify` with the files divided over the ranks: one rank would take an hour for a large model."""
    part, num_parts = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    facts, fault = manifest.verify(path, part, num_parts)
    everyone = ranks.gather((socket.gethostname(), fault, [facts.get("step"), facts.get("samples")]))
    for host, found, position in everyone:
        if found or position != everyone[0][2]:
            place = f" on {host}" if host != everyone[0][0] else ""
            return {}, f"{found or 'another checkpoint of that name'}{place}"
    return facts, ""


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name, on the device "meta": its type and shape without its numbers.

    Raises:
        UserError: the files are not what torch.distributed.checkpoint writes, though their digests are right.
    """
    try:
        found: Any = _reader(path).read_metadata().state_dict_metadata  # tensors alone
    except OSError:
        raise
    except Exception as error:
        raise UserError(f"checkpoint {path} holds a file that is not a checkpoint's: {error!r}") from error
    return {name: torch.empty(one.size, dtype=one.properties.dtype, device="meta") for name, one in found.items()}


def _reader(path: Any) -> Any:
    """What reads a checkpoint's files for torch.distributed.checkpoint; that of a store brings its own."""
    import torch.distributed.checkpoint as dcp  # here, because it takes as long as all other imports of a refused flag

    return path.reader() if hasattr(path, "reader") else dcp.HuggingFaceStorageReader(str(path))


def check_fits(path: Path, model: nn.Module) -> None:
    """Compare a checkpoint's names and shapes with the plain model's.

    Raises:
        UserError: the checkpoint is of another model; lists the first differences.
    """
    saved = {name: one for name, one in tensors_in(path).items() if not name.startswith(keymap.NO_WEIGHTS)}
    _refuse_differences(path, "this model", keymap.model_tensors(model), saved)


def _refuse_differences(path: Path, what: str, wanted: keymap.Tensors, found: keymap.Tensors) -> None:
    if differences := keymap.differences(wanted, found):
        config = f"{path.parent.parent}/config.json"
        advice = f"use its flags: --config {config}; or begin anew: --init {path} --name NEW"
        error = UserError("\n  ".join([f"checkpoint {path} does not fit {what} ({advice}):", *differences]))
        error.config = config
        raise error


def load(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill this rank's tensors in place from a checkpoint of any number of ranks (all ranks take part).

    Args:
        path: a checkpoint that `choose` returned.
        tensors: the tensors to fill, by canonical name; a rank may hold only some of them.

    Raises:
        UserError: the checkpoint lacks a tensor, as that of another optimizer does, or has it in another shape.
    """
    import torch.distributed.checkpoint as dcp

    saved = tensors_in(path)
    lacking = tuple(kind for kind in keymap.NO_WEIGHTS if not any(name.startswith(kind) for name in saved))
    if keymap.OPTIMIZER in lacking and any(name.startswith(keymap.OPTIMIZER) for name in tensors):
        ranks.print0(f"{path} has weights but no optimizer state: the optimizer starts fresh")
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(lacking)}
    asked = {name: one for name, one in saved.items() if name in tensors}
    _refuse_differences(path, "this model or optimizer", tensors, asked)
    try:
        dcp.load(tensors, storage_reader=_reader(path))
    except dcp.CheckpointException as error:  # a BaseException, which `except Exception` and @record miss
        reasons = [reason for reason, _ in error.failures.values()]
        if any(isinstance(reason, OSError) for reason in reasons):  # perhaps for a moment only
            raise RuntimeError(str(error)) from error
        raise UserError(f"checkpoint {path} cannot be loaded: {reasons[0]!r}") from error
