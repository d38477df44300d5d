"""What a step launches, copies, casts, sends and holds on CUDA, without a GPU: `uv run python -m tests.cuda_table`.

It writes the figures of docs/measured/gpu-counts.md: each recipe at 8 and 64 ranks, counted by tools/plan/counter.py,
and an estimate of two steps on 8 H100. tests/recipes/test_cuda_path.py compares its counts with the
page, so whoever changes a figure writes the page again. `--json FILE` also writes all counts.

The estimate, in seconds, of a rank's step:

    compute    = sum over matrix products, convolutions and attention of
                 max(FLOPs / (PEAK_FLOPS * PRODUCTS_REACH), bytes / (PEAK_BYTES * MEMORY_REACHES))
    elementwise = bytes of all other kernels, each operand and result once / (PEAK_BYTES * MEMORY_REACHES)
    device     = compute + elementwise
    launches   = kernels * LAUNCH_S, the time in which the host can launch them
    sent       = sum over collectives of n ranks of factor * bytes / (LINK_BYTES * LINK_REACHES), with the factor
                 2 (n - 1) / n of a ring's all-reduce, (n - 1) / n of its all-gather and reduce-scatter, 1 of a message
                 (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)
    bubble     = 1 - m / (m + p - 1) for a pipeline of p stages and m micro-batches (https://arxiv.org/abs/1811.06965)
    best       = max(device / (1 - bubble), launches, sent): everything hides behind the longest
    worst      = max(device, launches) / (1 - bubble) + sent: no collective hides
    MFU        = FLOPs of the products / (best or worst) / PEAK_FLOPS

Of a pipeline, the slower one of the first and the last rank counts.
"""

import argparse
import datetime
import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.harness import pages, runner, theory
from tests.harness.runner import ROOT

PAGE = ROOT / "docs" / "measured" / "gpu-counts.md"
COMMAND = "uv run python -m tests.cuda_table"
NOT_RUN = {
    "cellfree_mimo": "it trains nothing: there is no backward pass and no update to count",
    "syncbn_ppo": "its environments, on the CPU, need the actions' values, and fake tensors have none",
}
SEQUENCES = 16  # of a step at 8 ranks; 8 times as many at 64
IMAGES = 64
# Data sheet of the H100 SXM: https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
PEAK_FLOPS = 989e12  # bfloat16, without sparsity
PEAK_BYTES = 3.35e12  # a second, of HBM3
LINK_BYTES = 450e9  # a second and direction, of NVLink; the sheet's 900 GB/s are both directions
# Assumed, and not measured.
PRODUCTS_REACH = 0.65
MEMORY_REACHES = 0.8
LINK_REACHES = 0.75
LAUNCH_S = 6e-6  # of eager PyTorch: Python, dispatcher, autograd and driver


@dataclass(frozen=True)
class Case:
    """A recipe's layout, and the rank that is looked at."""

    recipe: str
    size: int
    strategy: tuple[str, ...] = ()
    rank: int = 0
    config: str = ""  # a file of accelerate_gpt's configs/

    @property
    def dp_size(self) -> int:
        """Ranks, or groups of them, that read different samples."""
        sizes = dict(itertools.pairwise(self.strategy))
        return self.size // int(next((sizes[flag] for flag in ("--tp", "--pp", "--cp") if flag in sizes), 1))

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return (SEQUENCES if runner.workload(self.recipe) == "gpt" else IMAGES) * max(1, self.size // 8)

    @property
    def flags(self) -> list[str]:
        """All of them: those of the strategy, and of a small model."""
        found = [*self.strategy, "--global-batch-size", str(self.batch)]
        if runner.workload(self.recipe) == "gpt":
            found += ["--num-layers", str(theory.LAYERS), "--width", str(theory.WIDTH), "--num-heads", "8"]
            found += ["--seq-len", str(theory.LENGTH)]
        if "--pp" in self.strategy:
            found += ["--micro-batch-size", "2"]
        return found

    def __str__(self) -> str:
        words = [self.recipe, *self.strategy, *([f"configs/{self.config}"] if self.config else [])]
        return " ".join(words) + (f" (rank {self.rank})" if self.rank else "")


def waits(case: Case) -> int:
    """Times that the host waits in a forward pass: for the numbers of rows that travel between experts."""
    kind = dict(itertools.pairwise(case.strategy)).get("--ep-kind", "")
    return {"exchange": 1, "gather": 2}.get(kind, 0) * theory.LAYERS


def cases(recipe: str) -> list[Case]:
    """The layouts of a recipe that the page shows."""
    if recipe in NOT_RUN:
        return []
    if runner.world_sizes(recipe) == [1]:
        return [Case(recipe, 1)]
    found = []
    for size in (8, 64):
        if runner.has_flag(recipe, "--pp"):
            pipeline = ("--pp", "8", "--schedule", runner.choices(recipe, "--schedule")[0])
            found += [Case(recipe, size, pipeline), Case(recipe, size, pipeline, rank=size - 1)]
        elif runner.has_flag(recipe, "--tp"):
            found += [Case(recipe, size, ("--tp", tp)) for tp in ("4", "8")]
        elif runner.has_flag(recipe, "--cp"):
            found += [
                Case(recipe, size, ("--cp", "8", "--cp-kind", kind)) for kind in runner.choices(recipe, "--cp-kind")
            ]
        elif runner.has_flag(recipe, "--ep"):
            kinds = runner.choices(recipe, "--ep-kind")
            found += [Case(recipe, size, ("--ep", "8", "--ep-kind", kind)) for kind in kinds]
            found += [Case(recipe, size, ("--ep", "1"))]
        else:
            found.append(Case(recipe, size))
            if runner.has_flag(recipe, "--sync-bn") and size == 8:
                found.append(Case(recipe, size, ("--sync-bn",)))
            if runner.has_flag(recipe, "--dp-replicate"):
                found.append(Case(recipe, size, ("--dp-replicate", "8" if size == 64 else "2")))
            sharded = sorted((ROOT / "recipes" / recipe).glob("configs/*sdp*.yaml"))
            found += [Case(recipe, size, config=path.name) for path in sharded if size == 8]
    return found


def count(chosen: Sequence[Case], mutants: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The counts of each case, from a process of their own, as it changes torch.

    Args:
        chosen: what to count.
        mutants: the mistake to make in each of them, see fake_cuda.MUTANTS.

    Raises:
        RuntimeError: a case failed; with the traceback.
    """
    asked = [
        {
            "folder": str(ROOT / "recipes" / case.recipe),
            "size": case.size,
            "flags": case.flags,
            "rank": case.rank,
            "config": str(ROOT / "recipes" / case.recipe / "configs" / case.config) if case.config else "",
            "mutant": mutant,
        }
        for case, mutant in itertools.zip_longest(chosen, mutants, fillvalue="")
    ]
    command = [sys.executable, "-W", "ignore", "-m", "tests.harness.fake_cuda", json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for case, one in zip(chosen, found, strict=False):
        if "error" in one:
            raise RuntimeError(f"{case} on {case.size} ranks: {one.get('trace', one['error'])}")
    if len(found) != len(chosen):
        raise RuntimeError(f"{len(found)} of {len(chosen)} cases have answered: {done.stderr}")
    return found


# --- the table ---------------------------------------------------------------------------------------------------

HEAD = """\
| recipe | ranks | waits | to host | from host | CPU tensors | casts | M cast | kernels | sent, MB (calls) | peak, MB |
|---|---|---|---|---|---|---|---|---|---|---|"""


def sent_by_kind(step: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Calls and bytes of each kind of collective over each axis."""
    found: dict[str, tuple[int, float]] = {}
    for one in step["traffic"]:
        calls, before = found.get(f"{one['kind']} {one['axis']}", (0, 0))
        found[f"{one['kind']} {one['axis']}"] = (calls + one["calls"], before + one["bytes"])
    return found


def row(case: Case, counted: dict[str, Any]) -> str:
    """A line of the table: the second training step of a rank."""
    step = counted["step"]
    small = step["small_calls"]
    sent = [
        f"{kind} {bytes_ / 1e6:.3f} ({calls - small.get(kind, 0)}"
        + (f" + {small[kind]} small)" if kind in small else ")")
        for kind, (calls, bytes_) in sent_by_kind(step).items()
    ]
    cells = [
        f"`{case}`",
        case.size,
        sum(step["syncs"].values()),
        step["to_host"],
        step["from_host"],
        sum(step["cpu_tensors"].values()),
        sum(step["casts"].values()),
        f"{sum(step['cast_elements'].values()) / 1e6:.3f}",
        step["kernels"],
        "<br>".join(sent) or "nothing",
        f"{step['peak_bytes'] / 1e6:.1f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


# --- the estimate --------------------------------------------------------------------------------------------------

LARGE = ("--num-layers", "18", "--width", "2048", "--num-heads", "16", "--seq-len", "2048", "--vocab-size", "50304")
SEQUENCES_A_GPU = 4
IMAGES_A_GPU = 128
MICRO_BATCHES = 32
TRAINED = {  # name in the table: recipe, flags, samples of a step over 8 GPUs
    "GPT 1.1 B, ddp": ("ddp_gpt", LARGE, 8 * SEQUENCES_A_GPU),
    "GPT 1.1 B, fsdp": ("fsdp_gpt", LARGE, 8 * SEQUENCES_A_GPU),
    "GPT 1.1 B, tensor --tp 8": ("tensor_gpt", (*LARGE, "--tp", "8"), SEQUENCES_A_GPU),
    "GPT 1.1 B, pipeline --pp 8": (
        "pipeline_gpt",
        (*LARGE, "--pp", "8", "--micro-batch-size", "1"),
        MICRO_BATCHES,
    ),
    "ResNet-50, ddp": ("ddp_resnet", ("--model", "resnet50", "--image-size", "224"), 8 * IMAGES_A_GPU),
}


@dataclass(frozen=True)
class Large(Case):
    """A case of the estimate, whose flags are all in `strategy`."""

    @property
    def flags(self) -> list[str]:
        """As they stand there."""
        return list(self.strategy)


FACTORS = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "broadcast": 1.0}


def estimate(step: dict[str, Any], bubble: float, ranks: int = 8) -> dict[str, float]:
    """Seconds of a rank's step by the formulas above, and its FLOPs."""
    compute = sum(
        number * max(flops / (PEAK_FLOPS * PRODUCTS_REACH), moved / (PEAK_BYTES * MEMORY_REACHES))
        for flops, moved, *_, number in step["products"]
    )
    elementwise = step["elementwise_bytes"] / (PEAK_BYTES * MEMORY_REACHES)
    device = compute + elementwise
    launches = step["kernels"] * LAUNCH_S
    sent = sum(
        FACTORS.get(kind.partition(" ")[0], ranks / (ranks - 1)) * (ranks - 1) / ranks * sent
        for kind, (_, sent) in sent_by_kind(step).items()
        if not kind.startswith("receive")
    ) / (LINK_BYTES * LINK_REACHES)
    return {
        "compute": compute,
        "elementwise": elementwise,
        "launches": launches,
        "sent": sent,
        "best": max(device / (1 - bubble), launches, sent),
        "worst": max(device, launches) / (1 - bubble) + sent,
        "flops": sum(flops * number for flops, *_, number in step["products"]),
    }


def estimates() -> tuple[str, dict[str, Any]]:
    """The table, and what was counted for it."""
    lines = [
        "| training | samples | TFLOP | compute | elementwise | launches | sent | step, ms | MFU, % | peak, GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    kept = {}
    for name, (recipe, flags, batch) in TRAINED.items():
        depth = 8 if "--pp" in flags else 1
        whole = (*flags, "--global-batch-size", str(batch))
        counted = count([Large(recipe, 8, whole, rank=rank) for rank in sorted({0, depth - 1})])
        kept[name] = counted
        bubble = 1 - MICRO_BATCHES / (MICRO_BATCHES + depth - 1)
        ranks = [estimate(one["step"], bubble) for one in counted]
        slow = max(ranks, key=lambda one: one["worst"])
        peak = max(one["step"]["peak_bytes"] for one in counted)
        flops = slow["flops"] if depth == 1 else None
        cells = [
            name,
            batch,
            f"{slow['flops'] / 1e12:.1f}",
            *(f"{slow[part] * 1e3:.1f}" for part in ("compute", "elementwise", "launches", "sent")),
            f"{slow['best'] * 1e3:.0f} to {slow['worst'] * 1e3:.0f}",
            ""
            if flops is None
            else "{:.0f} to {:.0f}".format(*(100 * flops / slow[end] / PEAK_FLOPS for end in ("worst", "best"))),
            f"{peak / 1e9:.1f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines), kept


@functools.cache
def conditions() -> str:
    """What the counts depend on; the processor is not among it."""
    return f"`{COMMAND}`, {datetime.date.today()}, torch {torch.__version__}, no GPU."


def main() -> None:
    """Count everything, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write all counts to this file")
    args = parser.parse_args()
    chosen = [case for recipe in runner.RECIPES for case in cases(recipe)]
    counted = count(chosen)
    table, large = estimates()
    reasons = [f"- `{recipe}`: {why}." for recipe, why in NOT_RUN.items()]
    pages.write(
        PAGE,
        measured=conditions(),
        counts="\n".join([HEAD, *map(row, chosen, counted)]),
        left="\n".join(reasons),
        estimate=table,
    )
    if args.json:
        small = {f"{case} on {case.size}": one for case, one in zip(chosen, counted, strict=True)}
        args.json.write_text(json.dumps({"conditions": conditions(), "cases": small, "estimate": large}, indent=1))


if __name__ == "__main__":
    main()
