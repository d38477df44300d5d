"""A state that has gone wrong is never kept: the save is refused, and the run ends or goes back and is exact again."""

import random
import re

import pytest

from tests.harness import inject, runner
from tests.harness.fault_case import STEPS, FaultCase, checkpoints
from tests.harness.states import same_tensors

KINDS = ("parameter", "moment", "buffer")
REWIND = ("--on-bad-state", "rewind")


def damage(
    kind: str, how: str, seed: int = 0, rank: int = -1, step: int = 3, point: str = "end of a step"
) -> inject.Fault:
    """One element of a rank's state changes; a bit flips only in what another rank holds as well."""
    return (point, "damage state", rank, step, kind, how, seed)


def skip_if_not_there(case: FaultCase, kind: str, *flags: str) -> tuple[str, ...]:
    """Flags with which buffers are the same on all ranks; or the kind of state does not exist here."""
    if kind == "moment":
        case.skip_unless_it_trains()
    if kind == "buffer":
        if runner.workload(case.recipe) in ("gpt", "mimo"):
            pytest.skip("not applicable: no buffers are saved")
        if runner.has_flag(case.recipe, "--sync-bn"):
            return ("--sync-bn", *flags)
    return flags


def start_damaged(case: FaultCase, fault: tuple, *flags: str, mutant: str = "") -> runner.Result:
    """Skips if no other rank holds what was to be changed."""
    result = case.start(*flags, faults=[fault], mutant=mutant)
    if any(event["event"] == "nothing shared" for event in case.events):
        pytest.skip("not applicable: no two ranks hold the same part of this state")
    return result


@pytest.mark.fault("numbers: NaN in a {kind} of one rank")
@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_not_saved(kind: str, case: FaultCase) -> None:
    """With a save at each step, no checkpoint after the fault; the same command is exact."""
    flags = skip_if_not_there(case, kind)
    fault = damage(kind, "nan", step=4, point="before the data")
    result = case.start(*flags, "--save-every", "1", faults=[fault])
    case.check_refused(
        result, rf"error: not finite at step 4: \S+ on rank {case.size - 1}\. An update may have overflowed"
    )
    assert list(checkpoints(case.run_dir)) == [1, 2, 3]
    if not flags:
        case.resume_and_check("--save-every", "1")


@pytest.mark.fault("numbers: NaN in a parameter, and rank 0 is the last to see it", least=2)
def test_rank_0_is_late(case: FaultCase) -> None:
    """All ranks find it: rank 0 prints it, and none takes another's error for the cause."""
    flags = skip_if_not_there(case, "parameter")
    faults = [damage("parameter", "nan", step=4, point="before the data"), ("end of a step", "finds late", 0, 2, 1.0)]
    case.check_refused(case.start(*flags, faults=faults), r"error: not finite at step 4: \S+ on rank ")


@pytest.mark.fault("numbers: a bit of a {kind} of one rank, found at the save", least=2)
@pytest.mark.parametrize("kind", KINDS)
def test_bit_is_not_saved(kind: str, case: FaultCase) -> None:
    """With the defaults, --check-every 100 among them."""
    flags = skip_if_not_there(case, kind)
    result = start_damaged(case, damage(kind, "bit", case.place), *flags)
    case.check_refused(result, r"error: replicas differ at step 4: \S+( \[.*\])? on rank ")
    assert list(checkpoints(case.run_dir)) == [2]
    if not flags:
        case.resume_and_check()


@pytest.mark.fault("numbers: mutant, state is not looked at before a save", least=2)
def test_mutant_saves_it(case: FaultCase) -> None:
    case.skip_unless_it_trains()  # else a rank's fault does not spread, and rank 0's results are saved
    result = start_damaged(case, damage("parameter", "bit", case.place), mutant="state is not looked at")
    assert result.ok, str(result)
    case.record_message(result.outputs[0], "done     step 6 of 6")
    with pytest.raises(AssertionError):
        case.check_same_as_reference()


# --- going back ---


def check_went_back(case: FaultCase, result: runner.Result, fault: str) -> None:
    assert result.ok, str(result)
    case.record_message(result.outputs[0], rf"warning: {fault}.*going back to the newest checkpoint")
    assert re.search(r"step \d was computed again, without the fault: it was a passing one", result.outputs[0])


@pytest.mark.fault("numbers: a bit of a parameter, --on-bad-state rewind", least=2)
def test_rewind(case: FaultCase) -> None:
    """The same processes compute the steps again, and end as if there had been no fault."""
    result = start_damaged(case, damage("parameter", "bit", case.place), *REWIND)
    check_went_back(case, result, "replicas differ at step 4")
    case.check_same_as_reference()


@pytest.mark.fault("numbers: NaN in a parameter before the first save, --on-bad-state rewind")
def test_rewind_to_the_start(case: FaultCase) -> None:
    case.skip_unless_it_trains()  # else nobody looks at a step before it is saved
    result = case.start(*REWIND, "--name", "", "--save-every", "4", faults=[damage("parameter", "nan", step=1)])
    assert result.ok, str(result)
    [run] = case.out.iterdir()
    run.rename(case.run_dir)
    check_went_back(case, result, "the gradient was not finite in step 2")
    case.check_same_as_reference()


@pytest.mark.fault("numbers: NaN in a step, computed again by --on-bad-state rewind")
def test_passing_nan(case: FaultCase) -> None:
    """No update is skipped in the end."""
    result = case.start(*REWIND, "--save-every", "1", "--log-every", "9", faults=[("backward", "spoil", -1, 3)])
    check_went_back(case, result, "the gradient was not finite in step 3")
    case.check_same_checkpoints(STEPS)


@pytest.mark.fault("stop: SIGTERM just before --on-bad-state rewind", least=2)
def test_request_outlives_it(case: FaultCase) -> None:
    """The ranks go back, stop as asked, and continue as if undisturbed."""
    request = ("end of a step", "signal and hear", 0, 3, "SIGTERM")
    pauses = [("end of a step", "hear", -1, 3)] * 2  # the second after it has gone back
    result = case.start(*REWIND, faults=[damage("parameter", "bit", case.place), request, *pauses])
    if any(event["event"] == "nothing shared" for event in case.events):
        pytest.skip("not applicable: no two ranks hold the same part of this state")
    assert result.ok, str(result)
    case.record_message(result.outputs[0], r"stopped  checkpoint saved \(SIGTERM")
    assert max(checkpoints(case.run_dir)) < STEPS
    case.resume_and_check(exact=False)
    case.check_same_checkpoints(STEPS)


@pytest.mark.fault("numbers: NaN in a step, also when it is computed again")
def test_lasting_nan(case: FaultCase) -> None:
    """It is of the data or the program: skipped, as without --on-bad-state rewind."""
    result = case.start(*REWIND, faults=[("backward", "spoil", -1, 3)] * 2)
    assert result.ok, str(result)
    case.record_message(result.outputs[0], "note: the gradient was not finite in step 3 again: this is no passing")
    assert "it was a passing one" not in result.outputs[0]


@pytest.mark.fault("numbers: a bit of a parameter, also when it is computed again", least=2)
def test_lasting_bit(case: FaultCase) -> None:
    faults = [damage("parameter", "bit", case.place)] * 2
    result = case.start(*REWIND, faults=faults)
    if any(event["event"] == "nothing shared" for event in case.events):
        pytest.skip("not applicable: no two ranks hold the same part of this state")
    case.check_refused(
        result, r"error: replicas differ at step 4: .*; this is no passing fault, because the run went back"
    )
    assert list(checkpoints(case.run_dir)) == [2]


@pytest.mark.fault("numbers: a loss spike in one step, computed again by --on-bad-state rewind")
def test_passing_spike(case: FaultCase) -> None:
    """Finite, and the same on all ranks: as when a batch or a checkpoint in memory was scaled by mistake."""
    case.skip_unless_it_trains()
    result = case.start(*REWIND, faults=[("end of a step", "grow", rank, 3) for rank in range(case.size)])
    check_went_back(case, result, "the loss was over 10 times the largest before in step 4")
    case.check_same_as_reference()


# --- anywhere ---

POINTS = {  # and whether they are rank 0's alone
    **{"end of a step": False, "update": False, "before the data": False},
    **{"in a file": True, "before the digests": True, "after the rename": True},
}


@pytest.mark.whole
@pytest.mark.fault("numbers: a flipped bit or NaN at a random place, {number}")
@pytest.mark.parametrize("number", range(8))
def test_random_place(number: int, case: FaultCase) -> None:
    """The run that continues ends with the reference's bits, or refuses: never a quiet difference."""
    drawn = random.Random(f"{case.recipe} {number}")
    kind = drawn.choice(KINDS)
    how = drawn.choice(("bit", "nan"))
    point = drawn.choice([*POINTS])
    rank = 0 if POINTS[point] else drawn.randrange(case.size)
    flags = skip_if_not_there(case, kind, "--save-every", drawn.choice(("1", "2")))
    more = drawn.choice(((), ("--async-save",))) if point != "update" else ()
    fault = damage(kind, how, seed=drawn.randrange(10**6), rank=rank, step=drawn.randint(2, 5), point=point)
    case.row.message = f"{how} in a {kind} of rank {rank}, {point}, step {fault[3]}"
    wanted = case.start(*flags, name="reference")
    assert wanted.ok, str(wanted)
    result = start_damaged(case, fault, *flags, *more, *REWIND)
    if not result.ok:
        case.check_refused(result, "error: (replicas differ|not finite|the gradient was not finite)")
        again = case.start(*flags, *more)
        assert again.ok, str(again)
    ours, theirs = checkpoints(case.run_dir), checkpoints(case.out / "reference")
    assert same_tensors(ours[6], theirs[6]), str(result)
