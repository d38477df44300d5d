"""What a step launches, copies, casts, sends and holds on CUDA, without a GPU: `uv run python -m tests.cuda_table`.

It writes the figures of docs/measured/gpu-counts.md: each recipe at 8 and 64 ranks, counted by tools/plan/counter.py,
and an estimate of two steps on 8 H100. tests/recipes/test_cuda_path.py compares its counts with the
page, so whoever changes a figure writes the page again. `--json FILE` also writes all counts.

The estimate, in seconds, of a rank's step:

    compute    = sum over matrix products, convolutions and attention of
                 max(FLOPs / (PEAK_FLOPS * reach), bytes / (PEAK_BYTES * MEMORY_REACHES)); reach is PRODUCTS_REACH,
                 and of attention what the planner has fitted to published runs
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

Of a pipeline, the slower one of the first and the last rank counts. The same formulas stand beside a published step of
a larger GPT, with what is known of its machine and its program put in one after the other.
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
from tools.plan import hardware, published

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


@dataclass(frozen=True)
class Assumed:
    """What differs from the assumptions at the top of this file.

    Attributes:
        peak_bytes: a second, of the GPU's memory.
        again: share of the products' FLOPs, without attention's, that the step computes a second time.
        elementwise: what is left of the bytes that all other kernels move.
    """

    peak_bytes: float = PEAK_BYTES
    again: float = 0.0
    elementwise: float = 1.0


PAPER = Assumed()


@functools.cache
def attention_reaches() -> float:
    """Share of PEAK_FLOPS that attention's kernels reach, as the planner has fitted it to published runs."""
    machine = hardware.find("h100-ib")
    return machine.reach.attention * machine.peak_attention / machine.peak_16bit


def estimate(step: dict[str, Any], bubble: float, ranks: int = 8, assumed: Assumed = PAPER) -> dict[str, float]:
    """Seconds of a rank's step by the formulas above, and its FLOPs."""
    bandwidth = assumed.peak_bytes * MEMORY_REACHES
    compute = attention = 0.0
    for flops, moved, _, kind, number in step["products"]:
        if kind == "attention":
            attention += number * max(flops / (PEAK_FLOPS * attention_reaches()), moved / bandwidth)
        else:
            bound = max(flops / (PEAK_FLOPS * PRODUCTS_REACH), moved / bandwidth)
            compute += number * (1 + assumed.again) * bound
    compute += attention
    elementwise = assumed.elementwise * step["elementwise_bytes"] / bandwidth
    device = compute + elementwise
    launches = step["kernels"] * LAUNCH_S
    sent = sum(
        FACTORS.get(kind.partition(" ")[0], ranks / (ranks - 1)) * (ranks - 1) / ranks * sent
        for kind, (_, sent) in sent_by_kind(step).items()
        if not kind.startswith("receive")
    ) / (LINK_BYTES * LINK_REACHES)
    return {
        "compute": compute,
        "attention": attention,
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


PUBLISHED = "torchtitan 8B FSDP8"  # in tools/plan/published.csv; and with " compile"
COMPILED = 1 / 3  # of the bytes of elementwise kernels, which --compile is assumed to leave


def beside_published() -> str:
    """The table of a published step below this estimate, which takes on one more of its conditions in each line."""
    rows = {row.name: row for row in published.gpts()}
    row = rows[PUBLISHED]
    machine, shape, layout = row.machine, row.shape, row.layout
    sizes = {"num-layers": shape.layers, "width": shape.width, "num-heads": shape.heads, "num-kv-heads": shape.kv_heads}
    sizes |= {"mlp-width": shape.mlp_width, "vocab-size": shape.vocab, "seq-len": shape.seq_len}
    sizes |= {"micro-batch-size": layout.micro_batch, "global-batch-size": layout.global_batch}
    flags = [f"--{name}={size}" for name, size in sizes.items()]
    (counted,) = count([Large("fsdp_gpt", layout.size, (*flags, "--recompute", "selective"))])
    blocks = shape.layers * shape.layer_parameters
    # Half of the products of a block's forward pass, which is one of three passes over its weights.
    again = blocks / (blocks + shape.vocab * shape.width) / 6
    memory = machine.memory_bandwidth
    samples = layout.global_batch // layout.size
    counts = (shape.model_flops, published.counted_flops(shape, "selective"))

    def line(name: str, *steps: float) -> str:
        shares = [span([samples * flops / one / PEAK_FLOPS for one in reversed(steps)], 100) for flops in counts]
        return f"| {name} | {span(steps, 1e3)} | {' | '.join(shares)} |"

    def ours(name: str, assumed: Assumed) -> str:
        found = estimate(counted["step"], 0.0, layout.size, assumed)
        return line(name, found["best"], found["worst"]) + " |"

    def theirs(name: str, step_s: float, assumed: Assumed) -> str:
        found = estimate(counted["step"], 0.0, layout.size, assumed)
        return line(f"**{name}**", step_s) + f" {step_s / found['worst']:.2f} to {step_s / found['best']:.2f} times |"

    eager, third = Assumed(memory, again), Assumed(memory, again, COMPILED)
    return "\n".join(
        [
            "| Llama 3.1 8B on 8 H100 | step, ms | MFU, % | with all of attention's square, % | of the line above |",
            "|---|---|---|---|---|",
            ours("this estimate of fsdp_gpt", PAPER),
            ours(f"with memory of {memory / 1e12:.1f} TB/s", Assumed(memory)),
            ours("and every second product of a block's forward pass again", eager),
            theirs("torchtitan, measured", row.step_s, eager),
            ours("the same, with a third of the elementwise bytes", third),
            theirs("torchtitan, compiled, measured", rows[f"{PUBLISHED} compile"].step_s, third),
        ]
    )


def compiled(step: dict[str, Any]) -> str:
    """The table of what --compile would leave of a step."""
    lines = ["| GPT 1.1 B, fsdp | attention, ms | step, ms | MFU, % |", "|---|---|---|---|"]
    for name, assumed in {"as above": PAPER, "a third of the elementwise bytes": Assumed(elementwise=COMPILED)}.items():
        found = estimate(step, 0.0, assumed=assumed)
        steps = (found["best"], found["worst"])
        shares = [found["flops"] / one / PEAK_FLOPS for one in reversed(steps)]
        lines.append(f"| {name} | {1e3 * found['attention']:.0f} | {span(steps, 1e3)} | {span(shares, 100)} |")
    return "\n".join(lines)


def span(values: Sequence[float], times: float) -> str:
    """The values in units of 1 / times: "142 to 164"."""
    return " to ".join(f"{times * value:,.0f}" for value in values)


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
        compiled=compiled(large["GPT 1.1 B, fsdp"][0]["step"]),
        published=beside_published(),
    )
    if args.json:
        small = {f"{case} on {case.size}": one for case, one in zip(chosen, counted, strict=True)}
        args.json.write_text(json.dumps({"conditions": conditions(), "cases": small, "estimate": large}, indent=1))


if __name__ == "__main__":
    main()
