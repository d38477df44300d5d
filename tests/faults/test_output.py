"""What a run prints and records beside its checkpoints: none of it can end a training."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from common.run import run_dir

from tests.harness import inject, runner
from tests.harness.disks import mounted
from tests.harness.fault_case import STEPS, FaultCase


@pytest.fixture
def target(what: str, case: FaultCase) -> Iterator[str]:
    """What the action "print to" gets."""
    if what == "the reader has left":
        yield ""
        return
    with mounted(case.folder / "small") as place:
        inject.ACTIONS["fill"](str(place))
        yield str(place / "out.log")


LOSSES = ["the reader has left", "a full disk"]


@pytest.mark.fault("output: {what}, from step 2 on")
@pytest.mark.parametrize("what", LOSSES)
def test_lost(what: str, target: str, case: FaultCase) -> None:
    """The training ends as without a fault, and logs/ has what could not be printed."""
    faults = [("end of a step", "print to", rank, 2, target) for rank in range(case.size)]
    result = case.start(faults=faults)
    assert result.ok, str(result)
    case.check_same_as_reference()
    log = (case.run_dir / "logs" / "rank_00000.log").read_text()
    case.record_message(
        log, r"warning: the output cannot be written \(.*\), which ends no training; what follows is in"
    )
    assert log.count("the output cannot be written") == 1
    assert f"done     step {STEPS} of {STEPS}" in log
    assert "Traceback" not in log


@pytest.mark.fault("output: mutant, {what} and output is not protected")
@pytest.mark.parametrize("what", LOSSES)
def test_mutant(what: str, target: str, case: FaultCase) -> None:
    result = case.start(faults=[("end of a step", "print to", 0, 2, target)], mutant="output is not protected")
    assert not result.ok, str(result)


ENDS = {  # flags, faults, and the exit code
    "trains to its end": ([], [], 0),
    "is refused": (["--log-every", "-1"], [], 2),
    "raises": ([], [("end of a step", "raise", 0, 3)], 1),
}


@pytest.mark.fault("output: launched into a pipe without a reader, {how}")
@pytest.mark.parametrize("how", ["trains to its end", *(pytest.param(e, marks=pytest.mark.whole) for e in [*ENDS][1:])])
def test_launched_without_a_reader(how: str, case: FaultCase) -> None:
    """The exit code is the training's, not that of the interpreter's last flush."""
    flags, faults, expected = ENDS[how]
    reader, pipe = os.pipe()
    os.close(reader)
    code, _ = case.launch(*flags, faults=faults, onto=pipe)
    os.close(pipe)
    assert code == expected
    if not expected:
        case.check_same_as_reference()


# --- records ----------------------------------------------------------------------------------------------


def lose_events(case: FaultCase, place: Path, mutant: str = "") -> runner.Result:
    """Train 40 steps; from step 2 to 30, the disk is full."""
    faults = [("end of a step", "fill", 0, 2, str(place)), ("end of a step", "free", 0, 30, str(place))]
    result = case.start("--max-steps", "40", "--save-every", "40", faults=faults, mutant=mutant)
    assert result.ok, str(result)
    return result


def steps_on_board(case: FaultCase) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.step for event in EventAccumulator(str(case.run_dir)).Reload().Scalars(case.curve)]


@pytest.mark.fault("output: TensorBoard's file on a full disk for a while")
def test_events_return(case: FaultCase) -> None:
    """After its first error, TensorBoard's writer would raise it for ever."""
    with mounted(case.out) as place:
        result = lose_events(case, place)
        assert "Traceback" not in str(result), str(result)
        case.record_message(result.outputs[0], "warning: TensorBoard lacks step ")
        files = [*case.run_dir.glob("events.out.tfevents.*")]
        assert len(files) == 2
        assert all(file.stat().st_size for file in files)
        steps = steps_on_board(case)
        assert {1, 2, *range(32, 41)} <= {*steps}
        assert len(steps) == len({*steps})
        assert {*range(31, 41)} <= runner.records(case.run_dir, case.curve).keys()
        last = result.outputs[0].partition("31/40")[2]
        assert last
        assert "warning: " not in last.partition("32/40")[2], "none that is false, once there is room"


@pytest.mark.fault("output: mutant, TensorBoard's writer is kept after an error")
def test_mutant_keeps_writer(case: FaultCase) -> None:
    with mounted(case.out) as place:
        result = lose_events(case, place, mutant="TensorBoard's writer is kept")
        assert not {*range(32, 41)} <= {*steps_on_board(case)}, str(result)


DAMAGES = {
    "a half line": lambda line: line[: len(line) // 2],  # and the next line is glued to it
    "zeros": lambda line: bytes(len(line) - 1) + b"\n",
    "what is not UTF-8": lambda line: b"\xff\xfe" + line,
    "a line without a step": lambda line: line.replace(b"step", b"stop"),
    "a line that is a list": lambda line: b"[" + line[:-1] + b"]\n",
}


def damage_record(case: FaultCase, what: str) -> int:
    """Damage the record of step 2 of a run of 4 steps; returns the number of the line, from 1."""
    case.copy_reference(until=4)
    file = case.run_dir / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    hit = next(i for i, line in enumerate(lines) if case.curve.encode() in line and json.loads(line)["step"] == 2)
    lines[hit] = DAMAGES[what](lines[hit])
    file.write_bytes(b"".join(lines))
    return hit + 1


@pytest.mark.fault("output: {what} in metrics.jsonl")
@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_record(what: str, case: FaultCase) -> None:
    """The line is named and left out; every other record stays."""
    number = damage_record(case, what)
    result = case.start()
    assert result.ok, str(result)
    assert result.outputs[0].count("is damaged") == 1
    case.record_message(result.outputs[0], rf"warning: line {number} of \S+/metrics\.jsonl is damaged")
    losses = {record["step"]: record[case.curve] for record in run_dir.records(case.run_dir) if case.curve in record}
    wanted = runner.records(case.reference(), case.curve)
    del wanted[2]
    assert losses == wanted
    case.check_same_checkpoints(STEPS)


@pytest.mark.fault("output: mutant, damaged records are not left out")
def test_mutant_reads_damage(case: FaultCase) -> None:
    damage_record(case, "zeros")
    assert not case.start(mutant="damaged records are not left out").ok


def test_every_kind_of_damage_is_one(tmp_path: Path) -> None:
    """What follows a damaged line is read, and what a kill has cut off is not."""
    line = b'{"step": 1, "train/loss": 0.5}\n'
    for damage in DAMAGES.values():
        (tmp_path / "metrics.jsonl").write_bytes(line + damage(line) + line + line + line[:9])
        assert 1 <= len(run_dir.records(tmp_path)) - 1 <= 2, damage(line)
