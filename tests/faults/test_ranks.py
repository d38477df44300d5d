"""A rank that dies, raises, hangs or exits early is named on every rank, in time, and the run continues."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from common import manifest
from common.protect.watch import BEAT_S, DEAD_S

from tests.faults.conftest import num_ranks
from tests.harness import inject, runner
from tests.harness.fault_case import HANG, PROMPT, FaultCase, checkpoints, events_in, find_line
from tests.harness.runner import wait_for

DEAD = round(DEAD_S / BEAT_S)  # heartbeats that a rank compares for
SPIN = 16  # more, for a rank that moves
PHASES = {
    "data": "reading",
    "backward": "backward",
    "optimizer": "update",
    "evaluation": "evaluation",
    "the main loop": "end of a step",
}


def who(rank: int, step: int) -> str:
    return rf"rank {rank} \(host \S+, pid \d+, step {step}\)"


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    """Let every rank exit by itself, which the tests check."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "GRACE_S", runner.PATIENT_S)
        yield


def end_frozen(file: Path) -> None:
    """Kill the frozen rank once another one has exited."""
    wait_for(lambda: any(event["event"] == "exited" for event in events_in(file)))
    frozen = [event["pid"] for event in events_in(file) if event["event"] == "fault"][-1]
    with contextlib.suppress(ProcessLookupError):  # the harness, which ends what is left after a while, was faster
        os.kill(frozen, signal.SIGKILL)


# --- runs that mostly wait, beside each other -------------------------------------------------------------


BESIDE = 6  # runs of at most two ranks each
Meanwhile = Callable[[Path], None]


def cases_that_wait(items: Sequence[pytest.Item], make: Callable[[str], FaultCase]) -> Iterator[tuple[str, FaultCase]]:
    """The tests with the mark `waits` that apply to their recipe, each with a case of its own."""
    for item in items:
        waits, fault = item.get_closest_marker("waits"), item.get_closest_marker("fault")
        if waits:
            case = make(item.callspec.params["case"])
            flag = waits.kwargs.get("flag")
            if case.size >= fault.kwargs.get("least", 1) and (not flag or runner.has_flag(case.recipe, flag)):
                yield item.nodeid, case


def start_behind_gate(case: FaultCase, fault: inject.Fault, gate: threading.Barrier, after: Meanwhile) -> runner.Result:
    """Start a run that waits after its first step until all have done theirs: then no start disturbs a clock."""
    opened = case.folder / "opened"

    def meanwhile(file: Path) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            wait_for(lambda: sum(event["event"] == "fault" for event in events_in(file)) == case.size)
            gate.wait(runner.HANG_S)
        opened.touch()
        after(file)

    waits = [("end of a step", "wait for", rank, 1, str(opened)) for rank in range(case.size)]
    return case.start(faults=[*waits, fault], meanwhile=meanwhile)


@pytest.fixture(scope="module")
def runs_that_wait(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reference_run: Callable[[str], Path]
) -> Callable[[pytest.Item], tuple[FaultCase, Future[runner.Result]]]:
    """Begins the next BESIDE of them where one is asked for that has not begun."""

    def make(recipe: str) -> FaultCase:
        return FaultCase(recipe, tmp_path_factory.mktemp(recipe), num_ranks(recipe), lambda: reference_run(recipe))

    faults = {item.nodeid: item.get_closest_marker("waits") for item in request.session.items}
    waiting = dict(cases_that_wait(request.session.items, make))
    begun: dict[str, tuple[FaultCase, Future[runner.Result]]] = {}

    def begin(item: pytest.Item) -> tuple[FaultCase, Future[runner.Result]]:
        if item.nodeid not in begun:
            names = [item.nodeid, *(name for name in waiting if name not in begun and name != item.nodeid)][:BESIDE]
            for name in names:
                waiting[name].reference()
            gate, pool = threading.Barrier(len(names)), ThreadPoolExecutor(len(names))
            for name in names:
                after = faults[name].kwargs.get("meanwhile", lambda _: None)
                future = pool.submit(start_behind_gate, waiting[name], faults[name].args[0], gate, after)
                begun[name] = waiting[name], future
            pool.shutdown(wait=False)
        return begun[item.nodeid]

    return begin


@pytest.fixture
def result(
    case: FaultCase,
    request: pytest.FixtureRequest,
    runs_that_wait: Callable[[pytest.Item], tuple[FaultCase, Future[runner.Result]]],
) -> runner.Result:
    """What came of the run with the fault of the mark `waits`, whose case `case` becomes."""
    if flag := request.node.get_closest_marker("waits").kwargs.get("flag"):
        case.skip_without(flag)
    begun, future = runs_that_wait(request.node)
    outcome = future.result()
    runner.results.append(outcome)  # it may have run in the time of another test
    case.take_over(begun)
    return outcome


@pytest.mark.fault("rank: SIGKILL in mid-step", core=True)
@pytest.mark.waits(("update", "signal later", -1, 4, "SIGKILL"))
def test_killed(result: runner.Result, case: FaultCase) -> None:
    last = case.size - 1
    finding = f"dead or frozen; last heartbeat of {who(last, 4)}: {case.in_update}"
    assert result.codes[last] == -signal.SIGKILL, str(result)
    if case.size > 1:
        case.check_named(result, PROMPT + DEAD, finding, culprits=[last])
    again = case.resume_and_check()
    case.row.message = case.row.message or find_line(again.outputs[0], "resuming from step 2 of")
    assert case.row.steps_lost == 1


@pytest.mark.fault("rank: SIGKILL in mid-step, MAX_RESTARTS=1")
def test_killed_and_restarted(case: FaultCase) -> None:
    code, out = case.launch(faults=[("update", "signal", -1, 4, "SIGKILL")], MAX_RESTARTS="1")
    assert code == 0, out
    case.record_cost(case.steps_done())
    case.record_message(out, r"resuming from step 2 of")
    assert case.row.steps_lost == 1
    case.check_same_as_reference()


@pytest.mark.fault("rank: raises, {phase}")
@pytest.mark.parametrize(
    "phase", [pytest.param(one, marks=[pytest.mark.whole] * (one != "backward")) for one in PHASES]
)
def test_raises(phase: str, case: FaultCase) -> None:
    if phase == "data":
        case.skip_without("--data")
    check_raises(case, case.size - 1, phase)


@pytest.mark.whole
@pytest.mark.fault("rank: raises, rank 0, which keeps the store", least=2)
def test_rank_0_raises(case: FaultCase) -> None:
    check_raises(case, 0, "backward")


def check_raises(case: FaultCase, rank: int, phase: str) -> None:
    result = case.start("--eval-every", "1", faults=[(PHASES[phase], "raise", rank, 4)])
    what = "ArithmeticError: a fault that was put in"
    case.check_named(
        result,
        PROMPT,
        f"{who(rank, 4)} failed in {case.in_update if phase == 'optimizer' else phase}",
        what,
        r'inject\.py", line \d+, in _raise',
    )
    case.resume_and_check("--eval-every", "1", exact=False)
    assert case.row.steps_lost in (1, 2)


@pytest.mark.fault("rank: hangs, SIGSTOP", least=2)
@pytest.mark.waits(("update", "signal later", -1, 4, "SIGSTOP"), meanwhile=end_frozen)
def test_frozen(result: runner.Result, case: FaultCase) -> None:
    last = case.size - 1
    finding = f"dead or frozen; last heartbeat of {who(last, 4)}: {case.in_update}"
    case.check_named(result, HANG, finding, culprits=[last])
    case.resume_and_check()


@pytest.mark.fault("rank: hangs, in the data")
@pytest.mark.waits(("reading", "sleep", -1, 4), flag="--data")
def test_sleeps_in_the_data(result: runner.Result, case: FaultCase) -> None:
    last = case.size - 1
    finding = f"no progress for 3 s: {who(last, 4)}: data"
    case.check_named(result, HANG, finding, r'data\.py", line \d+, in __getitem__')
    if case.size > 1:
        case.check_named(result, HANG, r"ranks \[0\] are waiting for it")
    case.record_message(result.outputs[0], finding)
    case.resume_and_check()


@pytest.mark.fault("rank: spins, in an evaluation", least=2)
@pytest.mark.waits(("evaluation", "spin", -1, 4))
def test_spins(result: runner.Result, case: FaultCase) -> None:
    """It moves, but the others wait for it in vain: twice --hang-timeout."""
    last = case.size - 1
    finding = rf"no progress for \d[\d.]* s, though it moves \(raise --hang-timeout .*\): {who(last, 4)}: evaluation"
    case.check_named(result, HANG + SPIN, finding, r"ranks \[0\] are waiting for it")
    case.resume_and_check()


@pytest.mark.fault("rank: mismatched collectives", least=2)
@pytest.mark.waits(("end of a step", "barrier", -1, 3))
def test_mismatched_collectives(result: runner.Result, case: FaultCase) -> None:
    case.check_named(
        result,
        HANG,
        "no progress for 3 s: all ranks are waiting for each other",
        rf"{who(0, 3)}: .*waiting in gloo:all_?reduce",
        rf"{who(case.size - 1, 3)}: .*waiting in gloo:barrier",
    )
    assert len([*case.run_dir.glob("logs/flight_recorder_*.json")]) == case.size
    case.resume_and_check()


@pytest.mark.fault("rank: exits early, with exit code 0", least=2)
@pytest.mark.waits(("end of a step", "exit", -1, 3))
def test_exits_early(result: runner.Result, case: FaultCase) -> None:
    last = case.size - 1
    assert result.codes[last] == 0
    case.check_named(result, PROMPT, f"{who(last, 3)} exited before the training was done", culprits=[last])
    case.resume_and_check()


@pytest.mark.fault("rank: crash loop of one rank, MAX_RESTARTS=2")
@pytest.mark.rest
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


@pytest.mark.whole
@pytest.mark.fault("rank: hangs, SIGSTOP of rank 0 under torchrun", least=2)
def test_rank_0_is_frozen(case: FaultCase) -> None:
    """The one that writes to the terminal, and keeps the store: the launcher speaks for it, once it is killed."""
    faults = [("update", "signal later", 0, 4, "SIGSTOP")]
    code, out = case.launch(faults=faults, meanwhile=lambda _, file: end_frozen(file))
    assert code, out
    case.record_message(out, f"dead or frozen; last heartbeat of {who(0, 4)}|gets no answer from the store: its host")
    case.row.notice_s = max(event["time"] for event in case.events if event["event"] == "named") - case.fault_time()
    assert case.beats(1) <= HANG, "of the other rank"
    case.resume_and_check()


@pytest.mark.fault("rank: mutant, nobody watches", least=2)
def test_mutant_without_watch(case: FaultCase) -> None:
    result = case.start(faults=[("update", "signal", -1, 4, "SIGKILL")], mutant="nobody watches")
    assert "dead or frozen" not in str(result)
    case.row.message = "nobody is named"
