"""What the tests print when they fail, and which devices they see: tried on a pytest of its own."""

import gc
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests import conftest
from tests.harness import again, forks, runner
from tests.launch.test_forkserver import alive

# A training that fails on rank 1, and whose log is where a run has it; and what the tests see of GPUs.
RECIPE = """
import os, pathlib, sys
logs = pathlib.Path(sys.argv[2]) / "run" / "logs"
logs.mkdir(parents=True, exist_ok=True)
(logs / f"rank_{int(os.environ['RANK']):05d}.log").write_text(f"log of {os.environ['RANK']}")
print(f"rank {os.environ['RANK']} sees {os.environ.get('CUDA_VISIBLE_DEVICES')!r}")
if os.environ["RANK"] == "1":
    raise ArithmeticError("as asked")
"""
TESTS = """
from pathlib import Path
import pytest
from tests.harness import runner

def test_good():
    assert runner.rerun(print, [("fine",)] * 2).ok

def test_bad():
    here = Path(__file__).parent
    runner.GRACE_S = runner.PATIENT_S
    runner.run_recipe(here / "own" / "train.py", 2, "--out", str(here / "our runs"), "--name", "run")
    assert False, "deliberately"

@pytest.mark.gpu
def test_gpu():
    raise AssertionError("it is not run")
"""

# In both of two workers, which then are told to end or are killed.
WAITS = """
import os
from pathlib import Path
import pytest
from tests.harness import runner

@pytest.mark.parametrize("number", range(2))
def test_waits(number):
    assert runner.rerun(print, [()]).ok
    pids = (os.getpid(), os.getppid(), runner._idle[0].process.pid)
    folder = Path(__file__).parent
    (folder / f"{number}.txt").write_text(" ".join(map(str, pids)) + "\\n")
    runner.wait_for((folder / "go on").exists)
"""
PYTEST = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml"]


def run_pytest(folder: Path, *more: str) -> str:
    folder.joinpath("own").mkdir()
    folder.joinpath("own", "train.py").write_text(RECIPE)
    folder.joinpath("test_some.py").write_text(TESTS)
    command = [*PYTEST, "-n", "0", "-rs", *more, str(folder / "test_some.py")]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1", "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=runner.ROOT, env=environ, capture_output=True, text=True, timeout=runner.HANG_S, check=False
    )
    return done.stdout + done.stderr


def test_failing_training_is_printed_with_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And GPUs are hidden from the tests and from the ranks."""
    printed = run_pytest(tmp_path)
    assert "1 failed, 1 passed, 1 skipped" in printed, printed
    assert "needs a GPU: pytest --gpus" in printed
    shown = printed.partition("trainings of this test")[2].partition("= slowest")[0]
    assert "training 1 of 1: exit codes [0, 1]" in shown, "not that of the test before"
    for text in ("rank 0 sees ''", "rank 1 sees ''", "ArithmeticError: as asked", "log of 0", "log of 1"):
        assert text in shown, shown
    by_hand = re.search("^by hand: (.+)$", shown, re.MULTILINE)
    assert by_hand
    assert shlex.split(by_hand[1]) == [
        *("NPROC_PER_NODE=2", "OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES=", "bash", "launch/torchrun.sh"),
        *(str(tmp_path / "own"), "--out", str(tmp_path / "our runs"), "--name", "run"),
    ]
    command = re.search("^as here: (.+)$", shown, re.MULTILINE)
    assert command
    monkeypatch.setattr(sys, "argv", shlex.split(command[1])[2:])
    with pytest.raises(SystemExit) as ended:
        again.main()
    assert ended.value.code
    assert "ArithmeticError: as asked" in capsys.readouterr().out


def test_begins_where_it_is_asked_and_says_what_it_left(tmp_path: Path) -> None:
    printed = run_pytest(tmp_path, "--begin=3", "--part=1/2", "--until=1", "-vv")
    assert re.findall("::test_(bad|good|gpu) SKIPPED", printed) == ["gpu", "good"], printed
    assert re.search(r"SKIPPED \[2\] .*NOT RUN: the time is over", printed), printed
    assert "2 skipped, 1 deselected" in printed, printed


@pytest.mark.parametrize("killed", [True, False])
def test_workers_are_forks_of_one_process_and_none_is_left(killed: bool, tmp_path: Path) -> None:
    """Nor a rank that waits for another training, however pytest ends."""
    tmp_path.joinpath("test_some.py").write_text(WAITS)
    files = [tmp_path / f"{number}.txt" for number in range(2)]
    with subprocess.Popen([*PYTEST, "-n", "2", str(tmp_path)], cwd=runner.ROOT) as process:
        runner.wait_for(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
        process.kill() if killed else tmp_path.joinpath("go on").touch()
    assert process.returncode == (-signal.SIGKILL if killed else 0)
    (one, parent, rank), (other, other_parent, other_rank) = (map(int, file.read_text().split()) for file in files)
    assert parent == other_parent != process.pid
    for pid in (parent, one, other, rank, other_rank):
        runner.wait_for(lambda pid=pid: not alive(pid), f"{pid} is left")


def test_what_the_workers_cannot_import_is_said(tmp_path: Path) -> None:
    package = tmp_path / "tests" / "harness"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.touch()
    shutil.copy(forks.__file__, package)
    (package / "preload.py").write_text("print('a note')\nraise ArithmeticError('deliberately')\n")
    with pytest.raises(ImportError, match=r"(?s)cannot begin:.*preload.py.*ArithmeticError: deliberately"):
        forks.server(tmp_path).__enter__()
    (package / "preload.py").write_text("print('a note')\n")
    with forks.server(tmp_path) as python:
        done = subprocess.run([*shlex.split(python), "-c", "print(1 + 1)"], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"


def lose_store() -> None:
    """In a rank: ask a store that resets the connection."""

    def reset() -> None:
        asked, _ = server.accept()
        asked.recv(1)
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asked.close()
        server.close()

    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=reset, daemon=True).start()
    with pytest.raises(dist.DistError):
        dist.TCPStore("127.0.0.1", server.getsockname()[1], is_master=False, timeout=timedelta(seconds=3)).get("never")


def test_rank_prints_no_stack_of_a_store_that_ends() -> None:
    """How much it prints, torch reads when it is imported: before a rank is forked."""
    result = runner.spawn(lose_store, [()], timeout_s=60)
    assert result.ok, str(result)
    assert result.outputs == [""]


class Left:
    """As a process group that nobody has destroyed: its end is for the process that began it."""

    def __init__(self) -> None:
        self.itself = self
        self.begun_by = os.getpid()

    def __del__(self) -> None:
        if self.begun_by != os.getpid():
            os._exit(1)


def test_a_fork_collects_nothing_of_its_parents() -> None:
    Left()
    pid = os.fork()
    if not pid:
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


class File:
    """One that trains, or not, in the place of pytest's."""

    def __init__(self, trains: bool) -> None:
        self.obj = SimpleNamespace(**{"runner": runner} if trains else {})


def test_trainings_begin_each_workers_share() -> None:
    files = [File(trains) for trains in (False, True, True, False)]
    items = [SimpleNamespace(getparent=lambda _, file=file: file) for file in files for _ in range(5)]
    dealt: list[Any] = conftest.dealt(items, 2)
    assert sorted(map(id, dealt)) == sorted(map(id, items))
    assert [vars(one.getparent(pytest.Module).obj) != {} for one in dealt] == [*[True] * 5, *[False] * 5] * 2


def test_parts_are_the_whole() -> None:
    names = [f"test_{i}" for i in range(11)]
    parts = [taken(names, f"{k}/4") for k in range(1, 5)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert {len(one) for one in parts} == {2, 3}
    for wrong in ("", "0/4", "5/4", "1/0", "1", "1/4/2", "-1/4"):
        asked: Any = SimpleNamespace(getoption={"part": wrong}.get)
        with pytest.raises(pytest.UsageError, match=f"--part {wrong} is not K/N"):
            conftest.part(asked)


def taken(names: list[str], part: str) -> list[str]:
    items: list[Any] = [SimpleNamespace(nodeid=name, get_closest_marker=nothing) for name in names]
    options = {"part": part, "begin": 0, "gpus": False}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config: Any = SimpleNamespace(getoption=options.get, hook=hook, args=[], getini=nothing)
    steps = conftest.pytest_collection_modifyitems(config, items)
    for _ in steps:
        pass
    return [one.nodeid for one in items]


@pytest.mark.parametrize("gpus", [True, False])
def test_gpus_are_shown_where_that_is_asked(gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", os.environ["HF_HOME"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    ends: list[Callable[[], None]] = []
    given: Any = SimpleNamespace(
        getoption={"gpus": gpus, "part": "1/1"}.get, add_cleanup=ends.append, addinivalue_line=nothing
    )
    conftest.pytest_configure(given)
    ends[0]()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("0,1" if gpus else "")


def nothing(*_: object) -> None:
    """Ends well."""


@pytest.mark.parametrize(
    ("args", "repeats"),
    [
        ([("text", 1.5, None, [("a", -1)], Path("/tmp"))], True),
        ([({"a": (1, 2)},)], True),
        ([(runner.Layout("r", 1, (), 1),)], False),
    ],
    ids=["plain", "dict", "an object"],
)
def test_arguments_that_a_shell_can_give(args: list[tuple[object, ...]], repeats: bool) -> None:
    (command,) = again.commands(runner.Result([0], [""], nothing, args))
    if not repeats:
        assert command == "only the test repeats it"
        return
    word, text = shlex.split(command)[-2:]
    assert word == f"{__name__}:nothing"
    assert again.decode(again.ast.literal_eval(text)) == args


def test_long_outputs_are_cut() -> None:
    text = "\n".join(map(str, range(200)))
    shown = again.report([runner.Result([1], [text], nothing, [()])], "tests/test_a.py::test_b[c d]")
    assert "\n140\n" in shown
    assert "\n139\n" not in shown
    assert "python -m pytest -n 0 -m '' 'tests/test_a.py::test_b[c d]'" in shown
