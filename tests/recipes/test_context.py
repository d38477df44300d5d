"""context_gpt where the generic tests do not go: a group of three ranks, which their sequences do not divide by."""

from pathlib import Path

import pytest
import torch

from tests.conftest import write_text
from tests.harness import runner
from tests.recipes.conftest import SAMPLES
from tests.recipes.test_equivalence import curves, plain_gpt_loop, worst

NUM_RANKS, LENGTH = 3, 12
# Heads that three ranks divide, two of them to each head of keys and values; and a tied embedding.
SIZES = (("seq_len", LENGTH), ("num_heads", 6), ("num_kv_heads", 3), ("head_width", 6))
FLAGS = [part for name, size in SIZES for part in (f"--{name.replace('_', '-')}", str(size))]


@pytest.fixture(scope="module")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many sequences as the generic tests have, of another length."""
    return write_text(tmp_path_factory.mktemp("short") / "text", SAMPLES, 30, LENGTH)


@pytest.mark.parametrize("kind", runner.choices("context_gpt", "--cp-kind"))
def test_three_ranks_share_sequences(kind: str, short_text: Path, tmp_path: Path) -> None:
    wanted = plain_gpt_loop(str(short_text), torch.float64, SIZES, tied=True)
    layout = runner.Layout("context_gpt", NUM_RANKS, ("--cp", str(NUM_RANKS), "--cp-kind", kind), 1)
    found = curves(layout, tmp_path, "--data", str(short_text), "--dtype", "float64", "--tied", *FLAGS)
    assert worst(found[0], wanted.losses) < 1e-9
    assert worst(found[1], wanted.norms) < 1e-9
    assert found[2] == pytest.approx(wanted.held_out, rel=1e-9)
