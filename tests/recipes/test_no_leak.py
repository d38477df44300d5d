"""What a document learns does not move by a bit with another document of its row, in every layout.

Where only the second document of a row counts, a change of the first changes neither the loss nor a gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common.run import cli, process_group
from common.train import data, guard, sampler
from common.workloads import gpt

from tests.harness import runner
from tests.recipes.test_any_size import CPU, LENGTH, VOCABULARY, flags, layouts
from tests.recipes.test_weights import load

GPT = [recipe for recipe in runner.SUPERVISED if runner.workload(recipe) == "gpt"]
SAMPLES = 8
FIRST = 5  # tokens of the first document
assert LENGTH > FIRST + 3


class Two:
    """Rows of two documents; those of the first depend on `change`."""

    vocab_size = VOCABULARY
    change = 0

    def __len__(self) -> int:
        return SAMPLES

    def read(self, _: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        places = np.arange(LENGTH)
        first = places < FIRST
        tokens = (7 * indices[:, None] + 3 * places + first * self.change) % VOCABULARY
        positions = np.broadcast_to(np.where(first, places, places - FIRST), tokens.shape)
        targets = np.where(first, -100, (tokens + 1) % VOCABULARY)
        return torch.from_numpy(np.stack([tokens, positions], 1)), torch.from_numpy(targets)


def found(train: Any, args: Any, model: Any, mesh: Any, change: int) -> dict[str, torch.Tensor]:
    """Loss and gradients of a step on this rank."""
    reader = Two()
    reader.change = change
    dp_rank, dp_size = train.dp_coordinates(mesh)
    division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, dp_size)
    plan = sampler.make_plan(division, SAMPLES, run_seed=0, max_steps=0, epochs=1, progress={})
    finite = guard.FiniteGuard(model, train.make_optimizer(args, model), plan, 0)
    batches: Any = data.training(reader, plan, dp_rank, 0, CPU)
    sums = train.forward_backward(args, model, batches.step(), dp_size * finite.loss_scale)
    finite.unscale_gradients(sums)
    numbers = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    numbers = {name: one.to_local() if hasattr(one, "placements") else one for name, one in numbers.items()}
    return {name: one.clone() for name, one in (numbers | {"loss": sums["loss"]}).items()}


def check(path: str, layout: runner.Layout, world: Any) -> None:
    train = load(path)
    args = cli.parse(train.Args, flags(layout, 0 if "--pp" not in layout.flags else 1))
    mesh = train.make_mesh(args, world)
    model = train.parallelize(args, train.make_model(args, Two()), mesh, CPU)
    for _ in range(2):  # after the first step DDP lays its buckets out anew, and gloo adds four ranks in another order
        once = found(train, args, model, mesh, 0)
        model.zero_grad(set_to_none=True)
    other = found(train, args, model, mesh, 1)
    assert once.keys() == other.keys()
    moved = {name: (one - other[name]).abs().max().item() for name, one in once.items() if one.numel()}
    assert not any(moved.values()), f"{layout}: {moved}"


def check_all(paths: dict[str, str], some: Sequence[runner.Layout], mutant: str) -> None:
    if mutant:
        MUTANTS[mutant]()
    world = process_group.start()
    for layout in some:
        check(paths[layout.recipe], layout, world)
        dist.barrier()
    process_group.finish(world.process)


def run(size: int, some: Sequence[runner.Layout], mutant: str = "") -> runner.Result:
    paths = {recipe: str(runner.ROOT / "recipes" / recipe / "train.py") for recipe in GPT}
    return runner.spawn(check_all, [(paths, some, mutant)] * size)


@pytest.mark.parametrize("size", [pytest.param(n, marks=() if n == 1 else pytest.mark.rest) for n in (1, 2, 3, 4)])
def test_no_leak(size: int) -> None:
    result = run(size, [layout for layout in layouts(size) if layout.recipe in GPT])
    assert result.ok, str(result)


def late(positions: torch.Tensor) -> torch.Tensor:
    """The first token of a document as the last one of that before."""
    return (positions == 1).cumsum(1)


MUTANTS: dict[str, Callable[[], object]] = {
    "no mask": lambda: setattr(gpt, "documents_of", torch.zeros_like),
    "a boundary is one token late": lambda: setattr(gpt, "documents_of", late),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("recipe", ["ddp_gpt", "pipeline_gpt", "context_gpt"])
def test_mutant_of_a_mask(recipe: str, mutant: str) -> None:
    result = run(2, [runner.layout(recipe, 2)], mutant)
    assert not result.ok
    assert "AssertionError" in str(result)
