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
        tokens: (num_tokens,) uint16, a memory map.
    """

    def __init__(self, path: Path, num_tokens: int) -> None:
        """Open a file that `seal` has completed; compare a small one with its checksums at once.

        Raises:
            UserError: the file has changed since it was written.
        """
        self._path = path
        num_blocks = -(-2 * num_tokens // BLOCK_BYTES)
        found = path.stat().st_size
        wanted = 2 * num_tokens + 4 * num_blocks
        if found != wanted:
            raise self._changed(f"it has {found} bytes instead of {wanted}")
        # A memory map cannot be empty.
        content = np.memmap(path, np.uint16, "r") if found else np.zeros(0, np.uint16)
        self.tokens = content[:num_tokens]
        self._checksums = content[num_tokens:].copy().view(np.uint32)
        self._checked = np.zeros(num_blocks, bool)
        if 0 < 2 * num_tokens <= CHECKED_AT_ONCE:
            self.check(np.zeros(1, np.int64), num_tokens)

    def check(self, starts: np.ndarray, length: int) -> None:
        """Compare the blocks that hold `length` tokens from each of `starts` on, unless that has been done before.

        Raises:
            UserError: the file has changed since it was written.
        """
        offsets = np.append(np.arange(0, length, BLOCK_BYTES // 2), length - 1)
        blocks = 2 * (starts[:, None] + offsets) // BLOCK_BYTES
        if self._checked[blocks].all():
            return
        for block in np.unique(blocks):
            tokens = self.tokens[block * BLOCK_BYTES // 2 : (block + 1) * BLOCK_BYTES // 2]
            if zlib.crc32(tokens.data) != self._checksums[block]:
                raise self._changed(f"block {block} has another checksum")
            self._checked[block] = True

    def _changed(self, how: str) -> UserError:
        self._path.unlink(missing_ok=True)
        return UserError(
            f"{self._path} has changed since it was written ({how}). It has been deleted; the same command packs the "
            "text again"
        )


def seal(path: Path) -> None:
    """Append the checksums of its blocks to a file of tokens, and flush it to the disk."""
    checksums = []
    with path.open("rb+") as file:
        while block := file.read(BLOCK_BYTES):
            checksums.append(zlib.crc32(block))
        file.write(np.array(checksums, np.uint32).data)
    manifest.sync(path)
