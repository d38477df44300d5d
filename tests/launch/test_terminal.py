"""What a terminal does to a launch, with real signals: Ctrl-C at its start, Ctrl-Z; and a launcher that is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import mutants, runner
from tests.launch import test_forkserver
from tests.launch.test_forkserver import alive, children, make
from tests.launch.test_launch import LAUNCHER, launch, popen, training_flags, wait

waiting = test_forkserver.waiting

# Of the launcher, which sends itself the signal when it is about to import a module for the first time.
INTERRUPTS = """
import os, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"] and os.path.basename(sys.argv[0]) == "agent.py":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), 2)

if len(sys.orig_argv) > 1 and sys.orig_argv[1].endswith("agent.py"):
    sys.modules.pop("signal", None)
    sys.meta_path.insert(0, Interrupts())
"""
LINE = "\nstopped by SIGINT before the training began: there was nothing to save\n"


@pytest.fixture
def heard() -> Iterator[None]:
    """SIGINT as a terminal's, where these tests run in a script's background, whose processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("at", ["signal", "torch", "numpy", "launch.supervisor", "torch.distributed.run"])
def test_interrupt_while_the_launcher_imports(at: str, tmp_path: Path) -> None:
    """An exception would not do: torch catches some of those that an import of its raises."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS)
    recipe = make(tmp_path / "own", "print('trains')\n")
    result = launch(recipe, AT=at, PYTHONPATH=str(tmp_path), GPUS_ON_NODE="")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", LINE)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_ctrl_z_and_fg(waiting: Any) -> None:
    """The ranks are in sessions of their own, which the terminal does not reach."""
    process, _, rank, go = waiting
    os.kill(process.pid, signal.SIGTSTP)
    runner.wait_for(lambda: state(process.pid) == state(rank) == "T")
    os.kill(process.pid, signal.SIGCONT)
    runner.wait_for(lambda: "T" not in (state(process.pid), state(rank)))
    go.touch()
    assert wait(process).returncode == 0


@pytest.mark.parametrize("when", ["a rank imports", "the first step compiles"])
def test_no_rank_outlives_a_killed_launcher(when: str, small_digits: Path, tmp_path: Path) -> None:
    """Also where it dies before a rank has looked whose child it is, or while the first step takes minutes."""
    asleep, go = tmp_path / "asleep", tmp_path / "go"
    sleep = f"import pathlib, time\nopen({str(asleep)!r}, 'a').write('.')\n"
    if when == "a rank imports":
        path = mutants.mutate("ddp_resnet", tmp_path, {})
        path.write_text(f"{sleep}while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n{path.read_text()}")
    else:
        step = "finite.unscale_gradients(sums)"
        path = mutants.mutate(
            "ddp_resnet", tmp_path, {"train_step": {step: f"{sleep}time.sleep({2 * runner.HANG_S})\n{step}"}}
        )
    flags = training_flags(small_digits, tmp_path / "out", "run")
    process = popen(["bash", LAUNCHER, path.parent, *flags, "--max-steps", "1000"], runner.ROOT, {})
    runner.wait_for(lambda: asleep.exists() and asleep.read_text() == "..")
    left = children(process.pid)
    assert len(left) >= 2
    process.kill()
    process.wait()
    go.touch()
    runner.wait_for(lambda: not any(map(alive, left)))
    out, err = process.communicate()
    # A quick first step ends before a rank has looked for its launcher: then there is something to save.
    saved = (tmp_path / "out" / "run" / "stopped.json").exists()
    assert not saved or when == "a rank imports", out
    assert ("has died, on rank 0, before its first step: it exits\n" in out) == (not saved), out + err
