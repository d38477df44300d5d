"""A rank that dies, raises, hangs or exits early is named on every rank, in time, and the run continues."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from common import manifest
from common.watch import GONE_S
from tests.harness import runner
from tests.harness.fault_case import FaultCase, checkpoints, events_in, find_line, wait_for

BUSY_S = 1.0  # what a machine that does other things as well may add
HANG_S, PROMPT_S = 3 + 2 + BUSY_S, 2 + BUSY_S  # --hang-timeout, and what finding out may take
PHASES = {
    "data": "reading",
    "backward": "backward",
    "optimizer": "update",
    "evaluation": "evaluation",
    "the main loop": "end of a step",
}


Hang = Callable[[str, FaultCase], runner.Result]
HANGS = {  # ranks that it needs, and the fault
    "SIGSTOP": (2, ("update", "signal later", -1, 4, "SIGSTOP")),
    "data": (1, ("reading", "sleep", -1, 4)),
    "collectives": (2, ("end of a step", "barrier", -1, 3)),
}


def who(rank: int, step: int) -> str:
    return rf"rank {rank} \(host \S+, pid \d+, step {step}\)"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every rank exit by itself, which the tests check."""
    monkeypatch.setattr(runner, "GRACE_S", 5.0)


def end_frozen(file: Path) -> None:
    """Kill the frozen rank once another one has exited."""
    wait_for(lambda: any(event["event"] == "exited" for event in events_in(file)))
    os.kill(next(event["pid"] for event in events_in(file) if event["event"] == "fault"), signal.SIGKILL)


@pytest.fixture(scope="module")
def hang() -> Hang:
    """Runs that hang, all of a recipe at once: most of the time they wait."""
    begun: dict[str, dict[str, tuple[FaultCase, Future]]] = {}

    def result_of(what: str, case: FaultCase) -> runner.Result:
        if case.recipe not in begun:
            case.reference()
            pool = ThreadPoolExecutor(len(HANGS))
            begun[case.recipe] = {}
            for name, (least, fault) in HANGS.items():
                one = FaultCase(case.recipe, case.folder / name.lower(), case.size, case.reference)
                if case.size >= least and (name != "data" or runner.has_flag(case.recipe, "--data")):
                    one.folder.mkdir()
                    after = end_frozen if name == "SIGSTOP" else None
                    begun[case.recipe][name] = (one, pool.submit(one.start, faults=[fault], meanwhile=after))
            pool.shutdown()
        one, result = begun[case.recipe][what]
        case.take_over(one)
        return result.result()

    return result_of


@pytest.mark.fault("rank: SIGKILL in mid-step", core=True)
def test_killed(case: FaultCase) -> None:
    last = case.size - 1
    result = case.start(faults=[("update", "signal later", -1, 4, "SIGKILL")])
    finding = f"dead or frozen, as last seen: {who(last, 4)}: optimizer"
    assert result.codes[last] == -signal.SIGKILL, str(result)
    if case.size > 1:
        case.check_named(result, PROMPT_S + GONE_S, finding, culprits=[last])
    again = case.resume_and_check()
    case.row.message = case.row.message or find_line(again.outputs[0], "continues from step 2 of")
    assert case.row.steps_lost == 1


@pytest.mark.fault("rank: SIGKILL in mid-step, MAX_RESTARTS=1")
def test_killed_and_restarted(case: FaultCase) -> None:
    code, out = case.launch(faults=[("update", "signal", -1, 4, "SIGKILL")], MAX_RESTARTS="1")
    assert code == 0, out
    case.record_cost(case.steps_done())
    case.record_message(out, r"continues from step 2 of")
    assert case.row.steps_lost == 1
    case.check_same_as_reference()


@pytest.mark.fault("rank: raises, {phase}")
@pytest.mark.parametrize("phase", [pytest.param(one, marks=[pytest.mark.rest] * (one != "backward")) for one in PHASES])
def test_raises(phase: str, case: FaultCase) -> None:
    if phase == "data":
        case.skip_without("--data")
    check_raises(case, case.size - 1, phase)


@pytest.mark.rest
@pytest.mark.fault("rank: raises, rank 0, which keeps the store", least=2)
def test_rank_0_raises(case: FaultCase) -> None:
    check_raises(case, 0, "backward")


def check_raises(case: FaultCase, rank: int, phase: str) -> None:
    result = case.start("--eval-every", "1", faults=[(PHASES[phase], "raise", rank, 4)])
    what = "ArithmeticError: a fault that was put in"
    case.check_named(result, PROMPT_S, f"{who(rank, 4)} failed in {phase}", what, r'inject\.py", line \d+, in _raise')
    case.resume_and_check("--eval-every", "1", exact=False)
    assert case.row.steps_lost in (1, 2)


@pytest.mark.fault("rank: hangs, SIGSTOP", least=2)
def test_frozen(hang: Hang, case: FaultCase) -> None:
    result, last = hang("SIGSTOP", case), case.size - 1
    finding = f"dead or frozen, as last seen: {who(last, 4)}: optimizer"
    case.check_named(result, HANG_S, finding, culprits=[last])
    case.resume_and_check()


@pytest.mark.fault("rank: hangs, in the data")
def test_sleeps_in_the_data(hang: Hang, case: FaultCase) -> None:
    case.skip_without("--data")
    result, last = hang("data", case), case.size - 1
    finding = f"no progress for 3 s: {who(last, 4)}: data"
    case.check_named(result, HANG_S, finding, r'data\.py", line \d+, in __next__')
    if case.size > 1:
        case.check_named(result, HANG_S, r"ranks \[0\] wait for it")
    case.record_message(result.outputs[0], finding)
    case.resume_and_check()


@pytest.mark.fault("rank: mismatched collectives", least=2)
def test_mismatched_collectives(hang: Hang, case: FaultCase) -> None:
    result = hang("collectives", case)
    case.check_named(
        result,
        HANG_S,
        "no progress for 3 s, and all ranks wait for each other",
        rf"{who(0, 3)}: .*waits in gloo:all_?reduce",
        rf"{who(case.size - 1, 3)}: .*waits in gloo:barrier",
    )
    assert len([*case.run_dir.glob("logs/flight_recorder_*.json")]) == case.size
    case.resume_and_check()


@pytest.mark.fault("rank: exits early, with exit code 0", least=2)
def test_exits_early(case: FaultCase) -> None:
    last = case.size - 1
    result = case.start(faults=[("end of a step", "exit", -1, 3)])
    assert result.codes[last] == 0
    case.check_named(result, PROMPT_S, f"{who(last, 3)} left before the training was done", culprits=[last])
    case.resume_and_check()


@pytest.mark.fault("rank: crash loop of one rank, MAX_RESTARTS=2")
def test_crash_loop(case: FaultCase) -> None:
    """Of one, because each start of a rank takes seconds of a core."""
    case.copy_reference(until=2)
    faults = [("end of a step", "raise", -1, 3)]
    code, out = case.launch(faults=faults, size=1, MAX_RESTARTS="2")
    assert code == 1, out
    assert [event["event"] for event in case.events].count("fault") == 3
    case.record_message(out, r"^rank \d \(pid \d+\) failed first")
    assert list(checkpoints(case.run_dir)) == [2]
    assert not manifest.verify(checkpoints(case.run_dir)[2])[1]
    case.resume_and_check()


@pytest.mark.rest
@pytest.mark.fault("rank: hangs, SIGSTOP of rank 0 under torchrun", least=2)
def test_rank_0_is_frozen(case: FaultCase) -> None:
    """The one that writes to the terminal, and keeps the store: the launcher speaks for it, once it is killed."""
    faults = [("update", "signal later", 0, 4, "SIGSTOP")]
    code, out = case.launch(faults=faults, meanwhile=lambda _, file: end_frozen(file))
    assert code, out
    case.record_message(out, f"dead or frozen, as last seen: {who(0, 4)}|hears nothing of the store: rank 0")
    case.row.notice_s = max(event["time"] for event in case.events if event["event"] == "named") - case.fault_time()
    assert case.row.notice_s < HANG_S
    case.resume_and_check()


@pytest.mark.fault("rank: mutant, nobody watches", least=2)
def test_mutant_without_watch(case: FaultCase) -> None:
    result = case.start(faults=[("update", "signal", -1, 4, "SIGKILL")], mutant="nobody watches")
    assert "dead or frozen" not in str(result)
    case.row.message = "nobody is named"
