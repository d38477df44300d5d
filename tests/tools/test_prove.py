"""`python -m tools.prove` passes on this machine, and each of its proofs fails for a defect that it is there for."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools.prove import page

from tests.harness import mutants, runner

PARTS = ("common", "launch", "recipes", "tools")


def prove(folder: Path, size: int, *flags: str, root: Path = runner.ROOT) -> tuple[int, dict[str, Any], str]:
    """Its exit code, what prove.json holds, and what it prints."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LAUNCHED_AS", "RUN_KEY")}
    environ = kept | {"NPROC_PER_NODE": str(size), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tools.prove", "--out", str(folder), *flags]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=840, check=False)
    file = folder / "prove.json"
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(file.read_text()), done.stdout


def failed(found: dict[str, Any]) -> list[str]:
    """The proofs that a page says have failed."""
    return [f"{row['proof']}: {row['what']}: {row['figure']}" for row in found["proofs"] if row["verdict"] == "failed"]


def test_short(tmp_path: Path) -> None:
    """One recipe on two ranks: all proofs are reached and pass, and the page has the figures."""
    code, found, printed = prove(tmp_path, 2, "--recipes", "fsdp_gpt")
    assert not failed(found)
    assert code == 0, printed
    assert {row["proof"] for row in found["proofs"]} == {"equal", "moves", "kill", "stop", "rates", "collectives"}
    assert {one["layout"] for one in found["figures"]["rates"]} == {"fsdp_gpt"}
    assert all(one["bytes_per_s"] > 0 for one in found["figures"]["collectives"])
    text = (tmp_path / "prove.md").read_text()
    assert "0 failed" in text
    assert "| ranks | 2 on 1 machine |" in text
    assert not list(tmp_path.glob("*/runs")), "checkpoints of a run that nobody asked to keep"


def test_figures_stand_under_their_heads(tmp_path: Path) -> None:
    """Images have no tokens a second."""
    rates = [
        {"layout": "ddp_gpt", "perf/samples_per_s": 1.0, "perf/tokens_per_s": 2.0, "perf/mfu": 0.5},
        {"layout": "ddp_resnet", "perf/samples_per_s": 3.0, "perf/mfu": 0.25},
    ]
    page.write(tmp_path, [], {"rates": rates}, {})
    lines = (tmp_path / "prove.md").read_text().splitlines()
    assert lines[-4:] == [
        "| layout | samples_per_s | tokens_per_s | mfu |",
        "|---|---|---|---|",
        "| ddp_gpt | 1 | 2 | 0.5 |",
        "| ddp_resnet | 3 |  | 0.25 |",
    ]


def test_time_that_is_over_is_no_success(tmp_path: Path) -> None:
    code, found, _ = prove(tmp_path, 1, "--recipes", "fsdp_gpt", "--minutes", "0")
    assert code == 2
    assert {row["figure"] for row in found["proofs"] if not row["needs"]} == {"the time was over (--minutes)"}


def test_nothing_proven_is_no_success(tmp_path: Path) -> None:
    """One rank of DistributedDataParallel is what everything is compared with."""
    code, found, _ = prove(tmp_path, 1, "--recipes", "ddp_gpt", "--proofs", "equal")
    assert code == 2
    assert [row["needs"] for row in found["proofs"]] == ["2 ranks"]


# Recipe, the defect, and the proof that fails for it.
NEVER_SENDS = {"forward_backward": {"contextlib.nullcontext() if batch.last else model.no_sync()": "model.no_sync()"}}
WRONG_MEAN = {"train_step": {"dp_size * finite.loss_scale": "finite.loss_scale"}}
DEFECTS: dict[str, tuple[mutants.Changes, str]] = {
    "gradients are never sent": (NEVER_SENDS, "equal"),
    "a wrong divisor": (WRONG_MEAN, "equal"),
}


def copy_of_the_tree(folder: Path) -> Path:
    """Of what the command runs, to be changed."""
    for part in PARTS:
        shutil.copytree(runner.ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.rest
@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_of_a_recipe(defect: str, tmp_path: Path) -> None:
    root = copy_of_the_tree(tmp_path / "tree")
    changes, proof = DEFECTS[defect]
    mutated = mutants.mutate("ddp_gpt", tmp_path / "mutant", changes)
    shutil.copy(mutated, root / "recipes/ddp_gpt/train.py")
    code, found, _ = prove(tmp_path / "out", 2, "--recipes", "ddp_gpt", "--proofs", proof, root=root)
    assert code == 2
    assert failed(found)


NOBODY = "Watch._compare = lambda self, to_the_end=False: ([], set())"
FLIP = """
_load = load
def load(path, tensors):
    _load(path, tensors)
    one = next(tensor for tensor in tensors.values() if tensor.ndim > 1)
    one.view(-1)[:1].view(torch.uint8)[0] ^= 1
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    ("file", "more", "proof"),
    [
        ("state/checkpoint.py", FLIP, "moves"),
        ("protect/peers.py", "Peers.compare = lambda self, to_the_end=False: ([], set())", "kill"),
    ],
    ids=["a checkpoint comes back with a flipped bit", "nobody names the dead"],
)
def test_defect_of_common(file: str, more: str, proof: str, tmp_path: Path) -> None:
    root = copy_of_the_tree(tmp_path / "tree")
    with (root / "common" / file).open("a") as module:
        module.write(f"\n{more}\n")
    flags = ("--recipes", "ddp_gpt", "--proofs", proof, "--timeout", "40")
    code, found, _ = prove(tmp_path / "out", 2, *flags, root=root)
    assert code == 2
    assert failed(found)
