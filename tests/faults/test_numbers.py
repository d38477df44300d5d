"""Bad numbers change nothing or are named, on all ranks alike; other numbers of ranks get the same losses."""

import shutil
from typing import Any

import pytest

from tests.harness import runner
from tests.harness.fault_case import BATCH, STEPS, FaultCase, checkpoints
from tests.harness.states import same_tensors


@pytest.mark.fault("numbers: NaN on one rank")
def test_nan(case: FaultCase) -> None:
    """All ranks skip the same update: it changes nothing, and the replicas stay equal."""
    flags = ("--save-every", "1", "--check-every", "1")
    result = case.start(*flags, faults=[("backward", "spoil", -1, 3)])
    assert result.ok, str(result)
    case.record_message(result.outputs[0], r"warning: skipped 1 update because the gradient was not finite")
    saved = checkpoints(case.run_dir)
    counts = ("rollout.", "strategy.steps")  # where the environments are, and how soon the replicas meet
    assert same_tensors(saved[3], saved[2], but=counts)
    assert not same_tensors(saved[4], saved[3], but=counts)
    assert max(runner.records(case.run_dir, case.curve)) == STEPS


@pytest.mark.fault("numbers: mutant, updates that are not finite are made")
def test_mutant_makes_them(case: FaultCase) -> None:
    """What they leave is not saved."""
    mutant = "updates that are not finite are made"
    result = case.start("--save-every", "1", faults=[("backward", "spoil", -1, 3)], mutant=mutant)
    case.check_refused(result, "error: not finite at step 3: ")
    assert max(checkpoints(case.run_dir)) == 2


@pytest.mark.fault("numbers: NaN in more steps in a row than --max-skips")
def test_too_many_nans(case: FaultCase) -> None:
    result = case.start("--max-skips", "1", faults=[("backward", "spoil", -1, step) for step in (3, 4)])
    message = r"error: the gradient was not finite in steps 3 to 4, more than --max-skips 1 allows: "
    if case.recipe in runner.SUPERVISED:  # an environment's samples have no indices
        case.check_refused(result, message + ".*samples")
        samples = case.row.message.partition("these steps: ")[2].partition("; to continue")[0]
        assert samples.count(",") == 2 * (24 - 1), samples
    else:
        case.check_refused(result, message + "lower --lr, set --max-grad-norm; to continue")
    case.resume_and_check()


def drift(case: FaultCase, mutant: str = "") -> tuple[runner.Result, tuple[str, ...]]:
    """Put it in where two ranks hold the same; if none do as the recipe is usually run, then on more ranks.

    Returns what came of it, and the flags of another layout than the usual one.
    """
    faults = [("end of a step", "drift", -1, 3)]
    more = runner.layouts(case.recipe)[-1]
    for size, flags in ((case.size, ()), (more.size, (*more.strategy, *more.micro_batches(BATCH)))):
        case.size = size
        result = case.start("--check-every", "1", *flags, faults=faults, mutant=mutant)
        if not any(event["event"] == "nothing shared" for event in case.events):
            return result, flags
        assert result.ok, str(result)
        shutil.rmtree(case.run_dir)
    pytest.skip(f"not applicable: no two of {more.size} ranks hold the same part of a parameter")


@pytest.mark.fault("numbers: one parameter of one rank changes by one bit", least=2)
def test_drift(case: FaultCase) -> None:
    result, flags = drift(case)
    assert all(result.codes), str(result)
    drifted = rf"replicas differ at step 3: \S+( \[.*\])? on rank {case.size - 1} differs from rank \d"
    case.record_message(result.outputs[0], drifted)
    assert list(checkpoints(case.run_dir)) == [2]
    case.resume_and_check(*flags, exact=not flags)


@pytest.mark.fault("numbers: mutant, replicas are not compared", least=2)
def test_mutant_drift_goes_unseen(case: FaultCase) -> None:
    result, _ = drift(case, mutant="replicas are not compared")
    assert result.ok, str(result)
    case.record_message(result.outputs[0], "done     step 6 of 6")


@pytest.mark.fault("numbers: other world size in mid-epoch", least=2)
def test_other_world_size(case: FaultCase) -> None:
    """The same numbers in float64; with BatchNorm, which must see the same samples, over all ranks."""
    sync = ["--sync-bn"] if runner.has_flag(case.recipe, "--sync-bn") else []
    flags = ("--dtype", "float64", *sync)
    assert case.start(*flags, name="reference").ok
    most = runner.world_sizes(case.recipe)[-1]
    for size, until in ((2, "2"), (1, "4"), (min(3, most), "0")):
        result = case.start(*flags, "--stop-after", until, size=size)
        assert result.ok, str(result)
    case.record_cost(4)
    for tag in (case.curve, "train/grad_norm"):
        close: Any = pytest.approx(runner.records(case.out / "reference", tag), rel=1e-9)
        assert runner.records(case.run_dir, tag) == close, tag
    case.record_message(result.outputs[0], "resuming from step 4 of")
