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

from common import UserError, manifest, printable, ranks
from common.workloads import parsing, private_api

if TYPE_CHECKING:
    from datasets import Dataset

BATCH_ROWS = 256  # that are tokenized at a time
PARTS = 256  # of a set, at most; a process packs one before it looks for more
WAIT_S = 600.0  # for other processes that pack the same set, while nothing of it grows
POLL_S = 0.1
SHOW_S = 30.0  # between lines on how far the packing is
BLOCK_BYTES = 2**20  # small, because the first batches read a few tokens from each of many blocks
CHECKED_AT_ONCE = 2**28  # bytes, read in 0.1 s; a larger file is checked block by block, when each is first read


class Mapped(np.memmap):
    """A memory map of a file, to read. Where it is unpickled it opens the file again; numpy pickles the content.

    A loader worker that is not forked, as on macOS, gets its data set so.
    """

    def __getitem__(self, index: Any) -> Any:
        """A part of the map; or a copy, which is an ordinary array."""
        found = super().__getitem__(index)
        return (
            found if not isinstance(found, np.ndarray) or np.may_share_memory(found, self) else found.view(np.ndarray)
        )

    def __reduce__(self) -> Any:
        """The file, and where in it this part begins."""
        whole: Any = self
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if getattr(whole, "offset", None) is None or not self.size or not self.flags.c_contiguous:
            return np.array(self).__reduce__()
        place = whole.offset + self.ctypes.data - whole.ctypes.data
        return Mapped, (whole.filename, self.dtype, "r", place, self.shape)


class Packed:
    """The tokens of one file.

    Attributes:
        tokens: (num_tokens,) uint16 or uint32, a memory map.
    """

    def __init__(self, path: Path, num_tokens: int, dtype: type[np.unsignedinteger]) -> None:
        """Open a file that `pack` has written; compare a small one with its checksums at once.

        Raises:
            UserError: the file has changed since it was written.
        """
        self._path = path
        size = num_tokens * dtype().itemsize
        num_blocks = -(-size // BLOCK_BYTES)
        found = manifest.size(path)
        wanted = size + 4 * num_blocks
        if found != wanted:
            raise self._changed(f"it has {found} bytes instead of {wanted}")
        # A memory map cannot be empty.
        content = Mapped(path, np.uint8, "r") if found else np.zeros(0, np.uint8)
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
    part_rows = max(BATCH_ROWS, -(-len(rows) // PARTS))
    shares = [range(start, min(len(rows), start + part_rows)) for start in range(0, len(rows), part_rows)]
    parts = stem.with_suffix(f".{part_rows}.parts")
    began = shown = changed = time.monotonic()
    state: object = None
    while True:
        if found := _packed(stem, encoder.dtype):
            shutil.rmtree(parts, ignore_errors=True)
            return found
        with contextlib.suppress(FileExistsError):  # whoever joins all parts may remove it while mkdir looks at it
            parts.mkdir(parents=True, exist_ok=True)
        sizes = _sizes(parts)
        done = {int(path.name.split(".")[0]): path for path in sizes if path.suffix == ".part"}
        missing = [number for number in range(len(shares)) if number not in done]
        now = time.monotonic()
        if now - shown > SHOW_S:
            shown = now
            share = 1 - len(missing) / max(1, len(shares))
            ranks.print0(f"data     tokenizing: {share:.0%} after {(now - began) / 60:.1f} min; kept for later starts")
        for number in missing or [len(shares)]:
            with _locked(parts / f"{number}.lock") as mine:
                # Looked at again: its last owner may have completed it, or all of them.
                if not mine or any(parts.glob(f"{number}.*.part")):
                    continue
                if _packed(stem, encoder.dtype):
                    break
                if missing:
                    _write_part(parts, number, rows, shares[number], encoder)
                else:
                    _join(stem, parts, [done[number] for number in range(len(shares))])
            break
        else:  # other processes have all that is missing
            if sizes != state:
                state = sizes
                changed = now
            if now - changed > WAIT_S:
                raise UserError(
                    f"--data: another process has a lock in {parts} and has tokenized nothing for {WAIT_S:.0f} s: "
                    "stop it"
                )
            time.sleep(POLL_S)


def _packed(stem: Path, dtype: type[np.unsignedinteger]) -> Path | None:
    """The whole file, if it is there and has not changed since it was written."""
    # Older versions wrote files without checksums, and left one number out of their names.
    for path in stem.parent.glob(f"{stem.name}.*.*.*.tokens"):
        try:
            Packed(path, int(path.name.split(".")[2]), dtype)
            return path
        except (ValueError, OSError) as error:  # also of a name whose numbers are none
            sys.stderr.write(f"note: {printable(str(error))}\n")
    return None


def _sizes(parts: Path) -> dict[Path, int]:
    """Files that grow while their processes work, and parts that are complete."""
    found = {}
    with contextlib.suppress(FileNotFoundError):  # another process may rename a file, or delete all of them
        for path in [path for path in parts.iterdir() if path.suffix != ".lock"]:
            with contextlib.suppress(FileNotFoundError):
                found[path] = path.stat().st_size
    return found


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
    """Write the tokens of some rows under a temporary name, then rename: `<number>.<bytes of text>.<tokens>.part`."""
    # If locks do not work across machines, each writes the same file, and the last rename wins.
    partial = parts / f"{number}.{os.uname().nodename}.{os.getpid()}.partial"
    num_bytes = 0
    num_tokens = 0
    with partial.open("wb") as file:
        for start in own[::BATCH_ROWS]:
            tokens, some = encoder.encode(parsing.cells(rows, slice(start, min(start + BATCH_ROWS, own.stop))))
            file.write(tokens.data)
            num_bytes += some
            num_tokens += len(tokens)
    partial.rename(parts / f"{number}.{num_bytes}.{num_tokens}.part")


def _join(stem: Path, parts: Path, paths: Sequence[Path]) -> None:
    """Make one file of all parts, with checksums of its blocks; it grows where the other processes look."""
    numbers = [[int(number) for number in path.name.split(".")[1:3]] for path in paths]
    num_bytes = sum(one for one, _ in numbers)
    num_tokens = sum(one for _, one in numbers)
    partial = parts / f"joined.{os.uname().nodename}.{os.getpid()}.partial"
    sha256 = hashlib.sha256()
    checksums = []
    with partial.open("wb") as file:
        for block in _blocks(paths):
            file.write(block)
            sha256.update(block)
            checksums.append(zlib.crc32(block))
        file.write(np.array(checksums, np.uint32).data)
    manifest.sync(partial)
    partial.replace(stem.with_suffix(f".{num_bytes}.{num_tokens}.{sha256.hexdigest()[:16]}.tokens"))


def _blocks(paths: Sequence[Path]) -> Iterator[bytes]:
    """The contents of several files, one after the other, in blocks of BLOCK_BYTES; the last one may be shorter."""
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
