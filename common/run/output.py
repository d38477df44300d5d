"""What a rank prints. A full disk under it, or a reader that has gone away, ends no training."""

import contextlib
import errno
import io
import os
import select
import shlex
import stat
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

PATIENCE_S = 5.0  # with a reader that has stopped reading


class Output:
    """The two streams of a process.

    Attributes:
        spare: a file that gets what cannot be printed; None while there is none.
    """

    def __init__(self) -> None:
        self.spare: Path | None = None
        self._warned = False  # once for both streams

    def keep(self, content: bytes, reason: str) -> None:
        """Write to the spare file what could not be printed."""
        if not self._warned:
            self._warned = True
            where = f"; what follows is in {self.spare}" if self.spare else ""
            warning = f"warning: the output cannot be written ({reason}), which ends no training{where}\n".encode()
            content = warning + content
            with contextlib.suppress(OSError):
                os.write(2, warning)  # not through sys.stderr, whose write this may be
        with contextlib.suppress(OSError):
            if self.spare:
                self.spare.parent.mkdir(exist_ok=True)
                with append_to(self.spare) as file:
                    file.buffer.write(content)


class _Lasting(io.FileIO):
    """A file descriptor to which every write succeeds: whoever prints could do nothing about an error."""

    def __init__(self, number: int, output: Output) -> None:
        super().__init__(number, "w", closefd=False)
        self.output = output
        self._patience_s = PATIENCE_S

    def write(self, content: Any, /) -> int:
        """Write bytes, or keep them in the spare log."""
        try:
            # A reader that pauses (`less`, Ctrl-S) would hold the training up. A ready pipe takes PIPE_BUF bytes.
            if select.select([], [self.fileno()], [], self._patience_s)[1]:
                self._patience_s = PATIENCE_S
                written = super().write(memoryview(content)[: select.PIPE_BUF])
                if written is not None:
                    return written
            self._patience_s = 0.0
            reason = "nobody reads it"
        except OSError as error:
            reason = error.strerror or str(error)
        self.output.keep(bytes(content), reason)
        return len(content)


def protect() -> Output:
    """Let no write to sys.stdout and sys.stderr raise an OSError, nor the flush at the interpreter's exit."""
    protected = Output()
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if stream is None:  # the process was started without it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(raw, _Lasting):  # protected already
            raw.output = protected
        elif stream is getattr(sys, f"__{name}__"):  # and no notebook's
            buffer = io.BufferedWriter(_Lasting(number, protected))
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=True))
    return protected


def append_to(file: Path) -> TextIO:
    """Open a file of the run to read and append to it.

    Raises:
        OSError: it cannot be opened; it is a link, which could lead to somebody's file elsewhere, or no regular file.
    """
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)  # waits for no pipe's reader
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    return os.fdopen(opened, "a+")


def redirect(log: Path) -> None:
    """Append this process's output to a log, by file descriptor, so that messages of C++ crashes arrive there too."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with append_to(log) as file:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    except OSError as error:
        sys.stderr.write(f"warning: {log} cannot be opened, so this rank prints to the terminal: {error}\n")
    else:
        sys.stdout.write(f"--- {datetime.now().isoformat(timespec='seconds')} {shlex.join(sys.argv)}\n")
        sys.stdout.flush()
