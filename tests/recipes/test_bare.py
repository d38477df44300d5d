"""Each bare twin trains as the recipe beside it: of the same batches and initial weights, the same losses and norms."""

import ast
import copy
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from common import seed
from common.run import cli, process_group
from common.train import data, initial, metrics

from tests.harness import module, runner, twins
from tests.harness.twins import BATCH, TWINS

CPU = torch.device("cpu")
STEPS = 4

FLAGS = {
    "resnet": ("--label-smoothing", "0", "--model", "resnet6"),
    "ppo": (*runner.SMALL["ppo"], "--target-kl", "0"),
    "gpt": ("--seq-len", "16", "--num-layers", "4", "--num-heads", "4", "--width", "40", "--mlp-width", "44"),
}


def test_each_recipe_that_trains_has_one() -> None:
    assert sorted(runner.TRAINING) == TWINS


@pytest.mark.parametrize("recipe", TWINS)
def test_imports_the_workload_alone(recipe: str) -> None:
    tree = ast.parse((runner.ROOT / "recipes" / recipe / "bare.py").read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in found if name and name.startswith("common")} == {"common.workloads"}


FINITE = SimpleNamespace(loss_scale=1, unscale_gradients=lambda _: None, skip_if_not_finite=lambda _: None)
Steps = Iterator[tuple[tuple[metrics.Sums, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]


def supervised(part: Any, twin: Any, args: Any, mesh: Any) -> Steps:
    """Steps of a recipe and of its twin, on the same samples."""
    dp_rank, dp_size = part.dp_coordinates(mesh)
    train, _ = part.make_data(args)
    plain = initial.materialize(part.make_model(args, train), args.seed, CPU, torch.float64)
    model = part.parallelize(args, part.make_model(args, train), mesh, CPU)
    optimizer = part.make_optimizer(args, model)
    ours = twin.parallelize(copy.deepcopy(plain), CPU)
    our_optimizer = part.make_optimizer(args, ours)
    micro = args.micro_batch_size or BATCH
    for step in range(STEPS):
        chosen = (np.arange(BATCH) + step * BATCH)[dp_rank::dp_size]
        pieces = [chosen[i : i + micro] for i in range(0, len(chosen), micro)]
        reads = [train.read(np.zeros_like(piece), piece) for piece in pieces]
        batches = [data.Batch(*read, BATCH, read is reads[-1]) for read in reads]
        loader = SimpleNamespace(step=functools.partial(iter, batches))
        wanted = part.train_step(args, model, optimizer, FINITE, loader, dp_size)
        yield wanted, twin.train_step(ours, our_optimizer, *train.read(np.zeros_like(chosen), chosen))
        if hasattr(twin, "outer_step") and (step + 1) % twin.INNER_STEPS == 0:
            twin.outer_step(ours)


def reinforced(part: Any, twin: Any, args: Any, mesh: Any) -> Steps:
    """Updates of PPO and of its twin, by the same noise and the same orders of samples."""
    dp_rank, dp_size = part.dp_coordinates(mesh)
    envs, our_envs = (part.make_envs(args, dp_rank, dp_size)[0] for _ in range(2))
    model = part.parallelize(args, part.make_model(args, envs), mesh, CPU)
    optimizer = part.make_optimizer(args, model)
    plain = initial.materialize(part.make_model(args, envs), args.seed, CPU, torch.float64)
    ours = twin.parallelize(plain, CPU)
    our_optimizer = part.make_optimizer(args, ours)
    times = np.arange(args.rollout_steps)[:, None]
    for step in range(1, STEPS + 1):
        at = times[..., None] + (step - 1) * args.rollout_steps
        noise = seed.uniform(args.seed, seed.ACTION, at, envs.index[:, None], np.arange(envs.num_outputs))
        epochs = np.arange(args.update_epochs) + (step - 1) * args.update_epochs
        keys = [seed.mix(args.seed, seed.ORDER, int(epoch), envs.index, times) for epoch in epochs]
        orders = np.stack([key.argsort(axis=0, kind="stable") for key in keys])
        wanted = part.train_step(args, model, optimizer, FINITE, envs, step)
        yield wanted, twin.train_step(ours, our_optimizer, our_envs, noise, orders)


def compare(recipe: str, argv: list[str], mutant: tuple[str, str]) -> None:
    """On each rank: losses and gradient norms of the recipe and of its twin."""
    part = module.load(recipe)
    args = cli.parse(part.Args, argv)
    world = process_group.start("gloo", "float64")
    steps = supervised if recipe in runner.SUPERVISED else reinforced
    losses = []
    for (sums, norm), (loss, our_norm) in steps(part, twins.load(recipe, mutant), args, part.make_mesh(args, world)):
        wanted = metrics.means(sums)["loss"], norm.item()
        found = loss.item(), our_norm.item()
        for one, other in zip(found, wanted, strict=True):
            assert math.isclose(one, other, rel_tol=1e-9), (len(losses), found, wanted)
        losses.append(wanted[0])
    assert len(losses) == STEPS
    assert max(losses) > 1.001 * min(losses), "it has learned something"
    process_group.finish(world.process)


def run(recipe: str, size: int, folders: dict[str, Path], mutant: tuple[str, str] = ("", "")) -> runner.Result:
    workload = runner.workload(recipe)
    argv = ["--dtype", "float64", *FLAGS[workload], *twins.flags(recipe, size), "--warmup-steps", "0", "--lr", "0.02"]
    if workload in folders:
        argv += ["--data", str(folders[workload]), "--global-batch-size", str(BATCH)]
    return runner.rerun(compare, [(recipe, argv, mutant)] * size)


@pytest.mark.parametrize(
    ("recipe", "size"), [(one, size) for one in TWINS for size in (1, 2, 4) if size in runner.world_sizes(one)]
)
def test_equal(recipe: str, size: int, small_data: dict[str, Path]) -> None:
    result = run(recipe, size, small_data)
    assert result.ok, str(result)


MUTANTS = {
    "ddp_gpt without DDP": ("DistributedDataParallel(model.to(device))", "model.to(device)"),
    "allreduce_resnet with sums": ("        grad.div_(dist.get_world_size())\n", ""),
    "multinode_resnet sends nothing": ("if is_last else", "if False else"),
    "pipeline_gpt has lost a layer": ("!= rank]:", "!= rank or name == '2']:"),
    "context_gpt at positions of its own": (
        "targets.chunk(size, 1)[rank], positions)",
        "targets.chunk(size, 1)[rank])",
    ),
    "syncbn_ppo with statistics of a process alone": ("average(x.mean(0))", "x.mean(0)"),
    "diloco_gpt without momentum": ("momentum=0.9, nesterov=True", "momentum=0.0"),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_mutant_fails(what: str, small_data: dict[str, Path]) -> None:
    result = run(what.split(maxsplit=1)[0], 2, small_data, MUTANTS[what])
    assert not result.ok
    assert "AssertionError" in str(result), str(result)


@pytest.mark.rest
@pytest.mark.parametrize("recipe", TWINS)
def test_continues_from_its_checkpoint(recipe: str, tmp_path: Path) -> None:
    """As the docstring says; PPO's environments begin new episodes."""
    flag, half = ("--epochs", 1) if "resnet" in recipe else ("--steps", 10)
    path = twins.write_small(recipe, tmp_path)
    size = runner.world_sizes(recipe, 2)[-1]

    def last_line(steps: int, *more: str) -> str:
        result = runner.run_recipe(path, size, flag, str(steps), *more)
        assert result.ok, str(result)
        assert not any("loss" in output for output in result.outputs[1:]), "rank 0 speaks for all"
        return [line for line in result.outputs[0].splitlines() if line.startswith(flag[2:-1])][-1]

    checkpoint = ("--checkpoint", str(tmp_path / "saved"))
    assert last_line(half, *checkpoint).startswith(f"{flag[2:-1]} {half}/{half}  ")
    found = last_line(2 * half, *checkpoint)
    assert found.startswith(f"{flag[2:-1]} {2 * half}/{2 * half}  ")
    if runner.workload(recipe) != "ppo":
        assert found == last_line(2 * half)
