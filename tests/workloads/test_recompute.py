"""--recompute computes blocks again in the backward pass: twice as often, to the same bits, in less memory."""

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from common import UserError
from common.run import cli
from common.workloads import gpt
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from tests.harness import runner

RECOMPUTING = [recipe for recipe in runner.RECIPES if runner.has_flag(recipe, "--recompute")]
STEPS, LAYERS = 2, 3


def count_blocks(path: str, argv: list[str], file: str) -> None:
    """Run a recipe, and count how often a block is computed, on each rank."""
    real, calls = gpt.Block.forward, []

    def forward(self: gpt.Block, *args: object) -> object:
        calls.append(1)
        return real(self, *args)

    gpt.Block.forward = forward
    try:
        runner.run_unmeasured(path, [path, *argv])
    finally:
        gpt.Block.forward = real
    Path(file).write_text(str(len(calls)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECOMPUTING)
def test_recompute(recipe: str, dtype: str, small_text: Path, tmp_path: Path) -> None:
    path = str(runner.ROOT / "recipes" / recipe / "train.py")
    layout = runner.layout(recipe, 2)
    argv = [*runner.SMALL["gpt"], "--data", str(small_text), "--dtype", dtype, "--max-steps", str(STEPS)]
    argv += ["--eval-every", "1000", "--log-every", "1", "--global-batch-size", "8", "--out", str(tmp_path)]
    argv += [*layout.strategy, *(("--micro-batch-size", "2") if "--pp" in layout.strategy else ())]
    counts = []
    for what in ("none", "full", "selective"):
        files = [str(tmp_path / f"{what}-{rank}") for rank in range(2)]
        flags = [*argv, "--name", what, "--recompute", what]
        result = runner.rerun(count_blocks, [(path, flags, file) for file in files])
        assert result.ok, str(result)
        counts.append([int(Path(file).read_text()) for file in files])
    # Each step computes again, in each micro-batch; the evaluation at the end does not.
    kept, *again = counts
    blocks = [1, 2] if "--pp" in layout.strategy else [LAYERS, LAYERS]
    wanted = [STEPS * number * (4 if "--pp" in layout.strategy else 1) for number in blocks]
    for more in again:
        found = sorted(b - a for a, b in zip(kept, more, strict=True))
        # The pass in which torch learns the shapes of a pipeline also goes back through some stages.
        extra = [found[rank] - wanted[rank] for rank in range(2)]
        assert all(0 <= extra[rank] <= (blocks[rank] if "--pp" in layout.strategy else 0) for rank in range(2)), found
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        for what in ("full", "selective"):
            assert runner.records(tmp_path / what, tag) == runner.records(tmp_path / "none", tag)


class Alive(TorchDispatchMode):
    """Notes the operations, and the memory of each tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: collections.Counter[str] = collections.Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.operations[function.name()] += 1
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return made

    def bytes(self) -> int:
        """Of what was made here and is still there."""
        return sum(size for storage, size in self._made.values() if not storage.expired())


def cost(what: str) -> tuple[int, int, int]:
    """Of a model's step: bytes that wait for the backward pass, products of matrices, and other operations."""
    model = gpt.GPT(gpt.Shape(64, LAYERS, 4, 64))
    gpt.recompute(model, what)
    tokens = torch.arange(4 * 32).view(4, 32) % 64
    with Alive() as alive:
        loss = model(tokens, tokens).sum()
        waiting = alive.bytes()
        loss.backward()
    products = sum(number for name, number in alive.operations.items() if name in gpt.KEPT or "dot_product" in name)
    return waiting, products, alive.operations.total() - products


def test_memory_and_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The less is kept, the more is computed; selective computes no product again, and keeps less than all."""
    none, selective, full = (cost(what) for what in ("none", "selective", "full"))
    assert full[0] < 0.5 * none[0]
    assert full[0] < 0.6 * selective[0]
    assert selective[0] < 0.8 * none[0]
    assert selective[1] == none[1]
    # A block's last product is never computed again: nothing keeps its result. The other six are, and attention.
    assert full[1] - none[1] == LAYERS * (6 + 1)
    assert none[2] < selective[2]
    # Two mutants: one keeps no product, and the other one more than products.
    monkeypatch.setattr(gpt, "KEPT", (*gpt.KEPT, "aten::mul"))
    assert cost("selective")[0] > 0.9 * none[0]
    monkeypatch.setattr(gpt, "_what_to_keep", lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    assert cost("selective")[1] > selective[1]


def test_an_older_run_was_recomputed_or_not(tmp_path: Path) -> None:
    """Its config.json has true or false; on the command line, the flag alone is refused with what it may be."""

    @dataclasses.dataclass(frozen=True)
    class Args:
        recompute: gpt.Recompute = "selective"
        tied: bool = False

    for before, now in (True, "full"), (False, "none"), ("selective", "selective"):
        (tmp_path / "config.json").write_text(json.dumps({"args": {"recompute": before, "tied": True}}))
        assert cli.parse(Args, ["--config", str(tmp_path / "config.json")]) == Args(now, tied=True)


@pytest.mark.parametrize("argv", [["--recompute"], ["--recompute", "--tied"]])
def test_flag_alone(argv: list[str]) -> None:
    """As it was written before there were choices."""

    @dataclasses.dataclass(frozen=True)
    class Args:
        recompute: gpt.Recompute = "none"
        tied: bool = False

    with pytest.raises(UserError, match=r"^--recompute needs a value: none, selective, full$"):
        cli.parse(Args, argv)
    assert cli.parse(Args, ["--recompute=full", "--tied"]) == Args("full", tied=True)


def gradients_with_dropout(what: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Shape(vocab_size=8, num_layers=2, num_heads=2, width=8, mlp_width=8))
    for block in model.blocks.values():
        block.mlp.down = torch.nn.Sequential(block.mlp.down, torch.nn.Dropout(0.5))
    gpt.recompute(model, what)
    tokens = torch.arange(12).view(2, 6) % 8
    torch.manual_seed(1)
    model(tokens, tokens).sum().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("what", ["full", "selective"])
def test_dropout_in_a_block_draws_the_same_again(what: str) -> None:
    """Which the model here has none of, and an adopter may add: other masks would give a wrong gradient."""
    for one, other in zip(gradients_with_dropout("none"), gradients_with_dropout(what), strict=True):
        assert torch.equal(one, other)
