"""Who is blamed is who did it: slow is not hung, frozen accuses nobody, and whoever fails alone is named at once."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from common.protect.watch import BEAT_S, DEAD_S

from tests.faults.test_ranks import DEAD, _patient, end_frozen, who  # noqa: F401
from tests.faults.test_saves import flags_for
from tests.harness import inject, runner
from tests.harness.fault_case import (
    HANG,
    PROMPT,
    FaultCase,
    checkpoints,
    events_in,
    find_line,
    temporaries,
    wait_for_beats,
)
from tests.harness.runner import wait_for

HOW = ("synchronous", "asynchronous")
SAVE_S = 5.0  # process_group.TIMEOUT_S of these runs, longer than --hang-timeout
SLOW_S = 8.0  # a save that takes longer than both


def patient(case: FaultCase, seconds: float = SAVE_S) -> list[inject.Fault]:
    """Each rank waits so long for a save that stands still; the first may import a store's client, and has longer."""
    return [("end of a step", "patience", rank, 3, seconds) for rank in range(case.size)]


def of_size(case: FaultCase, size: int) -> None:
    if runner.world_sizes(case.recipe)[-1] < size:
        pytest.skip(f"not applicable: it needs {size} ranks")
    case.size = size


# --- saves ------------------------------------------------------------------------------------------------


def save_slowly(case: FaultCase, how: str, mutant: str = "") -> runner.Result:
    slow = ("between the files", "trickle", -1, 4, str(case.run_dir), SLOW_S)
    return case.start(*flags_for(how), faults=[*patient(case), slow], mutant=mutant)


@pytest.mark.fault("rank: a save that is slower than --hang-timeout, {how}")
@pytest.mark.parametrize("how", HOW)
def test_slow_save(how: str, case: FaultCase) -> None:
    """Bytes that come in are progress; with --async-save, the end of the run waits for the save under way."""
    result = save_slowly(case, how)
    assert result.ok, str(result)
    # Asynchronous, it is the one under way after step 4: of an earlier step, or on a slow machine of a later one.
    case.record_message(result.outputs[0], r"warning: the save of step [246] is slow: [\d.]+ MB in \d+ s")
    assert result.outputs[0].count("is slow") == 1, str(result)
    case.check_same_as_reference()


@pytest.mark.whole
@pytest.mark.fault("rank: mutant, the bytes of a save do not count as progress")
def test_mutant_bytes_do_not_count(case: FaultCase) -> None:
    result = save_slowly(case, "synchronous", "the bytes of a save do not count")
    assert not result.ok
    case.record_message(str(result), rf"no progress for {SAVE_S:g} s: {who(case.size - 1, 4)}: save")


@pytest.mark.fault("rank: hangs, in a save")
def test_save_that_hangs(case: FaultCase) -> None:
    last = case.size - 1
    result = case.start(faults=[*patient(case), ("between the files", "sleep", -1, 4)])
    case.check_named(result, round(SAVE_S / BEAT_S) + PROMPT, rf"no progress for {SAVE_S:g} s: {who(last, 4)}: save")
    if case.size > 1:
        find_line(result.outputs[0], r"ranks \[0\] are waiting for it")
    case.resume_and_check()


def save_without_memory(case: FaultCase, how: str, mutant: str = "") -> runner.Result:
    pause = ("end of a step", "let the save end", 0, 3)
    faults = [*patient(case), pause, ("before the data", "no memory", -1, 4)]
    return case.start(*flags_for(how, pauses=True), faults=faults, mutant=mutant)


@pytest.mark.fault("rank: one has no memory for a save, {how}")
@pytest.mark.parametrize("how", HOW)
def test_save_fails_on_one_rank(how: str, case: FaultCase) -> None:
    """The others do not wait for it: the save has failed, with the error of the one, and the training continues."""
    result = save_without_memory(case, how)
    assert result.ok, str(result)
    cause = rf"warning: no checkpoint of step 4: rank {case.size - 1} on \S+: MemoryError: .*; training continues"
    case.record_message(result.outputs[0], cause)
    assert list(checkpoints(case.run_dir)) == [2, 6]
    assert not temporaries(case.run_dir)
    case.check_same_as_reference()


@pytest.mark.whole
@pytest.mark.fault("rank: mutant, who fails alone in a save stays in its group", least=2)
def test_mutant_stays_in_the_group(case: FaultCase) -> None:
    result = save_without_memory(case, "synchronous", "who fails alone in a save stays in its group")
    assert not result.ok
    case.record_message(str(result), "no progress for|exits;")


# --- who it was -------------------------------------------------------------------------------------------


def thaw(file: Path) -> None:
    """Let the frozen rank continue once another one has exited."""
    wait_for(lambda: any(event["event"] == "exited" for event in events_in(file)))
    with contextlib.suppress(ProcessLookupError):
        os.kill(next(event["pid"] for event in events_in(file) if event["event"] == "fault"), signal.SIGCONT)


@pytest.mark.fault("rank: frozen for longer than --hang-timeout, then awake, rank {rank}", least=2)
@pytest.mark.parametrize("rank", [0, -1])
def test_frozen_and_awake(rank: int, case: FaultCase) -> None:
    result = case.start(faults=[("update", "signal later", rank, 4, "SIGSTOP")], meanwhile=thaw)
    frozen = rank % case.size
    own = rf"{who(frozen, 4)} was frozen itself for \d+ s"
    output = case.output(result, frozen)
    case.record_message(output, own)
    others = [one for one in range(case.size) if one != frozen]
    assert not any(f"last heartbeat of rank {one} " in output for one in others), output
    assert all(result.codes), str(result)
    case.resume_and_check()


@pytest.mark.whole
@pytest.mark.fault("rank: mutant, a rank does not notice that it was frozen", least=2)
def test_mutant_does_not_notice(case: FaultCase) -> None:
    faults = [("update", "signal later", 0, 4, "SIGSTOP")]
    result = case.start(faults=faults, meanwhile=thaw, mutant="nobody notices that it was frozen")
    assert "was frozen itself" not in str(result)
    case.row.message = "the frozen rank accuses others"


def die_early(case: FaultCase, mutant: str = "", meanwhile: Callable[[Path], None] | None = None) -> runner.Result:
    """Rank 0 waits for nobody meanwhile: it reads its data, for minutes."""
    faults = [("before the first step", "sleep", 0, 0), ("before the first step", "signal later", -1, 0, "SIGKILL")]
    return case.start(faults=faults, mutant=mutant, meanwhile=meanwhile)


@pytest.mark.fault("rank: SIGKILL before the training begins", least=2)
def test_killed_early(case: FaultCase) -> None:
    result = die_early(case)
    last = case.size - 1
    case.check_named(result, PROMPT + DEAD, f"dead or frozen; last heartbeat of {who(last, 0)}", culprits=[last])
    case.resume_and_check(exact=True)


@pytest.mark.fault("rank: SIGKILL, as NCCL shows it: no connection ends, and nobody's collective fails", least=2)
def test_killed_without_a_word(case: FaultCase) -> None:
    """Rank 0 waits for nobody, as the host of a GPU whose kernel spins; its own limit is far."""
    last = case.size - 1
    faults = [("update", "sleep", 0, 4), ("update", "signal later", last, 4, "SIGKILL")]
    result = case.start("--hang-timeout", "100", faults=faults, mutant="no connection ends")
    finding = f"dead or frozen; last heartbeat of {who(last, 4)}: {case.in_update}"
    case.check_named(result, PROMPT + 2 * DEAD, finding, culprits=[last])
    case.resume_and_check()


@pytest.mark.whole
@pytest.mark.fault("rank: hangs, SIGSTOP, as a machine without power shows: no connection ends", least=2)
def test_frozen_without_a_word(case: FaultCase) -> None:
    """Longer than a dead process of the same machine, which can be told: a frozen one may come back."""
    last = case.size - 1
    faults = [("update", "sleep", 0, 4), ("update", "signal later", last, 4, "SIGSTOP")]
    result = case.start("--hang-timeout", "100", faults=faults, mutant="no connection ends", meanwhile=end_frozen)
    finding = f"dead or frozen; last heartbeat of {who(last, 4)}: {case.in_update}"
    silence = round(10 / BEAT_S)  # a tenth of --hang-timeout
    case.check_named(result, silence + PROMPT + DEAD, finding, culprits=[last])
    assert case.beats(0) >= silence


@pytest.mark.whole
@pytest.mark.fault("rank: mutant, no rank feels the end of the next one", least=2)
def test_mutant_feels_nothing(case: FaultCase) -> None:
    def end(file: Path) -> None:
        wait_for(lambda: sum(event["event"] == "fault" for event in events_in(file)) == 2)
        wait_for_beats(file, 2 * (PROMPT + DEAD), ranks=[0])
        (pid,) = {event["pid"] for event in events_in(file) if event["rank"] == 0}
        os.kill(pid, signal.SIGKILL)

    result = die_early(case, "no rank feels the end of the next one", end)
    assert "dead or frozen" not in str(result)
    case.row.message = "nobody is named"


@pytest.mark.fault("rank: keeps the interpreter's lock")
def test_locked(case: FaultCase) -> None:
    """Alone, a thread of C ends it; of several, the others name it."""
    faults = [("update", "sleep a little", -1, 4), ("update", "lock", -1, 4)]  # first a heartbeat or two
    result = case.start(faults=[*patient(case, 3.0), *faults])
    last = case.size - 1
    assert result.codes[last], str(result)
    if case.size > 1:
        finding = f"dead or frozen; last heartbeat of {who(last, 4)}"
        case.check_named(result, HANG + DEAD, finding, culprits=[last])
    else:
        case.record_message(result.outputs[0], r"^Timeout \(0:00:0\d\)!")
    case.resume_and_check()


@pytest.mark.fault("rank: one process alone keeps the interpreter's lock")
def test_locked_alone(case: FaultCase) -> None:
    result = case.start(faults=[("before the first step", "patience", 0, 0, 3.0), ("update", "lock", 0, 4)], size=1)
    assert result.codes == [1], str(result)
    case.record_message(result.outputs[0], r"^Timeout \(0:00:0\d\)!")
    find_line(result.outputs[0], r'inject\.py", line \d+ in _lock')


@pytest.mark.whole
@pytest.mark.fault("rank: mutant, no thread of C watches the interpreter")
def test_mutant_locked_alone(case: FaultCase) -> None:
    faults = [("before the first step", "patience", 0, 0, 3.0), ("update", "lock", 0, 4)]

    def end(file: Path) -> None:
        wait_for(lambda: sum(event["event"] == "fault" for event in events_in(file)) == 2)
        time.sleep(2 * (3.0 + 2 * DEAD_S))  # twice what the thread of C waits
        os.kill(events_in(file)[0]["pid"], signal.SIGKILL)

    result = case.start(faults=faults, size=1, mutant="no thread of C watches the interpreter", meanwhile=end)
    assert result.codes == [-signal.SIGKILL], "only the test has ended it"
    case.row.message = "nothing is printed"


@pytest.mark.fault("rank: two at once, SIGKILL and SIGSTOP")
def test_killed_and_frozen(case: FaultCase) -> None:
    of_size(case, 3)
    faults = [("update", "signal later", 2, 4, "SIGSTOP"), ("update", "signal later", 1, 4, "SIGKILL")]

    def end_both(file: Path) -> None:
        wait_for(lambda: any(event["event"] == "exited" for event in events_in(file)))
        for event in events_in(file):
            if event["event"] == "fault":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(event["pid"], signal.SIGKILL)

    result = case.start(faults=faults, meanwhile=end_both)
    both = [f"dead or frozen; last heartbeat of {who(rank, 4)}" for rank in (1, 2)]
    case.check_named(result, HANG, *both, culprits=[1, 2])


@pytest.mark.fault("rank: two at once, one raises and one is killed", least=2)
def test_raises_and_killed(case: FaultCase) -> None:
    result = case.start(faults=[("update", "signal", -1, 4, "SIGKILL"), ("update", "raise", 0, 4)])
    case.record_message(result.outputs[0], f"{who(0, 4)} failed in {case.in_update}: ArithmeticError")
    find_line(result.outputs[0], rf"dead or frozen; last heartbeat of rank {case.size - 1} ")
    case.resume_and_check()


# --- devices ----------------------------------------------------------------------------------------------


@pytest.mark.fault("rank: its device {what}")
@pytest.mark.parametrize("what", ["computes wrongly", "forgets"])
def test_wrong_device(what: str, case: FaultCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 0.5)  # as torchrun: the rank that alone has found it ends with rank 0
    result = case.start(faults=[("at the start", what, -1, 0)])
    told = {"computes wrongly": "multiplies matrices of float32 wrongly", "forgets": "does not keep the"}[what]
    case.check_refused(result, rf"error: cpu of \S+ \(rank {case.size - 1}\) {told}.*: exclude that machine")


@pytest.mark.whole
@pytest.mark.fault("rank: mutant, no device is tried")
def test_mutant_device(case: FaultCase) -> None:
    result = case.start(faults=[("at the start", "computes wrongly", -1, 0)], mutant="no device is tried")
    assert result.ok, str(result)
    case.row.message = "nothing is noticed"
