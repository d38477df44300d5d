"""Folders of tokens that another program has packed: nanoGPT's, llm.c's and Megatron's files, as memory maps."""

import hashlib
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import filelock
import numpy as np

from common import UserError, manifest, ranks
from common.workloads import packed

# llm.c: 256 int32, of which the first three are a magic number, the version, and the number of tokens.
LLMC_TYPES: dict[tuple[int, int], type[np.unsignedinteger]] = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}
LLMC_MAGICS = {magic for magic, _ in LLMC_TYPES}
LLMC_HEADER = 1024
# Megatron's index: magic, version, type of the tokens, numbers of sequences and documents, then their sizes.
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
LOOKED_AT = 1000  # sequences of a file, at most, whose positions are compared with their sizes
# Its types by code; tokens are never negative, so that the types without a sign read the same numbers.
MEGATRON_TYPES: dict[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    8: np.uint16,
}
SPLITS = {"train": re.compile("train"), "validation": re.compile("val|dev"), "test": re.compile("test")}  # in a name
SAMPLE_BYTES = 2**16
SAMPLES = 64  # of all files together, but two of each
SCAN_TOKENS = 2**24
MOST_TOKENS = 2**31  # which the types with a sign of Megatron have, too
WAIT_S = 600.0


class Tokens:
    """The tokens of several files, one after the other, as one row.

    Attributes:
        digest: hash of the files' names and sizes, and of pieces of them: reading GBs would take minutes.
        sampled: the largest token of these pieces.
    """

    def __init__(self, parts: Sequence[tuple[Path, np.ndarray]]) -> None:
        """Join memory maps of tokens, (n,) each."""
        self._files = parts
        self._parts = [tokens for _, tokens in parts]
        self._ends = np.cumsum([len(tokens) for tokens in self._parts])
        self.sampled = 0
        found = hashlib.sha256()
        samples = max(2, SAMPLES // len(parts))
        for path, tokens in parts:
            found.update(repr((path.name, len(tokens), tokens.dtype.str)).encode())
            length = SAMPLE_BYTES // tokens.itemsize
            for start in np.linspace(0, max(0, len(tokens) - length), samples).astype(int):
                piece = np.array(tokens[start : start + length])
                found.update(piece.data)
                self.sampled = max(self.sampled, int(piece.max(initial=0)))
        self.digest = found.hexdigest()[:16]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Tokens at these positions of the row, of the same shape."""
        if len(self._parts) == 1:
            return self._parts[0][positions]
        rows = np.empty(positions.shape, np.int64)
        which = np.searchsorted(self._ends, positions, side="right")
        for i in np.unique(which):
            here = which == i
            start = self._ends[i] - len(self._parts[i])
            rows[here] = self._parts[i][positions[here] - start]
        return rows

    def cut(self, share: float) -> tuple["Tokens", "Tokens"]:
        """All but the end of the last file, and this end: `share` of the file stays."""
        path, tokens = self._files[-1]
        middle = round(share * len(tokens))
        return Tokens([*self._files[:-1], (path, tokens[:middle])]), Tokens([(path, tokens[middle:])])

    def largest(self) -> int:
        """The largest token, from all of the files."""
        return max(
            (
                int(tokens[start : start + SCAN_TOKENS].max())
                for tokens in self._parts
                for start in range(0, len(tokens), SCAN_TOKENS)
            ),
            default=0,
        )


def load(folder: Path) -> tuple[str, dict[str, Tokens]] | None:
    """The layout of a folder and the tokens of its splits, "train" and perhaps others; None if it has no such files.

    A file belongs to the split that its name has in it; a lone file without one is for training.

    Raises:
        UserError: a file is missing, cut off, or no tokens; or its name tells no split.
    """
    try:
        return _load(folder)
    except OSError as error:  # a pipe or a link to nowhere, which the file system shows as a file; or the disk
        what = f"{error.filename or folder}: {error.strerror or error}"
        raise UserError(f"--data: {what}; it must be a file of tokens that can be read") from error


def _load(folder: Path) -> tuple[str, dict[str, Tokens]] | None:
    files = sorted(folder.glob("*.bin"))
    for index in sorted(folder.glob("*.idx")):
        if _begins(index, len(MEGATRON_MAGIC)) == MEGATRON_MAGIC and index.with_suffix(".bin") not in files:
            raise UserError(f"--data {folder} has {index.name} of Megatron, but no {index.stem}.bin with its tokens")
    if not files:
        return None
    layouts = set()
    parts: dict[str, list[tuple[Path, np.ndarray]]] = {}
    for path in files:
        splits = [split for split, pattern in SPLITS.items() if pattern.search(path.stem)]
        if len(splits) != 1 and len(files) > 1:
            raise UserError(f"--data {folder}: {path.name} must have either train, val or test in its name")
        layout, tokens = _open(path)
        if not len(tokens):
            raise UserError(f"--data {folder}: {path.name} has no tokens")
        layouts.add(layout)
        parts.setdefault(splits[0] if len(splits) == 1 else "train", []).append((path, tokens))
    if len(layouts) > 1:
        raise UserError(f"--data {folder} has files of several layouts: {', '.join(sorted(layouts))}")
    if "train" not in parts:
        raise UserError(
            f"--data {folder}: no file has train in its name, only {', '.join(path.name for path in files)}"
        )
    return layouts.pop(), {split: Tokens(found) for split, found in parts.items()}


def vocab_size(splits: Sequence[Tokens]) -> int:
    """One more than the largest token. The first process that asks reads all tokens, and keeps the answer."""
    import datasets

    name = hashlib.sha256(" ".join(split.digest for split in splits).encode()).hexdigest()[:16]
    file = datasets.config.HF_DATASETS_CACHE / "packed" / f"{name}.vocabulary"
    file.parent.mkdir(parents=True, exist_ok=True)
    sampled = max(split.sampled for split in splits)
    lock = filelock.FileLock(file.with_suffix(".lock"), timeout=WAIT_S)  # the system releases it if its holder dies
    if not _kept(file, sampled):  # said before the lock, which another process may have got
        ranks.print0("data     looking for the largest token, once; --tokenizer would tell it")
    try:
        with lock:
            if size := _kept(file, sampled):
                return size
            size = 1 + max(split.largest() for split in splits)
            if size > MOST_TOKENS:
                raise UserError(f"--data: the largest token is {size - 1}, perhaps a negative number: no tokens")
            manifest.replace(file, _sealed(file, size))
            return size
    except filelock.Timeout as error:
        raise UserError(
            f"--data: another process has held {error.lock_file} for {WAIT_S:.0f} s: stop it, or give --tokenizer"
        ) from error


def _sealed(file: Path, size: int) -> str:
    """What the file of a vocabulary's size holds: the size, and a digest, which a changed bit does not fit."""
    return f"{size} {hashlib.sha256(f'{file.name} {size}'.encode()).hexdigest()[:16]}"


def _kept(file: Path, sampled: int) -> int:
    """The vocabulary's size that a file holds; 0 if it is not there, or cannot be right: then it is made again."""
    try:
        found = manifest.read_bytes(file, 99).decode()
        size = int(found.split(" ")[0])
    except (OSError, ValueError):
        return 0
    return size if found == _sealed(file, size) and sampled < size <= MOST_TOKENS else 0


def _begins(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a regular file.

    Raises:
        OSError: it is not one, or cannot be read.
    """
    manifest.size(path)
    with path.open("rb") as file:
        return file.read(num_bytes)


def _open(path: Path) -> tuple[str, np.ndarray]:
    """The layout of a file, and its tokens (n,), a memory map."""
    size = manifest.size(path)
    header = _begins(path, 12)
    index = path.with_suffix(".idx")
    if index.exists():
        dtype, count = _read_index(index)
        return "Megatron", _map(path, dtype, 0, count)
    if len(header) == 12:
        magic, version, count = np.frombuffer(header, np.int32).tolist()
        if (magic, version) in LLMC_TYPES:
            return "llm.c", _map(path, LLMC_TYPES[magic, version], LLMC_HEADER, count)
        if magic in LLMC_MAGICS:
            known = " or ".join(f"{key} version {number}" for key, number in LLMC_TYPES)
            raise UserError(
                f"--data {path} has the header {magic} version {version} of llm.c's layout: it must be {known}"
            )
    if size % 2:
        raise UserError(
            f"--data {path} has {size} bytes: without a header or an .idx file, it must be nanoGPT's 16-bit tokens"
        )
    return "nanoGPT", _map(path, np.uint16, 0, size // 2)


def _read_index(path: Path) -> tuple[type[np.unsignedinteger], int]:
    """The type and the number of the tokens that a file of Megatron has."""
    header = _begins(path, MEGATRON_HEADER.size)
    if len(header) < MEGATRON_HEADER.size or header[:9] != MEGATRON_MAGIC:
        raise UserError(f"--data {path} is no index of Megatron")
    _, version, code, sequences, documents = MEGATRON_HEADER.unpack(header)
    if version != 1 or code not in MEGATRON_TYPES:
        raise UserError(f"--data {path} has version {version} and type {code} of Megatron's layout, which are unknown")
    # A size and a position for each sequence, and the first sequence of each document.
    wanted = MEGATRON_HEADER.size + 12 * sequences + 8 * documents
    found = path.stat().st_size
    if found not in (wanted, wanted + sequences):  # sets of images and text have a mode for each sequence as well
        raise UserError(f"--data {path} has {found} bytes instead of {wanted} for {sequences} sequences: it is cut off")
    if not sequences:
        return MEGATRON_TYPES[code], 0
    sizes = np.memmap(path, np.int32, "r", MEGATRON_HEADER.size, (sequences,))
    if (least := int(sizes.min())) < 0:
        raise UserError(f"--data {path} has a sequence of {least} tokens")
    # They are read as they lie, whatever the positions say: those of a thousand are compared.
    starts = np.memmap(path, np.int64, "r", MEGATRON_HEADER.size + 4 * sequences, (sequences,))
    some = np.unique(np.linspace(0, sequences - 1, LOOKED_AT).astype(np.int64))
    ends = starts[some] + sizes[some].astype(np.int64) * MEGATRON_TYPES[code]().itemsize
    total = int(sizes.sum(dtype=np.int64))
    after = np.append(starts[some[:-1] + 1], total * MEGATRON_TYPES[code]().itemsize)
    if starts[0] or not np.array_equal(ends, after):
        raise UserError(
            f"--data {path} has sequences that do not lie one after the other in the .bin file: pack them again"
        )
    return MEGATRON_TYPES[code], total


def _map(path: Path, dtype: type[np.unsignedinteger], offset: int, count: int) -> np.ndarray:
    found = path.stat().st_size
    wanted = offset + count * dtype().itemsize
    if count < 0:
        raise UserError(f"--data {path} has {count} tokens, as its header says: it is damaged")
    if found != wanted:
        raise UserError(
            f"--data {path} has {found} bytes instead of {wanted}: it is cut off, or not what its header says"
        )
    if not count:
        return np.zeros(0, dtype)
    return packed.Mapped(path, dtype, "r", offset, (count,))
