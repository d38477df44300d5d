"""Which evaluation is the best so far, over resumes, and when --patience has waited for a better one long enough."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from common import UserError
from common.state.best import Best

pytestmark = pytest.mark.usefixtures("group")
NAN = float("nan")


def go_through(best: Best, values: Sequence[float], first_step: int = 0) -> tuple[list[int], list[str]]:
    """An evaluation after each step, of one metric; the best step so far, and what --patience says."""
    found = [
        (best.add(step, {"x": 1.0, best_metric(best): value}), best.step)
        for step, value in enumerate(values, first_step + 1)
    ]
    return [step for _, step in found], [said for said, _ in found]


def best_metric(best: Best) -> str:
    return best._tag.removeprefix("val/")


@pytest.mark.parametrize(
    ("metric", "values", "steps"),
    [
        ("loss", [3.0, 2.0, 2.5, 1.0], [1, 2, 2, 4]),  # lower
        ("top1", [0.5, 0.25, 0.75, 0.5], [1, 1, 3, 3]),  # higher
        ("loss", [2.0, 2.0, 2.0], [1, 1, 1]),  # the first of equal ones
        ("loss", [NAN, 3.0, NAN, 2.0], [-1, 2, 2, 4]),
        ("loss", [float("inf"), NAN], [-1, -1]),
    ],
)
def test_best_so_far(metric: str, values: list[float], steps: list[int], tmp_path: Path) -> None:
    found, said = go_through(Best({"keep_best": metric}, tmp_path, 0), values)
    assert found == steps
    assert not any(said), "nobody has asked for --patience"


@pytest.mark.parametrize(
    ("keep_best", "patience", "values", "ends"),
    [
        ("", 2, [3.0, 2.0, 2.5, 2.0], {4: "no better val/loss for 2 evaluations, best 2 at step 2"}),
        ("", 2, [3.0, 3.5, 2.0, 2.5], {}),
        ("top1", 1, [0.25, 0.5, 0.5], {3: "no better val/top1 for 1 evaluations, best 0.5 at step 2"}),
        ("", 2, [NAN, NAN], {2: "no better val/loss for 2 evaluations, best nan at step 0"}),
        ("loss", 0, [1.0, 2.0, 3.0, 4.0], {}),
        ("", 1, [1.0, 2.0, 3.0], {n: f"no better val/loss for {n - 1} evaluations, best 1 at step 1" for n in (2, 3)}),
    ],
)
def test_patience(keep_best: str, patience: int, values: list[float], ends: dict[int, str], tmp_path: Path) -> None:
    steps, said = go_through(Best({"keep_best": keep_best, "patience": patience}, tmp_path, 0), values)
    assert {step: text for step, text in enumerate(said, 1) if text} == {
        step: f"--patience {patience}: {text}" for step, text in ends.items()
    }
    assert keep_best or set(steps) == {-1}, "no checkpoint is kept for it"


def test_nothing_is_asked(tmp_path: Path) -> None:
    """Then an evaluation may lack a loss, as that of a reward does."""
    best = Best({}, tmp_path, 0)
    assert [best.add(step, {"return": 1.0}) for step in (1, 2, 3)] == [""] * 3
    assert best.step == -1


@pytest.mark.parametrize(
    ("keep_best", "patience", "told"),
    [
        ("top1", 0, "--keep-best top1: an evaluation gives x, loss; name one of them with --keep-best"),
        ("top1", 3, "--keep-best top1: an evaluation gives x, loss; name one of them with --keep-best"),
    ],
)
def test_metric_that_no_evaluation_gives(keep_best: str, patience: int, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{told}$"):
        Best({"keep_best": keep_best, "patience": patience}, tmp_path, 0).add(1, {"x": 1.0, "loss": 2.0})
    with pytest.raises(
        UserError, match=r"^--patience 3: an evaluation gives return; name one of them with --keep-best$"
    ):
        Best({"patience": 3}, tmp_path, 0).add(1, {"return": 1.0})


LINES = [
    {"step": 2, "val/loss": 0.5, "val/top1": 0.9},
    {"step": 3, "train/loss": 0.01},
    {"step": 4, "val/loss": None, "val/top1": 0.1},
    {"step": 6, "val/loss": 0.75},
    {"step": 8, "val/loss": 0.25},  # the run continues after step 6, and comes to it again
]


@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant that forgets"])
def test_evaluations_of_before_a_resume(mutant: bool, tmp_path: Path) -> None:
    if not mutant:
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    best = Best({"keep_best": "loss", "patience": 3}, tmp_path, 6)
    assert best.step == -1, "that of before is kept already"
    said = best.add(8, {"loss": 0.6})
    assert (best.step, said) == (
        (8, "") if mutant else (-1, "--patience 3: no better val/loss for 3 evaluations, best 0.5 at step 2")
    )
    assert best.add(10, {"loss": 0.4}) == ""
    assert best.step == 10
