"""Which recipes there are, and in which ways each of them runs on so many ranks."""

import re
from dataclasses import dataclass
from pathlib import Path

from tools.about import ROOT, choices, has_flag, is_single, trainings, workload

TWO_GROUPS = "4 ranks, or a larger even number, for several such groups"
SAMPLES = 8  # of a step, for each rank
# Flags for a model that is quick in float64 on a CPU, and whose sizes 2, 4 and 8 divide. Eight layers are two stages
# for each of four ranks.
SMALL = {
    "gpt": ("--seq-len", "16", "--num-layers", "8", "--num-heads", "8", "--width", "32", "--mlp-width", "64"),
    "ppo": ("--rollout-steps", "16", "--width", "8", "--update-epochs", "2", "--eval-episodes", "2"),
}


@dataclass(frozen=True)
class Layout:
    """One way to run a recipe.

    Attributes:
        recipe: its name.
        flags: those of its strategy.
        dp_size: ranks, or groups of them, that read different samples.
        alone: it is one process, whatever the number of ranks.
        config: a file of Accelerate that chooses the strategy; "" for none.
        needs: what it needs and this world has not; "" if it can run.
    """

    recipe: str
    flags: tuple[str, ...] = ()
    dp_size: int = 1
    alone: bool = False
    config: str = ""
    needs: str = ""

    def __str__(self) -> str:
        config = [Path(self.config).name] if self.config else []
        return " ".join([self.recipe, *self.flags, *config, *(["in one process"] if self.alone else [])])

    @property
    def workload(self) -> str:
        """What it trains."""
        return workload(self.recipe)


def reference(kind: str) -> Layout:
    """What all layouts of a workload are compared with: DistributedDataParallel of one process, which sends nothing."""
    several = [recipe for recipe in trainings() if workload(recipe) == kind and not is_single(recipe)]
    return Layout(f"ddp_{kind}" if f"ddp_{kind}" in several else several[0], alone=True)


def layouts(recipe: str, size: int, gpus: bool) -> list[Layout]:
    """Every way to run a recipe on `size` ranks; also those that this number does not allow, with what they need."""
    if is_single(recipe):
        return [Layout(recipe, alone=True)]
    two = "" if size > 1 else "2 ranks"
    if has_flag(recipe, "--pp"):
        schedules = choices(recipe, "--schedule")
        pp = next((pp for pp in (4, 3, 2) if size % pp == 0), 2)
        lacks = "" if size % pp == 0 else "a number of ranks that 2 or 3 divides" if size > 1 else two
        found = [Layout(recipe, ("--pp", str(pp), "--schedule", name), size // pp, needs=lacks) for name in schedules]
        lacks = "" if size % 2 == 0 and size >= 4 else TWO_GROUPS
        if pp > 2 or lacks:
            found.append(Layout(recipe, ("--pp", "2", "--schedule", schedules[0]), size // 2, needs=lacks))
        return found
    if has_flag(recipe, "--tp"):
        tp = next((tp for tp in (8, 4, 2) if size % tp == 0), 2)
        lacks = "" if size % tp == 0 else two or "an even number of ranks"
        found = [Layout(recipe, ("--tp", str(tp)), size // tp, needs=lacks)]
        if tp > 2 or size < 4:
            lacks = "" if size % 2 == 0 and size >= 4 else TWO_GROUPS
            found.append(Layout(recipe, ("--tp", "2"), size // 2, needs=lacks))
        return found
    if has_flag(recipe, "--cp"):
        cp = next((cp for cp in (8, 4, 2) if size % cp == 0), 2)
        lacks = "" if size % cp == 0 else two or "an even number of ranks"
        kinds = choices(recipe, "--cp-kind")
        found = [Layout(recipe, ("--cp", str(cp), "--cp-kind", kind), size // cp, needs=lacks) for kind in kinds]
        if cp > 2 or size < 4:
            lacks = "" if size % 2 == 0 and size >= 4 else TWO_GROUPS
            found.append(Layout(recipe, ("--cp", "2", "--cp-kind", kinds[0]), size // 2, needs=lacks))
        return found
    # One rank of the reference is the reference.
    same = two if recipe == reference(workload(recipe)).recipe else ""
    found = [Layout(recipe, dp_size=size, needs=same)]
    if has_flag(recipe, "--inner-steps"):  # replicas that train apart give other numbers: it is one here
        found = [Layout(recipe, ("--replicas", "1", "--outer-lr", "1", "--outer-momentum", "0"), size)]
    if has_flag(recipe, "--sync"):
        found = [Layout(recipe, ("--sync", way), size) for way in choices(recipe, "--sync")]
    if has_flag(recipe, "--dp-replicate"):
        lacks = "" if size % 2 == 0 and size >= 4 else "4 ranks, or a larger even number"
        found.append(Layout(recipe, ("--dp-replicate", "2"), size, needs=lacks))
    for config in sorted((ROOT / "recipes" / recipe).glob("configs/*.yaml")):
        text = config.read_text()
        wanted = re.search(r"^num_processes: (\d+)", text, re.MULTILINE)
        on_cpu = "use_cpu: true" in text
        lacks = f"{wanted[1]} ranks" if wanted and int(wanted[1]) != size else ""
        if on_cpu == gpus:
            lacks = " and ".join(filter(None, [lacks, "no GPUs" if gpus else "GPUs"]))
        found.append(Layout(recipe, dp_size=size, config=str(config), needs=lacks))
    return found


def flags(layout: Layout, size: int, steps: int) -> tuple[str, ...]:
    """Flags of a short training whose numbers do not depend on the layout, in two micro-batches or more a step.

    Args:
        layout: how to run it.
        size: ranks of this world; the batch has as many samples for each.
        steps: length of the training.
    """
    batch = SAMPLES * size
    same = ("--max-steps", str(steps), "--log-every", "1", *SMALL.get(layout.workload, ()))
    if not has_flag(layout.recipe, "--data"):
        return (*same, "--num-envs", str(4 * size), "--global-batch-size", str(4 * batch), *layout.flags)
    # BatchNorm sees one micro-batch of all ranks at a time, so its size over all ranks is part of the training.
    micro = SAMPLES // 2 if "--pp" in layout.flags else batch // 2 // layout.dp_size
    sync = ("--sync-bn",) if has_flag(layout.recipe, "--sync-bn") else ()
    same += ("--global-batch-size", str(batch), "--lr-reference-batch", str(batch), "--warmup-steps", "2")
    # The replicas are not compared on the way: the curves show it, and the whole run.
    same += ("--lr", "0.005", "--max-grad-norm", "0.25", "--check-every", "0")
    return (*same, "--micro-batch-size", str(micro), *sync, *layout.flags)
