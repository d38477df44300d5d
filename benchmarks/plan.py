"""How far the planner errs: `uv run python -m benchmarks.plan` writes docs/plan.md and tools/plan/known.json.

Each part can be measured alone: `--only published`. The parts `memory` and `links` run real ranks on this machine;
links are those between network namespaces, which needs root.
"""

import argparse
import dataclasses
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import plan_here, plan_questions
from tests.harness import pages
from tools import about
from tools.plan import fit, hardware, known, published, transformer
from tools.plan.count import Case, count, each
from tools.plan.hardware import KNOWN, Hardware
from tools.plan.predict import of_rank, predict
from tools.plan.published import counted_flops

PAGE = about.ROOT / "docs" / "plan.md"
COMMAND = "uv run python -m benchmarks.plan"
SPLITS = 10
FAR = 0.35
WAITS = 0.1
BEFORE = (
    about.ROOT / "docs" / "measured" / "plan_before.json"
)  # seconds that the planner of 0.1.0 predicted of the rows, with its fractions
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
    "nanotron 80B": "an MFU of 14.8 % on 32 GPUs, which the source does not explain; nor does it name the links",
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


def of_row(row: published.Row, step_s: float, reaches: Mapping[str, hardware.Reach]) -> dict[str, Any]:
    """A row of known.json, with what says how near it is to a question."""
    machine = fit.with_reach(row.machine, reaches[row.machine.family])
    parts = of_rank(row.measured.works[0], machine)
    more: dict[str, float] = {"launch": parts["launch_s"] / parts["step_s"]}
    if row.name in {one["name"] for one in published.raw()}:  # which the explorer shows
        flops = row.shape.model_flops * row.layout.global_batch
        more["mfu"] = flops / (row.step_s * row.machine.peak_16bit * row.layout.size)
        more["parameters"] = row.shape.parameters / 1e9
    exact = {"tokens": row.shape.seq_len, "local_tokens": row.local_tokens, "year": published.YEARS[row.program]}
    exact |= {"tp": row.layout.tp, "pp": row.layout.pp}
    error = step_s / row.step_s - 1
    return compared(row.name, "gpt", row.machine.family, row.layout.size, error, **more) | exact


def signed(rows: Sequence[published.Row], steps: Mapping[str, float]) -> str:
    """How many rows, and their errors, as cells of a table."""
    errors = [steps[row.name] / row.step_s - 1 for row in rows]
    sizes = [abs(one) for one in errors]
    return (
        f"{len(rows)} | {statistics.fmean(sizes):.1%} | {statistics.fmean(errors):+.1%} | {max(errors, key=abs):+.0%}"
    )


def by(
    what: str, key: Callable[[published.Row], Any], rows: Sequence[published.Row], *columns: Mapping[str, float]
) -> list[str]:
    """A table of the errors of rows that have the same key."""
    groups = {value: [row for row in rows if key(row) == value] for value in sorted({key(row) for row in rows})}
    head = f"| {what} |" + " rows | mean | signed | worst |" * len(columns)
    cells = [f"| {value} | {' | '.join(signed(some, one) for one in columns)} |" for value, some in groups.items()]
    return [head, "|---|" + "--:|" * 4 * len(columns), *cells]


def of_sources() -> str:
    """Errors of all sources before and after, and how many rows lie in the range from the rows of all other sources."""
    fit_rows, held = published.may_be_fitted(), [row for row in published.foundry() if published.held_out(row)]
    rows = [*fit_rows, *held]
    reaches = {name: hardware.Reach(**one) for name, one in json.loads(KNOWN.read_text())["reach"].items()}
    after = {row.name: published.guess(row, reaches) for row in rows}
    left = {one.name: one for one in known.compared() if one.workload == "gpt"}
    outside = {row.name: row.step_s * (1 + left[row.name].error) for row in rows}
    before = json.loads(BEFORE.read_text())
    groups = sorted({row.group for row in rows})
    lines = ["| source | rows | of them fitted | before | fitted | left out | signed | worst | in the range | said |"]
    lines.append("|---|" + "--:|" * 9)
    covered = 0
    for group in groups:
        some = [row for row in rows if row.group == group]
        others = [left[row.name] for row in rows if row.group != group]
        said = [known.is_outside(left[row.name], others) for row in some]
        inside = [known.within(left[row.name], others) for row in some]
        covered += sum(map(any, zip(said, inside, strict=True)))
        mean = [
            statistics.fmean(abs(steps[row.name] / row.step_s - 1) for row in some)
            for steps in (before, after, outside)
        ]
        rest = signed(some, outside).split(" | ", 2)[2]
        fitted = sum(row.group == group for row in fit_rows)
        shares = " | ".join(f"{one:.1%}" for one in mean)
        lines.append(f"| {group} | {len(some)} | {fitted} | {shares} | {rest} | {sum(inside)} | {sum(said)} |")
    waiting = [row for row in rows if left[row.name].launch > WAITS]
    of_vtrain = sum(row.group == "vTrain single" for row in waiting)
    hardly = [row for row in rows if left[row.name].launch <= WAITS]
    far = [f"{row.name} {outside[row.name] / row.step_s - 1:+.0%}" for row in rows if is_far(row, outside)]
    no_words = [
        one
        for row, one in zip([row for row in rows if is_far(row, outside)], far, strict=True)
        if not known.is_outside(left[row.name], [left[other.name] for other in rows if other.group != row.group])
    ]
    return "\n".join(
        [
            f"The {len(held)} rows of llm-foundry that no fit has seen: mean {part(held, before)} before, and",
            f"{part(held, after)} now. All {len(rows)} rows, each by fractions fitted without its source: mean",
            f"{part(rows, before)} before, {part(rows, outside)} now. GPUs wait for launches for more than {WAITS:.0%}",
            f"of a step in {len(waiting)} rows, {of_vtrain} of them vTrain's: "
            f"{part(waiting, outside)}; all others: {part(hardly, outside)}.",
            f"{covered} of {len(rows)} ({covered / len(rows):.0%}) lie in the range that the rows of all other sources",
            f'give, or "outside of what was tested" is said of them. Off by more than {FAR:.0%}:',
            f"{len(far)}, and without these words: {', '.join(no_words) or 'none'}.",
            "",
            *lines,
            "",
            'The last column counts rows of which an answer says "outside of what was tested".',
            "",
            "Held-out rows of llm-foundry by length, before and now:",
            "",
            *by("tokens", lambda row: row.shape.seq_len, held, before, after),
            "",
            "All rows, each without its source, by ranks that split a matrix, and by GPUs:",
            "",
            *by("tensor ranks", lambda row: row.layout.tp, rows, outside),
            "",
            *by(
                "GPUs, to a power of 8", lambda row: 8 ** math.ceil(math.log(row.layout.size, 8) - 1e-9), rows, outside
            ),
        ]
    )


def part(rows: Sequence[published.Row], steps: Mapping[str, float]) -> str:
    """Mean of the errors' sizes."""
    return f"{statistics.fmean(abs(steps[row.name] / row.step_s - 1) for row in rows):.1%}"


def is_far(row: published.Row, steps: Mapping[str, float]) -> bool:
    """Whether a step is off by more than the planner should be without saying so."""
    return abs(steps[row.name] / row.step_s - 1) > FAR


def of_print() -> str:
    """Every row of published.csv, and all sources: predicted beside published."""
    rows = published.gpts()
    fit_rows, held = published.may_be_fitted(), [row for row in published.foundry() if published.held_out(row)]
    reaches = published.fitted(fit_rows)
    images = published.resnets()
    counted = {one.name: tuple(count(one.case, one.machine)) for one in images}
    measured = {one.name: fit.Measured(counted[one.name], one.machine, one.step_s) for one in images}
    # Convolutions are nowhere else; the other fractions are those of language models.
    convolutions = fit.fit(list(measured.values()), reaches["gpu"], 1.0).convolutions
    reaches = {name: dataclasses.replace(reach, convolutions=convolutions) for name, reach in reaches.items()}
    save(reach={name: {k: round(v, 4) for k, v in dataclasses.asdict(one).items()} for name, one in reaches.items()})
    outside = published.left_out(fit_rows, held)
    lines = ["| row | GPUs | step, s | fitted | left out | why, if more than 15 % |", "|---|--:|--:|--:|--:|---|"]
    compared_rows = [of_row(row, outside[row.name], reaches) for row in (*fit_rows, *held)]
    fit_errors, out_errors = [], []
    for row in rows:
        inner = published.guess(row, reaches) / row.step_s - 1
        outer = outside[row.name] / row.step_s - 1
        fit_errors.append(inner)
        out_errors.append(outer)
        why = reason(row.name) if max(abs(inner), abs(outer)) > BAD else ""
        cells = (row.name, f"{row.layout.size:,}", f"{row.step_s:.4g}", f"{inner:+.0%}", f"{outer:+.0%}", why)
        lines.append(f"| {' | '.join(cells)} |")
    keep(["gpt"], ["a100", "h100"], compared_rows)
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


# --- curves ------------------------------------------------------------------------------------------------------

GPT3 = transformer.Shape(12288, 96, 96, 96, 49152, False, 50_304, 2048, True)  # Brown et al. 2020, table 2.1
BERT = transformer.Shape(1024, 24, 16, 16, 4096, False, 30_522, 512, True)  # BERT-large, as a GPT of its size
RESNET = ("--model", "resnet50", "--image-size", "224", "--data", "imagenet", "--dtype", "float32")


def resnet_steps(machine: Hardware, sizes: Sequence[int], batch: int) -> list[float]:
    """Seconds of a step of ResNet-50 under DDP, with `batch` images a rank."""
    folder = about.ROOT / "recipes/ddp_resnet"
    cases = [Case(folder, size, (*RESNET, "--global-batch-size", str(batch * size))) for size in sizes]
    return [predict(works, machine).step_s for works in each(cases, machine) if isinstance(works, list)]


def gpt_steps(shape: transformer.Shape, machine: Hardware, layouts: Sequence[transformer.Layout]) -> list[float]:
    """Seconds of a step of a GPT, by formula."""
    return [predict([transformer.work(shape, layout)], machine).step_s for layout in layouts]


def of_curves() -> str:
    """The scaling of three papers, with the hardware that they state."""
    machines = hardware.table()
    sizes = [8, 16, 32, 64, 128, 256]
    goyal = resnet_steps(machines["p100-eth"], sizes, 32)
    gbit_100 = dataclasses.replace(machines["v100-ib"], network_bandwidth=100e9 / 8 / 8, network_latency_s=20e-6)
    ddp = resnet_steps(gbit_100, sizes, 32)
    bert = gpt_steps(
        BERT,
        dataclasses.replace(gbit_100, peak_16bit=gbit_100.peak_float32),  # in float32, as the paper trains
        [transformer.Layout(dp=size, micro_batch=8, global_batch=8 * size) for size in sizes],
    )

    def efficiencies(steps: Sequence[float]) -> str:
        return " | ".join(f"{steps[0] / step:.0%}" for step in steps)

    tbit_2 = dataclasses.replace(machines["a100-ib"], network_bandwidth=2e12 / 8 / 8)
    many = [128, 192, 256, 384, 512]
    rows = []
    for batch, printed in ((1, 173), (2, 186)):
        layouts = [
            transformer.Layout(
                size, micro_batch=batch, global_batch=batch * size, zero=3, recompute="full", grad_bytes=2
            )
            for size in many
        ]
        flops = batch * counted_flops(GPT3, "full") / 1e12
        cells = " | ".join(f"{flops / step:.0f}" for step in gpt_steps(GPT3, tbit_2, layouts))
        rows.append(f"| {batch} | {cells} | {printed} |")
    return f"""\
Efficiency over that of 8 GPUs, by {" / ".join(map(str, sizes))} GPUs; machines of 8:

| paper | model, network | {" | ".join(map(str, sizes))} | the paper |
|---|---|{"--:|" * len(sizes)}---|
| [Goyal et al. 2017](https://arxiv.org/abs/1706.02677) | ResNet-50, P100, 32 images a GPU, 50 Gbit/s a machine \
| {efficiencies(goyal)} | about 90 % at 256 (abstract) |
| [Li et al. 2020](https://arxiv.org/abs/2006.15704), DDP | ResNet-50, V100, 32 images a GPU, 100 Gbit/s a machine \
| {efficiencies(ddp)} | "near-linear" at 256 (abstract) |
| the same | a GPT of BERT-large's size, V100, 8 sequences a GPU | {efficiencies(bert)} \
| more bytes for each FLOP, so less than ResNet-50 |

[Zhao et al. 2023](https://arxiv.org/abs/2304.11277), FSDP: GPT-175B on A100-80 with 2 Tbit/s a machine, full
recomputation; TFLOP/s a GPU, counted with what is recomputed, by sequences a GPU and number of GPUs. The paper's
figures are as others quote them: 55 % and 60 % of the peak. Gradients travel in 16 bit, the
default of its mixed precision.

| sequences | {" | ".join(map(str, many))} | the paper |
|--:|{"--:|" * len(many)}--:|
{chr(10).join(rows)}

Batches that the papers' abstracts do not state are our assumption: 32 images and 8 sequences for DDP."""


# --- this machine ------------------------------------------------------------------------------------------------

EXAMPLES = (
    "recipes/fsdp_gpt --world-size 1024 --hardware h100-ib --num-layers 32 --width 4096 --num-heads 32 --seq-len 4096 "
    "--global-batch-size 1024",
    "recipes/fsdp_gpt --sweep --hardware h100-eth --num-layers 4 --width 2048 --num-heads 16 --seq-len 4096",
)


def of_example() -> str:
    """Two questions and their answers, as a terminal has them."""
    found = []
    for words in EXAMPLES:
        command = [sys.executable, "-m", "tools.plan", *shlex.split(words)]
        done = subprocess.run(command, cwd=about.ROOT, capture_output=True, text=True, check=True)
        found.append(f"```\n$ python -m tools.plan {words}\n{done.stdout}```")
    return "\n\n".join(found)


def of_links(known: str) -> str:
    """Steps over links; what they say of the error is for answers about a calibrated processor."""
    text, errors = plan_here.of_links(known)
    keep(
        ["gpt", "resnet"],
        ["cpu"],
        [compared(f"{recipe} {link}", about.workload(recipe), "cpu", 2, error) for recipe, link, error in errors],
    )
    return text


PARTS: dict[str, Callable[[], str]] = {
    "example": of_example,
    "published": of_print,
    "sources": of_sources,
    "questions": plan_questions.of_questions,
    "vtrain": of_vtrain,
    "curves": of_curves,
    "counts": plan_here.of_counts,
    "memory": plan_here.of_memory,
    "links": lambda: of_links(""),
}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", choices=["", *PARTS], help="one part of the page")
    parser.add_argument("--hardware", default="", help="for links: what --calibrate has written here a moment ago")
    args = parser.parse_args()
    only = args.only
    PARTS["links"] = lambda: of_links(args.hardware)
    found = {}
    for name, part in PARTS.items():
        if only in ("", name):
            began = time.monotonic()
            text = part()
            found[name] = f"{pages.measured(f'{COMMAND} --only {name}', began=began)}\n\n{text}"
    parts = pages.parts(PAGE.read_text()) | found
    pages.write(
        PAGE,
        example=parts["example"],
        published=parts["published"],
        sources=parts["sources"],
        questions=parts["questions"],
        vtrain=parts["vtrain"],
        curves=parts["curves"],
        counts=parts["counts"],
        memory=parts["memory"],
        links=parts["links"],
    )


if __name__ == "__main__":
    main()
