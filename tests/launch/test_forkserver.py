"""A forked rank is what Python would have started, and nothing of a rank that has failed reaches the next one."""

import contextlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch import forkserver
from tests.harness import runner
from tests.launch.test_launch import DDP, LAUNCHER, launch, planned, popen, shell, training_flags, wait

# What a rank finds of itself, in a file of its own for each start.
FACTS = r"""
import atexit, ctypes, gc, hashlib, json, logging, multiprocessing, os, pathlib, random, signal, sys, threading
import warnings
import numpy, torch, torch.distributed.checkpoint, torch.distributed.tensor, torch._dynamo, torch.utils.tensorboard

def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()

def status(name):
    return [line.split()[1] for line in open("/proc/self/status") if line.startswith(name)]

def facts():
    streams = [(s.encoding, s.errors, s.line_buffering, s.write_through, s.mode, s.fileno()) for s in
               (sys.stdin, sys.stdout, sys.stderr)]
    main = sys.modules["__main__"]
    product = torch.mm(torch.ones(256, 256), torch.full((256, 256), 0.1))
    return {
        "argv": [*sys.argv], "orig_argv": sys.orig_argv, "path": [*sys.path], "flags": str(sys.flags),
        "main": [main.__name__, main.__file__, str(main.__spec__), main.__package__, main.__cached__,
                 type(main.__loader__).__name__, sorted(n for n in vars(main) if n.startswith("__"))],
        "own": __name__ == "__main__" and vars(main) is globals(),
        "launcher's modules": sorted(n for n in sys.modules if n.partition(".")[0] in ("launch", "common", "tests")),
        "environ": {k: v for k, v in sorted(os.environ.items()) if not k.startswith("TORCHELASTIC_")
                    and k not in ("MASTER_PORT", "RUN_KEY", "LAUNCHER_PID", "_")},
        "C's environment": ctypes.CDLL(None).getenv(b"RANK") != 0,
        "folder": os.getcwd(), "umask": status("Umask"), "nice": os.nice(0),
        "leads": os.getsid(0) == os.getpid() == os.getpgrp(),
        "signals": [status(n) for n in ("SigBlk", "SigIgn")],
        "handlers": [str(signal.getsignal(n)).partition(" at ")[0] for n in sorted(signal.valid_signals())],
        "streams": streams, "descriptors": len(os.listdir("/proc/self/fd")),
        "command": pathlib.Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "threads": [threading.active_count(), torch.get_num_threads(), torch.get_num_interop_threads()],
        "seeded with 7": torch.initial_seed() == 7, "product": digest(product),
        "types": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_float32_matmul_precision(),
                  torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled],
        "distributed": torch.distributed.is_initialized(),
        "a function of torch": torch.nn.functional.relu.__module__ if torch.nn.functional.relu else "none",
        "collector": [gc.isenabled(), gc.get_threshold()],
        "parts": [multiprocessing.current_process().name, multiprocessing.get_start_method(allow_none=True),
                  multiprocessing.parent_process() is None],
        "filters": len(warnings.filters), "log": logging.getLogger("torch").level,
        "hooks": [sys.displayhook is sys.__displayhook__, sys.getrecursionlimit(), sys.getswitchinterval()],
        "C++ log": ctypes.c_int.in_dll(LIBRARY, "FLAGS_caffe2_log_level").value,
    }

LIBRARY = ctypes.CDLL(torch.__path__[0] + "/lib/libc10.so")

def random_draws():
    return [random.random(), float(numpy.random.rand()), torch.initial_seed(), torch.rand(()).item()]

def forked():
    return gc.get_freeze_count() > 10_000
"""
KEEP = (
    FACTS
    + r"""
def keep(name, **more):
    place = pathlib.Path(os.environ["FACTS"], f"{name}-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
    place.write_text(json.dumps({"facts": facts(), "forked": forked(), **more}))
"""
)


def ordinary(*args: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What launch/torchrun.sh does, but for the ranks, each of which Python starts."""
    words = planned(*args, **variables)
    assigned = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    more = {"PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    return wait(popen(words[len(assigned) :], runner.ROOT, assigned | more | variables))


def make(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text(text)
    return folder


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.name: json.loads(file.read_text()) for file in sorted(folder.iterdir())}


# --- as Python starts it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [None, signal.SIGINT], ids=["by hand", "in the background of a script"])
def test_same_as_an_ordinary_start(ignored: signal.Signals | None, tmp_path: Path) -> None:
    """All that a recipe could notice: its modules, environment, signals, descriptors, threads, random numbers."""
    recipe = make(tmp_path / "own", KEEP + "\nkeep('rank', draws=random_draws())\n")
    found = {}
    for start in (launch, ordinary):
        (folder := tmp_path / start.__name__).mkdir()
        variables = {"FACTS": str(folder), "OMP_NUM_THREADS": "2", "GPUS_ON_NODE": ""}
        before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
        try:
            result = start(recipe, "--a-flag", "it's a word", "", **variables)
        finally:
            signal.signal(signal.SIGINT, before)
        assert result.returncode == 0, result.stderr
        assert not result.stdout + result.stderr
        found[start.__name__] = kept(folder)
    assert [one["forked"] for one in found["launch"].values()] == [True, True]
    assert [one["forked"] for one in found["ordinary"].values()] == [False, False]
    for name, one in found["launch"].items():
        facts, expected = one["facts"], found["ordinary"][name]["facts"]
        # By the test, and by the launcher.
        for changes in ("GPUS_ON_NODE", "FACTS", "LAUNCHED_AS", "TORCHINDUCTOR_CACHE_DIR", "PYTHONBREAKPOINT", "PS1"):
            facts["environ"].pop(changes, None)
            expected["environ"].pop(changes, None)
        assert {key: (facts[key], expected[key]) for key in facts if facts[key] != expected[key]} == {}
        assert facts["own"]
        assert facts["threads"][1] == 2
    draws = [[one["draws"] for one in start.values()] for start in found.values()]
    distinct = [[len(set(kind)) for kind in zip(*ranks, strict=True)] for ranks in draws]
    assert distinct[0] == distinct[1], "a kind of number that each process draws for itself"
    assert distinct[0][:2] == [2, 2]


WORKERS = """
import atexit, multiprocessing, os, sys, torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([index ** 2, os.getpid()])

def main():
    atexit.register(lambda: os.write(1, f"ends {os.environ['RANK']}\\n".encode()))
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=method)
        rows = torch.cat(list(loader))
        assert rows[:, 0].tolist() == [0, 1, 4, 9, 16, 25, 36, 49], rows
        assert len(set(rows[:, 1].tolist())) == 2
    sys.stdout.write(f"loaded {os.environ['RANK']}")

if __name__ == "__main__":
    main()
"""


def test_loader_workers_and_the_end(tmp_path: Path) -> None:
    """Workers of each kind find the classes of the recipe's file; what runs at the end does so once."""
    result = launch(make(tmp_path / "own", WORKERS))
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert result.stdout.count(f"loaded {rank}") == 1, result.stdout
        assert result.stdout.count(f"ends {rank}\n") == 1, result.stdout
    assert not result.stderr


ENDS = {
    "returns": "pass",
    "code": "sys.exit(7)",
    "text": "sys.exit('the last words')",
    "raises": "raise ArithmeticError('an error')",
    "caused": "\n    try:\n        int('x')\n    except ValueError as error:\n        raise KeyError('why') from error",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "no file": "import does_not_exist",
}
END = """
import os, signal, sys

def inner():
    {end}

inner()
"""


@pytest.mark.parametrize("end", [pytest.param(one, marks=[pytest.mark.rest] * (one != "caused")) for one in ENDS])
def test_ends_as_in_an_ordinary_start(end: str, tmp_path: Path) -> None:
    """The same exit code, and the same lines, without one of the launcher's."""
    recipe = make(tmp_path / "own", END.format(end=ENDS[end]))
    results = [start(recipe, NPROC_PER_NODE="1", GPUS_ON_NODE="") for start in (launch, ordinary)]
    said = [(one.returncode, one.stdout, without_numbers(one.stderr)) for one in results]
    assert said[0] == said[1]
    assert "agent.py" not in said[0][2]


@pytest.mark.rest
def test_file_that_cannot_be_compiled(tmp_path: Path) -> None:
    recipe = make(tmp_path / "own", "x = (\n")
    results = [start(recipe, NPROC_PER_NODE="1") for start in (launch, ordinary)]
    said = [(one.returncode, without_numbers(one.stderr)) for one in results]
    assert said[0] == said[1]
    assert "SyntaxError" in said[0][1]
    assert "forkserver" not in said[0][1]


def without_numbers(text: str) -> str:
    return " ".join("(pid N)" if word.rstrip(")").isdigit() else word for word in text.replace("(pid ", "").split(" "))


@pytest.mark.rest
def test_same_losses(small_digits: Path, tmp_path: Path) -> None:
    for start in (launch, ordinary):
        result = start(DDP, *training_flags(small_digits, tmp_path, start.__name__))
        assert result.returncode == 0, result.stderr
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        values = [runner.records(tmp_path / name, tag) for name in ("launch", "ordinary")]
        assert values[0] == values[1]
        assert values[0]


# --- a rank that has failed -------------------------------------------------------------------------------

# All that a process can change of itself, and then dies of.
SPOIL = r"""
def spoil():
    os.environ["A_VARIABLE"] = "changed"
    os.environ.pop("PATH")
    os.chdir("/")
    os.umask(0o77)
    os.nice(1)
    sys.path.insert(0, "/nowhere")
    sys.argv.append("more")
    torch.manual_seed(7)
    torch.rand(10)
    numpy.random.seed(1)
    random.seed(1)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.backends.mkldnn.set_flags(False)
    torch.set_float32_matmul_precision("medium")
    torch.nn.functional.relu = None
    gc.set_threshold(7)
    sys.setrecursionlimit(5000)
    sys.setswitchinterval(0.1)
    logging.getLogger("torch").setLevel(1)
    warnings.simplefilter("error")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    sys.modules["common"] = sys
    sys.stderr = sys.stdout
    multiprocessing.current_process().name = "spoiled"
    multiprocessing.set_start_method("spawn")
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    os.dup(0)

SAME = {"orig_argv", "flags", "main", "own", "C's environment", "leads", "command", "distributed", "C++ log"}
"""
FAILS = (
    KEEP
    + SPOIL
    + r"""
keep("start", draws=random_draws())
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    before = facts()
    spoil()
    after = facts()
    keep("spoiled", untouched=[name for name in before if before[name] == after[name] and name not in SAME])
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


def test_nothing_is_carried_over(tmp_path: Path) -> None:
    """The proof's mutant is the rank that spoils itself: each fact that it could change shows the change."""
    (folder := tmp_path / "facts").mkdir()
    recipe = make(tmp_path / "own", FAILS)
    result = launch(recipe, FACTS=str(folder), OMP_NUM_THREADS="2", NPROC_PER_NODE="1", MAX_RESTARTS="1")
    assert result.returncode == 0, result.stderr
    found = kept(folder)
    assert [*found] == ["spoiled-0-0", "start-0-0", "start-0-1"]
    assert found["spoiled-0-0"]["untouched"] == [], "what this cannot see being changed, it proves nothing of"
    assert found["start-0-1"]["forked"]
    assert found["start-0-1"]["facts"] == found["start-0-0"]["facts"]
    for first, second in zip(found["start-0-0"]["draws"][:2], found["start-0-1"]["draws"][:2], strict=True):
        assert first != second


# --- the server's own end ---------------------------------------------------------------------------------

WAITS = r"""
import os, pathlib, signal, time
place = pathlib.Path(os.environ["FACTS"])
(place / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}").write_text(f"{os.getpid()} {os.getppid()}")
while not (place / "go").exists():
    time.sleep(0.01)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def children(pid: int) -> set[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return {int(one) for one in found.split()}


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


@pytest.fixture
def waiting(tmp_path: Path) -> Any:
    """A launcher, its server, its rank, and the file that lets the rank die."""
    recipe = make(tmp_path / "own", WAITS)
    (folder := tmp_path / "facts").mkdir()
    variables = {"FACTS": str(folder), "NPROC_PER_NODE": "1", "MAX_RESTARTS": "1"}
    process = popen(["bash", LAUNCHER, recipe], runner.ROOT, variables)
    first = folder / "0"
    rank, parent = map(int, runner.wait_for(lambda: first.exists() and first.read_text()).split())
    assert parent == process.pid, "the launcher is a rank's parent"
    (server,) = children(process.pid) - {rank}
    yield process, server, rank, folder / "go"
    (folder / "go").touch()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_server_ends_with_its_launcher(waiting: Any) -> None:
    process, server, rank, go = waiting
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(server, number)  # as Slurm sends to all processes of a job
    assert alive(server)
    process.kill()
    runner.wait_for(lambda: not alive(server))
    assert alive(rank), "it notices by itself, and saves"
    go.touch()
    runner.wait_for(lambda: not alive(rank))
    process.communicate()


def test_server_is_killed(waiting: Any) -> None:
    """As by a lack of memory: the ranks run on, and start in the ordinary way after a failure."""
    process, server, rank, go = waiting
    os.kill(server, signal.SIGKILL)
    runner.wait_for(lambda: not alive(server))
    assert alive(rank)
    go.touch()
    result = wait(process)
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("note: rank 0 imports alone: no process was forked ("), result.stderr
    assert result.stderr.count("\n") == 1


def test_server_is_stopped(waiting: Any) -> None:
    """It is continued, so the ranks start at once."""
    process, server, rank, go = waiting
    os.kill(server, signal.SIGSTOP)
    go.touch()
    result = wait(process)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "note: the process that ranks are forked from was stopped: it continues\n"
    assert not alive(server)
    assert not alive(rank)


@pytest.mark.parametrize("how", ["busy", "stopped", "stays stopped"])
def test_only_a_server_that_stays_stopped_is_given_up_early(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has other work, an answer may take longer than a start without it."""
    monkeypatch.setattr(forkserver, "LOOK_S", 0.1)
    ours, theirs = socket.socketpair()
    if not (pid := os.fork()):
        if how == "stays stopped":
            signal.signal(signal.SIGCONT, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        if how != "busy":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        theirs.send(forkserver.READY)
        os._exit(0)
    server = forkserver.Server(forkserver.Child(pid, ["python"]), ours, "train.py")
    with ours, theirs:
        if how == "stays stopped":
            with pytest.raises(TimeoutError):
                server._answer(ours, 1, runner.HANG_S)
        else:
            assert server._answer(ours, 1, runner.HANG_S) == forkserver.READY
        server.close()
    assert server._process.returncode in (0, -signal.SIGKILL)


# --- where ranks start in the ordinary way ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "options", "file"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, [], ""),
        ({"PYTHONSAFEPATH": "1"}, [], ""),
        ({}, ["--no-python"], ""),
        ({}, [], "tqdm/__init__.py"),  # the recipe's own, which the launcher must not have
        ({}, [], "json.py"),
    ],
    ids=["a GPU", "safe path", "another program", "a package", "a module"],
)
@pytest.mark.rest
def test_ordinary_start(variables: dict[str, str], options: list[str], file: str, tmp_path: Path) -> None:
    text = "import gc, sys\nprint('frozen', gc.get_freeze_count(), getattr(sys.modules.get('tqdm'), 'OWN', ''))\n"
    recipe = make(tmp_path / "own", f"#!{sys.executable}\n{'import tqdm' if 'tqdm' in file else ''}\n{text}")
    (recipe / "train.py").chmod(0o755)
    if file:
        spec = importlib.util.find_spec(file.partition("/")[0].removesuffix(".py"))
        (recipe / file).parent.mkdir(exist_ok=True)
        own = "OWN = 'own'\n" if "tqdm" in file else Path(str(spec and spec.origin)).read_text()
        (recipe / file).write_text(own)
        if "json" in file:
            (recipe / file).write_text("")
    result = launch(*options, recipe, NPROC_PER_NODE="1", **variables)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"frozen 0 {'own' if 'tqdm' in file else ''}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_ordinary_start_without_proc(tmp_path: Path) -> None:
    """As in a container that does not mount it."""
    recipe = make(tmp_path / "own", "import gc\nprint('frozen', gc.get_freeze_count())\n")
    unmount = ["unshare", "--mount", "bash", "-c", 'umount -l /proc; exec "$@"', "planted"]
    result = shell([*unmount, "bash", LAUNCHER, recipe], NPROC_PER_NODE="1")
    assert (result.returncode, result.stdout) == (0, "frozen 0\n"), result.stderr


def test_only_the_same_command_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may differ is what torchrun sets for each rank."""
    monkeypatch.setenv("A_VARIABLE", "1")
    one = forkserver.Server(None, None, "train.py")  # type: ignore[arg-type]
    args = (sys.executable, "-u", "train.py", "--lr", "1")
    env = dict(os.environ)
    assert one._can_fork(args, env | {"RANK": "1", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1"})
    assert not one._can_fork(args, env | {"OMP_NUM_THREADS": "64"})
    assert not one._can_fork(args, env | {"A_VARIABLE": "2"})
    del env["A_VARIABLE"]
    assert not one._can_fork(args, env)
    env["A_VARIABLE"] = "1"
    assert not one._can_fork((sys.executable, "-u", "-m", "train.py"), env)
    assert not one._can_fork(("numactl", "--cpunodebind=0", *args), env)
    assert not one._can_fork(("python3", *args[1:]), env)
    assert not one._can_fork((sys.executable, "-u", "other.py"), env)


def test_wait_has_a_limit() -> None:
    waits, ends = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ends)
        os.read(waits, 1)  # until the other end is closed
        os._exit(3)
    child = forkserver.Child(pid, ["python"])
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    os.close(ends)
    os.close(waits)
    assert child.wait(runner.HANG_S) == child.poll() == child.returncode == 3
    child.send_signal(signal.SIGKILL)  # has ended: nothing happens
