"""Muon under every strategy is that of one process, its bytes are those of the formula, and its state moves."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import private_api
from common.workloads import muon, several
from torch import nn

from tests.harness import runner, segments
from tests.harness.once import Once
from tests.recipes.test_equivalence import BATCH, FLAGS, RATES, Curve, curves, plain_gpt_loop, worst

RECIPES = [name for name in runner.SUPERVISED if runner.has_flag(name, "--optimizer")]
MUON = ("--optimizer", "muon")
DEEP = (("num_layers", 5),)


class PlainMuon(torch.optim.Optimizer):
    """Muon as its authors write it, for one process."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean += 0.05 * (p.grad - mean)
                x = 0.05 * p.grad + 0.95 * mean
                x = x / (x.square().sum().sqrt() + 1e-7)
                for _ in range(5):
                    # A X X^T X and so on are the same for a matrix and its transpose.
                    x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
                p.data *= 1 - group["lr"] * group["weight_decay"]
                p.data -= group["lr"] * 0.2 * max(p.shape) ** 0.5 * x


def plain_muon(model: nn.Module, adamw: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """PlainMuon for the matrices of the blocks, and the AdamW for the rest."""
    blocks = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    decay = adamw.param_groups[0]
    decay["params"] = [p for p in decay["params"] if all(p is not one for one in blocks)]
    return several.Several(PlainMuon([{"params": blocks, "weight_decay": decay["weight_decay"]}], {"lr": 0.0}), adamw)


@pytest.fixture(scope="module")
def plain(small_text: Path, epochs: dict[str, Path], once: Once) -> Callable[..., Curve]:
    def get(sizes: tuple, folder: Path = epochs["gpt"], tied: bool = False) -> Curve:
        return once.value(
            lambda: plain_gpt_loop(str(folder), torch.float64, sizes, tied, moved=plain_muon),
            *("plain muon", folder.name, sizes, tied),
        )

    return get


def ways() -> Iterator[Any]:
    """One layout of each recipe, and one in uneven parts; tests/recipes/test_documents_apart.py has all others."""
    for layout in (*(runner.layout(recipe, 2) for recipe in RECIPES), runner.layout("fsdp_gpt", 3)):
        yield pytest.param(layout, id=str(layout))


@pytest.mark.parametrize("layout", list(ways()))
def test_float64(layout: runner.Layout, plain: Callable, epochs: dict[str, Path], tmp_path: Path) -> None:
    wanted = plain(layout.sizes)
    found = curves(layout, tmp_path, "--data", str(epochs["gpt"]), "--dtype", "float64", *MUON)
    assert worst(found[0], wanted.losses) < 1e-9
    assert worst(found[1], wanted.norms) < 1e-9
    assert found[2] == pytest.approx(wanted.held_out, rel=1e-9)


def test_another_training_than_with_adamw(plain: Callable, epochs: dict[str, Path]) -> None:
    adamw = plain_gpt_loop(str(epochs["gpt"]), torch.float64)
    assert plain(()).losses[2] != pytest.approx(adamw.losses[2], rel=1e-6)


# From recipe to recipe, two steps each; in the end to the first one again.
DDP = runner.Layout("ddp_gpt", 2, (), 2)
STAGES = runner.Layout("pipeline_gpt", 2, ("--pp", "2", "--schedule", "1F1B"), 1)
WAYS = {
    "all": [
        DDP,
        runner.Layout("fsdp_gpt", 3, (), 3),
        runner.Layout("tensor_gpt", 4, ("--tp", "2"), 2),
        STAGES,
        runner.Layout("context_gpt", 2, ("--cp", "2", "--cp-kind", "ring"), 1),
        runner.Layout("fsdp_gpt", 4, ("--dp-replicate", "2"), 4),
        DDP,
    ],
    "two ranks": [DDP, runner.Layout("tensor_gpt", 2, ("--tp", "2"), 1), STAGES, DDP],
}


@pytest.mark.parametrize("name", list(WAYS))
def test_state_moves(name: str, plain: Callable, small_text: Path, tmp_path: Path) -> None:
    """Momentum that were lost, or of another matrix, would show in the next step."""
    wanted = plain(DEEP, small_text)
    way = []
    for i, layout in enumerate(WAYS[name]):
        sizes = (*runner.SMALL["gpt"], "--num-layers", "5", "--lr", str(2 * RATES["gpt"]), "--dtype", "float64", *MUON)
        where = ("--data", str(small_text), "--out", str(tmp_path / str(i)), "--name", "run")
        before = ("--resume", str(tmp_path / str(i - 1) / "run")) if i else ()
        how = (*layout.flags, *layout.micro_batches(BATCH), *where, *before, "--stop-after", str(2 * i + 2))
        recipe = runner.ROOT / "recipes" / layout.recipe / "train.py"
        way.append(segments.Segment(recipe, layout, (*FLAGS, *sizes, *how), tmp_path / str(i) / "notes"))
    result = segments.run(way)
    assert result.ok, str(result)
    for i, layout in enumerate(WAYS[name]):
        for tag, values in (("train/loss", wanted.losses), ("train/grad_norm", wanted.norms)):
            curve = runner.records(tmp_path / str(i) / "run", tag)
            assert list(curve) == [2 * i + 1, 2 * i + 2]
            assert all(abs(curve[step] / values[step - 1] - 1) < 1e-9 for step in curve), (str(layout), tag)


# --- odd shapes, and what is sent ---

SHAPES = ((2, 5), (7, 3), (4, 4), (6, 2), (1, 3))  # over three ranks, some have no row of some


def matrices() -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in SHAPES])


def move(model: nn.Module, optimizer: Any) -> None:
    """Three steps, with gradients that follow from the weights."""
    for _ in range(3):
        for p in model.parameters():
            p.grad = p.detach().sin() if not hasattr(p, "placements") else p.detach().clone().sin_()
        optimizer.step()


def group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.3}]


def rank_of(how: str, out: str) -> None:
    """One rank: three steps, what it then has, and the bytes that it has sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model: Any = matrices()
    if how != "plain":
        size = dist.get_world_size()
        names = ("dp_replicate", "dp_shard")
        mesh = (
            init_device_mesh("cpu", (size,)) if how == "fsdp" else init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        )
        fully_shard(model, mesh=mesh)
    optimizer = muon.Muon(group(model), torch.float64, dist.group.WORLD if how == "plain" else None)
    sent = 0
    real = dist.all_to_all_single

    def counted(received: torch.Tensor, given: torch.Tensor, taken: list, parts: list, group: Any) -> None:
        nonlocal sent
        sent += 8 * (sum(parts) - parts[group.rank()])
        real(received, given, taken, parts, group=group)

    dist.all_to_all_single = counted
    move(model, optimizer)
    whole = [p.full_tensor() if hasattr(p, "placements") else p for p in model.parameters()]
    line = {"sent": sent, "weights": [one.tolist() for one in whole]}
    Path(out).with_suffix(f".{dist.get_rank()}").write_text(json.dumps(line))
    dist.destroy_process_group()


@pytest.mark.parametrize(("how", "size"), [("plain", 3), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4)])
def test_odd_shapes_and_bytes(how: str, size: int, tmp_path: Path) -> None:
    alone = matrices()
    move(alone, PlainMuon(group(alone), {}))
    result = runner.spawn(rank_of, [(how, str(tmp_path / "out"))] * size)
    assert result.ok, str(result)
    ranks = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(size)]
    for line in ranks:
        for found, wanted in zip(line["weights"], alone, strict=True):
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted.detach(), rtol=1e-9, atol=1e-12)
    holders = size // (2 if how == "hsdp" else 1)
    # Each rank's rows of a matrix travel to its owner and back, but for the owner's own.
    total = 0
    for i, (rows, columns) in enumerate(sorted(SHAPES, key=lambda shape: -shape[0] * shape[1])):
        parts = [len(part) for part in torch.arange(rows).chunk(holders)]
        own = parts[i % holders] if i % holders < len(parts) else 0
        total += 2 * 8 * columns * (rows - own)
    copies = size // holders
    assert sum(line["sent"] for line in ranks) == (3 * copies * total if how != "plain" else 0)


def test_an_update_that_is_skipped() -> None:
    model = matrices()
    optimizer = muon.Muon(group(model), torch.float64)
    move(model, optimizer)
    before = [
        one.clone() for one in (*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values()))
    ]
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    private_api.skip_update_if(optimizer, torch.ones(()))
    optimizer.step()
    after = [*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]
    assert all(map(torch.equal, before, after))


def test_updates_are_as_large_as_those_of_adamw() -> None:
    torch.manual_seed(0)
    for shape in ((64, 64), (32, 96), (96, 32)):
        update = muon.orthogonalise(torch.randn(*shape)) * muon.RMS * max(shape) ** 0.5
        assert 0.14 < update.square().mean().sqrt() < 0.26
