"""Where a run's checkpoints lie, if that is a folder: how one is begun, committed by a rename, and removed.

`common.store.keeper` has the same functions for a store.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import manifest


def partial(final: Path) -> Path:
    """A name for a checkpoint that is being written."""
    return final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")


def make(partial: Path, needed: int) -> str:
    """Create the folder to write to, if the disk has enough space (rank 0).

    Raises:
        OSError: it has not, or the folder cannot be created.
    """
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"it needs {needed / 1e6:,.1f} MB, the disk has {free / 1e6:,.1f} MB free")
    return str(partial)


def commit(partial: Path, final: Path, facts: dict[str, Any], files: dict[str, Any]) -> None:
    """Write the manifest and rename the folder (rank 0)."""
    manifest.write(partial, facts, files)
    # It must be damaged, as is a link to itself: otherwise this run would have resumed from it.
    if os.path.lexists(final):
        final.rename(final.with_name(f"{partial.name}-damaged"))
    partial.rename(final)
    manifest.sync(final.parent)


def drop(partial: Path) -> None:
    """Remove what was not committed (rank 0)."""
    shutil.rmtree(partial, ignore_errors=True)


def room(run_dir: Path) -> str:
    """The free space, for a message."""
    place = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    disk = os.statvfs(place)
    return f"{disk.f_bavail * disk.f_frsize / 1e6:,.1f} MB and {disk.f_favail:,} files are free in {place}"


def tidy(final: Path, older: Iterable[Path]) -> None:
    """Delete older checkpoints, and what saves that were killed have left (rank 0).

    Raises:
        OSError: one could not be deleted.
    """
    for path in (*older, *final.parent.glob("step_*.tmp-*")):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def flush(writer: Any) -> None:
    """Flush a rank's file to the disk."""
    writer.flush()


def stamps(path: Path) -> list[Any]:
    """What changes when a program changes a checkpoint."""
    return manifest.stamps(path)


def replace(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    manifest.replace(path, text)
