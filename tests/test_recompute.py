"""--recompute computes each block again in the backward pass: twice as often, to the same bits."""

import runpy
import sys
from pathlib import Path

import pytest
from common.workloads import gpt

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
    sys.argv = [path, *argv]
    runpy.run_path(path, run_name="__main__")
    Path(file).write_text(str(len(calls)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECOMPUTING)
def test_recompute(recipe: str, dtype: str, small_text: Path, tmp_path: Path) -> None:
    path = str(runner.ROOT / "recipes" / recipe / "train.py")
    argv = [*runner.SMALL["gpt"], "--data", str(small_text), "--dtype", dtype, "--max-steps", str(STEPS)]
    argv += ["--eval-every", "1000", "--log-every", "1", "--global-batch-size", "8", "--out", str(tmp_path)]
    counts = []
    for name, flags in ("kept", []), ("recomputed", ["--recompute"]):
        files = [str(tmp_path / f"{name}-{rank}") for rank in range(2)]
        result = runner.spawn(count_blocks, [(path, [*argv, "--name", name, *flags], file) for file in files], 120)
        assert result.ok, str(result)
        counts.append([int(Path(file).read_text()) for file in files])
    # Each step recomputes; the evaluation at the end does not.
    assert [more - kept for kept, more in zip(*counts, strict=True)] == [STEPS * LAYERS] * 2
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        assert runner.records(tmp_path / "recomputed", tag) == runner.records(tmp_path / "kept", tag)
