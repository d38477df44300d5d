"""Checkpoints that earlier versions wrote are read, bit for bit, and trained on, by any number of ranks.

tests/state/checkpoints/ holds them: one of each workload, written by 1, 2 and 4 ranks. A change of the format adds a
folder beside them, `uv run python -m tests.state.test_old_checkpoints FOLDER`, and never touches what is there.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from common import UserError, manifest
from common.state import checkpoint

from tests.harness import runner
from tests.harness.fault_case import STEPS, FaultCase
from tests.harness.states import bits

FOLDER = Path(__file__).parent / "checkpoints"
WRITTEN_BY = ("ddp_resnet", "fsdp_gpt", "syncbn_ppo")
SIZES = (1, 2, 4)
STEP = 3  # in mid-training, and at the end of an epoch
OLD = sorted(path.parent for path in FOLDER.glob("*/*/digests.json"))


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of each tensor of a checkpoint, by name, as one process loads it."""
    found = {name: torch.empty_like(one, device="cpu") for name, one in checkpoint.tensors_in(path).items()}
    checkpoint.load(path, found)
    return {name: hashlib.sha256(bits(tensor)).hexdigest() for name, tensor in sorted(found.items())}


def write(out: Path) -> None:
    """A checkpoint of each recipe and number of ranks, with the digests of its tensors."""
    for recipe in WRITTEN_BY:
        for size in SIZES:
            with tempfile.TemporaryDirectory() as folder:
                case = FaultCase(recipe, Path(folder), size, Path)
                result = case.start("--stop-after", str(STEP))
                assert result.ok, str(result)
                target = out / f"{recipe}-{size}"
                shutil.copytree(checkpoint.folder(case.run_dir, STEP), target / "checkpoint")
            (target / "digests.json").write_text(json.dumps(digests(target / "checkpoint"), indent=1))


def test_each_workload_and_size_is_there() -> None:
    assert {runner.workload(recipe) for recipe in runner.TRAINING} == {runner.workload(recipe) for recipe in WRITTEN_BY}
    for version in FOLDER.iterdir():
        assert {path.name for path in version.iterdir()} == {f"{one}-{size}" for one in WRITTEN_BY for size in SIZES}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("old", OLD, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_old_checkpoint(old: Path, tmp_path: Path) -> None:
    """One process reads the bits that were written; two or three ranks train on."""
    assert manifest.verify(old / "checkpoint")[1] == ""
    assert digests(old / "checkpoint") == json.loads((old / "digests.json").read_text())
    recipe, _, size = old.name.rpartition("-")
    case = FaultCase(recipe, tmp_path, 3 if size == "2" else 2, Path)
    result = case.start("--resume", str(old / "checkpoint"))
    assert result.ok, str(result)
    assert f"resuming from step {STEP} of {old / 'checkpoint'}" in result.outputs[0]
    assert list(runner.records(case.run_dir, "train/loss")) == list(range(STEP + 1, STEPS + 1))


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    """It is not damaged: the older one would lose steps without a word."""
    run = tmp_path / "run"
    for step in (STEP - 1, STEP):
        shutil.copytree(OLD[0] / "checkpoint", checkpoint.folder(run, step))
    newest = checkpoint.folder(run, STEP)
    facts = json.loads((newest / manifest.NAME).read_text()) | {"format": 9}
    del facts["sha256"]
    (newest / manifest.NAME).write_text(json.dumps(facts | {"sha256": manifest._digest_json(facts)}))
    with pytest.raises(
        UserError, match=rf"{newest} has format 9, and this code reads formats up to {manifest.FORMAT}: continue"
    ):
        checkpoint.choose(run)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
