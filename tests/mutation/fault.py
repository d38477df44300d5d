"""A fault: a change of one text in one file, and the tests that must fail with it."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A change of one file.

    Attributes:
        name: what the fault does, in a few words.
        file: where, from the root of the repository.
        old: the text that it replaces, which the file has exactly once.
        new: what takes its place.
        tests: names of the tests that must see it, as pytest takes them.
        mark: what pytest's -m needs to run them; "" for all markers but that of the fault matrix.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    mark: str = ""

    def planted(self, root: Path) -> str:
        """The file's text with the fault.

        Raises:
            AssertionError: the file does not have the text exactly once.
        """
        text = (root / self.file).read_text()
        times = text.count(self.old)
        assert times == 1, f"{self.name}: {self.file} has {times} times, not once: {self.old}"
        return text.replace(self.old, self.new)

    def plant(self, root: Path, number: int) -> bytes:
        """Put the fault into a copy of the repository; returns what the file was.

        Python takes a compiled file for that of a source with the same size and second: each fault has its own second.
        """
        path = root / self.file
        before = path.read_bytes()
        path.write_text(self.planted(root))
        second = path.stat().st_mtime + 10 * number
        os.utime(path, (second, second))
        return before
