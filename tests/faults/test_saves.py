"""Killed at any point of a save, or without room on the disk, a run resuming from a checkpoint that is whole."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from common import manifest

from tests.harness import inject, runner
from tests.harness.disks import FEW_FILES, QUOTA, SMALL, mounted
from tests.harness.fault_case import STEPS, UNHURRIED, FaultCase, checkpoints, temporaries

HOW = ["synchronous", pytest.param("asynchronous", marks=pytest.mark.whole)]
KILLS = {  # point -> which rank, how, from which step the run continues
    "before the data": (-1, "signal", 2),
    "between the files": (-1, "signal later", 2),
    "in a file": (0, "die in a file", 2),
    "before the digests": (0, "signal", 2),
    "before the manifest": (0, "signal", 2),
    "before the rename": (0, "signal", 2),
    "after the rename": (0, "signal", 4),
    "during retention": (0, "die in a deletion", 4),
}


def flags_for(how: str, pauses: bool = False) -> tuple[str, ...]:
    """`pauses`: the main loop waits for the save beside it, for as long as a busy machine takes."""
    return ("--async-save", *UNHURRIED * pauses) if how == "asynchronous" else ()


@pytest.mark.fault("save: SIGKILL {point}, {how}")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("point", KILLS)
def test_killed(point: str, how: str, case: FaultCase) -> None:
    rank, action, expected = KILLS[point]
    more = str(case.run_dir) if action.startswith("die") else "SIGKILL"
    case.copy_reference(until=2)
    keep = ("--keep", "1") if point == "during retention" else ()
    result = case.start(*flags_for(how), *keep, faults=[(point, action, rank, 4, more)])
    assert -9 in result.codes, str(result)
    done = case.steps_done()
    assert all(not manifest.verify(path)[1] for step, path in checkpoints(case.run_dir).items() if step == expected)
    result = case.resume_and_check(*flags_for(how))
    case.record_message(result.outputs[0], f"resuming from step {expected} of")
    assert case.row.steps_lost == done - expected
    assert not temporaries(case.run_dir)


# --- the disk ---------------------------------------------------------------------------------------------


@pytest.fixture
def disk(what: str, case: FaultCase) -> Iterator[Path]:
    """A small disk of its own below the runs of a case, or, to be read-only, below checkpoints/; step 2 is saved."""
    options = DISKS[what].options
    if options:
        with mounted(case.out, options):
            case.copy_reference(until=2)
            yield case.out
        return
    case.copy_reference(until=2)
    place = case.run_dir / "checkpoints"
    kept = place.rename(case.folder / "kept")
    with mounted(place, SMALL):
        shutil.copytree(kept, place, dirs_exist_ok=True)
        yield place


class Disk(NamedTuple):
    """What goes wrong with a disk."""

    options: str  # of the disk
    point: str  # where and in which step it goes wrong
    step: int
    breaks: Sequence[str]  # how, and how it is mended: actions of inject.py
    mended: Sequence[str]
    message: str  # what the run prints of it


DISKS = {
    "full": Disk(SMALL, "end of a step", 3, ["fill"], ["free"], "disk full: "),
    "fills up in a save": Disk(SMALL, "before the data", 4, ["fill"], ["free"], "disk full: "),
    "inodes full": Disk(FEW_FILES, "end of a step", 3, ["fill entries"], ["free"], "disk full: "),
    "over quota": Disk(
        QUOTA, "end of a step", 3, ["btrfs", "qgroup", "limit", "32k"], ["btrfs", "quota", "disable"], "quota exceeded"
    ),
    "read-only": Disk("", "end of a step", 3, ["remount", "ro"], ["remount", "rw"], "Read-only file system"),
}


def fault_of(what: str, place: Path) -> inject.Fault:
    action, *more = DISKS[what].breaks
    return DISKS[what].point, action, 0, DISKS[what].step, str(place), *more


@pytest.mark.fault("disk: {what} for a while, {how}")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", DISKS)
def test_disk_for_a_while(what: str, how: str, disk: Path, case: FaultCase) -> None:
    """The save that fails warns, and the training continues to a last save that succeeds."""
    action, *more = DISKS[what].mended
    pause = ("end of a step", "let the save end", 0, 5)  # the one beside the training, which fails
    mended = ("end of a step", action, 0, 5, str(disk), *more)
    result = case.start(*flags_for(how, pauses=True), faults=[fault_of(what, disk), pause, mended])
    assert result.ok, str(result)
    assert "Traceback" not in str(result), str(result)
    case.record_message(
        result.outputs[0], f"warning: no checkpoint of step 4: .*{DISKS[what].message}.*; training continues"
    )
    assert list(checkpoints(case.run_dir)) == [2, 6]
    assert not temporaries(case.run_dir)
    case.check_same_checkpoints(2, 6)


@pytest.mark.fault("disk: {what} to the end, {how}")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", [pytest.param(one, marks=[pytest.mark.whole] * (one != "full")) for one in DISKS])
def test_disk_to_the_end(what: str, how: str, disk: Path, case: FaultCase) -> None:
    """The last save must succeed; once there is room, the run resuming from the checkpoint before."""
    result = case.start(*flags_for(how), faults=[fault_of(what, disk)])
    case.check_refused(result, f"error: the last checkpoint was not saved: .*{DISKS[what].message}")
    assert list(checkpoints(case.run_dir)) == [2]
    assert not manifest.verify(checkpoints(case.run_dir)[2])[1]
    action, *more = DISKS[what].mended
    inject.ACTIONS[action](str(disk), *more)
    case.resume_and_check(*flags_for(how))
    assert case.row.steps_lost == STEPS - 2
    assert not temporaries(case.run_dir)


@pytest.mark.fault("disk: {what} already when the run starts again")
@pytest.mark.parametrize("what", [what for what in DISKS if DISKS[what].options and "save" not in what])
def test_disk_at_the_start(what: str, disk: Path, case: FaultCase) -> None:
    """What a start writes can wait: the run warns and trains on, and what it had written stays."""
    for file in case.run_dir.glob("events.out.tfevents.*"):
        file.unlink()
    before = (case.run_dir / "config.json").read_bytes()
    action, *more = DISKS[what].breaks
    inject.ACTIONS[action](str(disk), *more)
    action, *more = DISKS[what].mended
    result = case.start("--save-every", "6", faults=[("end of a step", action, 0, 5, str(disk), *more)])
    assert result.ok, str(result)
    assert "Traceback" not in str(result), str(result)
    case.record_message(result.outputs[0], r"warning: not all files of this start were written to")
    assert (case.run_dir / "config.json").read_bytes() == before
    assert not [*case.run_dir.glob("*.tmp")]
    assert all(file.stat().st_size for file in case.run_dir.glob("events.out.tfevents.*"))
    assert runner.records(case.run_dir, case.curve).items() <= runner.records(case.reference(), case.curve).items()
    case.check_same_checkpoints(2, 6)


@pytest.mark.fault("disk: mutant, a start needs room")
@pytest.mark.parametrize("what", ["full"])
def test_mutant_needs_room(what: str, disk: Path, case: FaultCase) -> None:
    action, *more = DISKS[what].breaks
    inject.ACTIONS[action](str(disk), *more)
    assert not case.start(mutant="a start needs room on the disk").ok


@pytest.mark.fault("disk: the run's folder is removed")
def test_removed(case: FaultCase) -> None:
    """What is saved from then on is there, and is enough to continue."""
    result = case.start(faults=[("end of a step", "remove", 0, 3, str(case.run_dir))])
    assert result.ok, str(result)
    case.record_message(result.outputs[0], "done     step 6 of 6")
    assert list(checkpoints(case.run_dir)) == [4, 6]
    case.check_same_checkpoints(4, 6)
