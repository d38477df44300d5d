"""Find a checkpoint that is whole, and load it on any number of ranks; `saver` writes them.

A checkpoint is a folder `step_00001000/` of safetensors files, in which each rank wrote its share of the
canonical names (see `keymap`), and a MANIFEST.json with the size and SHA-256 of each file. Nothing in it is
pickled. `torch.distributed.checkpoint` reads and writes it, so the ranks that load may be others than those
that saved.
"""

import functools
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from common import UserError, keymap, manifest, ranks
from common.ranks import Answer


def folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def committed(run_dir: Path) -> list[Path]:
    """Every committed checkpoint of a run, newest first."""
    found = (run_dir / "checkpoints").glob("step_*")
    return sorted((path for path in found if path.name[5:].isdigit()), reverse=True)


@dataclass(frozen=True)
class Found:
    """What a run starts from.

    Attributes:
        run_dir: the run's own folder.
        fingerprint: of this run: what a position in the data depends on.
        path: the checkpoint to load; None for a new run.
        progress: its manifest, with "step" and "samples"; empty for a new run.
    """

    run_dir: Path
    fingerprint: dict[str, Any]
    path: Path | None
    progress: dict[str, Any]


def find(run_dir: Path, resume: str, model: nn.Module | None = None, **fingerprint: Any) -> Found:
    """Choose what to start from (all ranks take part; rank 0 looks, each reads some of the files, all get one choice).

    A run that has checkpoints continues from its newest whole one, also when `resume` is given, so that the
    same command can be run again. Otherwise `resume` names a run's folder or one checkpoint.

    Args:
        run_dir: this run's folder.
        resume: the flag; "" for none.
        model: the plain one, which need not have its weights yet; the checkpoint must fit it.
        **fingerprint: what a position in the data depends on, such as the seed, the same on all ranks; a line on the
            terminal says so where the checkpoint was written with another one.

    Raises:
        UserError: there are checkpoints, and none of them is whole; `resume` names nothing; or it is another model's;
            or the ranks differ in their fingerprint.
    """
    ranks.check_same(data=fingerprint)
    continued = ranks.from_rank0(lambda: bool(committed(run_dir)))
    if not continued and not resume:
        return Found(run_dir, fingerprint, None, {})
    path, progress = choose(run_dir) if continued else choose(Path(resume), "--resume ")
    ranks.print0(f"continues from step {progress['step']} of {path}")
    for key, value in fingerprint.items():
        if progress.get(key, value) != value:
            ranks.print0(f"note: it was written with {key} {progress[key]}, this run has {value}")
    if model:
        check_fits(path, model)
    return Found(run_dir, fingerprint, path, progress)


def choose(where: Path, flag: str = "") -> tuple[Path, dict[str, Any]]:
    """The newest whole checkpoint of a run, or the one that `where` is, and its manifest; `flag` named it.

    All ranks take part, where there is a process group: rank 0 looks, and each reads some of the files.

    Raises:
        UserError: there is none, none is whole, or everybody can write to it.
    """

    def look() -> list[Path]:
        try:
            place = where.expanduser()
            found = [place] if (place / manifest.NAME).is_file() else committed(place)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{flag}{where} cannot be looked at: {error}") from error
        if not found:
            raise UserError(f"{flag}{where}: no checkpoint there; give a run's folder or one of its checkpoints")
        return found

    faults: list[str] = []
    for path in _from_rank0(look):
        _from_rank0(functools.partial(_refuse_open_folder, path))
        facts, fault = _verify(path)
        if not fault:
            if faults:
                ranks.print0(f"damaged, not used: {'; '.join(faults)}")
            return path, facts
        faults.append(f"{path.name}: {fault}")
    raise UserError(
        f"{where} has checkpoints, and none of them is whole ({'; '.join(faults)}). "
        "To start over on purpose, give another --name"
    )


def _verify(path: Path) -> tuple[dict[str, Any], str]:
    """`manifest.verify`, and the files are dealt out over the ranks: one alone would take an hour for a large model."""
    if not dist.is_initialized():
        return manifest.verify(path)
    facts, fault = manifest.verify(path, dist.get_rank(), dist.get_world_size())
    mine = (socket.gethostname(), fault, [facts.get("step"), facts.get("samples")])
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for host, found, position in everyone:
        if found or position != everyone[0][2]:
            place = f" on {host}" if host != everyone[0][0] else ""
            return {}, f"{found or 'it is another one'}{place}"
    return facts, ""


def _from_rank0(answer: Callable[[], Answer]) -> Answer:
    return ranks.from_rank0(answer) if dist.is_initialized() else answer()


def _refuse_open_folder(path: Path) -> None:
    for place in (path.resolve(), *path.resolve().parents[:2]):  # the checkpoint, checkpoints/ and the run's folder
        mode = place.stat().st_mode if place.exists() else 0  # a link that leads nowhere is a damaged one
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(f"{place} can be written by everybody here, so nothing in it is trusted: chmod o-w {place}")


def tensors_in(path: Path) -> dict[str, TensorStorageMetadata]:
    """Name to type and shape of every tensor of a checkpoint."""
    metadata = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def check_fits(path: Path, model: nn.Module) -> None:
    """Compare a checkpoint's names and shapes with the plain model's.

    Raises:
        UserError: the checkpoint is of another model; lists the first names that differ.
    """
    saved = {name: tuple(entry.size) for name, entry in tensors_in(path).items()}
    saved = {name: size for name, size in saved.items() if not name.startswith(keymap.NO_WEIGHTS)}
    differences = keymap.differences({name: tuple(t.shape) for name, t in keymap.model_tensors(model).items()}, saved)
    if differences:
        raise UserError(f"--resume: {path} is of another model:\n  " + "\n  ".join(differences))


def load(path: Path | None, tensors: dict[str, torch.Tensor]) -> None:
    """Fill this rank's tensors in place from a checkpoint of any number of ranks (all ranks take part).

    Args:
        path: a checkpoint that `find` returned; None for nothing to load.
        tensors: where to load to, by canonical name; a rank may hold some of the names only.

    Raises:
        UserError: the checkpoint lacks one of them, as another optimizer's would, or has it in another shape.
    """
    if path is None:
        return
    saved = {name: tuple(entry.size) for name, entry in tensors_in(path).items()}
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(keymap.NO_WEIGHTS)}
    if len(weights) < len(tensors) and not any(name.startswith(keymap.OPTIMIZER) for name in saved):
        ranks.print0(f"{path} holds weights only: the optimizer starts anew")
        tensors = weights
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differences = keymap.differences(wanted, {name: size for name, size in saved.items() if name in wanted})
    if differences:
        raise UserError(f"--resume: {path} is of another model or optimizer:\n  " + "\n  ".join(differences))
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    except dcp.CheckpointException as error:  # a BaseException, which `except Exception` and @record would miss
        raise RuntimeError(str(error)) from error
