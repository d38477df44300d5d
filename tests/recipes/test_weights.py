"""A mean over the tokens of the whole step: gradients as in one process, whatever the layout and however they divide.

Some targets of each sequence are -100, and of some sequences all: ranks and micro-batches have unequal numbers of
tokens, or none. docs/losses.md has the line that each recipe gets here.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import keymap, seed
from common.run import cli, process_group
from common.train import data, guard, initial, metrics, sampler

from tests.harness import runner
from tests.recipes.test_any_size import CPU, LENGTH, TOLERANCE, VOCABULARY, flags, micro_sizes

PAGE = (runner.ROOT / "docs" / "losses.md").read_text()
FORWARD, SCHEDULE = re.findall(r"```python\n((?:    .*\n)+)```", PAGE)
GPT = [recipe for recipe in runner.SUPERVISED if runner.workload(recipe) == "gpt"]
SAMPLES = 11  # no multiple of anything: the second step has fewer
KNOWN = 0.5  # share of the targets that count


class Masked:
    """Sequences of random tokens, most of whose targets do not count; of the first two, none does."""

    vocab_size = VOCABULARY

    def __len__(self) -> int:
        return SAMPLES

    def read(self, _: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(seed.mix(7, indices[:, None], np.arange(LENGTH + 1)).astype(np.int64) & 0xFF)
        share = seed.uniform(8, indices[:, None], np.arange(LENGTH)) * (1 + (indices[:, None] % 3))
        known = torch.from_numpy((share < KNOWN) & (indices[:, None] > 1))
        return tokens[:, :-1] % VOCABULARY, torch.where(known, tokens[:, 1:] % VOCABULARY, -100)


def with_weight(recipe: str, folder: Path) -> Path:
    """A copy that returns the weight as the page says."""
    where, line = ("run_schedule", SCHEDULE) if runner.has_flag(recipe, "--pp") else ("forward", FORWARD)
    tree = runner.source(recipe)
    old = re.search(rf"^def {where}\(.*?^(    return \{{.*?\}}\n)", tree, re.MULTILINE | re.DOTALL)
    assert old is not None
    path = folder / recipe / "train.py"
    path.parent.mkdir(parents=True)
    path.write_text(tree.replace(old[1], line))
    return path


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).parent.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def token_mean(plain: Any, indices: np.ndarray) -> tuple[float, dict[str, torch.Tensor]]:
    """In one process: the loss and its gradient."""
    inputs, targets = Masked().read(indices, indices)
    plain.zero_grad()
    loss = torch.nn.functional.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), {name: one.grad for name, one in plain.named_parameters()}


def check(path: str, layout: runner.Layout, micro: int, world: Any) -> None:
    """Two steps, and an evaluation (all ranks)."""
    train = load(path)
    args = cli.parse(train.Args, flags(layout, micro))
    plain: Any = initial.materialize(train.make_model(args, Masked()), args.seed, CPU, torch.float64)
    mesh = train.make_mesh(args, world)
    dp_rank, dp_size = train.dp_coordinates(mesh)
    model = train.parallelize(args, train.make_model(args, Masked()), mesh, CPU)
    division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, dp_size)
    plan = sampler.make_plan(division, SAMPLES, run_seed=0, max_steps=0, epochs=1, progress={})
    finite = guard.FiniteGuard(model, train.make_optimizer(args, model), plan, 0)
    batches = data.training(Masked(), plan, dp_rank, 0, CPU)
    for step in range(1, plan.max_steps + 1):
        where = f"step {step} of {layout}, micro-batches of {micro}"
        sums = train.forward_backward(args, model, batches.step(), dp_size * finite.loss_scale)
        finite.unscale_gradients(sums)
        _, indices = plan.samples(plan.position(step - 1), plan.position(step))
        loss, wanted = token_mean(plain, indices)
        assert abs(metrics.means(sums)["loss"] - loss) <= TOLERANCE * loss, where
        found = {keymap.canonical(name): one.grad for name, one in model.named_parameters()}
        assert found.keys() <= wanted.keys(), where
        for name, one in found.items():
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            error = ((whole - wanted[name]).norm() / wanted[name].norm()).item()
            assert error <= TOLERANCE, f"{name} in {where}: {error}"
        model.zero_grad(set_to_none=True)
    sums = train.evaluate(args, model, data.evaluation(Masked(), plan, dp_rank, 0, CPU))
    loss, _ = token_mean(plain, np.arange(SAMPLES))
    assert abs(metrics.means(sums)["loss"] - loss) <= TOLERANCE * loss


def local(sums: metrics.Sums) -> torch.Tensor:
    return sums["weight"].double() / sums["count"].clamp(min=1)


def of_rank_0(sums: metrics.Sums) -> torch.Tensor:
    both = torch.stack([sums["weight"].double(), sums["count"].double()])
    dist.broadcast(both, 0)
    return both[0] / both[1].clamp(min=1)


def mean_of_ranks(sums: metrics.Sums) -> torch.Tensor:
    dist.all_reduce(total := local(sums))
    return total / dist.get_world_size()


real = metrics.weight_per_sample


def add_last(total: metrics.Sums, sums: metrics.Sums, add: Any = metrics.add) -> metrics.Sums:
    """Only the last micro-batch's weight."""
    return add({key: value for key, value in total.items() if key != "weight"}, sums)


MUTANTS: dict[str, Callable[[], object]] = {
    "each rank divides by its own weight": lambda: setattr(metrics, "weight_per_sample", local),
    "all divide by rank 0's": lambda: setattr(metrics, "weight_per_sample", of_rank_0),
    "a mean of the ranks' means": lambda: setattr(metrics, "weight_per_sample", mean_of_ranks),
    "by the samples alone": lambda: setattr(metrics, "weight_per_sample", lambda sums: torch.ones(())),
    "times the weight": lambda: setattr(metrics, "weight_per_sample", lambda sums: 1 / real(sums)),
    "by the weight twice": lambda: setattr(metrics, "weight_per_sample", lambda sums: real(sums) ** 2),
    "by the weight of the last micro-batch": lambda: setattr(metrics, "add", add_last),
    "by the weight without the samples": lambda: setattr(
        metrics, "weight_per_sample", lambda sums: real(sums) * sums["count"]
    ),
}


def check_all(paths: dict[str, str], some: Sequence[tuple[runner.Layout, int]], mutant: str) -> None:
    if mutant:
        MUTANTS[mutant]()
    world = process_group.start()
    for layout, micro in some:
        check(paths[layout.recipe], layout, micro, world)
        dist.barrier()
    process_group.finish(world.process)


def run(size: int, some: Sequence[tuple[runner.Layout, int]], folder: Path, mutant: str = "") -> runner.Result:
    paths = {recipe: str(with_weight(recipe, folder)) for recipe in {layout.recipe for layout, _ in some}}
    return runner.spawn(check_all, [(paths, some, mutant)] * size)


def test_token_mean(tmp_path: Path) -> None:
    """Two ranks that read different samples, in micro-batches, some of which are empty."""
    result = run(2, [(runner.layout("ddp_gpt", 2), 1)], tmp_path)
    assert result.ok, str(result)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_of_a_weight(mutant: str, tmp_path: Path) -> None:
    result = run(2, [(runner.layout("ddp_gpt", 2), 1)], tmp_path, mutant)
    assert not result.ok
    assert "AssertionError" in str(result)


@pytest.mark.parametrize("size", [1, 2])
def test_token_mean_of_all_recipes(size: int, tmp_path: Path) -> None:
    """With the line of the page, in one layout of each; test_documents_apart.py has this mean in others, without it."""
    first = [runner.layout(recipe, 2) for recipe in GPT]
    some = [(one, micro) for one in first if one.size == size for micro in micro_sizes(one)]
    result = run(size, some, tmp_path)
    assert result.ok, str(result)
