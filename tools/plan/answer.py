"""An answer for people, and as JSON."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common import UserError
from tools.plan import known
from tools.plan.count import Case
from tools.plan.hardware import Hardware
from tools.plan.known import span
from tools.plan.predict import Prediction, predict, seconds
from tools.plan.work import KINDS, Work

GIB = 2**30
DAY_S = 86_400.0
HIDDEN = {
    "no": "nothing is computed meanwhile",
    "backward": "during the backward pass",
    "step": "during computation",
    "engine": "during computation, by copy engines",
}


def workload(work: Work) -> str:
    """Which comparisons an answer has: gpt for what reads tokens, resnet for convolutions, in any folder."""
    return "gpt" if "tokens" in work.units else "resnet" if work.convolutions else "another model"


def fits(found: Prediction, machine: Hardware) -> bool:
    """Whether the peak is below the device's memory."""
    return found.peak_bytes <= machine.memory_bytes


SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def number_of_tokens(text: str) -> float:
    """Of a training, such as 300B, 1.5T or 2e9.

    Raises:
        UserError: it is none.
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([KMBGT]?)", text.strip(), re.IGNORECASE)
    try:
        tokens = float(found[1]) * SCALES[found[2].upper()] if found else 0.0
    except ValueError:
        tokens = 0.0
    if not 0 < tokens < math.inf:
        raise UserError(f"--tokens {text!r} must be a number above 0, such as 300B, 1.5T or 2e9")
    return tokens


@dataclass(frozen=True)
class Budget:
    """What a training of so many tokens takes, with the time that saves and failures take.

    Attributes:
        tokens: of the training.
        days: of it.
        shortest_days: if its steps are as short as the error of the planner lets them be.
        longest_days: the same for the longest.
        gpu_hours: all GPUs' hours.
        cost: of them, in the unit of --price; 0 if there is none.
    """

    tokens: float
    days: float
    shortest_days: float
    longest_days: float
    gpu_hours: float
    cost: float


def step_of(work: Work, found: Prediction) -> known.Step:
    """What an error depends on, of a predicted step."""
    tokens = work.units.get("tokens", 0)
    local = work.samples * tokens / work.world_size
    tp, pp = (max((one.ranks for one in work.traffic if one.axis == axis), default=1) for axis in ("tp", "pp"))
    return known.Step(work.world_size, found.step_s, found.launch_s, tokens, local, tp=tp, pp=pp)


def budget(tokens: float, price: float, works: Sequence[Work], machine: Hardware) -> Budget:
    """Of a training of so many tokens, at a price of a GPU's hour.

    Raises:
        UserError: the recipe reads no tokens.
    """
    first, found = works[0], predict(works, machine)
    if "tokens" not in first.units:
        raise UserError("--tokens needs a recipe that reads tokens, such as recipes/fsdp_gpt")
    steps = tokens / (first.samples * first.units["tokens"])
    low_s, high_s = known.between(workload(first), machine, step_of(first, found))
    days = steps * found.step_s / (1 - min(found.lost, 0.99)) / DAY_S
    hours = days * 24 * first.world_size
    return Budget(tokens, days, days * low_s / found.step_s, days * high_s / found.step_s, hours, hours * price)


def _budget_line(one: Budget, price: float) -> str:
    low, high = one.shortest_days / one.days, one.longest_days / one.days
    times = [span(days * DAY_S) for days in (one.days, one.shortest_days, one.longest_days)]
    scale = next(name for name in ("T", "B", "M", "") if one.tokens >= SCALES[name] or not name)
    parts = [
        f"{one.tokens / SCALES[scale]:.4g}{scale} tokens take {times[0]}, between {times[1]} and {times[2]}",
        f"{one.gpu_hours:,.0f} GPU-hours ({one.gpu_hours * low:,.0f} to {one.gpu_hours * high:,.0f})",
    ]
    if price:
        parts.append(f"{one.cost:,.0f} at {price:g} an hour ({one.cost * low:,.0f} to {one.cost * high:,.0f})")
    return "; ".join(parts)


def as_json(
    case: Case, works: Sequence[Work], machine: Hardware, tokens: float = 0.0, price: float = 0.0
) -> dict[str, Any]:
    """All of an answer."""
    found = predict(works, machine)
    return {
        **({"budget": dataclasses.asdict(budget(tokens, price, works, machine))} if tokens else {}),
        "recipe": str(case.folder),
        "flags": [*case.flags],
        "world_size": case.size,
        "hardware": dataclasses.asdict(machine),
        "prediction": dataclasses.asdict(found),
        "fits": fits(found, machine),
        "error": known.sentence(workload(works[0]), machine, step_of(works[0], found)),
        "ranks": [dataclasses.asdict(work) for work in works],
    }


def as_text(case: Case, works: Sequence[Work], machine: Hardware, tokens: float = 0.0, price: float = 0.0) -> str:
    """An answer of some lines."""
    found = predict(works, machine)
    first = works[0]
    most = max(works, key=lambda work: work.peak_bytes)
    machines = -(-case.size // machine.local_size)
    where = f"{case.size:,} x {machine.name}" + (f" on {machines:,} machines" if machines > 1 else "")
    units = [f"{count:,} {unit}" for unit, count in first.units.items()]
    sample = f" of {' and '.join(units)}" if units else ""
    kinds = {**dict.fromkeys(KINDS, 0.0), **most.memory}
    parts = ", ".join(
        f"{'activations and others' if kind == 'rest' else kind} {held / GIB:.2f}" for kind, held in kinds.items()
    )
    verdict = "it fits" if fits(found, machine) else "IT DOES NOT FIT"
    rate = first.samples / found.step_s
    rates = [f"{rate:,.4g} samples/s", *(f"{rate * count:,.4g} {unit}/s" for unit, count in first.units.items())]
    experts = f"{first.parameters / 1e6:,.4g} M parameters, of which a token meets {first.active / 1e6:,.4g} M"
    lines = [
        ("plan", f"{case.folder.name} on {where}; a step has {first.samples:,} samples{sample}"),
        *([("model", experts)] if first.active < first.parameters else []),
        (
            "memory",
            f"{found.peak_bytes / GIB:.2f} of {machine.memory_gib:g} GiB a rank, without allocator and libraries: "
            f"{verdict}",
        ),
        ("", f"at the peak: {parts}"),
        ("step", f"{span(found.step_s)}: {', '.join(_parts(found))}"),
        *(("sends", line) for line in _sends(works, machine)),
        (
            "rates",
            f"{', '.join(rates)}; MFU {found.mfu:.1%}; {1 - found.efficiency:.1%} of the time waits for other ranks",
        ),
        (
            "saves",
            f"{first.state_bytes / 1e9:.3g} GB in {span(found.save_s)}; a save every {span(found.interval_s)} loses "
            f"least time to saves and failures: {found.lost:.2%}",
        ),
        *([("budget", _budget_line(budget(tokens, price, works, machine), price))] if tokens else []),
        ("error", known.sentence(workload(first), machine, step_of(first, found))),
    ]
    names = [name if i == 0 or lines[i - 1][0] != name else "" for i, (name, _) in enumerate(lines)]
    return "\n".join(f"{name:8}{text}" for name, (_, text) in zip(names, lines, strict=True))


def size(count: float) -> str:
    """Bytes, for people."""
    limits = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    limit, unit = next(((limit, unit) for limit, unit in limits if count >= limit), (1, "bytes"))
    return f"{count / limit:.3g} {unit}"


def _parts(found: Prediction) -> list[str]:
    named = {
        "products_s": "products",
        "memory_s": "other operators",
        "launch_s": "launches",
        "bubble_s": "pipeline bubble",
        "exposed_s": "exposed communication",
    }
    shares = {text: getattr(found, name) / found.step_s for name, text in named.items()}
    return [f"{text} {share:.1%}" for text, share in shares.items() if share >= 0.0005]


def _sends(works: Sequence[Work], machine: Hardware) -> list[str]:
    """A line for each kind of collective of the rank that sends longest."""
    work = max(works, key=lambda one: sum(seconds(traffic, machine) for traffic in one.traffic))
    lines = []
    for one in work.traffic:
        over = f"{one.ranks:,} ranks" + (f" of {one.machines:,} machines" if one.machines > 1 else "")
        if one.ranks > 1:
            took = span(seconds(one, machine))
            sent = f"{size(one.bytes)} in {one.calls:,} calls, {took}"
            lines.append(f"{one.kind} {one.axis} ({over}): {sent}, {HIDDEN[one.hidden]}")
    return lines or ["nothing"]
