"""A step whose numbers may be wrong is computed again once, and it is said what that has shown."""

from pathlib import Path

import pytest
from common import BadStateError
from common.state.doubts import SPIKE, Doubts

PATH = Path("/runs/my run")
pytestmark = pytest.mark.usefixtures("group")


def go_back(error: BadStateError, doubts: Doubts | None = None) -> Doubts:
    """The doubts of a run that has gone back, which the one that begins again has."""
    doubts = doubts or Doubts("rewind")
    doubts.judge(error, PATH)
    return doubts


def test_losses_are_compared_with_those_before_a_rewind(capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy step after the checkpoint is no spike, and a lasting one is said to be one, and counts from then on."""
    losses = (2, 1, 0.5, 0.3, 0.2, 0.01, 0.2, 0.3, 25)  # the one of step 9 jumps, and is computed again from step 5 on
    doubts = Doubts("rewind")
    for step, loss in enumerate(losses[:-1], 1):
        doubts.check_loss(step, loss)
    with pytest.raises(BadStateError, match=r"^the loss was over 10 times the largest before in step 9$") as error:
        doubts.check_loss(9, losses[-1])
    assert error.value.step == 9
    go_back(error.value, doubts)
    for step, loss in enumerate(losses[5:], 6):
        doubts.check_loss(step, loss)
    doubts.check_loss(10, 0.4)
    told = capsys.readouterr().out
    assert told.count("in step 9 again: this is no passing fault") == told.count("again: this is") == 1
    assert told.count("going back to the newest checkpoint (--on-bad-state rewind)") == 1
    doubts.check_loss(11, 25 * SPIKE)
    with pytest.raises(BadStateError, match=r"in step 12$"):
        doubts.check_loss(12, 25 * SPIKE**2 + 1)


def test_losses_of_before_a_rewind_do_not_count() -> None:
    """A wrong one, which was no spike yet, would hide those that come."""
    doubts = Doubts("rewind")
    for step, loss in enumerate((1.0, 8.0), 1):
        doubts.check_loss(step, loss)
    go_back(BadStateError("not finite at step 3", 3), doubts)
    for step in (1, 2, 3):
        doubts.check_loss(step, 1.0)
    with pytest.raises(BadStateError, match=r"in step 4$"):
        doubts.check_loss(4, 11.0)


@pytest.mark.parametrize(
    ("losses", "spike"),
    [
        ((1.0, 10.0), 0),
        ((1.0, 10.1), 2),
        ((0.1, 1.0, 0.2, 10.0), 0),  # of the largest, not of the latest
        ((0.0, 99.0), 0),  # nothing to compare with
        ((float("nan"), 99.0), 0),
        ((1.0, float("nan"), 10.1), 3),  # NaN counts for nothing, and hides nothing
        ((1.0, float("inf")), 2),
    ],
    ids=str,
)
def test_spikes(losses: tuple[float, ...], spike: int) -> None:
    doubts = Doubts("rewind")
    found = 0
    for step, loss in enumerate(losses, 1):
        try:
            doubts.check_loss(step, loss)
        except BadStateError as error:
            found = error.step
    assert found == spike
    stays = Doubts("stop")
    for step, loss in enumerate(losses, 1):
        stays.check_loss(step, loss)


@pytest.mark.parametrize(
    ("confirmed", "told"),
    [
        ([], False),
        ([(5, False)], False),  # the checkpoint of the step itself comes before the next one
        ([(5, True)], True),
        ([(4, False), (6, False)], True),
        ([(6, False), (7, False), (8, True)], True),  # once
    ],
    ids=str,
)
def test_passing_fault(confirmed: list[tuple[int, bool]], told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    doubts = go_back(BadStateError("the gradient was not finite in step 5", 5))
    capsys.readouterr()
    for step, last in confirmed:
        doubts.confirm(step, last)
    line = "step 5 was computed again, without the fault: it was a passing one\n"
    assert capsys.readouterr().out == line * told


def test_lasting_fault_is_not_called_a_passing_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The same step, or one before it: it is trained on, for its numbers may be right."""
    for step in (3, 5):
        doubts = go_back(BadStateError("a spike in step 5", 5))
        capsys.readouterr()
        doubts.suspect(step, "a spike")
        doubts.confirm(8, last=True)
        assert capsys.readouterr().out == f"note: a spike in step {step} again: this is no passing fault\n"
    with pytest.raises(BadStateError, match=r"^a spike in step 6$"):
        doubts.suspect(6, "a spike")


def test_no_fault_is_spoken_of(capsys: pytest.CaptureFixture[str]) -> None:
    doubts = Doubts("rewind")
    doubts.confirm(5, last=True)
    assert capsys.readouterr().out == ""


def test_bad_state_that_ends_the_run() -> None:
    """Because the user wants that; the message says how to go on."""
    told = r"^replicas differ at step 5; to continue from the newest checkpoint, run: .* --name 'my run'$"
    with pytest.raises(BadStateError, match=told) as error:
        Doubts("stop").judge(BadStateError("replicas differ at step 5", 5), PATH)
    assert error.value.step == 5


def test_bad_state_for_the_second_time() -> None:
    """Whoever goes back from there twice gets there for ever; from a later one he may."""
    doubts = go_back(BadStateError("replicas differ at step 5", 5))
    told = "; this is no passing fault, because the run went back from there before; to continue from the newest "
    for step in (4, 5):
        with pytest.raises(BadStateError, match=f"^not finite{told}"):
            doubts.judge(BadStateError("not finite", step), PATH)
    go_back(BadStateError("not finite", 6), doubts)
    with pytest.raises(BadStateError, match=f"^not finite{told}"):
        doubts.judge(BadStateError("not finite", 6), PATH)
