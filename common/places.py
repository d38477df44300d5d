"""The paths that flags name, and which folder a run may have. Imports no torch."""

import errno
import re
import tempfile
from pathlib import Path

from common import UserError, manifest, trust

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk without room or inodes, and a quota


def local(flag: str, value: str) -> Path:
    """The path that a flag names.

    Raises:
        UserError: it is a URL, of which a path would be made: "s3://bucket" would be a folder "s3:"; or no file can
            have such a path, or be looked at.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", value):
        raise UserError(
            f"{flag} {value} is a URL, and only files of this machine are read and written: mount it, as with s3fs, "
            "gcsfuse or rclone, or copy it, and give the path (--out, --resume and --init also take s3://bucket/folder)"
        )
    try:
        path = Path(value).expanduser()
        manifest.looks_at(path)
        path.exists()  # here, where it is a sentence: a name may be too long, or lie in a folder of others
    except (OSError, RuntimeError) as error:
        raise UserError(f"{flag} {value:.300}: {getattr(error, 'strerror', error)}") from error
    return path


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
        trust.refuse_replaceable(path)
    except (OSError, RuntimeError) as error:  # a name that is too long, or links in a circle
        raise UserError(f"--out {out}, --name {name}: {error}") from error
    try:
        with tempfile.TemporaryFile(dir=existing):
            return path
    except OSError as error:
        if existing == path and error.errno in FULL:  # a run survives that, also if it starts again
            return path
        raise UserError(f"--out {out}: {existing} cannot be written to ({error.strerror})") from error
