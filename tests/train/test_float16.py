"""float16 trains like float32 under every strategy, because its loss scale keeps small gradients and then leaves."""

import json
from pathlib import Path

import pytest
import torch
from common import BadStateError, precision
from common.train import guard
from torch import nn

from tests.conftest import each_recipe
from tests.harness import runner
from tests.harness.states import same_tensors
from tests.train.test_guard import OPTIMIZERS, make_plan

CPU = torch.device("cpu")
STEPS = 4
LAST = f"checkpoints/step_{STEPS:08d}"


@pytest.mark.parametrize("recipe", each_recipe(runner.SUPERVISED))
def test_like_float32_and_resumes_exactly(recipe: str, small_text: Path, tmp_path: Path) -> None:
    layout = runner.layout(recipe, 2)
    flags = ["--data", str(small_text)] if runner.workload(recipe) == "gpt" else []
    flags += [*runner.small(recipe), *layout.strategy, *layout.micro_batches(8)]
    flags += ["--global-batch-size", "8", "--max-steps", str(STEPS), "--eval-every", "100", "--log-every", "1"]

    def train(name: str, *more: str) -> Path:
        place = ("--out", str(tmp_path), "--name", name)
        result = runner.run_recipe(recipe, layout.size, *flags, *place, *more)
        assert result.ok, str(result)
        return tmp_path / name

    runs = [train(dtype, "--dtype", dtype) for dtype in ("float16", "float32")]
    half, single = (runner.records(run, "train/loss") for run in runs)
    assert half == pytest.approx(single, rel=0.01)
    assert half != pytest.approx(single, rel=1e-7)
    # Adam's steps are the same for a gradient that still has the loss scale; its norm is not.
    norms = [runner.records(run, "train/grad_norm") for run in runs]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)
    train("parts", "--dtype", "float16", "--stop-after", "2")
    train("parts", "--dtype", "float16")
    parts, whole = (tmp_path / name / LAST for name in ("parts", "float16"))
    assert same_tensors(parts, whole)
    scales = [json.loads((path / "MANIFEST.json").read_text())["loss_scale"] for path in (parts, whole)]
    assert scales[0] == scales[1]
    assert 1 < scales[0][0] <= guard.FIRST_SCALE
    assert scales[0][1] > 0


def make_guard(model: nn.Module, dtype: torch.dtype, saved_scale: list[float] | None = None) -> guard.FiniteGuard:
    return guard.FiniteGuard(model, OPTIMIZERS["SGD"](model), make_plan(), 1, dtype, {"loss_scale": saved_scale})


def gradient(saved_scale: list[float] | None) -> torch.Tensor:
    """Of a weight, where the gradient of the activations is below what float16 can hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False))
    finite = make_guard(model, torch.float16, saved_scale)
    with precision.autocast(CPU, torch.float16):
        loss = model(torch.ones(4, 8)).float().sum() * 1e-8
    (loss * finite.loss_scale).backward()
    finite.unscale_gradients({})
    weight = model[0].weight
    assert weight.grad is not None
    return weight.grad


def test_small_gradients_are_kept() -> None:
    assert gradient(None).abs().min() > 0
    assert not gradient([1.0, 0]).any()


def test_lowered_and_raised(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is skipped to lower the scale is no fault, until the scale is 1."""
    monkeypatch.setattr(guard, "GROWTH_STEPS", 3)
    model = nn.Linear(2, 2)
    finite = make_guard(model, torch.float16, [4, 0])

    def step(number: int, norm: float) -> float:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        finite.skip_if_not_finite(torch.tensor(norm))
        finite.restore_if_skipped(number)
        return float(finite.loss_scale)

    assert [step(number, float("inf")) for number in (1, 2)] == [2.0, 1.0]
    assert finite.report() == 0
    assert "skipped 2 updates to lower float16's loss scale to 1" in capsys.readouterr().out
    assert [step(number, 1.0) for number in (3, 4, 5, 6, 7)] == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert finite.scale_state() == [2.0, 2.0]
    assert [step(number, float("nan")) for number in (8, 9, 10)] == [1.0, 1.0, 1.0]
    with pytest.raises(BadStateError, match="not finite in steps 9 to 10"):
        finite.report()


def test_other_types_have_none() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        finite = make_guard(nn.Linear(2, 2), dtype, [8.0, 1])
        assert (finite.loss_scale, finite.scale_state()) == (1, [])
