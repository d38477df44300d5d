"""The paths that flags name, and which folder a run may have. Imports no torch."""

import errno
import re
import tempfile
from pathlib import Path

from common import UserError, trust

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk without room or inodes, and a quota


def local(flag: str, value: str) -> Path:
    """The path that a flag names.

    Raises:
        UserError: it is a URL, of which a path would be made: "s3://bucket" would be a folder "s3:"; or there is no
            such user as in ~user.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", value):
        raise UserError(
            f"{flag} {value} is a URL, and only files of this machine are read and written: mount it, as with s3fs, "
            "gcsfuse or rclone, or copy it, and give the path"
        )
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise UserError(f"{flag} {value}: {error}") from error


def choose(out: str, name: str) -> Path:
    """This run's folder, `<out>/<name>`. Creates nothing.

    Raises:
        UserError: the folder could not be created or written to, or other users could change it or replace it; or it
            would not be in `out`.
    """
    if not Path(name).parts or {"..", "/"} & {*Path(name).parts}:
        raise UserError(f"--name {name} would be no folder in --out {out}: give a name without .. and / before it")
    try:
        path = (local("--out", out) / name).resolve()
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        trust.refuse_open(path)
        trust.refuse_open(path.parent)
    except (OSError, RuntimeError) as error:  # a name that is too long, or links in a circle
        raise UserError(f"--out {out}, --name {name}: {error}") from error
    try:
        with tempfile.TemporaryFile(dir=existing):
            return path
    except OSError as error:
        if existing == path and error.errno in FULL:  # a run survives that, also if it starts again
            return path
        raise UserError(f"--out {out}: {existing} cannot be written to ({error.strerror})") from error
