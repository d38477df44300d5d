"""Paths of objects, which the code for checkpoints uses as it uses those of files.

A folder is there if objects are: a checkpoint is, once its manifest is, which is written last and in one piece.
"""

import io
import re
import stat
from collections.abc import Iterator
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, Self

from common import UserError, manifest
from common.store.objects import uploads
from common.store.objects.client import PACKAGES, ask, filesystem, size_and_tag
from common.store.objects.reader import RangeReader

RANGE_BYTES = 2**24  # that one request reads


class StorePath(PurePosixPath):
    """The URL of an object or of a folder of them."""

    def __str__(self) -> str:
        """The URL; pathlib takes one of its slashes away."""
        return re.sub("^([a-z0-9]+):/+", r"\1://", super().__str__())

    def __fspath__(self) -> str:
        """It is no file: os.open would make one of that name.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self} is no file of this machine")

    def resolve(self) -> Self:
        """Itself."""
        return self

    expanduser = resolve

    @property
    def files(self) -> Any:
        """What reads and writes its store."""
        return filesystem(self.parts[0].rstrip(":"))

    def stat(self) -> Any:
        """Its size and kind, as of a file.

        Raises:
            FileNotFoundError: there is no such object, though there may be objects below that name.
            OSError: the store does not answer, or refuses.
        """
        if len(self.parts) < 3:
            raise FileNotFoundError(str(self))
        return SimpleNamespace(st_mode=stat.S_IFREG, st_size=size_and_tag(str(self), self.files)[0])

    def is_file(self) -> bool:
        """Whether there is such an object."""
        try:
            return bool(self.stat())
        except FileNotFoundError:
            return False

    def exists(self) -> bool:
        """Whether there is such an object, or one below that name."""
        return self.is_file() or bool(self.below())

    def below(self) -> list[Self]:
        """Every object below that name."""
        try:
            found = ask(self, "listed", lambda: self.files.find(str(self)))
        except FileNotFoundError:
            return []
        # Not by the store's own name of its kind: adlfs would call an az:// abfs://.
        return [type(self)(f"{self.parts[0]}//{name}") for name in found]

    def iterdir(self) -> Iterator[Self]:
        """The folders in it that have a manifest: what else lies there is of saves that were not committed."""
        return (one.parent for one in self.below() if one.name == manifest.NAME and one.parent.parent == self)

    def glob(self, _: str) -> list[Self]:
        """Nothing: who reads a checkpoint in a store reads what its manifest names, and no stranger."""
        return []

    def open(self, mode: str, buffering: int = -1) -> Any:
        """The object, to read from any place or to write at once; written whole or not at all."""
        if mode != "rb":
            return uploads.Upload(str(self), self.files)
        return io.BufferedReader(Ranges(self)) if buffering else Ranges(self)

    def read_bytes(self) -> bytes:
        """All of the object."""
        return bytes(ask(self, "read", lambda: self.files.cat_file(str(self))))

    def read_text(self) -> str:
        """The object's text."""
        return self.read_bytes().decode()

    def read(self, start: int, end: int) -> bytes:
        """Bytes of the object.

        Raises:
            OSError: they cannot be read, or there are fewer.
        """
        found = bytes(ask(self, "read", lambda: self.files.cat_file(str(self), start=start, end=end)))
        if len(found) != end - start:
            raise OSError(f"{self} gave {len(found)} bytes instead of {end - start}")
        return found

    def reader(self) -> Any:
        """The storage reader of a checkpoint for torch.distributed.checkpoint."""
        return RangeReader(self)


class Ranges(io.RawIOBase):
    """Reads an object as a file, `RANGE_BYTES` a request."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        self._size = path.stat().st_size
        self._at = 0
        self._kept = (0, b"")  # where the newest range begins, and its bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, counted from the start."""
        assert whence == io.SEEK_SET
        self._at = offset
        return offset

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as a range goes; 0 at the end."""
        begin, content = self._kept
        if not begin <= self._at < begin + len(content):
            begin = self._at
            end = min(begin + RANGE_BYTES, self._size)
            content = self._path.read(begin, end) if begin < end else b""
            self._kept = begin, content
        part = memoryview(content)[self._at - begin :][: len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def parse(flag: str, value: str) -> StorePath:
    """The URL that a flag names.

    Raises:
        UserError: its store's package is missing, or it names no folder, or holds a password, which is not repeated, or
            it cannot hold a run.
    """
    scheme, _, rest = value.partition("://")
    if "@" in rest.partition("/")[0] or "?" in rest:
        raise UserError(
            f"{flag} {scheme}://...: a URL with a user, a password or a query is not taken, as it would stand in "
            "config.json and logs; give credentials as the store's own tools take them: environment, file or role"
        )
    if not rest.strip("/") or {"..", "."} & {*rest.split("/")}:
        raise UserError(f"{flag} {value}: name a bucket and a folder in it, as in {scheme}://bucket/folder")
    if scheme == "hf" and flag == "--out":
        raise UserError(
            f"--out {value}: a run shows every few seconds that it lives, and the Hub would make a commit each time; "
            "train into a folder or s3://, and upload the checkpoint that you want to keep"
        )
    try:
        filesystem(scheme)
    except ImportError as error:
        package = PACKAGES[scheme]
        raise UserError(f"{flag} {value} needs the package {package}: pip install {package} ({error})") from error
    return StorePath(f"{scheme}://{rest.strip('/')}")
