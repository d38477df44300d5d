"""Small disks that fill up: in memory, or for a quota in a file."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL, FEW_FILES, QUOTA = "size=1m", "nr_inodes=64", "quota"


@contextlib.contextmanager
def mounted(place: Path, options: str = SMALL) -> Iterator[Path]:
    """A disk in memory; for a quota that binds root as well, a file with btrfs in it."""
    place.mkdir(parents=True, exist_ok=True)
    commands = [["mount", "-t", "tmpfs", "-o", options, "brigade-test", str(place)]]
    if options == QUOTA:
        image = place.with_name("image")
        image.touch()
        os.truncate(image, 120 * 2**20)
        commands = [["mkfs.btrfs", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]]
        commands.append(["btrfs", "quota", "enable", str(place)])
        if not shutil.which("mkfs.btrfs"):
            pytest.skip("not run: a quota needs btrfs-progs")
    for command in commands:
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("not run: to mount a small disk needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
