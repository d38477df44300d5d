"""What a judged script may not do: write outside of its folder, reach another machine, start programs."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

CHANGES: tuple[str, ...] = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.symlink",
)
CHANGES += ("os.link", "os.utime", "shutil.rmtree", "shutil.move")
STARTS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
FREE = ("/dev/", "/proc/self/")  # terminals, shared memory and nothing: no files that last


def install(folder: Path, own: Path) -> None:
    """Refuse in this process, from now on, what is forbidden. An audit hook cannot be taken out again."""
    inside = tuple(str(one.resolve()) + os.sep for one in (folder, own))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)

    def refuse_outside(path: Any) -> None:
        if isinstance(path, int) or path is None:
            return
        real = os.path.realpath(os.fsdecode(path))
        if not (real + os.sep).startswith((*inside, *FREE)):
            raise PermissionError(f"the judge lets a script write nothing outside of its temporary folder: {real}")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and writes(args):
            refuse_outside(args[0])
        elif event in CHANGES:
            for path in args[:2] if event in ("os.rename", "os.link", "shutil.move") else args[:1]:
                refuse_parent(path)
        elif event == "socket.connect" and not is_near(args[1]):
            raise PermissionError(f"the judge lets a script reach no other machine: {args[1]}")
        elif event in STARTS:
            raise PermissionError(f"the judge lets a script start no other program: {args[0]}")

    def refuse_parent(path: Any) -> None:
        """A link may be removed, whatever it leads to: its folder counts."""
        if not isinstance(path, int) and path is not None:
            text = os.path.abspath(os.fsdecode(path))
            refuse_outside(os.path.join(os.path.realpath(os.path.dirname(text)), "_"))

    sys.addaudithook(hook)


def writes(args: tuple[Any, ...]) -> bool:
    """Whether an "open" event is for writing."""
    _, mode, flags = args
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))


def is_near(address: Any) -> bool:
    """Whether an address is on this machine."""
    if not isinstance(address, tuple):
        return True  # a socket of the file system
    return str(address[0]).startswith("127.") or address[0] in ("localhost", "::1", "")
