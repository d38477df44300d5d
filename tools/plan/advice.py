"""What fits where the layout that was asked for does not: found by formula, and counted before it is advised.

The formulas of transformer.py say in milliseconds which layouts of a language model may fit, and how fast they are. The
fastest of them are counted, as any answer is. Other models have no formula: all of their layouts are counted.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools import about
from tools.plan import answer, sweep, transformer
from tools.plan.count import Case
from tools.plan.hardware import Hardware
from tools.plan.predict import Prediction, predict
from tools.plan.sweep import Row
from tools.plan.work import Work

AT_ONCE, MOST = 3, 12  # layouts that are counted beside each other, and of one number of ranks
SURE = 1.05  # how far the formula may be above what is counted: tests/tools/test_plan_memory.py
BYTES = 256  # tokens of the built-in text


@dataclass(frozen=True)
class Advice:
    """A layout that was counted, and fits.

    Attributes:
        command: that runs it.
        size: number of ranks.
        peak_bytes: of memory.
        step_s: of a step.
        longer: than the step that was asked for, by time a sample: 0.1 for a tenth, below 0 if it is faster.
    """

    command: str
    size: int
    peak_bytes: float
    step_s: float
    longer: float


def advise(case: Case, asked: Prediction, samples: int, machine: Hardware) -> Advice | None:
    """The fastest layout of these ranks that fits, or of the smallest number of ranks of which one does.

    Args:
        case: what does not fit.
        asked: its prediction.
        samples: of its step.
        machine: with too little memory.

    Returns:
        None if there is none, or if the recipe is a copy, whose flags are not known.
    """
    if case.folder.resolve() != about.ROOT / "recipes" / case.folder.name:
        return None
    more = (one for one in sweep.sizes(case) if one.size > case.size)
    for one in itertools.chain([case], more):
        if best := fastest(list(sweep.layouts(one, every=True)), machine):
            assert best.found
            command = sweep.command(best.case, machine)
            longer = (samples / asked.step_s) / best.rate - 1
            return Advice(command, one.size, best.found.peak_bytes, best.found.step_s, longer)
    return None


def fastest(cases: Sequence[Case], machine: Hardware) -> Row | None:
    """Of those that fit, as counted; None if none does."""
    if about.workload(cases[0].folder.name) == "gpt":
        guessed = [(guess(case, machine), case) for case in cases]
        may_fit = [one for one in guessed if one[0].peak_bytes <= SURE * machine.memory_bytes]
        cases = [case for _, case in sorted(may_fit, key=lambda one: one[0].step_s)]
    for some in batches(cases[:MOST]):
        rows = sweep.rows(some, machine)
        if fitting := [row for row in rows if row.found and answer.fits(row.found, machine)]:
            return max(fitting, key=lambda row: row.rate)
    return None


def batches(cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
    """Some after the other."""
    return (cases[i : i + AT_ONCE] for i in range(0, len(cases), AT_ONCE))


def guess(case: Case, machine: Hardware) -> Prediction:
    """What the formulas predict of a layout of a language model."""
    return predict([work(case, machine)], machine)


def work(case: Case, machine: Hardware) -> Work:
    """What the formulas say that a layout of a language model computes, sends and holds."""

    def value(flag: str) -> int:
        return sweep.value(case.flags, flag, sweep.default(case.folder.name, flag))

    recipe, width, heads = case.folder.name, value("--width"), value("--num-heads")
    shape = transformer.Shape(
        width,
        value("--num-layers"),
        heads,
        value("--num-kv-heads") or heads,
        value("--mlp-width") or -(-8 * width // (3 * 64)) * 64,
        True,
        value("--vocab-size") or BYTES,
        value("--seq-len"),
        "--tied" in case.flags,
        *((value("--experts"), value("--top-k")) if about.has_flag(recipe, "--experts") else ()),
    )
    flag = next((one for one in (*sweep.PARTS, sweep.EXPERTS) if about.has_flag(recipe, one)), "")
    parts, batch = (value(flag) or math.gcd(shape.experts, case.size)) if flag else 1, value(sweep.BATCH)
    sharing = 1 if flag == sweep.EXPERTS else parts  # ranks that read the same sequences
    layout = transformer.of_recipe(
        recipe,
        case.size,
        parts,
        micro_batch=value(sweep.MICRO) or max(1, batch * sharing // case.size),
        global_batch=batch,
        recompute=dict(itertools.pairwise(case.flags)).get(sweep.RECOMPUTE, "none"),
        local_size=machine.local_size,
    )
    return transformer.work(shape, layout)


def as_text(found: Advice | None, case: Case) -> str:
    """For people."""
    if not found:
        return "no layout of these recipes was found that fits: try a smaller model or shorter sequences"
    fits = "this fits" if found.size == case.size else f"on {case.size:,} nothing fits, and this on {found.size:,}"
    compared = f"{abs(found.longer):.0%} {'longer' if found.longer > 0 else 'shorter'} for a sample than what was asked"
    memory = f"{found.peak_bytes / answer.GIB:.2f} GiB"
    return f"{fits}: {memory}, a step of {answer.span(found.step_s)}, {compared}: {found.command}"


def as_json(found: Advice | None) -> dict[str, object] | None:
    """All of it."""
    return dataclasses.asdict(found) if found else None
