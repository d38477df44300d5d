"""What a rank holds, measured as benchmarks/strategies.py does it: docs/measured/strategies.md rests on that."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import keymap, ranks, session
from common.train import data
from common.workloads import gpt
from common.workloads.resnet import make_resnet
from torch.distributed.device_mesh import DeviceMesh

from tests.harness import module, mutants, probes, runner, short_resnet, theory  # noqa: F401 (resnet6)

NUM_RANKS = 2
FLAGS = ["--num-layers", "2", "--width", "64", "--seq-len", "8", "--global-batch-size", "4"]
NOT_SHARDED: mutants.Changes = {
    "make_mesh": {"(args.dp_replicate, world.size // args.dp_replicate)": "(world.size, 1)"},
    "parallelize": {"args.dp_replicate > 1": "True"},
}


def held(recipe: str | Path, folder: Path) -> list[list[int]]:
    """Bytes of parameters, gradients and optimizer state of each rank."""
    found = probes.in_ranks(probes.probe, recipe, NUM_RANKS, FLAGS, folder / "run")
    return [[one[what] for what in probes.HELD] for one in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What each rank of DDP holds."""
    found = held("ddp_gpt", tmp_path_factory.mktemp("ddp"))
    assert found == [found[0]] * NUM_RANKS
    return found[0]


def test_every_layout_has_a_theory() -> None:
    """Before a measurement finds out. All shares together are the model, as often as there are replicas of it."""
    assert {*theory.NAMES} == {theory.NAIVE, *runner.choices("pipeline_gpt", "--schedule")}
    layouts = theory.gpt_layouts()
    assert {layout.recipe for layout in layouts} == {one for one in runner.RECIPES if runner.workload(one) == "gpt"}
    for layout in layouts:
        shares = [theory.share(layout, rank)[1] for rank in range(layout.size)]
        whole = theory.M if "--ep" in layout.flags else theory.P
        assert sum(shares) / whole == pytest.approx(round(sum(shares) / whole)), str(layout)
        assert all(theory.traffic(layout, rank) for rank in range(layout.size)), str(layout)


def test_shown_rows_are_measured() -> None:
    """The rows of "Sent" that the page shows are there, and have something to send; the file has all rows."""
    measured = {theory.title(layout): layout for layout in theory.gpt_layouts()}
    for start in theory.SHOWN:
        name, kind = start.rsplit(" | ", 1)
        assert any(kind in theory.traffic(measured[name], rank) for rank in range(measured[name].size)), start
    rows = [f"| {start} | 1 | 0.00 |" for start in (*theory.SHOWN, "ddp_gpt | 2 | all-reduce")]
    assert theory.sent_table(rows).splitlines()[2:] == rows[:-1]
    head, *filed = theory.sent_file(rows)
    assert head[:3] == ["recipe", "ranks N", "kind"]
    assert [f"| {' | '.join(row)} |" for row in filed] == rows


def test_fsdp_holds_its_part(whole: list[int], tmp_path: Path) -> None:
    """DDP holds everything on each rank, FSDP 1/N of it."""
    parameters, gradients, state = whole
    assert gradients == parameters
    assert state == pytest.approx(2 * parameters, rel=0.01)
    part = [size / NUM_RANKS for size in whole]
    assert held("fsdp_gpt", tmp_path) == [pytest.approx(part, rel=0.02)] * NUM_RANKS


def test_mutant_whose_ranks_hold_all_is_found(whole: list[int], tmp_path: Path) -> None:
    mutant = mutants.mutate("fsdp_gpt", tmp_path, NOT_SHARDED)
    assert held(mutant, tmp_path) == [pytest.approx(whole, rel=0.02)] * NUM_RANKS


ADDS_OTHERWISE = """
for one in model.parameters():
    if one.placements[1].is_replicate() and dist.get_rank() % 2:
        one.grad.to_local().mul_(1 + 2 ** -30)
"""


@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant: each tp rank keeps its own"])
def test_copies_of_a_norm_stay_one(mutant: bool, small_data: dict[str, Path], tmp_path: Path) -> None:
    """Also where a group of ranks adds up in another order than the other one does, as NCCL may."""
    then = "" if mutant else "share_norms(model)"
    path = mutants.mutate("tensor_gpt", tmp_path, {"clip_gradients": {"share_norms(model)": ADDS_OTHERWISE + then}})
    flags = (*runner.small("tensor_gpt"), "--data", small_data["gpt"], "--tp", "2", "--dtype", "float64")
    flags = (*flags, "--max-steps", "3", "--check-every", "1", "--out", tmp_path / "runs")
    result = runner.run_recipe(path, 4, *map(str, flags))
    assert result.ok != mutant, str(result)
    assert ("replicas differ at step" in str(result)) == mutant


class OneRank(NamedTuple):
    """In the place of the recipes' `World`."""

    device: torch.device
    size: int


def begin_apart(recipe: str) -> None:
    """Two ranks begin with other weights and statistics; each pass makes both those of rank 0."""
    dist.init_process_group("gloo")
    train = module.load(recipe)
    args = train.Args(sync_bn=False, dtype="float64", max_grad_norm=0.0)
    cpu = torch.device("cpu")
    mesh = train.make_mesh(args, OneRank(cpu, 2))
    torch.manual_seed(0)
    plain = make_resnet("resnet6", 1, 10, 8)
    wanted = {name: one.double() for name, one in plain.state_dict().items()}
    for one in plain.parameters():
        one.data += dist.get_rank()
    model = train.parallelize(args, plain, mesh, cpu)
    statistics = [one for name, one in model.named_buffers() if name.endswith("running_mean")]
    samples = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8), dtype=np.uint8)
    batch = data.Batch(torch.from_numpy(samples), torch.arange(4), 8, True)

    def values() -> list[list[float]]:
        return ranks.gather([one.double().sum().item() for one in (*model.parameters(), *model.buffers())])

    assert {keymap.canonical(name): one for name, one in model.named_parameters()}.keys() <= wanted.keys()
    for name, one in model.named_parameters():
        assert torch.equal(one, wanted[keymap.canonical(name)]), name
    for one in statistics:
        one.fill_(dist.get_rank() + 1)
    train.forward_backward(args, model, iter([batch]), 2)
    mine, other = values()  # of the same samples, the same statistics are the same again
    assert mine == other
    with torch.no_grad():
        for one in statistics:
            one.fill_(dist.get_rank() + 1)
        train.forward_only(args, model.eval(), iter([batch]))
    assert all(one.eq(1).all() for one in statistics), "an evaluation is by the statistics of rank 0"
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "recipe", [name for name in runner.RECIPES if runner.has_flag(name, "--sync-bn") and not runner.is_single(name)]
)
def test_ranks_follow_rank_0(recipe: str) -> None:
    result = runner.spawn(begin_apart, [(recipe,)] * NUM_RANKS)
    assert result.ok, str(result)


def look_at_parts(recipe: str) -> None:
    """Which parameters a rank holds whole, after a forward pass and after an evaluation."""
    dist.init_process_group("gloo")
    train = module.load(recipe)
    cpu = torch.device("cpu")
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "width": 40, "mlp_width": 44}
    for reshard in (True, False):
        args = train.Args(seq_len=16, dtype="float32", reshard_after_forward=reshard, **sizes)
        mesh = train.make_mesh(args, OneRank(cpu, 2))
        with torch.device("meta"):
            plain = gpt.GPT(gpt.Shape(256, **sizes))
        model = train.parallelize(args, plain, mesh, cpu)
        tokens = torch.zeros(1, 16, dtype=torch.long)
        batch = data.Batch(tokens, tokens, 2, True)

        def whole(model: Any = model) -> set[str]:
            return {name.partition(".")[0] for name, one in model.named_parameters() if not hasattr(one, "placements")}

        assert whole() == set()
        train.forward(args, model, batch)
        rest = {"embed", "norm", "head"}
        assert whole() == (rest if reshard else rest | {"blocks"})
        with torch.no_grad():
            train.forward_only(args, model, iter([batch]))
        assert not whole() & rest, "an evaluation is over"
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", ["fsdp_gpt", "context_gpt"])  # a rank of tensor_gpt holds slices of a whole
def test_parts_are_dropped_after_use(recipe: str) -> None:
    result = runner.spawn(look_at_parts, [(recipe,)] * NUM_RANKS)
    assert result.ok, str(result)


# --- what a step does not do ---


def run_counted(path: str, argv: list[str]) -> None:
    """A training that fails if a step after the first takes a part of a mesh."""
    slices = 0
    inside = False
    take = DeviceMesh.__getitem__
    steps = session.Session.steps

    def counted(mesh: DeviceMesh, name: Any) -> DeviceMesh:
        nonlocal slices
        slices += inside
        return take(mesh, name)

    def numbered(run: session.Session, dp_rank: int) -> Iterator[int]:
        recipe_file = sys._getframe(1).f_globals  # whose main loop calls its train_step
        train_step = recipe_file["train_step"]
        for step in steps(run, dp_rank):

            def train(*args: Any, after: bool = step > 1) -> Any:
                nonlocal inside
                inside = after
                done = train_step(*args)
                inside = False
                return done

            recipe_file["train_step"] = train
            yield step
        assert slices == 0, f"{slices} slices of a mesh"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceMesh, "__getitem__", counted)
        patch.setattr(session.Session, "steps", numbered)
        runner.run_unmeasured(path, argv)


SLICES: mutants.Changes = {
    "average_experts": {"grad.to_local().div_(ep)": 'grad.to_local().div_(model.mesh["ep"].size())'}
}


@pytest.mark.parametrize("recipe", ["mutant", *(one for one in runner.SUPERVISED if runner.world_sizes(one)[-1] > 1)])
def test_a_step_takes_no_part_of_a_mesh(recipe: str, small_data: dict[str, Path], tmp_path: Path) -> None:
    """Each makes a mesh anew: once for each gradient of an expert, this took a large part of a small step."""
    name = "moe_gpt" if recipe == "mutant" else recipe
    path = mutants.mutate(name, tmp_path, SLICES if recipe == "mutant" else {})
    data_of = str(small_data[runner.workload(name)])
    flags = (*runner.small(name), *runner.layout(name, 2).with_experts, "--data", data_of, "--max-steps", "3")
    result = runner.run_recipe(path, 2, *flags, "--out", str(tmp_path / "runs"), target=run_counted)
    assert result.ok == (recipe != "mutant"), str(result)
    assert ("slices of a mesh" in str(result)) == (recipe == "mutant")
