"""Published measurements beside predictions: published.csv, llm_foundry.csv, and vTrain's 1,440 steps on A100.

What the fractions are fitted to: all rows of published.csv, those of llm_foundry.csv that `held_out` does not take, and
every 48th of vTrain's steps. Everything else is only compared.
"""

import csv
import dataclasses
import math
import random
import re
import statistics
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.plan import fit, hardware, transformer
from tools.plan.count import Case
from tools.plan.fit import Measured
from tools.plan.transformer import Layout, Shape

FOLDER = Path(__file__).parent
TERA = 1e12
# What programs hold and send that their rows do not say: bytes of parameters where they are kept, of the optimizer's
# state with a master copy where there is one, and of a gradient that is sent.
MASTER = {"storage": 2, "optimizer": 12, "grad_bytes": 4}
FLOAT32 = {"storage": 4, "optimizer": 8, "grad_bytes": 4}
PROGRAMS: dict[str, dict[str, Any]] = {
    # Its kernels are joined by hand, but those of attention: flash attention came later. In 2021 it sent gradients when
    # the backward pass was over.
    "megatron": {**MASTER, "compiled": True, "flash": False, "overlapped": False},
    # Its README on these rows: communication of all kinds is overlapped with computation.
    "megatron-core": {**MASTER, "compiled": True, "sums_hidden": True},
    # 126 layers, so that the first and the last stage have one less (https://arxiv.org/abs/2407.21783, 3.3.2).
    "meta": {**MASTER, "compiled": True, "balanced": True},
    # Stages by the FLOPs of their blocks; norms and positions by flash attention's kernels, which join small operators.
    "nanotron": {**MASTER, "compiled": True, "balanced": True},
    "torchtitan": FLOAT32,
    "llm-foundry": {**FLOAT32, "grad_bytes": 2, "compiled": True},
}


YEARS = {
    "megatron": 2021,
    "llm-foundry": 2023,
    "megatron-core": 2024,
    "meta": 2024,
    "torchtitan": 2025,
    "nanotron": 2025,
}


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        name: of the row.
        source: where it stands.
        shape: of the GPT.
        layout: over ranks.
        machine: by hardware.toml.
        step_s: measured, from what the source states.
        memory_gib: measured, or 0.
        program: that was run.
    """

    name: str
    source: str
    shape: Shape
    layout: Layout
    machine: hardware.Hardware
    step_s: float
    memory_gib: float
    program: str

    @property
    def measured(self) -> Measured:
        """For the fit."""
        return Measured((transformer.work(self.shape, self.layout),), self.machine, self.step_s)

    @property
    def local_tokens(self) -> float:
        """Tokens of a GPU in a step."""
        return self.layout.global_batch * self.shape.seq_len / self.layout.size

    @property
    def group(self) -> str:
        """What is left out with it: its source, and of llm-foundry's tables that of its hardware."""
        is_foundry = self.program == "llm-foundry"
        return f"llm-foundry on {self.machine.name}" if is_foundry else re.split(r" \(", self.source)[0]


def raw() -> list[dict[str, str]]:
    """All lines of published.csv."""
    with (FOLDER / "published.csv").open() as file:
        return list(csv.DictReader(file))


def gpts() -> list[Row]:
    """The rows of GPTs that can be predicted."""
    machines = hardware.table()
    return [_row(line, machines[line["hardware"]]) for line in raw() if line["kind"] == "gpt" and not line["refuse"]]


def _row(line: dict[str, str], machine: hardware.Hardware) -> Row:
    keys = ("width", "layers", "heads", "kv_heads", "mlp_width", "vocab", "seq_len")
    shape = Shape(**{key: int(line[key]) for key in keys}, gated=line["gated"] == "1", tied=line["tied"] == "1")
    own = PROGRAMS[line["program"]]
    layout = Layout(
        dp=int(line["dp"]),
        tp=int(line["tp"]),
        pp=int(line["pp"]),
        virtual=int(line["virtual"]),
        micro_batch=int(line["micro_batch"]),
        global_batch=int(line["global_batch"]),
        recompute=line["recompute"],
        zero=int(line["zero"]),
        local_size=int(line["gpus_per_node"]),
        # Sequence parallelism came with selective recomputation (https://arxiv.org/abs/2205.05198).
        sequence=not (line["program"] == "megatron" and line["recompute"] == "full"),
        **{"compiled": line["compiled"] == "1"} | own,
    )
    step = step_s(line["metric"], float(line["value"]), shape, layout, machine)
    memory = float(line["memory_gib"] or 0)
    return Row(line["name"], line["source"], shape, layout, machine, step, memory, line["program"])


def counted_flops(shape: Shape, recompute: str) -> float:
    """FLOPs of a sequence as sources count them, with the whole square of attention, forward, backward and again."""
    layer = shape.layer_flops + 2 * shape.seq_len * shape.seq_len * shape.width
    return 3 * (shape.layers * layer + shape.head_flops) + (shape.layers * layer if recompute == "full" else 0)


def step_s(metric: str, value: float, shape: Shape, layout: Layout, machine: hardware.Hardware) -> float:
    """Seconds of a step, from the figure that a source states."""
    flops = counted_flops(shape, "none") * layout.global_batch / layout.size
    again = counted_flops(shape, "full") * layout.global_batch / layout.size
    tokens = layout.global_batch * shape.seq_len / layout.size
    return {
        "tflops_per_gpu": lambda: flops / (value * TERA),
        "tflops_hw_per_gpu": lambda: again / (value * TERA),
        "mfu": lambda: flops / (value / 100 * machine.peak_16bit),
        "tokens_per_s_per_gpu": lambda: tokens / value,
        "step_s": lambda: value,
        "step_ms": lambda: value / 1e3,
    }[metric]()


# Width, layers and heads of MPT models; a vocabulary of 50,368, four times the width in an MLP, tied.
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}


def foundry() -> list[Row]:
    """The rows of llm_foundry.csv."""
    machines = hardware.table()
    found = []
    with (FOLDER / "llm_foundry.csv").open() as file:
        next(file)
        for line in csv.DictReader(file):
            width, layers, heads = MPT[line["model"]]
            length, gpus, batch = int(line["seq_len"]), int(line["gpus"]), int(line["global_batch"])
            shape = Shape(width, layers, heads, heads, 4 * width, False, 50_368, length, True)
            own, recompute = PROGRAMS["llm-foundry"], "full" if line["recompute"] == "1" else "none"
            micro = int(line["micro_batch"])
            layout = Layout(gpus, micro_batch=micro, global_batch=batch, recompute=recompute, zero=3, **own)
            name = f"MPT {line['model']} {length} tokens {gpus} {line['hardware']}"
            step = batch * length / float(line["tokens_s"])
            found.append(Row(name, "llm-foundry", shape, layout, machines[line["hardware"]], step, 0, "llm-foundry"))
    return found


def held_out(row: Row) -> bool:
    """Whether no fit sees a row of llm-foundry: by a checksum of its name, half of them."""
    return zlib.crc32(row.name.encode()) % 2 == 1


# --- vTrain --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A line of a100_one_node.csv; `features` are the logarithms that say which lines are near."""

    row: Row
    measured: Measured
    group: tuple[int, ...]  # what is computed; within it, only the layout differs
    features: tuple[float, ...]


def vtrain() -> list[Step]:
    """The 1,440 steps of Megatron-DeepSpeed GPTs on 2 to 8 A100, full recomputation, 1F1B."""
    machine = hardware.table()["a100-ib"]
    found = []
    with (FOLDER / "a100_one_node.csv").open() as file:
        next(file)
        for line in csv.reader(file):
            gpus, batch, micro, width, heads, layers, length, tp, dp, pp = map(int, line[:10])
            shape = Shape(width, layers, heads, heads, 4 * width, False, 51200, length, True)
            own = PROGRAMS["megatron"]
            layout = Layout(dp, tp, pp, 1, micro, batch, "full", **own, sequence=False)
            features = tuple(math.log2(value) for value in (tp, dp, pp, micro, width, layers, batch))
            name = f"vTrain h{width} L{layers} TP{tp} DP{dp} PP{pp} micro-batch {micro} batch {batch}"
            row = Row(name, "vTrain single", shape, layout, machine, float(line[10]) / 1e3, 0, "megatron")
            found.append(Step(row, row.measured, (gpus, batch, width, heads, layers, length), features))
    return found


NEAR = (0.5, 0.5, 0.5, 0.5, 0.3, 0.3, 0.5)  # how far a line's figure is felt, in each feature


def corrected(steps: Sequence[Step], predict: Callable[[Step], float]) -> Callable[[Step], float]:
    """The formula times the mean of measured / predicted of near lines, each with the weight of its nearness.

    Nadaraya and Watson's regression of the logarithm (https://doi.org/10.1137/1109020), drawn to the formula where no
    line is near.
    """
    ratios = [math.log(one.measured.step_s / predict(one)) for one in steps]

    def better(one: Step) -> float:
        total, weight = 0.0, 0.02
        for other, ratio in zip(steps, ratios, strict=True):
            far = sum(((a - b) / s) ** 2 for a, b, s in zip(one.features, other.features, NEAR, strict=True))
            near = math.exp(-far / 2)
            total += near * ratio
            weight += near
        return predict(one) * math.exp(total / weight)

    return better


@dataclass(frozen=True)
class Errors:
    """Of predictions: shares of the measured value."""

    mean: float
    median: float
    worst: float
    count: int
    regret: float = 0.0  # how much longer the chosen layouts take than the fastest ones, on average
    worst_regret: float = 0.0

    def __str__(self) -> str:
        return f"mean {self.mean:.1%}, worst {self.worst:.0%} of {self.count}"


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """Of one against the other."""
    found = [abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]
    return Errors(statistics.fmean(found), statistics.median(found), max(found), len(found))


def judged(steps: Sequence[Step], predict: Callable[[Step], float]) -> Errors:
    """Errors of steps, and the regret of the layouts that would be chosen among them."""
    guesses = {id(one): predict(one) for one in steps}
    groups: dict[tuple[int, ...], list[Step]] = defaultdict(list)
    for one in steps:
        groups[one.group].append(one)
    lost = []
    for some in groups.values():
        if len(some) > 1:
            chosen = min(some, key=lambda one: guesses[id(one)])
            lost.append(chosen.measured.step_s / min(one.measured.step_s for one in some) - 1)
    plain = errors([guesses[id(one)] for one in steps], [one.measured.step_s for one in steps])
    return dataclasses.replace(plain, regret=statistics.fmean(lost), worst_regret=max(lost))


def split(seed: int) -> tuple[Errors, Errors]:
    """Fit on a random fifth, and judge the rest: the formula alone, and with what near lines say."""
    steps = vtrain()
    random.Random(seed).shuffle(steps)  # noqa: S311 (a draw, and no secret)
    fifth, rest = steps[: len(steps) // 5], steps[len(steps) // 5 :]
    reach = fit.fit([one.measured for one in fifth], START)

    def formula(one: Step) -> float:
        return fit.predicted_s(one.measured, reach)

    return judged(rest, formula), judged(rest, corrected(fifth, formula))


# --- fits ----------------------------------------------------------------------------------------------------------

EVERY = 48  # of vTrain's steps one is fitted, or they would outweigh all others
START = hardware.Reach(attention=0.45, contention=0.3)  # of a GPU, where rows do not decide
TO_SHARED = 0.5  # how much the fractions of one family are drawn to those of all: the least error of sources left out


def fitted(rows: Sequence[Row]) -> dict[str, hardware.Reach]:
    """Achieved fractions of each family of machines, and "gpu" for all of them."""
    shared = fit.fit([one.measured for one in rows], START)
    families = sorted({one.machine.family for one in rows})
    own = {
        family: fit.fit([one.measured for one in rows if one.machine.family == family], shared, TO_SHARED)
        for family in families
    }
    return {"gpu": shared, **own}


def guess(row: Row, reaches: Mapping[str, hardware.Reach]) -> float:
    """Predicted seconds of a row's step, with the fractions of its family, or those of all."""
    return fit.predicted_s(row.measured, reaches.get(row.machine.family, reaches["gpu"]))


def may_be_fitted() -> list[Row]:
    """The rows that fractions may be fitted to."""
    return [*gpts(), *(row for row in foundry() if not held_out(row)), *(step.row for step in vtrain()[::EVERY])]


def left_out(rows: Sequence[Row], held: Sequence[Row] = ()) -> dict[str, float]:
    """Predicted seconds of each row, and of those held out, by fractions fitted to `rows` of all other sources."""
    groups = sorted({one.group for one in rows})
    with ProcessPoolExecutor(2) as pool:
        fits = pool.map(fitted, [[one for one in rows if one.group != group] for group in groups])
        found = dict(zip(groups, fits, strict=True))
    return {one.name: guess(one, found[one.group]) for one in (*rows, *held)}


# --- images --------------------------------------------------------------------------------------------------------

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "tf32": "float32"}


@dataclass(frozen=True)
class Images:
    """A published rate of ResNet-50; its work is counted in recipes/ddp_resnet."""

    name: str
    source: str
    case: Case
    machine: hardware.Hardware
    step_s: float


def resnets() -> list[Images]:
    """The rows of ResNet-50 that state a rate."""
    machines = hardware.table()
    found = []
    for line in raw():
        if line["kind"] == "resnet50" and line["metric"] == "images_per_s" and not line["refuse"]:
            batch, gpus = line["global_batch"], int(line["gpus"])
            precise = ("--matmul-precision", "high") if line["dtype"] == "tf32" else ()
            flags = ("--model", "resnet50", "--image-size", "224", "--global-batch-size", batch, "--data", "imagenet")
            case = Case(
                FOLDER.parents[1] / "recipes/ddp_resnet", gpus, (*flags, "--dtype", DTYPES[line["dtype"]], *precise)
            )
            step = int(batch) / float(line["value"])
            found.append(Images(line["name"], line["source"], case, machines[line["hardware"]], step))
    return found
