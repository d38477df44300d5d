"""Bad numbers leave no trace or are named, on all ranks alike; other ranks go on with the same numbers."""

import shutil
from typing import Any

import pytest

from tests.harness import runner
from tests.harness.fault_case import BATCH, STEPS, Cell, checkpoints, same_tensors


@pytest.mark.fault("numbers: NaN on one rank")
def test_nan(cell: Cell) -> None:
    """All ranks leave the same update out: it leaves no trace, and the replicas stay equal."""
    flags = ("--save-every", "1", "--check-every", "1")
    result = cell.start(*flags, faults=[("backward", "spoil", -1, 3)])
    assert result.ok, str(result)
    cell.say(result.outputs[0], r"warning: skipped 1 update because the gradient was not finite")
    saved = checkpoints(cell.run)
    assert same_tensors(saved[3], saved[2], but="rollout.")
    assert not same_tensors(saved[4], saved[3], but="rollout.")
    assert max(runner.records(cell.run, "train/loss")) == STEPS


@pytest.mark.fault("numbers: mutant, updates that are not finite are made")
def test_mutant_makes_them(cell: Cell) -> None:
    mutant = "updates that are not finite are made"
    cell.start("--save-every", "1", faults=[("backward", "spoil", -1, 3)], mutant=mutant)
    saved = checkpoints(cell.run)
    assert not same_tensors(saved[3], saved[2], but="rollout.")
    cell.message = "the checkpoint after step 3 is not the one before"


@pytest.mark.fault("numbers: NaN in more steps in a row than --max-skips")
def test_too_many_nans(cell: Cell) -> None:
    result = cell.start("--max-skips", "1", faults=[("backward", "spoil", -1, step) for step in (3, 4)])
    assert result.codes[0] == 2, str(result)
    assert all(result.codes), str(result)
    cell.say(
        result.outputs[0],
        r"error: the gradient was not finite in steps 3 to 4, more than --max-skips 1 allows: .*samples",
    )
    samples = cell.message.rpartition(": ")[2]
    assert samples.count(",") == 2 * (24 - 1), samples
    cell.resume()


def drift(cell: Cell, mutant: str = "") -> tuple[runner.Result, tuple[str, ...]]:
    """Put it in where two ranks hold the same; if none do as the recipe is usually run, then on more ranks.

    Returns what came of it, and the flags of another layout than the usual one.
    """
    faults = [("end of a step", "drift", -1, 3)]
    more = runner.layouts(cell.recipe)[-1]
    for size, flags in ((cell.size, ()), (more.size, (*more.strategy, *more.micro_batches(BATCH)))):
        cell.size = size
        result = cell.start("--check-every", "1", *flags, faults=faults, mutant=mutant)
        if not any(event["event"] == "nothing shared" for event in cell.events):
            return result, flags
        assert result.ok, str(result)
        shutil.rmtree(cell.run)
    pytest.skip(f"not applicable: no two of {more.size} ranks hold the same part of a parameter")


@pytest.mark.fault("numbers: one parameter of one rank changes by one bit", least=2)
def test_drift(cell: Cell) -> None:
    result, flags = drift(cell)
    assert all(result.codes), str(result)
    told = rf"replicas differ at step 3: \S+( \[.*\])? on rank {cell.size - 1} differs from rank \d"
    cell.say(result.outputs[0], told)
    assert list(checkpoints(cell.run)) == [2]
    cell.resume(*flags, exact=not flags)


@pytest.mark.fault("numbers: mutant, replicas are not compared", least=2)
def test_mutant_drift_goes_unseen(cell: Cell) -> None:
    result, _ = drift(cell, mutant="replicas are not compared")
    assert result.ok, str(result)
    cell.say(result.outputs[0], "done     step 6 of 6")


@pytest.mark.fault("numbers: other world size in mid-epoch", core=True, least=2)
def test_other_world_size(cell: Cell) -> None:
    """The same numbers in float64; with BatchNorm, which must see the same samples, over all ranks."""
    sync = ["--sync-bn"] if "    sync_bn: " in runner.source(cell.recipe) else []
    flags = ("--dtype", "float64", *sync)
    assert cell.start(*flags, name="whole").ok
    most = runner.world_sizes(cell.recipe)[-1]
    for size, until in ((2, "2"), (1, "4"), (min(3, most), "0")):
        result = cell.start(*flags, "--stop-after", until, size=size)
        assert result.ok, str(result)
    cell.count_lost(4)
    for tag in ("train/loss", "train/grad_norm"):
        close: Any = pytest.approx(runner.records(cell.out / "whole", tag), rel=1e-9)
        assert runner.records(cell.run, tag) == close, tag
    cell.say(result.outputs[0], "resuming from step 4 of")
