"""A file of packed tokens, which ends with a checksum of each of its blocks: a changed file is found, not read."""

import zlib
from pathlib import Path

import numpy as np

from common import UserError, manifest

BLOCK_BYTES = 2**20  # small, because the first batches read a few tokens from each of many blocks
CHECKED_AT_ONCE = 2**28  # bytes, read in 0.1 s; a larger file is checked block by block, when each is first read


class Packed:
    """The tokens of one file.

    Attributes:
        tokens: (num_tokens,) uint16 or uint32, a memory map.
    """

    def __init__(self, path: Path, num_tokens: int, dtype: type[np.unsignedinteger]) -> None:
        """Open a file that `seal` has completed; compare a small one with its checksums at once.

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


def token_type(vocab_size: int) -> type[np.unsignedinteger]:
    """The type that tokens of a vocabulary are stored in."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def seal(path: Path) -> None:
    """Append the checksums of its blocks to a file of tokens, and flush it to the disk."""
    checksums = []
    with path.open("rb+") as file:
        while block := file.read(BLOCK_BYTES):
            checksums.append(zlib.crc32(block))
        file.write(np.array(checksums, np.uint32).data)
    manifest.sync(path)
