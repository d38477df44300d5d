"""Many layouts beside each other: world sizes, or ways to split one training over as many ranks."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import about
from tools.plan import answer
from tools.plan.count import Case, NotCountedError, each
from tools.plan.hardware import Hardware
from tools.plan.known import span
from tools.plan.predict import Prediction, predict

SIZES = [2**i for i in range(17)]  # 1 to 65,536
BATCH, MICRO, RECOMPUTE = "--global-batch-size", "--micro-batch-size", "--recompute"
PARTS = ("--tp", "--pp", "--cp")  # of ranks that read the same sequences
EXPERTS = "--ep"  # of ranks that read different ones


@dataclass(frozen=True)
class Row:
    """A layout, and what was predicted of it, or why nothing was."""

    case: Case
    found: Prediction | None
    samples: int
    refusal: str = ""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.found.step_s if self.found else 0.0


def value(flags: Sequence[str], flag: str, default: int) -> int:
    """Of a flag with a number."""
    words = dict(itertools.pairwise(flags))
    return int(words.get(flag, default))


def set_flag(flags: Sequence[str], flag: str, to: object) -> tuple[str, ...]:
    """The flags with another value of one of them."""
    words = list(flags)
    while flag in words:
        del words[(at := words.index(flag)) : at + 2]
    return (*words, flag, str(to))


def default(recipe: str, flag: str) -> int:
    """Of a recipe's flag."""
    field = about.fields(recipe)[flag.lstrip("-").replace("-", "_")]
    return int(getattr(field.value, "value", 0))


def sizes(case: Case) -> Iterator[Case]:
    """The same training on 1 to 65,536 ranks; at least one sample a rank that reads."""
    batch = value(case.flags, BATCH, default(case.folder.name, BATCH))
    for size in SIZES:
        parts = math.prod(value(case.flags, flag, 1) for flag in PARTS)
        flags = set_flag(case.flags, BATCH, max(batch, size // parts))
        yield Case(case.folder, size, flags, case.config)


def layouts(case: Case, *, every: bool = False) -> Iterator[Case]:
    """Ways to split a training over these ranks: recipes of its workload, their parts, micro-batch, recomputation.

    Args:
        case: the training.
        every: also what is rarely fast: all micro-batches, and all that a recipe can recompute.
    """
    mine = case.folder.name
    batch = value(case.flags, BATCH, default(mine, BATCH))
    kept = case.flags
    for flag in (*PARTS, EXPERTS, MICRO, RECOMPUTE):
        while flag in kept:
            at = kept.index(flag)
            kept = (*kept[:at], *kept[at + 2 :])
    for recipe in sorted(about.RECIPES, key=lambda one: one != mine):  # the one that was asked for comes first
        if about.workload(recipe) != about.workload(mine) or not about.has_flag(recipe, MICRO):
            continue
        if about.is_single(recipe) or recipe.partition("_")[0] in ("accelerate", "allreduce", "diloco"):
            continue  # the same layouts by another library or by hand, or other numbers by design
        if about.has_flag(recipe, EXPERTS) != about.has_flag(mine, EXPERTS):
            continue  # another model
        part = next((flag for flag in (*PARTS, EXPERTS) if about.has_flag(recipe, flag)), "")
        for parts in [2**i for i in range(1, 7) if 2**i <= case.size] if part else [1]:
            a_rank = batch * (1 if part == EXPERTS else parts) // case.size
            micros = [2**i for i in range(max(1, a_rank).bit_length()) if every or a_rank // 2**i <= 32]
            modes = ["none", *(["selective"] if every else []), "full"] if about.has_flag(recipe, RECOMPUTE) else [""]
            for micro, mode in itertools.product(micros if every else micros[-3:], modes):
                flags = (*kept, *((part, str(parts)) if part else ()), MICRO, str(micro))
                yield Case(
                    about.ROOT / "recipes" / recipe,
                    case.size,
                    (*flags, *((RECOMPUTE, mode) if mode else ())),
                    case.config,
                )


def rows(cases: Sequence[Case], machine: Hardware) -> Iterator[Row]:
    """What is predicted of each case, as it comes."""
    for case, works in zip(cases, each(cases, machine), strict=False):
        if isinstance(works, NotCountedError):
            yield Row(case, None, 0, str(works))
        else:
            yield Row(case, predict(works, machine), works[0].samples)


def command(case: Case, machine: Hardware) -> str:
    """What runs a case."""
    folder = case.folder.resolve()
    recipe = folder.relative_to(about.ROOT) if folder.is_relative_to(about.ROOT) else folder
    words = [str(recipe), *case.flags]
    local = min(case.size, machine.local_size)
    config = f"ACCELERATE_CONFIG={case.config} " if case.config else ""
    if case.size <= machine.local_size:
        return f"{config}NPROC_PER_NODE={local} bash launch/torchrun.sh {' '.join(words)}"
    return f"{config}bash launch/slurm.sh -N{math.ceil(case.size / local)} --gpus-per-node={local} {' '.join(words)}"


def line(row: Row, machine: Hardware) -> str:
    """Of the table."""
    if row.found is None:
        return f"{row.case.size:>6} no: {row.refusal}"
    found = row.found
    share = found.exposed_s / found.step_s
    bound = max(BOUNDS, key=lambda part: getattr(found, part))
    memory = f"{found.peak_bytes / answer.GIB:.3g}" + ("" if answer.fits(found, machine) else "!")
    cells = (
        f"{row.case.size:>6}",
        f"{memory:>8}",
        f"{span(found.step_s):>8}",
        f"{row.rate:>10.4g}",
        f"{found.efficiency:>6.1%}",
        f"{share:>6.1%}",
        f"{BOUNDS[bound]:<9}",
        command(row.case, machine),
    )
    return " ".join(cells)


HEAD = "  size      GiB     step  samples/s   busy   sends bound by  command     (! does not fit)"
BOUNDS = {
    "products_s": "products",
    "memory_s": "memory",
    "launch_s": "launches",
    "bubble_s": "bubble",
    "exposed_s": "sending",
}


def summary(found: Sequence[Row], machine: Hardware) -> list[str]:
    """What fits, what is fastest, and where sending begins to take most of a step."""
    fitting = [row for row in found if row.found and answer.fits(row.found, machine)]
    counted = [row for row in found if row.found]
    refused = len(found) - len(counted)
    fit = f"{len(fitting)} of {len(counted)} fit into {machine.memory_gib:g} GiB (! does not)"
    lines = [f"{fit}, {refused} cannot be"]
    if fitting:
        best = max(fitting, key=lambda row: row.rate)
        lines.append(f"fastest that fits: {best.rate:.4g} samples/s: {command(best.case, machine)}")
    sent = [row.case.size for row in counted if row.found and row.found.exposed_s > row.found.step_s / 2]
    lines.append(
        f"sending takes more than half of a step from {min(sent):,} ranks on"
        if sent
        else "sending never takes half of a step"
    )
    return lines


def folder_of(name: str) -> Path:
    """A recipe's folder, by its path or its name."""
    path = Path(name)
    path = path.parent if path.name == "train.py" else path
    return path if (path / "train.py").exists() else about.ROOT / "recipes" / path.name
