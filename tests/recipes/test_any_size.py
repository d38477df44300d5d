"""An evaluation, and a training's last step, end on any number of samples: also where a rank gets none of them.

Sections 2 to 4 of each recipe run on sets of 1 to twice dp samples, and are compared with the plain model in one
process. Sets of no samples never come so far.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import UserError, seed
from common.run import cli, process_group
from common.train import data, initial, metrics, sampler
from common.workloads import dataset, gpt

from tests.harness import module, runner, short_resnet  # noqa: F401 (resnet6)

MICRO = (0, 1, 2)  # --micro-batch-size
STEP = 4  # samples of each dp rank in a whole step
TOLERANCE = 1e-9
LENGTH, VOCABULARY = 16, 32
CPU = torch.device("cpu")


class Tokens:
    """Sequences of random tokens; or pictures, where a recipe reads such."""

    vocab_size = VOCABULARY
    channels, size = 1, 8
    class_names = tuple("0123456789")

    def __init__(self, length: int, pictures: bool) -> None:
        self._length = length
        self._pictures = pictures

    def __len__(self) -> int:
        return self._length

    def read(self, _: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        keys = np.arange(64 if self._pictures else LENGTH + 1)
        drawn = torch.from_numpy(seed.mix(7, indices[:, None], keys).astype(np.int64) & 0xFF)
        if self._pictures:
            return drawn.view(-1, 1, 8, 8).to(torch.uint8), torch.from_numpy(indices) % 10
        return drawn[:, :-1] % VOCABULARY, drawn[:, 1:] % VOCABULARY


def flags(layout: runner.Layout, micro: int) -> list[str]:
    """Of a small training in this layout."""
    pp = layout.size // layout.dp_size if "--pp" in layout.flags else 1
    found = [*runner.small(layout.recipe), *layout.flags, "--dtype", "float64", "--max-grad-norm", "0"]
    found += ["--global-batch-size", str(STEP * pp * layout.dp_size)]
    return found if "--micro-batch-size" in layout.flags else [*found, "--micro-batch-size", str(micro)]


def is_first(layout: runner.Layout) -> bool:
    """Of its recipe, on its number of ranks: how it divides samples does not depend on who shares a model."""
    return layout == runner.layout(layout.recipe, layout.size)


def micro_sizes(layout: runner.Layout) -> Sequence[int]:
    """All in a first layout; but a pipeline needs several micro-batches, if it is not the naive one."""
    naive = "--pp" not in layout.flags or layout.size == layout.dp_size
    return MICRO if naive and is_first(layout) else MICRO[1:2]


def sizes_of(layout: runner.Layout) -> Sequence[int]:
    """All in a first layout; else one where most have none, one where some have more, and one where all have two."""
    dp_size = layout.dp_size
    return range(1, 2 * dp_size + 1) if is_first(layout) else sorted({1, dp_size + 1, 2 * dp_size})


def close(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= TOLERANCE * abs(wanted)


def check(layout: runner.Layout, micros: Sequence[int], world: Any, sizes: Sequence[int] = ()) -> None:
    """One layout in this rank, with one model: all sizes, or these, in each of these micro-batches (all ranks)."""
    train = module.load(layout.recipe)
    args = cli.parse(train.Args, flags(layout, micros[0]))
    is_text = runner.workload(layout.recipe) == "gpt"
    some = Tokens(2 * layout.dp_size, not is_text)
    plain = initial.materialize(train.make_model(args, some), args.seed, CPU, torch.float64)
    mesh = train.make_mesh(args, world)
    dp_rank, dp_size = train.dp_coordinates(mesh)
    model = train.parallelize(args, train.make_model(args, some), mesh, CPU)
    next(one for one in model.modules() if not any(one.children())).eval()  # as make_model may have put one
    modes = [one.training for one in model.modules()]
    for micro, size in itertools.product(micros, sizes or sizes_of(layout)):
        args = cli.parse(train.Args, flags(layout, micro))
        division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, dp_size)
        where = f"{layout}, micro-batches of {micro}, {size} samples"
        held_out = Tokens(size, not is_text)
        plan = sampler.make_plan(division, size, run_seed=0, max_steps=0, epochs=1, progress={})
        sums = train.evaluate(args, model, data.evaluation(held_out, plan, dp_rank, 0, CPU))
        assert metrics.totals(sums)["count"] % size == 0, where
        assert [one.training for one in model.modules()] == modes, where
        batch = data.Batch(*held_out.read(np.zeros(size), np.arange(size)), size, True)
        plain.eval()
        with torch.no_grad():
            wanted = loss_of(args, train, plain, batch, is_text).item() / size
        assert close(metrics.means(sums)["loss"], wanted), where
        if is_text:
            step = data.training(held_out, plan, dp_rank, 0, CPU).step()
            train.forward_backward(args, model, step, dp_size)
            norm = train.clip_gradients(args, model).item()
            model.zero_grad(set_to_none=True)
            plain.train().zero_grad()
            (loss_of(args, train, plain, batch, is_text) / size).backward()
            wanted = torch.nn.utils.get_total_norm([one.grad for one in plain.parameters()]).item()
            assert close(norm, wanted), f"the gradient of {where}: {norm} for {wanted}"


def loss_of(args: Any, train: Any, plain: Any, batch: data.Batch, is_text: bool) -> torch.Tensor:
    """Of the plain model; a recipe's own forward does not compute a pipeline's."""
    return gpt.loss(plain(batch.inputs), batch.targets, []) if is_text else train.forward(args, plain, batch)["loss"]


def check_all(layouts: Sequence[runner.Layout], sizes: Sequence[int] = ()) -> None:
    """All micro-batches; or one, of one sample a rank, if sizes are given."""
    world = process_group.start()
    for layout in layouts:
        micros = (1,) if sizes else micro_sizes(layout)
        for some in (
            [(micro,) for micro in micros] if "--pp" in layout.flags else [micros]
        ):  # it is built for their size
            check(layout, some, world, sizes)
            dist.barrier()
    process_group.finish(world.process)


def layouts(size: int) -> list[runner.Layout]:
    """All on this many ranks, of recipes that train on a set of samples; and slices of one rank, of tensor_gpt."""
    apart = runner.Layout("tensor_gpt", size, ("--tp", "1"), size)
    every = runner.schedules_once(one for recipe in runner.SUPERVISED for one in runner.layouts(recipe))
    found = [one for one in every if one.size == size]
    return found if apart in found else [*found, apart]


def test_no_rank_needs_samples() -> None:
    """What torch never ended to flatten: a DTensor without rows."""
    found = [one for one in layouts(2) if one.flags == ("--tp", "1")]
    assert [one.dp_size for one in found] == [2]
    result = runner.spawn(check_all, [(found, (1, 3))] * 2)  # of which rank 1 gets none, or fewer
    assert result.ok, str(result)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_layouts(size: int) -> None:
    found = layouts(size)
    recipes = {one for one in runner.SUPERVISED if size in runner.world_sizes(one)}
    assert {one.recipe for one in found} == recipes
    result = runner.spawn(check_all, [(found,)] * size)
    assert result.ok, str(result)


def play(size: int) -> None:
    """Fewer episodes than ranks."""
    world = process_group.start()
    train = module.load("syncbn_ppo")
    for episodes in range(1, 2 * size + 1):
        args = cli.parse(train.Args, [*runner.small("syncbn_ppo"), "--eval-episodes", str(episodes)])
        mesh = train.make_mesh(args, world)
        dp_rank, dp_size = train.dp_coordinates(mesh)
        envs, _ = train.make_envs(args, dp_rank, dp_size)
        model = train.parallelize(args, train.make_model(args, envs), mesh, CPU)
        sums = train.evaluate(args, model, dp_rank, dp_size)
        assert metrics.totals(sums)["count"] == episodes
    process_group.finish(world.process)


def test_fewer_episodes_than_ranks() -> None:
    result = runner.spawn(play, [(3,)] * 3)
    assert result.ok, str(result)


def test_no_samples_at_all() -> None:
    """They are refused, and not taken for a stream."""
    with pytest.raises(UserError, match="without samples"):
        dataset.MapStyle([], 0)
