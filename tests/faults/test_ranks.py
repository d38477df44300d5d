"""A rank that dies, raises, hangs or leaves is named on every rank, in time, and the run goes on from where it was."""

import dataclasses
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from common import manifest, ranks
from common.watch import GONE_S

from tests.harness import runner
from tests.harness.fault_case import Cell, checkpoints, events_in, wait_for

BUSY_S = 1.0  # what a machine that does other things as well may add
HANG_S, PROMPT_S = 3 + 2 + BUSY_S, 2 + BUSY_S  # --hang-timeout, and what finding out may take
PHASES = {
    "data": "reading",
    "backward": "backward",
    "optimizer": "update",
    "evaluation": "evaluation",
    "the main loop": "end of a step",
}


Hang = Callable[[str, Cell], runner.Result]
HANGS = {  # ranks that it needs, and the fault
    "SIGSTOP": (2, ("update", "signal later", -1, 4, "SIGSTOP")),
    "data": (1, ("reading", "sleep", -1, 4)),
    "collectives": (2, ("end of a step", "barrier", -1, 3)),
}


def who(rank: int, step: int) -> str:
    return rf"rank {rank} \(host \S+, pid \d+, step {step}\)"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every rank leave by itself, which is what is tested."""
    monkeypatch.setattr(ranks, "GRACE_S", 5.0)


def end_frozen(file: Path) -> None:
    """Kill the frozen rank once another has left."""
    wait_for(lambda: any(event["event"] == "left" for event in events_in(file)))
    os.kill(next(event["pid"] for event in events_in(file) if event["event"] == "fault"), signal.SIGKILL)


@pytest.fixture(scope="module")
def hang() -> Hang:
    """Runs that hang, all of a recipe at once: most of the time they wait."""
    begun: dict[str, dict[str, tuple[Cell, Future]]] = {}

    def result_of(what: str, cell: Cell) -> runner.Result:
        if cell.recipe not in begun:
            cell.whole()
            pool = ThreadPoolExecutor(len(HANGS))
            begun[cell.recipe] = {}
            for name, (least, fault) in HANGS.items():
                one = dataclasses.replace(cell, folder=cell.folder / name.lower())
                if cell.size >= least and (name != "data" or runner.has_flag(cell.recipe, "--data")):
                    one.folder.mkdir()
                    after = end_frozen if name == "SIGSTOP" else None
                    begun[cell.recipe][name] = (one, pool.submit(one.start, faults=[fault], meanwhile=after))
            pool.shutdown()
        one, result = begun[cell.recipe][what]
        vars(cell).update(vars(one))
        return result.result()

    return result_of


@pytest.mark.fault("rank: SIGKILL in mid-step", core=True)
def test_killed(cell: Cell) -> None:
    last = cell.size - 1
    result = cell.start(faults=[("update", "signal later", -1, 4, "SIGKILL")])
    finding = f"dead or frozen; last heartbeat of {who(last, 4)}: optimizer"
    assert result.codes[last] == -signal.SIGKILL, str(result)
    if cell.size > 1:
        cell.check_named(result, PROMPT_S + GONE_S, finding, culprits=[last])
    again = cell.resume()
    cell.message = cell.message or cell.line(again.outputs[0], "resuming from step 2 of")
    assert cell.steps_lost == 1


@pytest.mark.fault("rank: SIGKILL in mid-step, MAX_RESTARTS=1")
def test_killed_and_restarted(cell: Cell) -> None:
    code, out = cell.launch(faults=[("update", "signal", -1, 4, "SIGKILL")], MAX_RESTARTS="1")
    assert code == 0, out
    cell.count_lost(cell.done())
    cell.say(out, r"resuming from step 2 of")
    assert cell.steps_lost == 1
    cell.check_exact()


@pytest.mark.fault("rank: raises, {phase}")
@pytest.mark.parametrize("phase", [pytest.param(one, marks=[pytest.mark.rest] * (one != "backward")) for one in PHASES])
def test_raises(phase: str, cell: Cell) -> None:
    if phase == "data":
        cell.needs("--data")
    check_raises(cell, cell.size - 1, phase)


@pytest.mark.rest
@pytest.mark.fault("rank: raises, rank 0, which keeps the store", least=2)
def test_rank_0_raises(cell: Cell) -> None:
    check_raises(cell, 0, "backward")


def check_raises(cell: Cell, rank: int, phase: str) -> None:
    result = cell.start("--eval-every", "1", faults=[(PHASES[phase], "raise", rank, 4)])
    what = "ArithmeticError: a fault that was put in"
    cell.check_named(result, PROMPT_S, f"{who(rank, 4)} failed in {phase}", what, r'inject\.py", line \d+, in _raise')
    cell.resume("--eval-every", "1", exact=False)
    assert cell.steps_lost in (1, 2)


@pytest.mark.fault("rank: hangs, SIGSTOP", least=2)
def test_frozen(hang: Hang, cell: Cell) -> None:
    result, last = hang("SIGSTOP", cell), cell.size - 1
    finding = f"dead or frozen; last heartbeat of {who(last, 4)}: optimizer"
    cell.check_named(result, HANG_S, finding, culprits=[last])
    cell.resume()


@pytest.mark.fault("rank: hangs, in the data")
def test_sleeps_in_the_data(hang: Hang, cell: Cell) -> None:
    cell.needs("--data")
    result, last = hang("data", cell), cell.size - 1
    finding = f"no progress for 3 s: {who(last, 4)}: data"
    cell.check_named(result, HANG_S, finding, r'data\.py", line \d+, in __next__')
    if cell.size > 1:
        cell.check_named(result, HANG_S, r"ranks \[0\] are waiting for it")
    cell.say(result.outputs[0], finding)
    cell.resume()


@pytest.mark.fault("rank: mismatched collectives", least=2)
def test_mismatched_collectives(hang: Hang, cell: Cell) -> None:
    result = hang("collectives", cell)
    cell.check_named(
        result,
        HANG_S,
        "no progress for 3 s: all ranks are waiting for each other",
        rf"{who(0, 3)}: .*waiting in gloo:all_?reduce",
        rf"{who(cell.size - 1, 3)}: .*waiting in gloo:barrier",
    )
    assert len([*cell.run.glob("logs/flight_recorder_*.json")]) == cell.size
    cell.resume()


@pytest.mark.fault("rank: leaves early, with exit code 0", least=2)
def test_leaves_early(cell: Cell) -> None:
    last = cell.size - 1
    result = cell.start(faults=[("end of a step", "exit", -1, 3)])
    assert result.codes[last] == 0
    cell.check_named(result, PROMPT_S, f"{who(last, 3)} exited before the training was done", culprits=[last])
    cell.resume()


@pytest.mark.fault("rank: crash loop of one rank, MAX_RESTARTS=2")
def test_crash_loop(cell: Cell) -> None:
    """Of one, because each start of a rank takes seconds of a core."""
    cell.begin(2)
    faults = [("end of a step", "raise", -1, 3)]
    code, out = cell.launch(faults=faults, size=1, MAX_RESTARTS="2")
    assert code == 1, out
    assert [event["event"] for event in cell.events].count("fault") == 3
    cell.say(out, r"^rank \d \(pid \d+\) failed first")
    assert list(checkpoints(cell.run)) == [2]
    assert not manifest.verify(checkpoints(cell.run)[2])[1]
    cell.resume()


@pytest.mark.rest
@pytest.mark.fault("rank: hangs, SIGSTOP of rank 0 under torchrun", least=2)
def test_rank_0_is_frozen(cell: Cell) -> None:
    """The one that writes to the terminal, and keeps the store: the launcher speaks for it, once it is killed."""
    faults = [("update", "signal later", 0, 4, "SIGSTOP")]
    code, out = cell.launch(faults=faults, meanwhile=lambda _, file: end_frozen(file))
    assert code, out
    cell.say(out, f"dead or frozen; last heartbeat of {who(0, 4)}|gets no answer from the store: its host")
    cell.notice_s = max(event["time"] for event in cell.events if event["event"] == "named") - cell.fault_time()
    assert cell.notice_s < HANG_S
    cell.resume()


@pytest.mark.fault("rank: mutant, nobody watches", least=2)
def test_mutant_without_watch(cell: Cell) -> None:
    result = cell.start(faults=[("update", "signal", -1, 4, "SIGKILL")], mutant="nobody watches")
    assert "dead or frozen" not in str(result)
    cell.message = "nobody is named"
