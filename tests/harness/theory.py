"""What each strategy should hold and send by the textbook, for a model as benchmarks/strategies.py measures it."""

import functools
import itertools
import runpy

import torch
from common.workloads import gpt, moe

from tests.harness import runner
from tests.harness.runner import ROOT

LAYERS = 8
WIDTH = 256
LENGTH = 64
BATCH = 16
REPLICAS = ("accelerate_gpt", "ddp_gpt")
OUTER = ("--inner-steps", "1")  # of diloco_gpt: each step, also the measured one, ends with an outer step
EXPERTS, TOP_K = 8, 2  # of moe_gpt
RECIPE = "pipeline_gpt"
NAIVE = "GPipe, 1 micro-batch"  # one rank computes at a time
DEFAULT, *OTHERS = runner.choices(RECIPE, "--schedule")
NAMES = [NAIVE, "GPipe", DEFAULT, *(name for name in OTHERS if name != "GPipe")]
SENT_HEAD = """\
| recipe | ranks N | kind | calls | MB | textbook | MB | left out, MB | unexplained | small calls |
|---|---|---|---|---|---|---|---|---|---|"""
SHOWN = (  # the rows of "Sent" that everybody should see: how they begin
    "ddp_gpt | 4 | all-reduce",
    "fsdp_gpt | 4 | all-gather",
    "fsdp_gpt | 4 | reduce-scatter",
    "fsdp_gpt --dp-replicate 2 | 4 | all-reduce",
    "tensor_gpt --tp 4 | 4 | all-gather",
    "tensor_gpt --tp 4 | 4 | reduce-scatter",
    "context_gpt --cp 4 --cp-kind ring | 4 | send",
    "context_gpt --cp 4 --cp-kind allgather | 4 | all-gather",
    "context_gpt --cp 4 --cp-kind ulysses | 4 | all-to-all",
    "moe_gpt --ep 4 --ep-kind exchange | 4 | all-to-all",
    "moe_gpt --ep 4 --ep-kind gather | 4 | all-gather",
    "moe_gpt --ep 2 --ep-kind exchange | 4 | all-gather",
    f"pipeline_gpt --pp 4 --schedule {DEFAULT} | 4 | send",
    f"pipeline_gpt --pp 2 --schedule {DEFAULT} | 4 | all-reduce",
)


def flag(name: str) -> str:
    """What --schedule is for a row of the tables."""
    return "GPipe" if name == NAIVE else name


@functools.cache
def stages(name: str, num_ranks: int) -> list[list[int]]:
    """Numbers of the stages of each rank of a pipeline, as the recipe has them."""
    recipe = runpy.run_path(str(ROOT / "recipes" / RECIPE / "train.py"))
    args = recipe["Args"](schedule=flag(name), pp=num_ranks)
    return [recipe["stage_numbers"](args, rank) for rank in range(num_ranks)]


def model_bytes(*names: str, experts: int = 1) -> int:
    """Of the parameters of the whole model, in float32, whose name has one of these in it."""
    with torch.device("meta"):
        model = moe.with_experts(gpt.GPT(gpt.Shape(256, LAYERS, 4, WIDTH)), moe.Routing(experts, TOP_K))
    return sum(4 * p.numel() for name, p in model.named_parameters() if any(part in name for part in names))


P, BLOCK, NORMS = model_bytes(""), model_bytes("blocks.0."), model_bytes("norm")
M, X = model_bytes("", experts=EXPERTS), model_bytes("mlp.experts.", experts=EXPERTS)  # with experts, and these alone
Term = tuple[str, float]  # a formula in words, and its bytes


def options(layout: runner.Layout) -> dict[str, str]:
    """Its flags."""
    return dict(zip(layout.flags[::2], layout.flags[1::2], strict=True))


def owners(layout: runner.Layout) -> list[int]:
    """Rank, in its pipeline, of each stage."""
    flags = options(layout)
    of_ranks = stages(flags["--schedule"], int(flags["--pp"]))
    return [rank for _, rank in sorted((stage, rank) for rank, stages in enumerate(of_ranks) for stage in stages)]


def stage_bytes(layout: runner.Layout) -> list[int]:
    """Parameters of each stage: its blocks, and what comes before the first and after the last."""
    num = len(owners(layout))
    sizes = [BLOCK * (LAYERS * (i + 1) // num - LAYERS * i // num) for i in range(num)]
    sizes[0] += model_bytes("embed")
    sizes[-1] += model_bytes("head") + 4 * WIDTH
    return sizes


def share(layout: runner.Layout, rank: int) -> Term:
    """What a rank should hold of the parameters; the optimizer's state is twice that."""
    flags = options(layout)
    if "--pp" in flags:
        of = zip(owners(layout), stage_bytes(layout), strict=True)
        return "its own layers", sum(size for owner, size in of if owner == rank // layout.dp_size)
    if layout.recipe in REPLICAS or "--inner-steps" in flags:
        return "P", P
    name, whole = ("M", M) if "--ep" in flags else ("P", P)
    if "--dp-replicate" in flags:
        return f"{name}/S", whole / (layout.size // int(flags["--dp-replicate"]))
    return f"{name}/N", whole / layout.size


def traffic(layout: runner.Layout, rank: int) -> dict[str, list[Term]]:
    """What a rank should send in a step, by kind: first the textbook's term, then what it leaves out."""
    flags, found = options(layout), dict[str, list[Term]]()
    rest = P - LAYERS * BLOCK  # what FSDP gathers first, and gives back last
    stream = 4 * BATCH * LENGTH * WIDTH / layout.dp_size  # of a group's part of the batch
    if layout.recipe in REPLICAS:
        found["all-reduce"] = [("P", P)]
    elif "--inner-steps" in flags:  # in a step that ends with an outer one
        alone: Term = ("DDP of one rank calls it, and sends nothing", P)
        in_replica: Term = ("the replica's gradients", P)
        found["all-reduce"] = [("P", P), in_replica if "--replicas" in flags else alone]
    elif "--ep" in flags:
        found |= experts(layout, int(flags["--ep"]), stream)
        if "--dp-replicate" in flags:
            found["all-reduce"] = [share(layout, rank)]
    elif layout.recipe in ("fsdp_gpt", "context_gpt"):
        found["all-gather"] = [("2 P", 2 * P), ("first and last layers gathered once", -rest)]
        found["reduce-scatter"] = [("P", P)]
        if "--dp-replicate" in flags:
            found["all-reduce"] = [share(layout, rank)]
        if layout.recipe == "context_gpt":
            for kind, (words, streams) in context(flags["--cp-kind"], int(flags["--cp"])).items():
                first = found.get(kind, [("", 0.0)])[0]
                term = (" + ".join(filter(None, [first[0], words])), first[1] + streams * LAYERS * stream)
                found[kind] = [term, *found.get(kind, [])[1:]]
    elif layout.recipe == "tensor_gpt":
        tp, fsdp = int(flags["--tp"]), int(flags["--tp"]) < layout.size
        ends: Term = ("around embedding and last norm", 2 * stream)
        found["all-gather"] = [
            ("4 L B T C + 2 P/tp" * fsdp or "4 L B T C", 4 * LAYERS * stream + 2 * P / tp * fsdp),
            ends,
        ]
        found["reduce-scatter"] = [
            ("4 L B T C + P/tp" * fsdp or "4 L B T C", 4 * LAYERS * stream + P / tp * fsdp),
            ends,
        ]
        sliced_loss = ("the loss over sliced logits", 3 * stream / WIDTH)
        found["all-reduce"] = [("none", 0.0), sliced_loss, ("gradients of norms", NORMS)]
        found["broadcast"] = [("norms", NORMS * tp / layout.size)]
        if fsdp:
            whole = NORMS * (1 - 1 / tp)
            once = (rest - 4 * WIDTH) / tp + 4 * WIDTH
            found["all-gather"] += [("norms are whole", 2 * whole), ("first and last layers gathered once", -once)]
            found["reduce-scatter"] += [("norms are whole", whole)]
    elif "--pp" in flags:
        me = rank // layout.dp_size
        count = sum(me in border for border in itertools.pairwise(owners(layout)) if border[0] != border[1])
        found |= {kind: [(f"{count} B T C", count * stream)] for kind in ("send", "receive")}
        if layout.dp_size > 1:
            found["all-reduce"] = [share(layout, rank)]
    return found


def context(kind: str, cp: int) -> dict[str, Term]:
    """What attention sends in a block's forward and backward pass, by kind of call; as a multiple of B T C.

    Keys and values are as wide as the residual stream here: the model has no grouped heads.
    """
    if kind == "ulysses":  # queries, keys, values, results; and their gradients
        return {"all-to-all": ("8 L B T C / cp", 8 / cp)}
    if kind == "allgather":  # keys and values, again in the backward pass; and their gradients
        return {"all-gather": ("4 L B T C", 4.0), "reduce-scatter": ("2 L B T C", 2.0)}
    hops: Term = ("6 L B T C (cp - 1) / cp", 6 * (cp - 1) / cp)  # of the same
    return {"send": hops, "receive": hops}


def experts(layout: runner.Layout, ep: int, stream: float) -> dict[str, list[Term]]:
    """What moe_gpt sends in a step, by kind: what FSDP does, and tokens. Of an exchange, the mean over the ranks."""
    flags = options(layout)
    sharded = layout.size // int(flags.get("--dp-replicate", 1)) > ep  # an expert lies on several ranks
    rest = P - LAYERS * BLOCK
    gathers, scatters = ["2 (M - X)"], ["M - X"]
    gathered, scattered = 2.0 * (M - X), 1.0 * (M - X)
    if sharded:
        gathers, scatters = [*gathers, "2 X/ep"], [*scatters, "X/ep"]
        gathered, scattered = gathered + 2 * X / ep, scattered + X / ep
    group = stream * ep  # the residual stream of the ranks that share experts
    if flags["--ep-kind"] == "exchange":
        tokens = {"all-to-all": [("4 L b T k C", 4 * LAYERS * TOP_K * stream)]}
    else:
        tokens = {}
        gathers, scatters = [*gathers, "L ep b T (2 C + 3 k)"], [*scatters, "L ep b T (2 C + k)"]
        gathered += LAYERS * group * (2 + 3 * TOP_K / WIDTH)
        scattered += LAYERS * group * (2 + TOP_K / WIDTH)
    return {
        "all-gather": [(" + ".join(gathers), gathered), ("first and last layers gathered once", -rest)],
        "reduce-scatter": [(" + ".join(scatters), scattered)],
        **tokens,
    }


# --- Layouts that are measured --------------------------------------------------------------------------------


def gpt_layouts() -> list[runner.Layout]:
    """Those of 2 and 4 ranks, of the GPT recipes, without the odd sizes of tests; hybrids with one schedule."""
    found = []
    for recipe in runner.RECIPES:
        if runner.has_flag(recipe, "--experts"):  # which the layouts of tests do not have
            found += with_experts(recipe)
            continue
        for one in runner.layouts(recipe) if runner.workload(recipe) == "gpt" else []:
            again = one.dp_size > 1 and options(one).get("--schedule", DEFAULT) != DEFAULT
            if one.size in (2, 4) and not again and options(one).get("--pp") != "1":
                apart = runner.has_flag(recipe, "--inner-steps")
                found.append(runner.Layout(recipe, one.size, OUTER if apart else one.strategy, one.dp_size))
                if apart and one.size == 4:
                    found.append(runner.Layout(recipe, one.size, (*OUTER, "--replicas", "2"), one.dp_size))
    return found


def with_experts(recipe: str) -> list[runner.Layout]:
    """All experts on 2 or 4 ranks, in both ways; and on 2 of 4, with FSDP between them or as replicas."""
    kinds = [("--ep-kind", kind) for kind in runner.choices(recipe, "--ep-kind")]
    found = [(size, ("--ep", str(size), *kind)) for size in (2, 4) for kind in kinds]
    found += [(4, ("--ep", "2", *kinds[0])), (4, ("--dp-replicate", "2", "--ep", "2", *kinds[0]))]
    return [runner.Layout(recipe, size, flags, size) for size, flags in found]


def title(layout: runner.Layout) -> str:
    """As a row has it."""
    return " ".join([layout.recipe, *layout.flags]) + f" | {layout.size}"


def sent_table(rows: list[str]) -> str:
    """The rows of SHOWN; the file beside the page has all of them."""
    return "\n".join([SENT_HEAD, *(row for start in SHOWN for row in rows if row.startswith(f"| {start} |"))])


def sent_file(rows: list[str]) -> list[list[str]]:
    """Head and rows of that file."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (SENT_HEAD.splitlines()[0], *rows)]
