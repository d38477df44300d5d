"""Processes of Python that begin with all that the tests import: forks of one that has it.

pytest's workers are such forks, and the fork servers of their ranks: each would import for seconds. What runs as
`python tests/harness/forks.py ADDRESS ... -c CODE` lets a fork of the process that serves there run the code.
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing.util
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

SPAWN = multiprocessing.util.spawnv_passfds
MOST = 1 << 16  # bytes of code
READY = "ready\n"


@contextlib.contextmanager
def server(root: Path) -> Iterator[str]:
    """Run a process that serves, in the root of the repository; gives what replaces `python` in a command.

    Raises:
        ImportError: what the tests import cannot be imported.
    """
    with tempfile.TemporaryDirectory(prefix="brigade-forks-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/address"
        listener.bind(address)
        listener.listen()
        code = f"from tests.harness import forks; exec(forks.serve({listener.fileno()})); forks.end()"
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # It ends when its input does.
        with subprocess.Popen([sys.executable, "-c", code], cwd=root, pass_fds=[listener.fileno()], **pipes) as process:
            said = "the tests cannot begin:\n"
            while (line := process.stdout.readline()) != READY:
                if not line:
                    raise ImportError(said)
                said += line
            yield shlex.join([sys.executable, "-S", str(Path(__file__).resolve()), address])


def serve(fd: int) -> str:
    """Fork for each who connects to a socket; returns, in a fork only, the code to run there.

    It ends when its input does, and kills the forks that are left.
    """
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends this process
    gc.disable()  # imports only add: the collector takes a quarter of their time
    said = READY
    try:
        importlib.import_module("tests.harness.preload")
    except Exception:
        said = traceback.format_exc()
    with contextlib.suppress(BrokenPipeError):
        os.write(1, said.encode())
    if said != READY:
        end()
    os.dup2(2, 1)  # what forks print is no answer
    gc.enable()
    listener = socket.socket(fileno=fd)
    pids = []
    while True:
        if listener not in select.select([listener, 0], [], [])[0]:
            for pid in pids:  # not another's: nobody has waited for them
                os.kill(pid, signal.SIGKILL)
            end()
        connection, _ = listener.accept()
        code, fds, _, _ = socket.recv_fds(connection, MOST, 3)
        pid = os.fork()
        if not pid:
            break
        pids.append(pid)
        for one in (connection.detach(), *fds):
            os.close(one)
    signal.signal(signal.SIGINT, interrupted)
    listener.close()
    begin_fork_server()
    for number, one in enumerate(fds):
        os.dup2(one, number)
        os.close(one)
    connection.detach()  # it closes when this process ends, which ends the command
    return code.decode()


def end() -> NoReturn:
    """End this process; to take all modules down would take seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def begin_fork_server() -> None:
    """Let the fork server of `multiprocessing` be a fork of this process, which has no threads."""
    multiprocessing.util.spawnv_passfds = spawn_by_fork  # type: ignore[assignment]
    forkserver.ensure_running()
    multiprocessing.util.spawnv_passfds = SPAWN


def spawn_by_fork(path: Any, args: Any, fds: Any) -> int:
    """As `multiprocessing.util.spawnv_passfds`, but a fork server is a fork of this process, which has no threads."""
    if "multiprocessing.forkserver" not in args[-1]:
        return SPAWN(path, args, fds)
    pid = os.fork()
    if pid:
        return pid
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/dev/fd"):
            if int(name) not in (0, 1, 2, nothing, *fds):
                os.dup2(nothing, int(name))  # not closed: objects of pytest write to these numbers, whatever has them
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # and not what pytest captures
        exec(args[-1], {})  # it never returns
    finally:
        os._exit(0)


def main() -> None:
    """Have a fork run the code that ends the command line, and end when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the fork
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        socket.send_fds(server, [sys.argv[-1].encode()], [0, 1, 2])
        server.recv(1)


if __name__ == "__main__":
    main()
