"""A run whose checkpoints lie in a folder: how one is begun, committed by a rename, and removed.

`common.store.objects.keeper.Keeper` has the same methods for a run in an object store.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import manifest
from common.run import run_dir
from common.run.process import Process


@dataclass(frozen=True)
class Disk:
    """A run's folder.

    Attributes:
        run_dir: log, records, configuration.
        path: where the checkpoints lie, in checkpoints/.
        spare: where the last one goes if it cannot be written here; None for nowhere.
        lost: who has taken the run over; "" for nobody, as the lock of a folder ends with its process.
    """

    run_dir: Path
    spare: None = None
    lost: str = ""

    @property
    def path(self) -> Path:
        """The same folder."""
        return self.run_dir

    def claim(self, process: Process) -> None:
        """Keep other jobs out; see `run_dir.claim` (all ranks)."""
        run_dir.claim(self.run_dir, process)

    def make(self, final: Path, needed: int) -> str:
        """Create a folder to write a checkpoint to, if the disk has enough space for so many bytes (rank 0).

        Raises:
            OSError: it has not, or the folder cannot be created.
        """
        partial = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < needed:
            partial.rmdir()
            raise OSError(errno.ENOSPC, f"it needs {needed / 1e6:,.1f} MB, the disk has {free / 1e6:,.1f} MB free")
        return str(partial)

    def partial(self, named: str) -> Path:
        """What `make` has made, on any rank."""
        return Path(named)

    def flush(self, file: Path) -> None:
        """Flush a rank's file to the disk."""
        manifest.sync(file)

    def commit(self, partial: Path, final: Path, facts: dict[str, Any], files: dict[str, Any]) -> None:
        """Write the manifest and rename the folder (rank 0)."""
        manifest.write(partial, facts, files)
        # It must be damaged, as is a link to itself: otherwise this run would have resumed from it.
        if os.path.lexists(final):
            final.rename(final.with_name(f"{partial.name}-damaged"))
        partial.rename(final)
        manifest.sync(final.parent)

    def drop(self, partial: Path) -> None:
        """Remove what was not committed (rank 0)."""
        shutil.rmtree(partial, ignore_errors=True)

    def room(self) -> str:
        """The free space, for a message."""
        place = next(path for path in (self.run_dir, *self.run_dir.parents) if path.exists())
        disk = os.statvfs(place)
        return f"{disk.f_bavail * disk.f_frsize / 1e6:,.1f} MB and {disk.f_favail:,} files are free in {place}"

    def stamps(self, path: Path) -> list[tuple[Any, ...]]:
        """What changes when a program changes a checkpoint."""
        return manifest.stamps(path)

    def tidy(self, final: Path, pointers: Mapping[str, str], older: Iterable[Path]) -> None:
        """Write small files beside a checkpoint, delete older ones and what killed saves have left (rank 0).

        Raises:
            OSError: one could not be written or deleted.
        """
        for name, text in pointers.items():
            manifest.replace(final.with_name(name), text)
        for path in (*older, *final.parent.glob("step_*.tmp-*")):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
