"""Which folder a run may have: one that this user can write to, and that not every user can. And what is no path."""

import errno
import os
import re
import stat
import tempfile
from pathlib import Path

from common import UserError, ranks

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk without room or inodes, and a quota


def local(flag: str, value: str) -> Path:
    """The path that a flag names.

    Raises:
        UserError: it is a URL, of which a path would be made: "s3://bucket" would be a folder "s3:".
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", value):
        raise UserError(
            f"{flag} {value} is a URL, and only files of this machine are read and written: mount it, as with s3fs, "
            "gcsfuse or rclone, or copy it, and give the path"
        )
    return Path(value).expanduser()


def choose(out: str, name: str) -> Path:
    """Choose this run's folder, `<out>/<name>` (all ranks). Creates nothing.

    Raises:
        UserError: the folder could not be created or written to, or every user can write to it; or it would not be in
            `out`.
    """

    def choose() -> str:
        if not Path(name).parts or {"..", "/"} & {*Path(name).parts}:
            raise UserError(f"--name {name} would be no folder in --out {out}: give a name without .. and / before it")
        try:
            path = (local("--out", out) / name).resolve()
            existing = next(parent for parent in (path, *path.parents) if parent.exists())
            refuse_open(path)
        except (OSError, RuntimeError) as error:  # a name that is too long, or ~user of an unknown user
            raise UserError(f"--out {out}, --name {name}: {error}") from error
        try:
            with tempfile.TemporaryFile(dir=existing):
                return str(path)
        except OSError as error:
            if existing == path and error.errno in FULL:  # a run survives that, also if it starts again
                return str(path)
            raise UserError(f"--out {out}: {existing} cannot be written to ({error.strerror})") from error

    return Path(ranks.from_rank0(choose))


def refuse_open(folder: Path) -> None:
    """Refuse a folder in which every user can replace files, unless TRUST_OPEN_FOLDERS=1.

    Raises:
        UserError: it is one.
        OSError: it cannot be looked at.
    """
    try:
        mode = folder.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    is_open = stat.S_ISDIR(mode) and mode & stat.S_IWOTH and not mode & stat.S_ISVTX
    if is_open and os.environ.get("TRUST_OPEN_FOLDERS") != "1":
        raise UserError(
            f"{folder} is writable by every user, so its checkpoints are not trusted: chmod o-w {folder}; where that "
            "changes nothing (SMB, FUSE, WSL) and no other user has access, set TRUST_OPEN_FOLDERS=1"
        )
