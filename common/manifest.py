"""MANIFEST.json of a checkpoint: size and SHA-256 of each file, and of itself, so that any changed bit is found."""

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from common import UserError

NAME = "MANIFEST.json"
FORMAT = 1
MOST_BYTES = 2**27  # of a JSON file; 10,000 ranks need 2 MB


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


def size(path: Path) -> int:
    """Size of a regular file in bytes; opening a pipe or a device could take for ever.

    Raises:
        OSError: there is no such file, or it is not a regular one.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "not a regular file", str(path))
    return found.st_size


def read_bytes(path: Path) -> bytes:
    """Read a regular file; see `size`."""
    size(path)
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Parse a JSON file that anybody may have written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, too deep or not JSON.
    """
    if size(path) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES} bytes")
    try:
        return json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError(f"{path} has too many brackets within brackets") from error


def _check(manifest: dict[str, Any], path: Path) -> str:
    """What is wrong with a manifest whose digest is right, or with the names in its folder; "" if nothing is."""
    for key in ("step", "samples"):
        if type(manifest.get(key)) is not int or not 0 <= manifest[key] < 2**63:
            return f"{NAME} has {key} {manifest.get(key)!r:.40} instead of a number"
    scale = manifest.get("loss_scale", [1.0, 0.0])
    if not (isinstance(scale, list) and len(scale) == 2 and all(type(one) is float and one >= 0 for one in scale)):
        return f"{NAME} has loss_scale {scale!r:.40} instead of two numbers"
    number = re.fullmatch(r"step_(\d+)", path.name, re.ASCII)
    if number and int(number[1]) != manifest["step"]:
        return f"it is of step {manifest['step']}, and the folder's number is {int(number[1])}"
    if not manifest["files"]:
        return f"{NAME} names no files"
    strange = [name for name in manifest["files"] if name != Path(name).name]
    if strange:
        return f"{NAME} names {strange[0]!r}, which is not in the folder"
    # torch.distributed.checkpoint reads each of them, and the last one's tensors count.
    unnamed = sorted(file.name for file in path.glob("*.safetensors") if file.name not in manifest["files"])
    return f"{_shown(unnamed[0])} is not in {NAME}: move it out of the folder" if unnamed else ""


def _shown(name: str) -> str:
    """A file's name for a message, which control characters and bytes that are not UTF-8 would spoil."""
    return name if name.isprintable() and len(name) < 300 else ascii(name[:300])


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

    Raises:
        UserError: the checkpoint is undamaged, but of another format.
    """
    try:
        manifest = read_json(path / NAME)
        intact = manifest.pop("sha256") == _digest_json(manifest)
        files = {path / name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {}, f"{NAME} cannot be read ({type(error).__name__})"
    if not intact:
        return {}, f"{NAME} has changed since it was written"
    if manifest.get("format") != FORMAT:  # older checkpoints may be readable, but this one is not damaged
        raise UserError(
            f"checkpoint {path} has format {manifest.get('format')!r:.40}, and this code reads format {FORMAT}: "
            "continue with the code that wrote it, or move it away to continue from an older one"
        )
    if fault := _check(manifest, path):
        return {}, fault
    for file, (num_bytes, digest) in list(files.items())[part::num_parts]:
        try:
            found = size(file)
            if found != num_bytes:
                return {}, f"{_shown(file.name)} has {found} bytes instead of {num_bytes}"
            if _digest(file) != digest:
                return {}, f"{_shown(file.name)} has changed since it was written"
        except FileNotFoundError:
            return {}, f"{_shown(file.name)} is missing"
        except (OSError, ValueError) as error:  # a bad sector; a name that no file can have
            return {}, f"{_shown(file.name)} cannot be read ({getattr(error, 'strerror', error)})"
    return manifest, ""
