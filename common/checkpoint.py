"""Checkpoints that are whole or absent: written beside the old ones, committed by one rename, verified before use.

A checkpoint is a folder `step_00001000/` of safetensors files, in which each rank wrote its share of the
canonical names (see `keymap`), and a MANIFEST.json with the size and SHA-256 of each file. Nothing in it is
pickled. `torch.distributed.checkpoint` reads and writes it, so the ranks that load may be others than those
that saved.
"""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from common import UserError, keymap, log, manifest, world


def save(run_dir: Path, step: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any], keep: int) -> Path:
    """Write and commit `checkpoints/step_<step>`; until the rename, a kill leaves the older ones as they were.

    Args:
        run_dir: the run's folder, which all ranks see.
        step: optimizer steps done.
        tensors: this rank's state by canonical name (all ranks take part).
        facts: what is no tensor, such as position and seed; JSON values, taken from rank 0.
        keep: older checkpoints beyond this many are deleted after the commit.

    Returns:
        The committed folder.
    """
    final = checkpoint_dir(run_dir, step)
    partial = world.from_rank0(lambda: _make_partial(final))
    rows = {name: tensor.contiguous() for name, tensor in tensors.items()}  # safetensors knows no strides
    writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
    # What several ranks hold under one name is taken from the lowest: BatchNorm's running statistics are not the
    # same on all of them, and a mixture would be nobody's.
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with _as_exception():
        dcp.save(rows, storage_writer=writer, planner=planner)
    # Each rank wrote the file that carries its number: it reads back and hashes that one.
    mine = {path.name: manifest.seal(path) for path in partial.glob(f"shard-{dist.get_rank() + 1:05d}-*")}
    files: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(files, mine)
    if dist.get_rank() == 0:
        everything = {name: entry for part in files for name, entry in part.items()}
        manifest.write(partial, {"step": step, **facts}, everything)
        if final.exists():  # a damaged one, or the resume that led here would have begun after it
            final.rename(final.with_name(f"{final.name}.tmp-damaged"))
        partial.rename(final)
        manifest.sync(final.parent)
        # Newer ones are damaged, or this run would have begun after them: they do not count as kept.
        older = [path for path in _steps(run_dir) if path.name <= final.name]
        for old in [*older[max(1, keep) :], *final.parent.glob("step_*.tmp-*")]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def _make_partial(final: Path) -> Path:
    partial = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    return partial


@contextlib.contextmanager
def _as_exception() -> Iterator[None]:
    """DCP raises a BaseException, which every `except Exception` and torchrun's error file would miss."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise RuntimeError(str(error)) from error


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def _steps(run_dir: Path) -> list[Path]:
    """Committed checkpoints, newest first."""
    found = (run_dir / "checkpoints").glob("step_*")
    return sorted((path for path in found if path.name[5:].isdigit()), reverse=True)


def find(run_dir: Path, resume: str, terms: dict[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """Choose what to start from (all ranks take part; rank 0 looks, all get its choice).

    A run that has checkpoints continues from its newest whole one, also when `resume` is given, so that the
    same command can be run again. Otherwise `resume` names a run's folder or one checkpoint.

    Args:
        run_dir: this run's folder.
        resume: the flag; "" for none.
        terms: what the position depends on, such as the seed; a checkpoint written under others is named.

    Returns:
        The checkpoint and its manifest, or (None, {}) for a run that is new.

    Raises:
        UserError: there are checkpoints, and none of them is whole; or `resume` names nothing.
    """
    path, facts = world.from_rank0(lambda: _find(run_dir, resume))
    if path:
        log.say(f"continues from step {facts['step']} of {path}")
        for key, value in terms.items():
            if facts.get(key) != value:
                log.say(f"note: it was written with {key} {facts.get(key)}, this run has {value}")
    return path, facts


def _find(run_dir: Path, resume: str) -> tuple[Path | None, dict[str, Any]]:
    candidates = _steps(run_dir)
    where = run_dir
    if not candidates:
        if not resume:
            return None, {}
        where = Path(resume).expanduser()
        candidates = [where] if (where / manifest.NAME).is_file() else _steps(where)
        if not candidates:
            raise UserError(f"--resume {resume}: no checkpoint there; give a run's folder or one of its checkpoints")
    faults: list[str] = []
    for path in candidates:
        facts, fault = manifest.verify(path)
        if not fault:
            if faults:
                log.say(f"damaged, not used: {'; '.join(faults)}")
            return path, facts
        faults.append(f"{path.name}: {fault}")
    raise UserError(
        f"{where} has checkpoints, and none of them is whole ({'; '.join(faults)}). "
        "To start over on purpose, give another --name"
    )


def load(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill this rank's tensors in place from a checkpoint of any number of ranks (all ranks take part).

    Args:
        path: a checkpoint that `find` returned.
        tensors: where to load to, by canonical name.

    Raises:
        UserError: the checkpoint is of another model; lists the first names that differ.
    """
    reader = dcp.HuggingFaceStorageReader(str(path))
    metadata = reader.read_metadata().state_dict_metadata
    saved = {name: tuple(entry.size) for name, entry in metadata.items() if not isinstance(entry, BytesStorageMetadata)}
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differences = keymap.differences(wanted, saved)
    if differences:
        raise UserError(f"--resume: {path} is of another model:\n  " + "\n  ".join(differences))
    with _as_exception():
        dcp.load(tensors, storage_reader=reader)
