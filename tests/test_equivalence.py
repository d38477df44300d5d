"""Every strategy gives the numbers of a plain single-process loop: same seed, same global batch, same curve."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common import images, sampler, seed
from common.models.resnet import make_resnet
from tests import ranks, short_resnet  # noqa: F401 (--model resnet6)

# One epoch of 469 images: 19 steps of 24, in two passes each, and a last one of 13, which divides by none of
# 2, 3 and 4. Augmentation, weight decay, warm-up, and clipping at a norm that every step exceeds.
SAMPLES, BATCH, PASS, STEPS = 469, 24, 12, 20
CLIP, LR, WARMUP, DECAY, SMOOTHING = 0.25, 1.0, 5, 5e-4, 0.1
FLAGS = [
    *("--epochs", "1", "--global-batch-size", str(BATCH), "--max-grad-norm", str(CLIP), "--lr", str(LR)),
    *("--warmup-steps", str(WARMUP), "--log-every", "1", "--eval-every", "1000", "--save-every", "1000"),
]


def plain_resnet_loop(
    folder: str, dtype: torch.dtype, name: str = "resnet6", steps: int = STEPS
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step, as one would write it for one process."""
    train, _ = images.load(folder, run_seed=0, flip=False)
    seed.everything(0, seed.INIT)
    model = make_resnet(name, 1, 10, 8).to(dtype)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": DECAY}, {"params": others}], momentum=0.9)
    order = sampler.permutation(len(train), 0, 0)
    losses, norms = [], []
    for step in range(steps):
        batch = order[step * BATCH : (step + 1) * BATCH]
        loss = torch.zeros((), dtype=dtype)
        for part in np.array_split(batch, 2):  # BatchNorm sees a pass at a time, so the passes are part of the maths
            pixels, labels = train.read(np.zeros_like(part), part)
            logits = model(pixels.to(dtype) / 127.5 - 1)
            loss = loss + F.cross_entropy(logits, labels, reduction="sum", label_smoothing=SMOOTHING)
        loss = loss / len(batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, CLIP / (norm.item() + 1e-6))
        factor = (step + 1) / (WARMUP + 1)
        if step >= WARMUP:
            factor = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
        for group in optimizer.param_groups:
            group["lr"] = LR * BATCH / 256 * factor
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


PLAIN_LOOPS = {"resnet": plain_resnet_loop}


@pytest.fixture(scope="session")
def plain() -> dict[tuple, tuple[list[float], list[float]]]:
    """Curves of the plain loops, each computed once."""
    return {}


def plain_curve(plain: dict, recipe: str, dtype: str, folder: Path, *how: Any) -> tuple[list[float], list[float]]:
    workload = recipe.rpartition("_")[2]
    if (workload, dtype, *how) not in plain:
        plain[workload, dtype, *how] = PLAIN_LOOPS[workload](str(folder), getattr(torch, dtype), *how)
    return plain[workload, dtype, *how]


def curves(recipe: str | Path, world_size: int, out: Path, *flags: str) -> list[dict[int, float]]:
    """Loss and gradient norm by step of a run of a recipe, or of a mutant of one."""
    name = recipe if isinstance(recipe, str) else recipe.parent.name
    micro = ("--micro-batch-size", str(PASS // world_size))
    sync = ("--sync-bn",) if "sync_bn" in ranks.source(name) else ()
    where = ("--out", str(out), "--name", "run")
    result = ranks.run_recipe(recipe, world_size, *FLAGS, *ranks.small(name), *micro, *sync, *where, *flags)
    assert result.ok, str(result)
    return [ranks.records(out / "run", tag) for tag in ("train/loss", "train/grad_norm")]


def worst(found: dict[int, float], wanted: list[float], steps: int = STEPS) -> float:
    """Largest relative difference between a recorded curve and the plain one."""
    assert list(found) == list(range(1, steps + 1)), "every step is recorded once"
    return max(abs(value - wanted[step - 1]) / abs(wanted[step - 1]) for step, value in found.items())


@pytest.mark.parametrize(
    ("recipe", "world_size"), [(name, size) for name in ranks.RECIPES for size in ranks.world_sizes(name)]
)
def test_float64(recipe: str, world_size: int, plain: dict, small_digits: Path, tmp_path: Path) -> None:
    losses, norms = plain_curve(plain, recipe, "float64", small_digits)
    assert len(losses) == STEPS
    assert min(norms) > CLIP, "clipping must have an effect"
    found = curves(recipe, world_size, tmp_path, "--data", str(small_digits), "--dtype", "float64")
    assert worst(found[0], losses) < 1e-9
    assert worst(found[1], norms) < 1e-9


@pytest.mark.parametrize("recipe", ranks.RECIPES)
def test_float32(recipe: str, plain: dict, small_digits: Path, tmp_path: Path) -> None:
    losses, _ = plain_curve(plain, recipe, "float32", small_digits)
    found = curves(
        recipe, ranks.world_sizes(recipe, most=2)[-1], tmp_path, "--data", str(small_digits), "--dtype", "float32"
    )
    assert worst(found[0], losses) < 1e-4


@pytest.mark.parametrize("recipe", [name for name in ranks.RECIPES if name.endswith("_resnet")])
def test_default_model(recipe: str, plain: dict, small_digits: Path, tmp_path: Path) -> None:
    """The tests above train a small network; here is the one that people get, for a few steps."""
    losses, norms = plain_curve(plain, recipe, "float32", small_digits, "resnet18", 4)
    flags = ("--data", str(small_digits), "--dtype", "float32", "--model", "resnet18", "--stop-after", "4")
    found = curves(recipe, ranks.world_sizes(recipe, most=2)[-1], tmp_path, *flags)
    assert worst(found[0], losses, steps=4) < 1e-4
    assert worst(found[1], norms, steps=4) < 1e-2  # its roundings grow through 18 layers; the mutants are far beyond


MUTANTS = {
    "gradients are never reduced": {
        "return contextlib.nullcontext() if last else model.no_sync()": "return model.no_sync()"
    },
    "the mean is taken over the rank's own samples": {
        "(num_shards / batch.step_samples)": "(1 / batch.step_samples)",
    },
    "every rank reads the next rank's samples too": {
        'return mesh.get_local_rank("dp"), mesh.size()': "return 0, mesh.size()",
    },
    "BatchNorm sees the rank's own samples": {"if args.sync_bn:": "if not args.sync_bn:"},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(mutant: str, plain: dict, small_digits: Path, tmp_path: Path) -> None:
    """The proof above can fail: each of these defects is far outside the looser tolerance."""
    losses, norms = plain_curve(plain, "ddp_resnet", "float32", small_digits)
    path = ranks.mutate("ddp_resnet", tmp_path, MUTANTS[mutant])
    flags = ("--data", str(small_digits), "--dtype", "float32", "--stop-after", "4", "--check-every", "0")
    found = curves(path, 2, tmp_path, *flags)
    # Clipping hides a gradient that is only scaled from the losses, not from its norm.
    assert max(worst(found[0], losses, steps=4), worst(found[1], norms, steps=4)) > 1e-3
