"""Whether other users could change what lies in a folder. Imports no torch."""

import grp
import os
import pwd
import stat
from pathlib import Path

from common import UserError


def refuse_open(folder: Path, own: bool = True) -> None:
    """Refuse a folder in which other users can replace files, unless TRUST_OPEN_FOLDERS is set.

    They can if they own it, if every user can write to it, or the members of a group that is not this user's alone. In
    a folder of root with the sticky bit, as /tmp, each user can replace his own files only.

    Args:
        folder: what is no folder is not refused.
        own: whether it has to be this user's. Who names a folder to read a checkpoint in it trusts its owner.

    Raises:
        UserError: it is one.
        OSError: it cannot be looked at.
    """
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    mode = found.st_mode
    trust = os.environ.get("TRUST_OPEN_FOLDERS")
    if not stat.S_ISDIR(mode) or (mode & stat.S_ISVTX and found.st_uid == 0) or trust == "1":
        return
    shared = mode & stat.S_IWGRP and not is_own_group(found.st_gid)
    trusted = trust == "group" and shared and found.st_gid in (os.getegid(), *os.getgroups())
    if own and not trusted and found.st_uid not in (0, os.geteuid()):
        fault = f"belongs to another user (number {found.st_uid}), so its checkpoints are not trusted: use your own"
    elif mode & stat.S_IWOTH:
        fault = f"is writable by every user, so its checkpoints are not trusted: chmod o-w {folder}"
    elif shared and not trusted:
        fault = f"is writable by group {found.st_gid}: chmod g-w {folder}, or trust it: TRUST_OPEN_FOLDERS=group"
    else:
        return
    raise UserError(
        f"{folder} {fault}; where that changes nothing (SMB, FUSE, WSL, root on NFS or in a container) and no other "
        "user has access, set TRUST_OPEN_FOLDERS=1"
    )


def is_own_group(number: int) -> bool:
    """Whether a group is this user's alone: most systems make one for each user, and a umask of 002 that fits it."""
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(number)
    except KeyError:
        return False
    return (number, group.gr_name) == (user.pw_gid, user.pw_name) and {*group.gr_mem} <= {user.pw_name}
