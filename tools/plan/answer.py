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


def workload(case: Case) -> str:
    """What a recipe trains, by the last word of its name: gpt or resnet; another one has no comparisons."""
    return case.folder.resolve().name.rpartition("_")[2]


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
        "error": known.sentence(workload(case), machine, case.size, found.step_s),
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
        f"{'activations and others' if kind == 'rest' else kind} {size / GIB:.2f}" for kind, size in kinds.items()
    )
    verdict = "it fits" if fits(found, machine) else "IT DOES NOT FIT"
    rate = first.samples / found.step_s
    rates = [f"{rate:,.4g} samples/s", *(f"{rate * count:,.4g} {unit}/s" for unit, count in first.units.items())]
    lines = [
        ("plan", f"{case.folder.name} on {where}; a step has {first.samples:,} samples{sample}"),
        (
            "memory",
            f"{found.peak_bytes / GIB:.2f} of {machine.memory_gib:g} GiB a rank, without allocator and libraries: "
            f"{verdict}",
        ),
        ("", parts),
        ("step", f"{span(found.step_s)}: {', '.join(_parts(found))}"),
        *(("sends", line) for line in _sends(works, machine)),
        (
            "rates",
            f"{', '.join(rates)}; MFU {found.mfu:.1%}; {found.efficiency:.1%} of ranks that need not wait or send",
        ),
        (
            "saves",
            f"{first.state_bytes / 1e9:.3g} GB in {span(found.save_s)}; every {span(found.interval_s)} loses least: "
            f"{found.lost:.2%} of the time for saves and failures",
        ),
        ("error", known.sentence(workload(case), machine, case.size, found.step_s)),
    ]
    names = [name if i == 0 or lines[i - 1][0] != name else "" for i, (name, _) in enumerate(lines)]
    return "\n".join(f"{name:8}{text}" for name, (_, text) in zip(names, lines, strict=True))


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
            sent = f"{one.bytes / 1e6:,.4g} MB in {one.calls:,} calls, {took}"
            lines.append(f"{one.kind} {one.axis} ({over}): {sent}, {HIDDEN[one.hidden]}")
    return lines or ["nothing"]
