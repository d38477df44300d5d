"""--rates freezes parts of a model, and gives others rates of their own."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import UserError
from common.state import checkpoint
from common.workloads import rates
from safetensors.torch import load_file
from torch import nn

from tests.harness import mutants, runner


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
    line = (
        "rates    stem=0,fc=10: 4 of 10 tensors are frozen; averages of their BatchNorms still follow the data (=eval "
    )
    assert capsys.readouterr().out == line + "for =0 keeps them)\n"
    rates.freeze(make_model(), "stem=eval,fc=10")
    assert capsys.readouterr().out == "rates    stem=eval,fc=10: 4 of 10 tensors are frozen\n"
    rates.freeze(make_model(), "")
    assert capsys.readouterr().out == ""


def test_state_that_no_checkpoint_holds_is_refused_before_a_step() -> None:
    model = make_model()
    with pytest.raises(
        UserError, match="LBFGS keeps lists of the directions of its last steps, which no checkpoint holds"
    ):
        rates.name_unheld(model, torch.optim.LBFGS(model.parameters()))


def test_frozen_parts_in_eval_mode() -> None:
    """Which keep their BatchNorms' statistics; a part of a part has its own factor."""
    model = rates.freeze(make_model(), "all=eval,fc=1,blocks.10=0")
    modes = {name: module.training for name, module in model.named_modules() if not any(module.children())}
    assert modes == {"stem.0": False, "stem.1": False, "blocks.1": False, "blocks.10": True, "fc": True}
    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["fc.weight", "fc.bias"]
    before = model["stem"][1].running_mean.clone()
    model["stem"](torch.randn(8, 2))
    assert torch.equal(model["stem"][1].running_mean, before)
    assert len(rates.groups(model, "all=eval,fc=1", 0.1, 0.0)) == 2


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


# --- parameters that no optimizer holds ---


def matrices_alone(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.ndim == 2], lr=0.1)


def test_parameters_that_no_group_holds_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """By names of the plain model, and by their share of the numbers that are to be trained; frozen ones are not."""
    model = rates.freeze(nn.ModuleDict({"module": make_model()}), "module.stem=0")
    capsys.readouterr()
    rates.name_unheld(model, matrices_alone(model))
    assert capsys.readouterr().out == (
        "warning: no group of the optimizer holds blocks.1.bias, blocks.10.bias, fc.bias: 10 of 40 numbers (25.0%) are "
        "not trained; add them in make_optimizer, or freeze them with requires_grad_(False)\n"
    )
    rates.name_unheld(model, torch.optim.SGD(rates.groups(model, "stem=0", 0.1, 0.0), lr=0.1))
    rates.name_unheld(model, torch.optim.SGD([{"params": one} for one in model.parameters()], lr=0.1))
    assert capsys.readouterr().out == ""


def test_torchs_own_muon_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    rates.name_unheld(model, torch.optim.Muon(model.parameters()))
    assert "note: torch.optim.Muon computes in bfloat16, and all of it on every rank" in capsys.readouterr().out
    rates.name_unheld(model, torch.optim.AdamW(model.parameters()))
    assert "Muon" not in capsys.readouterr().out


def test_parameters_that_are_not_the_models_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    rates.name_unheld(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1))
    assert (
        "warning: the optimizer holds 1 tensors that are no parameters of the model: no ch" in capsys.readouterr().out
    )
    rates.name_unheld(model, matrices_alone(copy.deepcopy(model)))  # made before a strategy replaced the parameters
    first, second = capsys.readouterr().out.splitlines()
    assert "and 5 more: 55 of 55 numbers (100.0%) are not trained" in first
    assert "the optimizer holds 4 tensors that are no parameters" in second


def parts_on_ranks() -> None:
    """Each rank holds its own layer and, of the shared one, its own tensor, as an optimizer that is split does."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.ModuleDict({"shared": nn.Linear(2, 2), f"own{rank}": nn.Linear(2, 3)})
    held = [model["shared"].weight if rank else model["shared"].bias, model[f"own{rank}"].weight]
    rates.name_unheld(model, torch.optim.SGD(held, lr=0.1))
    dist.destroy_process_group()


def test_parts_of_all_ranks_are_looked_at() -> None:
    result = runner.spawn(parts_on_ranks, [(), ()])
    assert result.ok, str(result)
    assert "holds own0.bias, own1.bias: 6 of 24 numbers (25.0%) are not trained" in result.outputs[0]
    assert "warning" not in result.outputs[1]


@pytest.mark.parametrize(
    ("recipe", "layout"), [("fsdp_gpt", ()), ("ddp_resnet", ()), ("pipeline_gpt", ("--micro-batch-size", "4"))]
)
def test_recipe_names_what_it_does_not_train(
    recipe: str, layout: tuple[str, ...], small_data: dict[str, Path], tmp_path: Path
) -> None:
    """The mistake of who has split the groups by name and forgotten the rest; and no word without it."""
    kind = runner.workload(recipe)
    flags = ["--data", str(small_data[kind]), "--out", str(tmp_path), *runner.SMALL[kind], *layout, "--max-steps", "1"]
    flags += ["--global-batch-size", "8", "--eval-every", "9"]
    forgets = {"make_optimizer": {"rates.groups(model, args.rates, lr, args.weight_decay)": GROUPS}}
    said = [
        str(runner.run_recipe(path, 2, *flags, target=runner.run_unmeasured))
        for path in (recipe, mutants.mutate(recipe, tmp_path, forgets))
    ]
    assert "no group of the optimizer" not in said[0]
    norms = {"resnet": "bn1.bias, bn1.weight, fc.bias", "gpt": "blocks.0.attention_norm.weight"}[kind]
    assert f"warning: no group of the optimizer holds {norms}" in said[1], said[1]
    assert said[1].count("are not trained; add them in make_optimizer") == 1


GROUPS = "[one for one in rates.groups(model, args.rates, lr, args.weight_decay) if one['weight_decay']]"


@pytest.mark.parametrize(
    ("spec", "steps", "line"),
    [
        ("", 0, "peak learning rate 0.1"),
        ("fc=10,stem=0.5", 5, "peak learning rate 0.05 to 1; --warmup-steps 5 of 2,000 steps"),
        ("", 2000, "peak learning rate 0.1; --warmup-steps 2,000 is not below the training's 2,000 steps"),
    ],
)
def test_peaks_are_shown(spec: str, steps: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = torch.optim.SGD(rates.groups(make_model(), spec, 0.1, 0.0), lr=0.1)
    rates.show(optimizer, steps, 2000)
    assert capsys.readouterr().out == f"{line}\n"
