"""--rates freezes parts of a model, and gives others rates of their own."""

from pathlib import Path

import pytest
import torch
from common import UserError
from common.state import checkpoint
from common.workloads import rates
from safetensors.torch import load_file
from torch import nn

from tests.harness import runner


def make_model() -> nn.Module:
    return nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
            "blocks": nn.ModuleDict({"1": nn.Linear(3, 3), "10": nn.Linear(3, 3)}),
            "fc": nn.Linear(3, 4),
        }
    )


def frozen(spec: str) -> set[str]:
    model = rates.freeze(make_model(), spec)
    return {name.rpartition(".")[0] for name, one in model.named_parameters() if not one.requires_grad}


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("", set()),
        ("fc=10", set()),
        ("all=0,fc=1", {"stem.0", "stem.1", "blocks.1", "blocks.10"}),
        ("blocks.1=0", {"blocks.1"}),  # not blocks.10, whose name begins with the same letters
        ("blocks=0,blocks.10=0.5", {"blocks.1"}),  # the longest part counts
        ("fc.bias=0", set()),
    ],
)
def test_what_is_frozen(spec: str, wanted: set[str]) -> None:
    assert frozen(spec) - {"fc"} == wanted


def test_line(capsys: pytest.CaptureFixture[str]) -> None:
    rates.freeze(make_model(), "stem=0,fc=10")
    line = "rates    stem=0,fc=10: 4 of 10 tensors are frozen; averages of their BatchNorms still follow the data\n"
    assert capsys.readouterr().out == line
    rates.freeze(make_model(), "")
    assert capsys.readouterr().out == ""


def test_groups() -> None:
    """Matrices with weight decay and the rest without, for each rate; the highest first."""
    model = rates.freeze(make_model(), "stem=0,fc=10,blocks.1=0.5")
    groups = rates.groups(model, "stem=0,fc=10,blocks.1=0.5", 0.2, 0.1)
    names = {id(one): name for name, one in model.named_parameters()}
    found = [([names[id(one)] for one in group["params"]], group["lr"], group["weight_decay"]) for group in groups]
    assert found == [
        (["fc.weight"], 2.0, 0.1),
        (["fc.bias"], 2.0, 0.0),
        (["blocks.10.weight"], 0.2, 0.1),
        (["blocks.10.bias"], 0.2, 0.0),
        (["blocks.1.weight"], 0.1, 0.1),
        (["blocks.1.bias"], 0.1, 0.0),
    ]
    assert torch.optim.AdamW(groups, lr=1.0).param_groups[0]["lr"] == 2.0


@pytest.mark.parametrize(
    ("spec", "refusal"),
    [
        ("fc", "--rates 'fc': 'fc' must be PART=FACTOR, such as fc=10, or embed=0 to freeze it"),
        ("fc=x", "'fc=x' must be PART=FACTOR"),
        ("fc=-1", "'fc=-1' must be PART=FACTOR"),
        ("fc=inf", "'fc=inf' must be PART=FACTOR"),
        ("=1", "'=1' must be PART=FACTOR"),
        ("head=0", "--rates 'head=0': the model has no part 'head'; its parts are stem, blocks, fc"),
        ("all=0", "--rates 'all=0' freezes the whole model: one factor must be above 0"),
    ],
)
def test_refusals(spec: str, refusal: str) -> None:
    with pytest.raises(UserError, match=refusal):
        rates.freeze(make_model(), spec)


def test_only_the_last_layer_of_a_resnet_learns(small_digits: Path, tmp_path: Path) -> None:
    flags = ["--data", str(small_digits), "--out", str(tmp_path), "--name", "run", *runner.SMALL["resnet"]]
    flags += ["--max-steps", "3", "--save-every", "1", "--keep", "3", "--eval-every", "3", "--rates", "all=0,fc=1"]
    result = runner.run_recipe("ddp_resnet", 2, *flags)
    assert result.ok, str(result)
    first, last = (weights(tmp_path / "run", step) for step in (1, 3))
    counted = {name for name in first if "running" in name or "num_batches" in name}
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert changed - counted == {"fc.weight", "fc.bias"}


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in checkpoint.folder(run, step).glob("*.safetensors")]
    return {name: one for file in files for name, one in file.items() if not name.startswith("optimizer.")}


def test_zero_bubble_schedules_refuse_frozen_parts(small_text: Path, tmp_path: Path) -> None:
    """torch 2.15 gives no gradient, or a wrong one, to what lies beside a frozen part."""
    flags = ["--data", str(small_text), "--out", str(tmp_path), *runner.SMALL["gpt"], "--num-layers", "4"]
    flags += ["--micro-batch-size", "2", "--schedule", "DualPipeV", "--rates", "embed=0"]
    result = runner.run_recipe("pipeline_gpt", 2, *flags)
    assert "--schedule DualPipeV has wrong gradients beside frozen parts: use 1F1B or GPipe" in str(result)
