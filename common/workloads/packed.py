"""Token files, which the processes of a machine pack together: text as one row of tokens.

A file ends with a checksum of each of its blocks: a changed file is found, not read.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import filelock
import numpy as np

from common import UserError, manifest, private_api, ranks

if TYPE_CHECKING:
    from datasets import Dataset

BATCH_ROWS = 256  # that are tokenized at a time
PART_ROWS = 2**16  # at most, that a process packs before it looks for more
PARTS = 64  # at least, of a set that has batches for them: few rows may be long ones
WAIT_S = 600.0  # for other processes that pack the same set, while nothing of it grows
POLL_S = 0.1
SHOW_S = 30.0  # between lines on how far the packing is
BLOCK_BYTES = 2**20  # small, because the first batches read a few tokens from each of many blocks
CHECKED_AT_ONCE = 2**28  # bytes, read in 0.1 s; a larger file is checked block by block, when each is first read


class Packed:
    """The tokens of one file.

    Attributes:
        tokens: (num_tokens,) uint16 or uint32, a memory map.
    """

    def __init__(self, path: Path, num_tokens: int, dtype: type[np.unsignedinteger]) -> None:
        """Open a file that `pack` has completed; compare a small one with its checksums at once.

        Raises:
            UserError: the file has changed since it was written.
        """
        self._path = path
        size = num_tokens * dtype().itemsize
        num_blocks = -(-size // BLOCK_BYTES)
        found = path.stat().st_size
        wanted = size + 4 * num_blocks
        if found != wanted:
            raise self._changed(f"it has {found} bytes instead of {wanted}")
        # A memory map cannot be empty.
        content = np.memmap(path, np.uint8, "r") if found else np.zeros(0, np.uint8)
        self.tokens = content[:size].view(dtype)
        self._per_block = BLOCK_BYTES // dtype().itemsize
        self._checksums = content[size:].copy().view(np.uint32)
        self._checked = np.zeros(num_blocks, bool)
        if 0 < size <= CHECKED_AT_ONCE:
            self.check(np.zeros(1, np.int64), num_tokens)

    def check(self, starts: np.ndarray, length: int) -> None:
        """Compare the blocks that hold `length` tokens from each of `starts` on, unless that has been done before.

        Raises:
            UserError: the file has changed since it was written.
        """
        offsets = np.append(np.arange(0, length, self._per_block), length - 1)
        blocks = (starts[:, None] + offsets) // self._per_block
        if self._checked[blocks].all():
            return
        for block in np.unique(blocks):
            tokens = self.tokens[block * self._per_block : (block + 1) * self._per_block]
            if zlib.crc32(tokens.data) != self._checksums[block]:
                raise self._changed(f"block {block} has another checksum")
            self._checked[block] = True

    def _changed(self, how: str) -> UserError:
        self._path.unlink(missing_ok=True)
        return UserError(
            f"{self._path} has changed since it was written ({how}). It has been deleted; the same command packs the "
            "text again"
        )


class Encoder(Protocol):
    """Makes tokens of rows."""

    dtype: type[np.unsignedinteger]
    digest: str  # of all that decides the tokens of a row

    def encode(self, batch: Mapping[str, Sequence[Any]]) -> tuple[np.ndarray, int]:
        """Tokens of some rows, (n,), and the bytes of their texts."""


def token_type(vocab_size: int) -> type[np.unsignedinteger]:
    """The type that tokens of a vocabulary are stored in."""
    return np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32


def pack(rows: "Dataset", encoder: Encoder) -> Path:
    """Token file of a set: `<key>.<bytes of text>.<tokens>.<digest>.tokens`, in the cache of `datasets`.

    All processes of a machine that ask for it share the work, part by part. The tokens are the same for any number of
    them, because each row is encoded separately. A process that is killed is not waited for.

    Raises:
        UserError: another process has a part, and has packed nothing for WAIT_S.
    """
    import datasets

    key = hashlib.sha256(repr((private_api.fingerprint(rows), rows.column_names, encoder.digest)).encode())
    stem = datasets.config.HF_DATASETS_CACHE / "packed" / key.hexdigest()[:16]
    part_rows = min(PART_ROWS, max(BATCH_ROWS, -(-len(rows) // PARTS)))
    parts = stem.with_suffix(f".{part_rows}.parts")
    numbers = range(max(1, -(-len(rows) // part_rows)))
    began = shown = changed = time.monotonic()
    state: object = None
    while True:
        if found := _packed(stem, encoder.dtype):
            shutil.rmtree(parts, ignore_errors=True)
            return found
        parts.mkdir(parents=True, exist_ok=True)
        missing = [number for number in numbers if not _part(parts, number)]
        for number in missing or [-1]:
            with _locked(parts / f"{number}.lock") as mine:
                # Looked at again: its last owner may have completed it, or all of them.
                if not mine or _packed(stem, encoder.dtype) or (missing and _part(parts, number)):
                    continue
                if not missing:
                    _join(stem, parts, [_part(parts, number) for number in numbers])
                    break
                own = range(number * part_rows, min(len(rows), (number + 1) * part_rows))
                _write_part(parts, number, rows, own, encoder)
            break
        else:
            time.sleep(POLL_S)
        now = time.monotonic()
        if (new := _sizes(parts)) != state:
            state = new
            changed = now
        if now - shown > SHOW_S:
            shown = now
            done = 1 - len(missing) / len(numbers)
            ranks.print0(f"data     tokenizing: {done:.0%} after {(now - began) / 60:.1f} min; kept for later starts")
        if now - changed > WAIT_S:
            raise UserError(
                f"--data: another process has a lock in {parts} and has tokenized nothing for {WAIT_S:.0f} s: stop it"
            )


def _packed(stem: Path, dtype: type[np.unsignedinteger]) -> Path | None:
    """The whole file, if it is there and has not changed since it was written."""
    # Older versions wrote files without checksums, and left one number out of their names.
    for path in stem.parent.glob(f"{stem.name}.*.*.*.tokens"):
        try:
            Packed(path, int(path.name.split(".")[2]), dtype)
            return path
        except (UserError, OSError) as error:
            sys.stderr.write(f"note: {error}\n")
    return None


def _part(parts: Path, number: int) -> Path | None:
    """A part that is complete: `<number>.<bytes of text>.<tokens>.part`."""
    return next(parts.glob(f"{number}.*.*.part"), None)


def _sizes(parts: Path) -> dict[str, int]:
    """Bytes of the files that grow while their processes work."""
    sizes = {}
    with contextlib.suppress(FileNotFoundError):  # the folder goes when all parts are joined
        for path in [path for path in parts.iterdir() if path.suffix != ".lock"]:
            with contextlib.suppress(FileNotFoundError):  # its process has renamed it meanwhile
                sizes[path.name] = path.stat().st_size
    return sizes


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether this process has got a lock, which the system releases if the process dies."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except (filelock.Timeout, FileNotFoundError):  # the folder goes when all parts are joined
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _write_part(parts: Path, number: int, rows: "Dataset", own: range, encoder: Encoder) -> None:
    """Write the tokens of a part, those of its own rows, under a temporary name, then rename."""
    # If locks do not work across machines, each writes the same file, and the last rename wins.
    partial = parts / f"{number}.{os.uname().nodename}.{os.getpid()}.partial"
    num_bytes = 0
    num_tokens = 0
    with partial.open("wb") as file:
        for start in own[::BATCH_ROWS]:
            tokens, some = encoder.encode(rows[start : min(start + BATCH_ROWS, own.stop)])
            file.write(tokens.data)
            num_bytes += some
            num_tokens += len(tokens)
    partial.rename(parts / f"{number}.{num_bytes}.{num_tokens}.part")


def _join(stem: Path, parts: Path, numbered: list[Path | None]) -> None:
    """Make one file of all parts, with the checksums of its blocks, and flush it to the disk."""
    found = [path for path in numbered if path]
    numbers = np.array([[int(number) for number in path.name.split(".")[1:3]] for path in found])
    num_bytes, num_tokens = numbers.sum(0).tolist()
    partial = parts / f"all.{os.uname().nodename}.partial"  # it grows where the other processes look
    sha256 = hashlib.sha256()
    checksums = []
    with partial.open("wb") as file:
        for block in _blocks(found):
            file.write(block)
            sha256.update(block)
            checksums.append(zlib.crc32(block))
        file.write(np.array(checksums, np.uint32).data)
    manifest.sync(partial)
    partial.replace(stem.with_suffix(f".{num_bytes}.{num_tokens}.{sha256.hexdigest()[:16]}.tokens"))


def _blocks(paths: list[Path]) -> Iterator[bytes]:
    """The content of several files, one after the other, in blocks of BLOCK_BYTES; only the last one may be smaller."""
    block = b""
    for path in paths:
        with path.open("rb") as file:
            while more := file.read(BLOCK_BYTES - len(block)):
                block += more
                if len(block) == BLOCK_BYTES:
                    yield block
                    block = b""
    if block:
        yield block
