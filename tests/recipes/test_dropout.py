"""What ranks draw, looked at: other numbers for other layers and tokens, the same for copies.

A block draws a mask as dropout would: of the shape of what this rank holds of its output.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import ranks, seed
from common.run import cli, process_group
from common.train import data, guard, sampler
from common.workloads import gpt
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.harness import module, runner
from tests.recipes.test_any_size import CPU, Tokens, flags, layouts

GPT = [recipe for recipe in runner.SUPERVISED if runner.workload(recipe) == "gpt"]
SPLIT = {"pp": "--pp", "tp": "--tp", "cp": "--cp"}


def look(layout: runner.Layout, world: Any) -> tuple[list[list[str]], list[str]]:
    """Two steps of two micro-batches or more: the masks of each rank, and what it draws around the model."""
    train = module.load(layout.recipe)
    args = cli.parse(train.Args, flags(layout, 2))
    mesh = train.make_mesh(args, world)
    dp_rank, dp_size = train.dp_coordinates(mesh)
    reader = Tokens(4 * args.global_batch_size, False)
    model = train.parallelize(args, train.make_model(args, reader), mesh, CPU)
    division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, dp_size)
    plan = sampler.make_plan(division, len(reader), run_seed=0, max_steps=3, progress={})
    batches = data.training(reader, plan, dp_rank, 0, CPU)
    finite = guard.FiniteGuard(model, train.make_optimizer(args, model), plan, 0)
    masks: list[str] = []

    def draw(_: Any, __: Any, output: torch.Tensor) -> None:
        local: Any = output.to_local() if hasattr(output, "to_local") else output
        drawn = torch.rand(local.shape) < 0.5  # (b, T of this rank, C)
        masks.append(hashlib.sha256(drawn.numpy().tobytes()).hexdigest())

    for part in model.modules():
        if isinstance(part, gpt.Block):
            part.register_forward_hook(draw)
    around = []
    for step in (0, 1, 2):
        if step == 1:
            masks.clear()  # a pipeline's first step also computes its stages once to see their shapes
        seed.everything(args.seed, seed.STEP, step, dp_rank)
        train.forward_backward(args, model, batches.step(), dp_size * finite.loss_scale)
        around += [str(torch.rand(()).item())] * (step > 0)
        model.zero_grad(set_to_none=True)
    return ranks.gather(masks), ranks.gather([dp_rank, *around])


def check_all(some: Sequence[runner.Layout], same_everywhere: bool) -> None:
    """Each layout.

    Args:
        some: layouts.
        same_everywhere: a mutant: no rank knows which part it holds.
    """
    world = process_group.start()
    if same_everywhere:
        gpt.GPT.part = property(lambda _: None, lambda *_: None)  # type: ignore[assignment]
    for layout in some:
        masks, around = look(layout, world)
        every = [mask for found in masks for mask in found]
        assert len(every) >= 2 * layout.size, layout
        assert len(set(every)) == len(every), f"{layout}: {len(every) - len(set(every))} of {len(every)} masks twice"
        by_part: dict[int, list[Any]] = {}
        for dp_rank, *drawn in around:
            assert by_part.setdefault(dp_rank, drawn) == drawn, f"{layout}: ranks with the same samples draw others"
        assert len({*map(str, by_part.values())}) == len(by_part), layout
        dist.barrier()
    process_group.finish(world.process)


def test_masks_of_split_models() -> None:
    """One layout of each way to split a model, on two ranks."""
    found = []
    for recipe in GPT:
        if any(runner.has_flag(recipe, flag) for flag in SPLIT.values()):
            found.append(next(one for one in layouts(2) if one.recipe == recipe and one.dp_size == 1))
    assert len(found) == len(SPLIT)
    result = runner.spawn(check_all, [(found, False)] * 2)
    assert result.ok, str(result)


def test_part_without_numbers() -> None:
    """As the planner runs it: no tensor has a value that could be asked for."""
    with FakeTensorMode():
        model = gpt.GPT(gpt.Shape(vocab_size=8, num_layers=1, num_heads=2, width=8, mlp_width=8))
        model.part = 1
        assert model(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 4, 8)


@pytest.mark.parametrize("kind", SPLIT)
def test_mutant_without_a_part(kind: str) -> None:
    some = [next(one for one in layouts(2) if SPLIT[kind] in one.flags and one.dp_size == 1)]
    result = runner.spawn(check_all, [(some, True)] * 2)
    assert not result.ok
    assert "masks twice" in str(result)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_masks_of_all_layouts(size: int) -> None:
    found = [one for one in layouts(size) if one.recipe in GPT]
    result = runner.spawn(check_all, [(found, False)] * size)
    assert result.ok, str(result)
