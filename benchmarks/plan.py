"""How far the planner errs: `uv run python -m benchmarks.plan` writes docs/plan.md and tools/plan/known.json.

Each part can be measured alone: `--only published`. The parts `memory` and `links` run real ranks on this machine;
links are those between network namespaces, which needs root.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from tests.harness import pages
from tools import about
from tools.plan import fit, hardware, published, transformer
from tools.plan.count import count
from tools.plan.hardware import KNOWN

PAGE = about.ROOT / "docs" / "plan.md"
COMMAND = "uv run python -m benchmarks.plan"
SPLITS = 10
BAD = 0.15  # an error above it has a reason on the page
REASONS = {  # by the beginning of a row's name
    "SC21 7.5B": "its micro-batch is not published; we assume 4",
    "SC21": "micro-batches and interleaving are not published; its code of 2021 had no sequence parallelism",
    "MT-NLG": "whether its A100 have 40 or 80 GB, and its NICs, are not stated in the source",
    "Korthikanti": "the fastest code of its day: its kernels are joined by hand, and products reach more of the peak",
    "Megatron H100 32B": "width and layers are not published; its sums in groups of 8 are hidden better than we assume",
    "Megatron H100": "width, layers and micro-batch are not published, and are derived from the size",
    "torchtitan 8B TP8": "asynchronous sums hide more than a group of 8 is said to",
    "torchtitan": "GPUs held to 500 W: products reach less of the peak, the longer they are",
    "MPT 70B": "its gathers wait for a network of 8 ports of 200 Gbit/s better than we assume",
    "MPT 7B": "from 8 to 512 GPUs it loses 9 %, of which gathers explain little; the source names no reason",
    "nanotron 80B": "an MFU of 14.8 % on 32 GPUs: TP 8 over Ethernet-like links, which the source does not explain",
    "nanotron": "small layers beside 131,072 logits: the share of operators that are no products is uncertain",
    "vTrain": "Megatron-DeepSpeed of 2022, bound by launches: see the 1,440 steps above",
    "ResNet-50": "the loaders of several GPUs share one host's processor, and cuDNN chooses algorithms by size",
}


def reason(name: str) -> str:
    """Why a row may be off."""
    return next((why for begin, why in REASONS.items() if name.startswith(begin)), "not known")


def save(**parts: Any) -> None:
    """Replace parts of known.json."""
    read = json.loads(KNOWN.read_text()) if KNOWN.exists() else {"reach": {}, "compared": []}
    KNOWN.write_text(json.dumps(read | parts, indent=1) + "\n")


def keep(workloads: Sequence[str], families: Sequence[str], rows: list[dict[str, Any]]) -> None:
    """Replace the comparisons of these workloads and families."""
    read = json.loads(KNOWN.read_text())["compared"] if KNOWN.exists() else []
    others = [one for one in read if not (one["workload"] in workloads and one["family"] in families)]
    save(compared=sorted([*others, *rows], key=lambda one: (one["workload"], one["family"], one["name"])))


def compared(name: str, workload: str, family: str, ranks: int, error: float, **more: float) -> dict[str, Any]:
    """A row of known.json."""
    rounded = {key: round(value, 4) for key, value in {"error": error, **more}.items()}
    return {"name": name, "workload": workload, "family": family, "ranks": ranks, **rounded}


def summary(errors: Sequence[float]) -> str:
    """Mean, median and worst of errors."""
    sizes = [abs(one) for one in errors]
    mean, median = statistics.fmean(sizes), statistics.median(sizes)
    return f"mean {mean:.1%}, median {median:.1%}, worst {max(sizes):.0%} of {len(sizes)}"


def of_print() -> str:
    """Every row of published.csv: predicted beside published."""
    rows = published.gpts()
    reaches = published.fitted(rows)
    images = published.resnets()
    counted = {one.name: tuple(count(one.case, one.machine)) for one in images}
    measured = {one.name: fit.Measured(counted[one.name], one.machine, one.step_s) for one in images}
    # Convolutions are nowhere else; the other fractions are those of language models.
    convolutions = fit.fit(list(measured.values()), reaches["gpu"], 1.0).convolutions
    reaches = {name: dataclasses.replace(reach, convolutions=convolutions) for name, reach in reaches.items()}
    save(reach={name: {k: round(v, 4) for k, v in dataclasses.asdict(one).items()} for name, one in reaches.items()})
    outside = published.left_out(rows)
    lines = ["| row | GPUs | step, s | fitted | left out | why, if more than 15 % |", "|---|--:|--:|--:|--:|---|"]
    known = []
    fit_errors, out_errors = [], []
    for row in rows:
        inner = published.guess(row, reaches) / row.step_s - 1
        outer = outside[row.name] / row.step_s - 1
        fit_errors.append(inner)
        out_errors.append(outer)
        why = reason(row.name) if max(abs(inner), abs(outer)) > BAD else ""
        cells = (row.name, f"{row.layout.size:,}", f"{row.step_s:.4g}", f"{inner:+.0%}", f"{outer:+.0%}", why)
        lines.append(f"| {' | '.join(cells)} |")
        flops = row.shape.model_flops * row.layout.global_batch
        mfu = flops / (row.step_s * row.machine.peak_16bit * row.layout.size)
        billions = row.shape.parameters / 1e9
        known.append(
            compared(row.name, "gpt", row.machine.family, row.layout.size, outer, mfu=mfu, parameters=billions)
        )
    keep(["gpt"], ["a100", "h100"], known)
    image_errors, image_known = [], []
    for one in images:
        others = [measured[other.name] for other in images if other.case.flags != one.case.flags]
        reach = fit.fit(others, reaches["gpu"], 1.0)
        outer = fit.predicted_s(measured[one.name], reach) / one.step_s - 1
        inner = fit.predicted_s(measured[one.name], reaches["gpu"]) / one.step_s - 1
        image_errors.append(outer)
        why = reason(one.name) if max(abs(inner), abs(outer)) > BAD else ""
        cells = (one.name, str(one.case.size), f"{one.step_s:.4g}", f"{inner:+.0%}", f"{outer:+.0%}", why)
        lines.append(f"| {' | '.join(cells)} |")
        image_known.append(compared(one.name, "resnet", one.machine.family, one.case.size, outer))
    keep(["resnet"], ["a100"], image_known)
    refused = [f"- {line['name']}: {line['refuse']}." for line in published.raw() if line["refuse"]]
    memory = []
    for row in rows:
        if row.memory_gib:
            own = transformer.work(row.shape, row.layout).peak_bytes / 2**30
            memory.append(f"| {row.name} | {row.memory_gib:.1f} | {own:.1f} | {own / row.memory_gib - 1:+.0%} |")
    fractions = [
        f"| {name} | {' | '.join(f'{value:.2f}' for value in dataclasses.astuple(one))} |"
        for name, one in reaches.items()
    ]
    names = [field.name for field in dataclasses.fields(hardware.Reach)]
    return "\n".join(
        [
            f"GPTs, fitted on all rows: {summary(fit_errors)}. GPTs, each predicted by fractions that were fitted to",
            f"all other sources: {summary(out_errors)}.",
            f"ResNet-50, fitted to the rows of other GPUs and types: {summary(image_errors)}.",
            "",
            *lines,
            "",
            "Memory, of the rows that state it, in GiB; sources print what the allocator has reserved, we count live",
            "bytes:",
            "",
            "| row | published | predicted | |",
            "|---|--:|--:|--:|",
            *memory,
            "",
            "Not predicted, with the reason that the planner gives:",
            "",
            *refused,
            "",
            "The achieved fractions, fitted:",
            "",
            f"| family | {' | '.join(names)} |",
            "|---" + "|--:" * len(names) + "|",
            *fractions,
        ]
    )


def of_vtrain() -> str:
    """Ten random fifths of the 1,440 steps."""
    lines = [
        "| split | formula: mean | median | worst | regret | worst | with near lines: mean | median | worst | regret "
        "| worst |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    both = []
    for seed in range(SPLITS):
        found = published.split(seed)
        both.append(found)
        cells = [
            f"{value:.1%}" for one in found for value in (one.mean, one.median, one.worst, one.regret, one.worst_regret)
        ]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    means = [
        f"{statistics.fmean(getattr(pair[i], name) for pair in both):.1%}"
        for i in (0, 1)
        for name in ("mean", "regret")
    ]
    text = (
        f"Mean of ten splits: the formula alone errs by {means[0]} (regret {means[1]}), with what near lines say by "
        f"{means[2]} (regret {means[3]})."
    )
    return "\n".join([text, "", *lines])


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="one part of the page")
    only = parser.parse_args().only
    began = time.monotonic()

    def facts(*conditions: str) -> str:
        return pages.measured(f"{COMMAND} --only {only}" if only else COMMAND, *conditions, began=began)

    if only in ("", "published"):
        text = of_print()
        pages.write(PAGE, published=f"{facts()}\n\n{text}")
    if only in ("", "vtrain"):
        text = of_vtrain()
        pages.write(PAGE, vtrain=f"{facts()}\n\n{text}")


if __name__ == "__main__":
    main()
