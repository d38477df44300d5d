"""Ranks are forked from a process that has imported torch, so that a start takes a fraction of the seconds.

The launcher has to import torch anyway. Before it does anything else, `begin` forks from it a server that imports what
all recipes import, and then waits for the launcher. It computes nothing, has one thread, and draws no random number, so
every rank that is forked from it, also after a failure, begins with the same modules as the first one, and with nothing
that a rank has done. The recipe, `common` and all that depends on the workload are imported by each rank itself.

A rank is a child of the launcher, as in an ordinary start, in a session of its own: the server forks a process that
forks the rank and ends, and the launcher adopts the orphan (Linux, PR_SET_CHILD_SUBREAPER). So its exit code, its
signals and the death of the launcher reach whom they always do, and nothing depends on the server after that.

Forked ranks are for CPUs: with GPUs, where a driver that was touched before the fork would break them, each rank is
started in the ordinary way, and so it is wherever the launcher cannot tell that a forked one would be the same.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import json
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from launch import private_api

# What the launcher imports as well, and then what is only for ranks. Nothing of it may start a thread: pyarrow does.
SHARED = ("torch", "torch.distributed.checkpoint", "torch.distributed.tensor")
FOR_RANKS = (
    *("torch._dynamo", "torch.utils.flop_counter", "torch.utils.tensorboard"),  # DDP and each optimizer import dynamo
    *("filelock", "safetensors.torch", "torchvision", "tqdm", "tyro", "xxhash"),
)
# What differs between the launcher's environment and a rank's, and is not read before the recipe begins. With another
# difference, modules that were imported here might have read another value than the rank's.
OF_RANKS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "RUN_KEY", "LAUNCHER_PID", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_CPP_LOG_LEVEL"),  # `private_api.set_log_level` sets the level anew
}
OF_TORCHRUN = "TORCHELASTIC_"
IMPORT_S = 300.0  # for the imports, on a cold disk
FORK_S = 30.0  # on a machine that has other work
LOOK_S = 0.25  # between looks whether a server that does not answer is stopped
END_S = 5.0
READY = b"+"
LENGTH = struct.Struct("!Q")
NUM_DESCRIPTORS = 4  # that come with a request: for the answer, and the three streams
SEED_OF_OLD = 67280421310721  # with which torch begins in each process, unless it is so new that it draws one
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@dataclass(frozen=True)
class Program:
    """What a rank is to run."""

    code: CodeType
    namespace: dict[str, Any]


class Child:
    """A process that was forked: what torchrun uses of a `subprocess.Popen`."""

    def __init__(self, pid: int, args: Iterable[str]) -> None:
        self.pid = pid
        self.args = [*args]
        self.returncode: int | None = None
        self._lock = threading.Lock()  # the launcher's threads ask as well, and only one gets the exit code

    def poll(self) -> int | None:
        """The exit code, or minus the signal's number; None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Server:
    """The launcher's end of the connection to the server."""

    def __init__(self, process: Child, link: socket.socket, script: str) -> None:
        self._process = process
        self._link = link
        self._script = script
        self._environ = dict(os.environ)  # with which torch was imported
        self._ready = False

    def wait_until_ready(self) -> None:
        """Wait for the imports: before torchrun begins to start ranks, as it then has to start all of them."""
        if self._ready or self._link.fileno() < 0:
            return
        try:
            self._ready = self._answer(self._link, 1, IMPORT_S) == READY
        except TimeoutError:
            print(
                f"note: the imports for all ranks took longer than {IMPORT_S:g} s: each imports alone", file=sys.stderr
            )
        except OSError:
            self._ready = False
        if not self._ready:  # a rank that is started in the ordinary way shows why
            self.close()

    def start(self, args: tuple[str, ...], env: Mapping[str, str], stdout: int, stderr: int) -> Child | None:
        """Start a rank; None where it has to be started in the ordinary way.

        Args:
            args: its command.
            env: its whole environment.
            stdout: the descriptor to print to.
            stderr: the descriptor for errors.
        """
        if not self._ready or not self._can_fork(args, env):
            return None
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    _adopt(True)
                    handled = [int(number) for number in signal.valid_signals() if callable(signal.getsignal(number))]
                    request = json.dumps(
                        {"args": args, "env": dict(env), "launcher": os.getpid(), "handled": handled}
                    ).encode()
                    fds = [theirs.fileno(), 0, stdout, stderr]
                    self._link.settimeout(FORK_S)
                    socket.send_fds(self._link, [LENGTH.pack(len(request))], fds)
                    self._link.sendall(request)
                pid = LENGTH.unpack(self._answer(ours, LENGTH.size, FORK_S))[0]
                ours.sendall(READY)  # only now it may begin: a rank that nobody knows of must not
            except (OSError, struct.error) as error:
                why = error or "it has ended"
                print(f"note: rank {env.get('RANK')} imports alone: no process was forked ({why})", file=sys.stderr)
                self.close()
                return None
            finally:
                _adopt(False)
        return Child(pid, args)

    def _answer(self, connection: socket.socket, num_bytes: int, limit_s: float) -> bytes:
        """An answer; complete, as a short one is one piece. A server that is stopped is continued.

        Raises:
            TimeoutError: none has come in time, or the server is stopped and stays so, as in a debugger.
        """
        end = time.monotonic() + limit_s
        connection.settimeout(LOOK_S)
        continued = False
        while True:
            try:
                return connection.recv(num_bytes)
            except TimeoutError:
                is_stopped = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2][0] in "Tt"
                if (is_stopped and continued) or time.monotonic() > end:
                    raise
                if is_stopped:
                    print("note: the process that ranks are forked from was stopped: it continues", file=sys.stderr)
                    self._process.send_signal(signal.SIGCONT)
                    continued = True

    def _can_fork(self, args: tuple[str, ...], env: Mapping[str, str]) -> bool:
        """Whether this is `python -u SCRIPT ...`, with an environment in which the imports would be the same."""
        changed = {name for name in {*env, *self._environ} if env.get(name) != self._environ.get(name)}
        others = {name for name in changed - OF_RANKS if not name.startswith(OF_TORCHRUN)}
        return args[:3] == (sys.executable, "-u", self._script) and not others

    def close(self) -> None:
        """End the server, also one that is stopped; ranks that it has forked run on."""
        self._ready = False
        self._link.close()
        self._process.send_signal(signal.SIGKILL)  # it has nothing to tidy up
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)


server: Server | None = None  # in the launcher, from `begin` on, if ranks can be forked


def begin(words: list[str]) -> Program | None:
    """Fork the server, unless ranks have to be started in the ordinary way.

    Args:
        words: torchrun's options, `--option=value` each; the recipe's train.py; its flags.

    Returns:
        In the launcher None; in each rank, which returns from here too, its program.
    """
    global server  # noqa: PLW0603 (the supervisor asks for it)
    script = next((word for word in words if not word.startswith("-")), "")
    if not _can_serve(script):
        return None
    inherited = _descriptors()  # what the launcher's caller has left open: an ordinary rank does not get it
    gc.disable()  # imports only add: the collector takes a quarter of their time
    for name in SHARED:
        importlib.import_module(name)
    if _shadowed(script):
        gc.enable()
        return None
    ours, theirs = socket.socketpair()
    # Blocked, and not ignored: a signal to the launcher's processes must not end the server, nor be lost on a rank.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        gc.enable()
        theirs.close()
        server = Server(Child(pid, sys.orig_argv), ours, script)
        return None
    ours.close()
    os.setsid()  # away from the terminal's signals
    return _serve(theirs, script, inherited, before)


def _can_serve(script: str) -> bool:
    """Whether a forked rank is known to be the same as one that Python starts."""
    return (
        sys.platform == "linux"
        and os.environ.get("GPUS_ON_NODE") == "0"  # launch/torchrun.sh has counted them
        and Path("/proc/self/fd").is_dir()  # not in every container: descriptors and threads are read there
        and script.endswith(".py")
        and Path(script).is_file()
        # Python runs here as it would run for the rank: no option of its own, unbuffered, with its three streams.
        and sys.orig_argv[1:2] == sys.argv[:1]
        and getattr(sys.stdout, "write_through", False)
        and not sys.flags.safe_path
        and None not in (sys.stdin, sys.stdout, sys.stderr)
        and private_api.can_set_log_level()
    )


def _shadowed(script: str) -> bool:
    """Whether the recipe's folder has a module of the same name as one that has been imported, which it would get."""
    folder = Path(script).resolve().parent
    names = {one.stem.partition(".")[0] for one in folder.iterdir() if one.suffix in (".py", ".so", ".pyc")}
    names |= {one.parent.name for one in folder.glob("*/__init__.*")}
    return bool(names & {name.partition(".")[0] for name in sys.modules})


def _descriptors() -> set[int]:
    """The open descriptors of this process beside the three streams."""
    with os.scandir("/proc/self/fd") as entries:
        found = {int(entry.name) for entry in entries}
    return {one for one in found - {0, 1, 2} if Path(f"/proc/self/fd/{one}").exists()}


def _adopt(orphans: bool) -> None:
    """Let this process be the parent of its descendants whose own has ended, as the one that forks a rank has."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


# --- the server, and what it forks ------------------------------------------------------------------------


def _serve(link: socket.socket, script: str, inherited: set[int], signals: set[int | signal.Signals]) -> Program:
    """Import, and fork a rank for each request, until the launcher has ended. Returns in each rank."""
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        for name in FOR_RANKS:
            with contextlib.suppress(ImportError):  # the recipe says what it lacks
                importlib.import_module(name)
        if not _has_one_thread():
            os._exit(1)
        gc.freeze()  # the ranks' collectors need not look at what is here, and its pages stay shared
        link.sendall(READY)
        while request := _receive(link):
            if not (between := os.fork()):
                if os.fork():
                    os._exit(0)  # so that the launcher adopts the rank
                break
            os.waitpid(between, 0)
            for descriptor in request[1]:
                os.close(descriptor)
        else:
            os._exit(0)  # the launcher has ended, or needs no more ranks
    except Exception:
        os._exit(1)  # then the launcher starts ranks in the ordinary way, which shows what is wrong
    link.close()
    return _become_rank(*request, inherited, signals)


def _has_one_thread() -> bool:
    """Whether a fork copies all that runs here. numpy's threads end before a fork, and begin again when needed."""
    if not (probe := os.fork()):
        os._exit(0)
    os.waitpid(probe, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _receive(link: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A request and its descriptors; None at the end."""
    head, descriptors, _, _ = socket.recv_fds(link, LENGTH.size, NUM_DESCRIPTORS)
    if not head:
        return None
    length = LENGTH.unpack(head)[0]
    content = bytearray()
    while len(content) < length:
        if not (more := link.recv(length - len(content))):
            return None
        content += more
    return json.loads(content), descriptors


def _become_rank(
    request: dict[str, Any], descriptors: list[int], inherited: set[int], signals: set[int | signal.Signals]
) -> Program:
    """Make this process what Python makes of `python -u SCRIPT ...` before it runs the script."""
    args = request["args"]
    os.setsid()  # as torchrun does, which signals the whole group
    answer, *streams = descriptors
    if not _introduce(answer, request["launcher"]):
        os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for descriptor in inherited:
        with contextlib.suppress(OSError):  # closed since
            os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    private_api.set_log_level(os.environ.get("TORCH_CPP_LOG_LEVEL", ""))
    _draw_anew()
    sys.argv = args[2:]
    sys.orig_argv = args
    sys.path_importer_cache.clear()  # folders may have been made or changed since
    _show_command(args)
    script = str(Path(args[2]).absolute())
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __loader__=loader, __builtins__=builtins)
    for name, value in (("__cached__", None), ("__annotations__", {})):  # in the Pythons that have them
        if name in vars(sys.modules["__main__"]):
            module.__dict__[name] = value
    sys.modules["__main__"] = module
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]  # the launcher's own

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next  # the launcher's lines
        sys.__excepthook__(kind, error.with_traceback(trace), trace)

    sys.excepthook = show
    gc.enable()
    atexit.register(gc.unfreeze)  # what is frozen at the end, nanobind reports as leaked
    for number in request["handled"]:  # by the launcher: a rank that Python starts does not ignore these either
        if signal.getsignal(number) == signal.SIG_IGN or number == signal.SIGINT:  # which the launcher's leaves by
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    return Program(loader.source_to_code(loader.get_data(script), script), module.__dict__)


def _draw_anew() -> None:
    """What each process draws for itself when it begins. Python has seeded `random` anew already."""
    multiprocessing.current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    torch = sys.modules["torch"]
    if torch.initial_seed() != SEED_OF_OLD:
        torch.default_generator.seed()


def _introduce(answer: int, launcher: int) -> bool:
    """Tell the launcher this process's number; whether it has adopted this process, and knows of it."""
    end = time.monotonic() + FORK_S
    while os.getppid() != launcher:
        if time.monotonic() > end:  # it has died, or this system has no adoption
            return False
        time.sleep(0.001)
    with contextlib.suppress(OSError), socket.socket(fileno=answer) as connection:
        connection.settimeout(FORK_S)
        connection.sendall(LENGTH.pack(os.getpid()))
        return connection.recv(1) == READY
    return False


def _show_command(args: list[str]) -> None:
    """Let `ps` show the rank's command: written over the launcher's, which is longer."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        first, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), from field 3 on
        line = b"\0".join(map(os.fsencode, args))[: end - first - 1]
        if 0 < first < end:
            ctypes.memmove(first, line.ljust(end - first, b"\0"), end - first)
