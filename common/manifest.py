"""MANIFEST.json of a checkpoint: size and digests of each file, and its own, so that any changed bit is found.

Digests guard against damage and not against attackers, who could write a manifest as well. So those of the files are
XXH3 of 128 bits, of which a core computes ten times as many as of SHA-256 (`benchmarks.saves`): one for each chunk, so
that ranks and threads share the verification of a large file. Format 1 has one SHA-256 for each file.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from common import UserError, printable

NAME = "MANIFEST.json"
FORMAT = 2
CHUNK_BYTES = 2**26  # of a file, for each digest: part of the format
BLOCK_BYTES = 2**20  # written or read at once: a processor's cache holds it until it is hashed
READERS = 4  # threads that verify
MOST_BYTES = 2**27  # of a file that is read at once; the manifest of 10,000 ranks needs 2 MB
MOST_STEPS = 2**31  # of a training, as of --max-steps; and samples of a step


def write(folder: Path, facts: dict[str, Any], files: dict[str, Any]) -> None:
    """Write the manifest, see `text`, and flush it and the folder's entries to the disk."""
    replace(folder / NAME, text(facts, files))
    sync(folder)


def text(facts: dict[str, Any], files: dict[str, Any]) -> str:
    """What a manifest says.

    Args:
        facts: JSON values beside the tensors, such as step, position and seed.
        files: the result of `seal` for each file, by name.
    """
    manifest = {"format": FORMAT, **facts, "files": files}
    return json.dumps(manifest | {"sha256": _digest_json(manifest)}, indent=1)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(path: Path, content: str | bytes) -> None:
    """Write a file in one rename: after a kill, a power cut, or without room, either the old or the new one is there.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_suffix(".tmp")
    partial.unlink(missing_ok=True)  # of a process that was killed; or a link, which "x" would not follow either
    try:
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_blocks(file: BinaryIO, contents: Iterable[memoryview]) -> list[str]:
    """Write bytes to a file; returns the digest of each chunk."""
    digests: list[Any] = []
    num_bytes = 0
    for content in contents:
        rest = content
        while len(rest):
            written = num_bytes % CHUNK_BYTES  # of the chunk that is being written
            if not written:
                digests.append(xxhash.xxh3_128())
            block = rest[: min(BLOCK_BYTES, CHUNK_BYTES - written)]
            file.write(block)
            digests[-1].update(block)
            rest = rest[len(block) :]
            num_bytes += len(block)
    return [digest.hexdigest() for digest in digests]


def seal(path: Path, digests: list[str] | None = None) -> dict[str, Any]:
    """A file's entry: its size, and the digests of its chunks, which `write_blocks` has returned or the file gives."""
    num_bytes = path.stat().st_size
    if digests is None:
        digests = [_digest(path, start, CHUNK_BYTES, xxhash.xxh3_128()) for start in range(0, num_bytes, CHUNK_BYTES)]
    return {"bytes": num_bytes, "xxh3_128": digests}


def _digest(path: Path, start: int, num_bytes: int, digest: Any) -> str:
    """Digest of `num_bytes` of a file, or of what it has of them."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while num_bytes > 0 and (count := file.readinto(buffer[:num_bytes])):
            digest.update(buffer[:count])
            num_bytes -= count
    return str(digest.hexdigest())


def stamps(folder: Path) -> list[tuple[Any, ...]]:
    """What changes when a program changes, replaces, adds or removes a file of a checkpoint."""
    found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)]
    return sorted((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)


class Looked:
    """At which file or folder this process has looked last: what it may wait for, where it does not go on.

    Attributes:
        at: what `looks_at` was last called with; None before.
    """

    at: Path | str | None = None


def looks_at(path: Path | str) -> None:
    """Note a file or folder before the first call that a disk has to answer, as `places.local` and `size` do.

    Who writes to a store notes each part that was sent: `watch` takes another one for progress.
    """
    Looked.at = path


def size(path: Path) -> int:
    """Size of a regular file in bytes; opening a pipe or a device could take for ever.

    Raises:
        OSError: there is no such file, or it is not a regular one.
    """
    looks_at(path)
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "not a regular file", str(path))
    return found.st_size


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most so many bytes, and no more than it says it has, as those of /proc give for ever.

    Raises:
        OSError: it cannot be read; see also `size`.
    """
    found = size(path)
    if found > most:
        raise OSError(errno.EFBIG, f"it has {found} bytes, more than {most}", str(path))
    with path.open("rb") as file:
        return file.read(found)


def read_json(path: Path) -> Any:
    """Parse a JSON file that anybody may have written.

    Raises:
        OSError: it cannot be read, or is too large.
        ValueError: it is too deep or not JSON.
    """
    try:
        return json.loads(read_bytes(path))
    except RecursionError as error:
        raise ValueError(f"{path} has too many brackets within brackets") from error


def _check(manifest: dict[str, Any], path: Path) -> str:
    """What is wrong with a manifest whose digest is right, or with the names in its folder; "" if nothing is."""
    step, samples = (manifest.get(key) for key in ("step", "samples"))
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        return f"{NAME} has step {step!r:.40} instead of a number"
    if type(samples) is not int or not step <= samples <= step * MOST_STEPS:
        return f"{NAME} has samples {samples!r:.40} instead of a number that {step} steps can take"
    scale = manifest.get("loss_scale", [1.0, 0.0])
    if not (isinstance(scale, list) and len(scale) == 2 and all(type(one) is float and one >= 0 for one in scale)):
        return f"{NAME} has loss_scale {scale!r:.40} instead of two numbers"
    number = re.fullmatch(r"step_(\d+)", path.name, re.ASCII)
    if number and int(number[1]) != step:
        return f"it is of step {step}, and the folder's number is {int(number[1])}"
    if not manifest["files"]:
        return f"{NAME} names no files"
    if strange := [name for name in manifest["files"] if name != Path(name).name]:
        return f"{NAME} names {strange[0]!r:.300}, which is not in the folder"
    # torch.distributed.checkpoint reads each of them, and the last one's tensors count.
    unnamed = sorted(file.name for file in path.glob("*.safetensors") if file.name not in manifest["files"])
    return f"{printable(unnamed[0], 300)} is not in {NAME}: move it out of the folder" if unnamed else ""


def _digest_json(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _fault(path: Path, file_bytes: int, start: int, num_bytes: int, digest: Any, wanted: str) -> str:
    """What is wrong with a part of a file, whose digest must be as wanted; "" if nothing is."""
    name = printable(path.name, 300)
    try:
        found = size(path)
        if found != file_bytes:
            return f"{name} has {found} bytes instead of {file_bytes}"
        if _digest(path, start, num_bytes, digest) != wanted:
            return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:  # a bad sector; a name that no file can have
        return f"{name} cannot be read ({getattr(error, 'strerror', error)})"
    return ""


def _chunks(path: Path, manifest: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """All chunks of a checkpoint's files: what `_fault` takes.

    Raises:
        KeyError, TypeError, ValueError: the manifest's entries are not what `seal` returns.
    """
    for name, entry in manifest["files"].items():
        file_bytes = entry["bytes"]
        if type(file_bytes) is not int or not 0 <= file_bytes < 2**63:
            raise ValueError(f"{file_bytes!r:.40} bytes")
        if manifest["format"] == 1:
            yield path / name, file_bytes, 0, file_bytes, hashlib.sha256(), entry["sha256"]
            continue
        starts = range(0, file_bytes, CHUNK_BYTES) or [0]  # an empty file has to be there, too
        digests = entry["xxh3_128"] if file_bytes else [xxhash.xxh3_128().hexdigest()]
        for start, digest in zip(starts, digests, strict=True):
            yield path / name, file_bytes, start, CHUNK_BYTES, xxhash.xxh3_128(), digest


def verify(path: Path, part: int = 0, num_parts: int = 1) -> tuple[dict[str, Any], str]:
    """Compare a checkpoint with its manifest, byte by byte.

    Args:
        path: the checkpoint.
        part: which of the `num_parts` parts of its bytes to read.
        num_parts: number of readers that share the bytes.

    Returns:
        The manifest, and the fault that was found; "" for an undamaged checkpoint.

    Raises:
        UserError: the checkpoint is undamaged, but of another format.
    """
    try:
        manifest = read_json(path / NAME)
        intact = manifest.pop("sha256") == _digest_json(manifest)
        known = manifest.get("format") in (1, FORMAT)
        chunks = [*_chunks(path, manifest)] if intact and known else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {}, f"{NAME} cannot be read ({type(error).__name__})"
    if not intact:
        return {}, f"{NAME} has changed since it was written"
    if not known:  # older checkpoints may be readable, but this one is not damaged
        raise UserError(
            f"checkpoint {path} has format {manifest.get('format')!r:.40}, and this code reads formats up to {FORMAT}: "
            "continue with the code that wrote it, or move it away to continue from an older one"
        )
    if fault := _check(manifest, path):
        return {}, fault
    with ThreadPoolExecutor(READERS) as pool:
        faults = pool.map(lambda chunk: _fault(*chunk), chunks[part::num_parts])
        fault = next(filter(None, faults), "")
        pool.shutdown(cancel_futures=True)  # one is enough: a large damaged checkpoint is not read to its end
    return ({}, fault) if fault else (manifest, "")
