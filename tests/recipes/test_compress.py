"""What multinode_resnet sends: counted in torch's own record of the collectives."""

import json
import math
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from common import private_api, ranks
from common.run import process_group
from common.run.process import Process

from tests.harness import mutants, runner
from tests.harness.once import Once

RECIPE = "multinode_resnet"
STEPS = 6
BYTES = {"Float": 4, "BFloat16": 2, "Double": 8}  # what gradients and statistics are sent in; digests are whole numbers
FLAGS = [
    *("--max-steps", str(STEPS), "--global-batch-size", "16", "--micro-batch-size", "8", "--warmup-steps", "2"),
    *("--log-every", "1", "--eval-every", "1000", "--save-every", "1000", "--check-every", "1", "--dtype", "float32"),
]


def _recorded(path: str, argv: list[str], file: str) -> None:
    """Run a recipe, and keep what rank 0 has sent."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "5000"
    finish = process_group.finish

    def keep_and_finish(process: Process) -> None:
        if ranks.rank() == 0:
            Path(file).write_text(json.dumps(private_api.flight_recorder(torch.device("cpu"), only_active=False)))
        finish(process)

    process_group.finish = keep_and_finish
    sys.argv = [path, *argv]
    runpy.run_path(path, run_name="__main__")


def gradient_bytes(recipe: str | Path, folder: Path, *flags: str) -> tuple[int, dict[int, float]]:
    """Bytes of the all-reduces of the gradients in the last steps, and the loss of each step."""
    path = recipe if isinstance(recipe, Path) else runner.ROOT / "recipes" / recipe / "train.py"
    file = folder / "record.json"
    argv = [*FLAGS, *runner.small(RECIPE), "--out", str(folder), "--name", "run", *flags]
    result = runner.spawn(_recorded, [(str(path), argv, str(file))] * 2)
    assert result.ok, str(result)
    entries = json.loads(file.read_text())["entries"]
    sent = [
        sum(math.prod(size) * BYTES[kind] for size, kind in zip(e["input_sizes"], e["input_dtypes"], strict=True))
        for e in entries
        if e["profiling_name"] == "gloo:all_reduce" and BYTES.keys() >= set(e["input_dtypes"])
    ]
    return sum(sent), runner.records(folder / "run", "train/loss")


@pytest.fixture(scope="module")
def plain(once: Once, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[int, float]]:
    return once.value(lambda: gradient_bytes(RECIPE, tmp_path_factory.mktemp("plain")), "not compressed")


def test_bf16(plain: tuple[int, dict[int, float]], tmp_path: Path) -> None:
    """Half of the bytes, and the same training but for roundings."""
    sent, losses = gradient_bytes(RECIPE, tmp_path, "--compress", "bf16")
    assert sent / plain[0] == pytest.approx(0.5, rel=1e-3)
    assert losses[1] == plain[1][1]
    assert losses != plain[1]
    assert losses == pytest.approx(plain[1], rel=0.02)


def test_powersgd(plain: tuple[int, dict[int, float]], tmp_path: Path) -> None:
    """Whole during warm-up, a fraction afterwards, more of it with more columns; all ranks stay equal."""
    sent = {
        columns: gradient_bytes(RECIPE, tmp_path / columns, "--compress", "powersgd", "--powersgd-rank", columns)
        for columns in ("1", "4")
    }
    whole = plain[0] * 2 / STEPS
    assert whole < sent["1"][0] < sent["4"][0] < 0.7 * plain[0]
    late = ("--powersgd-rank", "1", "--warmup-steps", "4")
    assert gradient_bytes(RECIPE, tmp_path / "late", "--compress", "powersgd", *late)[0] > plain[0] * 4 / STEPS
    for _, losses in sent.values():
        assert [losses[step] for step in (1, 2, 3)] == [plain[1][step] for step in (1, 2, 3)]
        assert losses[5] != plain[1][5]
        assert losses[5] == pytest.approx(plain[1][5], rel=0.2)


def test_sent_once_a_step(plain: tuple[int, dict[int, float]], tmp_path: Path) -> None:
    """However many micro-batches a step has."""
    assert gradient_bytes(RECIPE, tmp_path, "--micro-batch-size", "2")[0] == plain[0]


MUTANTS: dict[str, mutants.Changes] = {
    "the hook is not registered": {
        "parallelize": {"model.register_comm_hook(group, default_hooks.bf16_compress_hook)": "pass"}
    },
    "every micro-batch sends": {
        "forward_backward": {"contextlib.nullcontext() if batch.last else model.no_sync()": "contextlib.nullcontext()"}
    },
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(mutant: str, plain: tuple[int, dict[int, float]], tmp_path: Path) -> None:
    path = mutants.mutate(RECIPE, tmp_path, MUTANTS[mutant])
    sent, _ = gradient_bytes(path, tmp_path, "--compress", "bf16", "--micro-batch-size", "2")
    assert sent / plain[0] > 0.9
