"""Every strategy gives the numbers of a plain single-process loop: same seed, same global batch, same curve."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common import data, images, seed
from common.models.resnet import make_resnet
from tests import ranks

# One epoch of the digits' 1,433 training images: 19 steps of 72 and a last one of 65, which divides by
# none of 2, 3 and 4. Two passes a step, clipping at a norm that is exceeded, augmentation, weight decay.
BATCH, PASS, STEPS = 72, 36, 20
CLIP, LR, WARMUP, DECAY, SMOOTHING = 1.0, 0.3, 5, 5e-4, 0.1
FLAGS = [
    *("--epochs", "1", "--global-batch-size", str(BATCH), "--max-grad-norm", str(CLIP), "--lr", str(LR)),
    *("--warmup-steps", str(WARMUP), "--log-every", "1", "--eval-every", "1000", "--save-every", "1000"),
]
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


def plain_resnet_loop(dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step, as one would write it for one process."""
    train, _ = images.load("digits", run_seed=0, flip=False)
    seed.everything(0, seed.INIT)
    model = make_resnet("resnet18", 1, 10, 8).to(dtype)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": DECAY}, {"params": others}], momentum=0.9)
    order = data.permutation(len(train), 0, 0)
    losses, norms = [], []
    for step in range(STEPS):
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
def plain() -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """Curves of the plain loops, each computed once."""
    return {}


def plain_curve(plain: dict, recipe: str, dtype: str) -> tuple[list[float], list[float]]:
    workload = recipe.rpartition("_")[2]
    if (workload, dtype) not in plain:
        torch.set_num_threads(2)
        plain[workload, dtype] = PLAIN_LOOPS[workload](getattr(torch, dtype))
    return plain[workload, dtype]


def worst(recipe: str | Path, name: str, world_size: int, dtype: str, curves: tuple, folder: Path, *flags: str) -> float:
    """Largest relative difference of a loss or a gradient norm between a recipe and the plain loop."""
    micro = ("--micro-batch-size", str(PASS // world_size))
    sync = ("--sync-bn",) if "sync_bn" in ranks.source(name) else ()
    result = ranks.run_recipe(
        recipe, world_size, *FLAGS, *micro, *sync, "--dtype", dtype, "--out", str(folder), "--name", "run", *flags
    )
    assert result.ok, result
    found = [ranks.records(folder / "run", tag) for tag in ("train/loss", "train/grad_norm")]
    steps = list(found[0])
    assert steps == list(range(1, len(steps) + 1))
    return max(
        abs(values[step] - curve[step - 1]) / abs(curve[step - 1])
        for values, curve in zip(found, curves, strict=True)
        for step in steps
    )


@pytest.mark.parametrize(
    ("recipe", "world_size"), [(name, size) for name in ranks.RECIPES for size in ranks.world_sizes(name)]
)
def test_equals_the_plain_loop_in_float64(recipe: str, world_size: int, plain: dict, tmp_path: Path) -> None:
    curves = plain_curve(plain, recipe, "float64")
    assert len(curves[0]) == STEPS
    assert min(curves[1]) > CLIP, "clipping must have an effect"
    assert worst(recipe, recipe, world_size, "float64", curves, tmp_path) < TOLERANCE["float64"]


@pytest.mark.parametrize("recipe", ranks.RECIPES)
def test_equals_the_plain_loop_in_float32(recipe: str, plain: dict, tmp_path: Path) -> None:
    curves = plain_curve(plain, recipe, "float32")
    world_size = ranks.world_sizes(recipe)[-1]
    assert worst(recipe, recipe, world_size, "float32", curves, tmp_path) < TOLERANCE["float32"]
