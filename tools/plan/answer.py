"""An answer for people, and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tools.plan import known
from tools.plan.count import Case
from tools.plan.hardware import Hardware
from tools.plan.known import span
from tools.plan.predict import Prediction, predict, seconds
from tools.plan.work import KINDS, Work

GIB = 2**30
HIDDEN = {"no": "nothing is computed meanwhile", "backward": "during the backward pass", "step": "during computation"}


def workload(work: Work) -> str:
    """Which comparisons an answer has: gpt for what reads tokens, resnet for convolutions, in any folder."""
    return "gpt" if "tokens" in work.units else "resnet" if work.convolutions else "another model"


def fits(found: Prediction, machine: Hardware) -> bool:
    """Whether the peak is below the device's memory."""
    return found.peak_bytes <= machine.memory_bytes


def as_json(case: Case, works: Sequence[Work], machine: Hardware) -> dict[str, Any]:
    """All of an answer."""
    found = predict(works, machine)
    return {
        "recipe": str(case.folder),
        "flags": [*case.flags],
        "world_size": case.size,
        "hardware": dataclasses.asdict(machine),
        "prediction": dataclasses.asdict(found),
        "fits": fits(found, machine),
        "error": known.sentence(workload(works[0]), machine, case.size, found.step_s, found.launch_s),
        "ranks": [dataclasses.asdict(work) for work in works],
    }


def as_text(case: Case, works: Sequence[Work], machine: Hardware) -> str:
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
    advice = "try --recompute full, a smaller --micro-batch-size, a recipe that splits the model, or more ranks"
    verdict = "it fits" if fits(found, machine) else f"IT DOES NOT FIT: {advice}"
    rate = first.samples / found.step_s
    rates = [f"{rate:,.4g} samples/s", *(f"{rate * count:,.4g} {unit}/s" for unit, count in first.units.items())]
    lines = [
        ("plan", f"{case.folder.name} on {where}; a step has {first.samples:,} samples{sample}"),
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
        ("error", known.sentence(workload(first), machine, case.size, found.step_s, found.launch_s)),
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
