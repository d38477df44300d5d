"""Draw the loss of every recipe in one picture: `uv run python -m benchmarks.curves` writes docs/measured/curves.png.

Every recipe trains from the same seed with the same global batch, in float64: images on 1 to 4 processes, text on 1 and
2, in every way that tests/harness/runner.py lists. The lower panels show what is left between the curves.
"""

import dataclasses
import datetime
import os
import subprocess
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import torch
from matplotlib import pyplot as plt
from tests.harness import runner
from tests.harness.runner import ROOT, Layout
from tools.about import cpu_name


@dataclasses.dataclass(frozen=True)
class Training:
    """What all recipes of a workload do."""

    title: str
    steps: int
    batch: int  # divides by 1, 2, 3 and 4
    flags: tuple[str, ...]


# One pass a step: BatchNorm sees the same samples on any number of ranks. So few steps want a lower learning rate than
# the recipes have by default. The second model is small: it runs often. Its steps are few, since Adam, which divides by
# a gradient's size, makes of the rounding of a gradient that is all but 0 a step like any other.
WORKLOADS = {
    "resnet": Training("ResNet-18 on digits", 100, 24, ("--model", "resnet18", "--lr", "0.05", "--warmup-steps", "4")),
    "gpt": Training(
        "GPT on Python's own text", 24, 120, ("--num-layers", "9", "--width", "64", "--seq-len", "32", "--lr", "0.004")
    ),
}


def layouts(workload: str) -> list[Layout]:
    """What to run, first what the others are compared with: a recipe that has no base of the same workload, alone."""
    recipes = [recipe for recipe in runner.RECIPES if runner.workload(recipe) == workload]
    found = [layout for recipe in recipes for layout in runner.layouts(recipe)]
    # Many ways on two processes for language models, on more the tests have them: a picture should take ten minutes.
    found = [layout for layout in found if workload != "gpt" or (layout.size <= 2 and layout.strategy != ("--pp", "1"))]
    return sorted(found, key=lambda layout: (layout.size, runner.follows(layout.recipe), layout.recipe))


def losses(layout: Layout, out: Path) -> list[float]:
    """Train for real, through the launcher; loss of each step."""
    what = WORKLOADS[runner.workload(layout.recipe)]
    steps, batch = str(what.steps), str(what.batch)
    sync_bn = ["--sync-bn"] if runner.has_flag(layout.recipe, "--sync-bn") else []
    flags = ["--max-steps", steps, "--global-batch-size", batch, "--lr-reference-batch", batch, *what.flags, *sync_bn]
    flags += ["--dtype", "float64", "--log-every", "1", *layout.strategy, *layout.micro_batches(what.batch)]
    command = ["bash", str(ROOT / "launch/torchrun.sh"), f"recipes/{layout.recipe}", *flags]
    command += ["--eval-every", steps, "--save-every", steps, "--out", str(out), "--name", str(layout)]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"NPROC_PER_NODE": str(layout.size)}
    )
    return list(runner.records(out / str(layout), "train/loss").values())


def draw(top: plt.Axes, bottom: plt.Axes, what: Training, curves: dict[Layout, list[float]]) -> None:
    """Curves above, and below their relative difference to the first one."""
    steps = range(1, what.steps + 1)
    recipes = list(dict.fromkeys(layout.recipe for layout in curves))
    (first, baseline), *_ = curves.items()
    for i, (layout, values) in enumerate(curves.items()):
        color = f"C{recipes.index(layout.recipe)}"
        # The first lines are broad and the later ones narrow, so that all show where they lie on each other.
        width = 9 - 8 * i / max(1, len(curves) - 1)
        label = None if layout.recipe in {other.recipe for other in list(curves)[:i]} else layout.recipe
        top.plot(steps, values, linewidth=width, color=color, label=label, solid_capstyle="round")
        difference = [max(abs(a - b) / b, 1e-17) for a, b in zip(values, baseline, strict=True)]
        bottom.semilogy(steps, difference, ".", markersize=3, color=color)
    top.legend(frameon=False, title=f"{len(curves)} runs, on {first.size} to {max(x.size for x in curves)} processes")
    top.set_title(f"{what.title}, batch {what.batch}")
    bottom.axhline(1e-9, color="black", linewidth=0.8, linestyle="--")
    bottom.annotate("1e-9, the tolerance of the tests", (1, 1.6e-9), fontsize=8)
    bottom.set_ylim(1e-17, 1e-7)
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Train, compare, draw."""
    with tempfile.TemporaryDirectory() as folder:
        found = {name: {one: losses(one, Path(folder)) for one in layouts(name)} for name in WORKLOADS}
    figure, panels = plt.subplots(
        2, len(WORKLOADS), figsize=(11, 5.4), sharex="col", height_ratios=[3, 1.4], layout="constrained"
    )
    for i, (name, curves) in enumerate(found.items()):
        draw(panels[0, i], panels[1, i], WORKLOADS[name], curves)
    panels[0, 0].set_ylabel("training loss")
    panels[1, 0].set_ylabel("relative to the\nfirst of them")
    figure.suptitle(
        f"float64; {cpu_name()}, {os.cpu_count()} cores, gloo, torch {torch.__version__}, {datetime.date.today()}",
        fontsize=9,
    )
    figure.savefig(ROOT / "docs/measured/curves.png", dpi=150)
    for name, curves in found.items():
        (_, baseline), *others = curves.items()
        worst = max(abs(a - b) / b for _, values in others for a, b in zip(values, baseline, strict=True))
        print(f"{name}: {len(curves)} runs, largest relative difference of a loss: {worst:.1e}")


if __name__ == "__main__":
    main()
