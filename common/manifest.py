"""MANIFEST.json of a checkpoint: size and SHA-256 of each file, and of itself, so that any changed bit is found."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

NAME = "MANIFEST.json"
FORMAT = 1


def write(folder: Path, facts: dict[str, Any], files: dict[str, Any]) -> None:
    """Write the manifest and flush it and the folder's entries to the disk.

    Args:
        folder: the checkpoint, with all its files.
        facts: JSON values beside the tensors, such as step, position and seed.
        files: the result of `seal` for each file, by name.
    """
    manifest = {"format": FORMAT, **facts, "files": files}
    (folder / NAME).write_text(json.dumps(manifest | {"sha256": _digest_json(manifest)}, indent=1))
    sync(folder / NAME)
    sync(folder)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def seal(path: Path) -> dict[str, Any]:
    """Flush a file to the disk; returns its size and digest."""
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_json(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def verify(path: Path, part: int = 0, num_parts: int = 1) -> tuple[dict[str, Any], str]:
    """Compare a checkpoint with its manifest, byte by byte.

    Args:
        path: the checkpoint.
        part: which of the `num_parts` parts of its files to read.
        num_parts: number of readers that share the files.

    Returns:
        The manifest, and the fault that was found; "" for an undamaged checkpoint.
    """
    try:
        manifest = json.loads((path / NAME).read_text())
        intact = manifest.pop("sha256") == _digest_json(manifest)
        files = {path / name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"{NAME} cannot be read ({type(error).__name__})"
    if manifest.get("format") != FORMAT:
        return {}, f"its format is {manifest.get('format')}, and this version reads format {FORMAT}"
    if not intact:
        return {}, f"{NAME} has changed since it was written"
    for file, (size, digest) in list(files.items())[part::num_parts]:
        try:
            found = file.stat().st_size
            if found != size:
                return {}, f"{file.name} has {found} bytes instead of {size}"
            if _digest(file) != digest:
                return {}, f"{file.name} has changed since it was written"
        except FileNotFoundError:
            return {}, f"{file.name} is missing"
        except OSError as error:  # a bad sector
            return {}, f"{file.name} cannot be read ({error.strerror})"
    return manifest, ""
