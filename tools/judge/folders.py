"""A copy of the folder that a script runs in, made of links: what the script writes stays in the copy."""

import os
from pathlib import Path

SKIPPED = {"__pycache__", "node_modules", "venv", "env", "runs", "wandb", "site-packages"}
MOST_ENTRIES = 4000


def link(source: Path, target: Path) -> None:
    """Make real folders, and links to the files in them, as far as there are not too many; then links to folders."""
    left = [MOST_ENTRIES]

    def fill(one: Path, other: Path) -> None:
        other.mkdir(parents=True, exist_ok=True)
        for entry in entries(one):
            if entry.name.startswith(".") or entry.name in SKIPPED or (not entry.is_dir() and not entry.is_file()):
                continue
            left[0] -= 1
            if entry.is_dir(follow_symlinks=False) and left[0] > 0:
                fill(Path(entry.path), other / entry.name)
            else:
                (other / entry.name).symlink_to(os.path.realpath(entry.path))

    fill(source, target)


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, files first; nothing of one that may not be read or is gone."""
    try:
        return sorted(os.scandir(folder), key=lambda found: (found.is_dir(), found.name))
    except OSError:
        return []


def prepare(script: Path, cwd: Path, folder: Path) -> tuple[Path, Path, dict[str, str]]:
    """Copy what a run needs.

    Args:
        script: the file, as the user knows it.
        cwd: the folder that the user runs it in.
        folder: a temporary folder.

    Returns:
        The script in the copy, the folder to run it in, and which folder of the copy stands for which of the user's.
    """
    script, cwd = script.resolve(), cwd.resolve()
    work = folder / "work"
    if script.is_relative_to(cwd):
        link(cwd, work)
        place = work / script.relative_to(cwd)
        _own(script, place)
        return place, work, {str(work): str(cwd)}
    work.mkdir(parents=True)
    link(script.parent, folder / "script")
    place = folder / "script" / script.name
    _own(script, place)
    return place, work, {str(folder / "script"): str(script.parent), str(work): str(cwd)}


def _own(script: Path, place: Path) -> None:
    """The script itself, also where it lies in what is not copied."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.symlink_to(script)
