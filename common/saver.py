"""Write checkpoints that are whole or absent: beside the old ones, committed by one rename, verified before use."""

import errno
import functools
import os
import platform
import shutil
import socket
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh

from common import UserError, checkpoint, manifest, private_api, process_group, ranks
from common.diagnose import SAVING

Tensors = dict[str, torch.Tensor]
STAGING = StagingOptions(False, False, False, False)  # into plain memory of the CPU, before `stage` returns


class SaveError(UserError):
    """A checkpoint could not be written, on any rank; the older ones are as they were."""


class Saver:
    """Writes the checkpoints of one run, beside the training if asked to."""

    def __init__(
        self, run_dir: Path, recipe: str, mesh: DeviceMesh, fingerprint: dict[str, Any], keep: int, in_background: bool
    ) -> None:
        """Join a group of its own, so that a save beside the training crosses none of its collectives (all ranks).

        Args:
            run_dir: the run's folder, which all ranks see.
            recipe: the train.py that runs.
            mesh: the ranks and their axes.
            fingerprint: what the position depends on, such as the seed; JSON values.
            keep: older whole checkpoints beyond this many are deleted after each commit.
            in_background: copy the state, and write it while the training goes on; at most one at a time.
        """
        self._run_dir, self._keep = run_dir, keep
        self._group: Any = dist.new_group(
            backend="gloo", group_desc=SAVING, timeout=timedelta(seconds=process_group.TIMEOUT_S)
        )
        self._facts = fingerprint | {
            "recipe": Path(recipe).resolve().parent.name,
            "world": dist.get_world_size(),
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        self._stager = DefaultStager(STAGING) if in_background else None
        self._pending: threading.Thread | None = None
        self._failure = ""
        process_group.background.callback(self._end)

    def _end(self) -> None:
        """After an error: wait a little for a save under way, whose peers leave as well."""
        if self._pending:
            self._pending.join(10)

    def save(self, step: int, tensors: Tensors, samples: int, last: bool) -> None:
        """Write and commit `checkpoints/step_<step>`; until the rename, a kill leaves the older ones as they were.

        Args:
            step: optimizer steps done.
            tensors: this rank's state by canonical name (all ranks take part).
            samples: position of the training.
            last: nothing comes after it, so it is written at once, and must succeed.

        Raises:
            SaveError: the last one could not be written. Another one that could not is only told.
        """
        self.drain()
        facts = self._facts | {"step": step, "samples": samples}
        if self._stager and not last:
            staged = self._stager.stage(tensors)
            if torch.__version__ < "2.13":  # there the first use spoils a stager; later ones use its buffers again
                self._stager = DefaultStager(STAGING)
            self._pending = threading.Thread(target=self._write, args=(staged, facts), name="save", daemon=True)
            self._pending.start()
            return
        self._write(tensors, facts)
        if last and self._failure:
            raise SaveError(f"the last checkpoint was not written: {self._failure}")
        self.drain()

    def drain(self) -> None:
        """Wait for a save that is under way, and tell of one that failed (all ranks)."""
        if self._pending:
            self._pending.join()
            self._pending = None
        if self._failure:
            ranks.print0(f"warning: {self._failure}; the training goes on")
            self._failure = ""

    def _write(self, tensors: Tensors, facts: dict[str, Any]) -> None:
        """Write one checkpoint; a failure, the same on all ranks, is left in `_failure`."""
        self._failure = ""
        final = checkpoint.folder(self._run_dir, facts["step"])
        partial = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
        try:
            partial = self._together(lambda: self._make(partial, tensors) if dist.get_rank() == 0 else None)[0]
            rows: Tensors = {}  # safetensors knows no strides
            self._together(lambda: rows.update({name: tensor.contiguous() for name, tensor in tensors.items()}))
            writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
            # What several ranks hold under one name is taken from the lowest: BatchNorm's running statistics are not
            # the same on all of them, and a mixture would be nobody's.
            planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            dcp.save(rows, storage_writer=writer, planner=planner, process_group=self._group)
            # Each rank reads back and hashes what it wrote itself.
            mine = functools.partial(private_api.files_of_rank, partial, dist.get_rank())
            files = self._together(lambda: {path.name: manifest.seal(path) for path in mine()})
            everything = {name: entry for part in files for name, entry in part.items()}
            self._together(lambda: self._commit(partial, final, facts, everything) if dist.get_rank() == 0 else None)
            self._tidy(final)
        except (Exception, dcp.CheckpointException) as error:  # the second is none of the first
            self._failure = f"no checkpoint of step {facts['step']}: {_plain(error, self._run_dir)}"
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def _together(self, part: Callable[[], Any]) -> list[Any]:
        """Let every rank do its part; all get all results, or all raise SaveError."""
        outcome: tuple[Any, str] = (None, "")
        try:
            outcome = (part(), "")
        except Exception as error:
            outcome = (None, f"rank {dist.get_rank()} on {socket.gethostname()}: {type(error).__name__}: {error}")
        outcomes = [outcome] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome, group=self._group)
        faults = [fault for _, fault in outcomes if fault]
        if faults:
            raise SaveError("; ".join(faults))
        return [result for result, _ in outcomes]

    def _make(self, partial: Path, tensors: Tensors) -> Path:
        """Create the folder to write to, if the disk has room (rank 0)."""
        partial.mkdir(parents=True)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"it needs {needed / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB left")
        return partial

    def _commit(self, partial: Path, final: Path, facts: dict[str, Any], files: dict[str, Any]) -> None:
        """Seal and rename (rank 0)."""
        if not files:
            raise SaveError(f"torch {torch.__version__} has given a checkpoint's files other names: see private_api.py")
        manifest.write(partial, facts, files)
        if final.exists():  # a damaged one, or the resume that led here would have begun after it
            final.rename(final.with_name(f"{partial.name}-damaged"))
        partial.rename(final)
        manifest.sync(final.parent)

    def _tidy(self, final: Path) -> None:
        """Point `latest` to the newest checkpoint, and delete what is too old (all ranks)."""
        try:
            found = self._together(lambda: checkpoint.committed(self._run_dir) if dist.get_rank() == 0 else [])[0]
            # Newer ones are damaged, or this run would have begun after them: they do not count as kept.
            older = [path for path in found if path.name < final.name]
            kept, share = 1, (dist.get_rank(), dist.get_world_size())
            while older and kept < self._keep:
                verify = functools.partial(manifest.verify, older.pop(0), *share)  # each rank reads some of the files
                kept += not any(fault for _, fault in self._together(verify))
            if dist.get_rank() == 0:
                latest = final.with_name("latest")  # for people; `find` looks for itself
                latest.with_suffix(".tmp").write_text(final.name)
                latest.with_suffix(".tmp").replace(latest)
                for path in (*older, *final.parent.glob("step_*.tmp-*")):
                    shutil.rmtree(path)
        except (SaveError, OSError) as error:  # the first on all ranks alike
            ranks.print0(f"warning: {final} is saved, but not all that is too old is deleted: {error}")


def _plain(error: BaseException, run_dir: Path) -> str:
    """What went wrong with the disk, in a line, whatever torch and safetensors make of it."""
    text = str(error).strip() or type(error).__name__
    place = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    space, entries = shutil.disk_usage(place).free, os.statvfs(place).f_favail
    full = any(sign in text for sign in ("No space left", "Errno 28", "os error 28", "unexpected pos"))
    left = f"{space / 1e6:,.1f} MB and {entries:,} files are free in {place}"
    return f"{'disk full: ' if full else ''}{text.strip().splitlines()[-1]} ({left})"
