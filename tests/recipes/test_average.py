"""--ema: the average that each layout keeps is that of a plain loop over the same weights, over stops and moves."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from common import keymap
from common.state import checkpoint
from common.state.average import Average
from safetensors.torch import load_file
from torch.optim import swa_utils

from tests.conftest import each_recipe
from tests.harness import mutants, runner
from tests.harness.runner import Layout
from tests.recipes.test_layouts import KINDS
from tests.tools.test_evaluate import said, values

pytestmark = pytest.mark.usefixtures("group")
DECAY = 0.75
EMA = ("--ema", str(DECAY))
STEPS = 4
FLAGS = (
    *("--dtype", "float64", "--log-every", "1", "--save-every", "1", "--keep", "99", "--eval-every", "2"),
    *("--max-steps", str(STEPS), "--warmup-steps", "2", "--name", "run"),
)
APART = ("--replicas", "0", "--outer-lr", "0.7", "--inner-steps", "3")  # diloco_gpt: each rank trains by itself
Data = Mapping[str, Path]


def run(layout: Layout, out: Path, data: Data, *flags: str, recipe: Path | None = None) -> str:
    """Train, and return what rank 0 has printed."""
    workload = runner.workload(layout.recipe)
    batch = ("--global-batch-size", "24", *layout.micro_batches(24)) if workload != "ppo" else ()
    where = (*(("--data", str(data[workload])) if workload in data else ()), "--out", str(out))
    argv = (*runner.small(layout.recipe), *FLAGS, *layout.flags, *batch, *where, *flags)
    result = runner.run_recipe(recipe or layout.recipe, layout.size, *argv)
    assert result.ok, str(result)
    return result.outputs[0]


def saved(out: Path, step: int) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, whole, by canonical name."""
    folder = checkpoint.folder(out / "run", step)
    like = {name: torch.empty_like(one, device="cpu") for name, one in checkpoint.tensors_in(folder).items()}
    checkpoint.load(folder, like)
    return like


def averages(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those among them, by the names of the weights."""
    begin = keymap.AVERAGE
    return {name.removeprefix(begin): one for name, one in tensors.items() if name.startswith(begin)}


def plain_average(steps: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What torch's AveragedModel makes of the weights that each step has left."""

    def holding(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        names = averages(steps[-1])
        return torch.nn.ParameterDict({name.replace(".", "/"): torch.nn.Parameter(tensors[name]) for name in names})

    found = swa_utils.AveragedModel(holding(steps[0]), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY))
    for tensors in steps:
        found.update_parameters(holding(tensors))
    return {name.removeprefix("module.").replace("/", "."): one.detach() for name, one in found.named_parameters()}


def check_average(steps: list[dict[str, torch.Tensor]], rtol: float = 0.0) -> None:
    """The last step holds the average of all of them."""
    found, wanted = averages(steps[-1]), plain_average(steps)
    assert found
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, rtol=rtol, atol=rtol, msg=name)
        assert "num_batches" in name or not torch.equal(one, steps[-1][name]), f"{name} is no average"


def trained(recipe: str) -> set[str]:
    """What has an average: what is trained, and BatchNorm's statistics, without its count of batches."""
    return {"conv1.weight", "bn1.running_mean"} if runner.workload(recipe) == "resnet" else set()


@pytest.mark.parametrize("recipe", each_recipe(runner.TRAINING))
def test_as_a_plain_loop_over_a_stop(recipe: str, small_data: Data, tmp_path: Path) -> None:
    """The average of each step's weights, bit for bit; and the training goes on as if there were none."""
    layout = runner.layout(recipe, 2)
    run(layout, tmp_path / "without", small_data, "--save-every", "100")
    run(layout, tmp_path / "with", small_data, *EMA, "--stop-after", "3")
    run(layout, tmp_path / "with", small_data, *EMA)
    steps = [saved(tmp_path / "with", step) for step in range(1, STEPS + 1)]
    check_average(steps)
    assert trained(recipe) <= averages(steps[-1]).keys()
    for tag in ("train/loss", "train/grad_norm"):
        curve, wanted = (runner.records(tmp_path / name / "run", tag) for name in ("with", "without"))
        assert curve == wanted, tag
    last = saved(tmp_path / "without", STEPS)
    assert all(torch.equal(steps[-1][name], one) for name, one in last.items())


def test_replicas_that_train_apart(small_data: Data, tmp_path: Path) -> None:
    """diloco_gpt: the average of the replicas' mean."""
    layout = Layout("diloco_gpt", 2, APART, 2)
    for stop in ("2", "0"):  # between two outer steps
        run(layout, tmp_path, small_data, *EMA, "--stop-after", stop)
    check_average([saved(tmp_path, step) for step in range(1, STEPS + 1)], rtol=1e-12)


def test_one_training_through_all_layouts(small_data: Data, tmp_path: Path) -> None:
    """A step in each kind of layout, each from what the one before has saved; the embedding is the head as well."""
    path = [layouts[0] for kind, layouts in KINDS.items() if kind != "dp"]
    steps, resume = [], ()
    for step, layout in enumerate(path, 1):
        out = tmp_path / str(step)
        how = ("--num-layers", "5", "--tied", "--max-steps", "20", "--stop-after", str(step))
        run(layout, out, small_data, *EMA, *how, *resume)
        steps.append(saved(out, step))
        resume = ("--resume", str(out / "run"))
    check_average(steps)
    assert averages(steps[-1]).keys() == {name for name in steps[-1] if not name.startswith(keymap.NO_WEIGHTS)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as the commands mean it
@pytest.mark.parametrize("recipe", ["ddp_resnet", "fsdp_gpt"])
def test_evaluated_and_exported(recipe: str, small_data: Data, tmp_path: Path) -> None:
    """What the run has evaluated is what the tools make of its checkpoint: the average.

    Evaluations without a save leave nothing of it in the model, such as what FSDP has gathered, if a copy keeps that.
    """
    layout = runner.layout(recipe, 2)
    sync = ("--sync-bn",) if runner.has_flag(recipe, "--sync-bn") else ()
    flags = (*sync, "--save-every", "100", "--eval-every", "1")
    change = {"forward_only": {"model.reshard()": "pass"}} if recipe == "fsdp_gpt" else {}
    path = mutants.mutate(recipe, tmp_path / "copy", change)
    run(layout, tmp_path, small_data, *EMA, *flags, recipe=path)
    run(layout, tmp_path / "without", small_data, *flags, recipe=path)
    assert runner.records(tmp_path / "run", "train/loss") == runner.records(tmp_path / "without/run", "train/loss")
    ran = runner.records(tmp_path / "run", "val/loss")[STEPS]
    with_it, without = said([str(tmp_path / "run"), "--ema"]), said([str(tmp_path / "run")])
    assert values(with_it)["val/loss"] == pytest.approx(ran, rel=1e-9)
    assert abs(values(without)["val/loss"] / ran - 1) > 1e-5
    assert "the run evaluated the average of its weights, which --ema evaluates here" in without
    assert "note: the run" not in with_it

    from tools.checkpoint import files

    files.export(str(tmp_path / "run"), tmp_path / "average.safetensors", ema=True)
    exported, last = load_file(tmp_path / "average.safetensors"), saved(tmp_path, STEPS)
    wanted = {name: one for name, one in last.items() if not name.startswith(keymap.NO_WEIGHTS)} | averages(last)
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], one) for name, one in wanted.items())


def test_begins_and_ends_with_a_line(small_data: Data, tmp_path: Path) -> None:
    """A run that had no average begins one with its weights; one that has had one says that it ends."""
    layout = runner.layout("ddp_gpt", 1)
    run(layout, tmp_path, small_data, "--stop-after", "1")
    text = run(layout, tmp_path, small_data, *EMA, "--stop-after", "3")
    assert f"has no average of the weights: that of --ema {DECAY:g} begins with its weights" in text
    check_average([saved(tmp_path, step) for step in (1, 2, 3)])
    text = run(layout, tmp_path, small_data)
    assert "has an average of the weights, which only --ema continues" in text
    assert not averages(saved(tmp_path, STEPS))


def test_only_what_is_trained(small_data: Data, tmp_path: Path) -> None:
    """Frozen weights have no average, which would only take memory; nor has a buffer that holds infinities."""
    layout = runner.layout("ddp_gpt", 1)
    run(layout, tmp_path, small_data, *EMA, "--rates", "all=0,head=1")
    assert averages(saved(tmp_path, STEPS)).keys() == {"head.weight"}
    assert "val/loss" in said([str(tmp_path / "run"), "--ema"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_other_types_of_weights(dtype: torch.dtype) -> None:
    """Sixteen bits would round a small share away; an evaluation takes nothing from the average."""
    model = torch.nn.Linear(2, 2, bias=False, dtype=dtype)
    averages = Average(model, 0.999)
    with torch.no_grad():
        for value in (1.0, 2.0, 2.0):
            model.weight.fill_(value)
            averages.update()
    wanted = 1 + (1 - 0.999**2)
    for _ in range(2):
        averages.swap(True)
        averages.swap(False)
    found = averages.to_save()["average.weight"]
    torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=1e-6, atol=0)
    assert (model.weight == 2).all()


def test_mutant_fails(small_data: Data, tmp_path: Path) -> None:
    """A recipe that forgets to log an evaluation would train the average on. More mutants: tests/mutation/floors.py."""
    log = "run.log_validation(step, sums, validation.metrics)"
    path = mutants.mutate("ddp_gpt", tmp_path, {"main": {log: "pass"}})
    with pytest.raises(AssertionError, match=r"run\.log_validation was not called"):
        run(runner.layout("ddp_gpt", 1), tmp_path / "out", small_data, *EMA, recipe=path)
