"""Experts over ranks: loss, load, bytes and time: `uv run python -m benchmarks.moe` (root, for the shaped link).

It writes figures of docs/moe.md and two pictures, from docs/measured/moe.json, where each part is kept as soon as it is
measured: "trainings" are whole trainings with one process each, two at a time; "links" are steps of 2 and 4 ranks, on
one machine and on as many, which are network namespaces on a switch with links of 100 Mbit/s.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import re
import runpy
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
import torch
from common import keymap
from common.state import checkpoint
from common.train import flops, initial
from common.workloads import moe, text
from matplotlib import pyplot as plt
from matplotlib.colors import TwoSlopeNorm
from tests.harness import machines, pages, probes, runner
from tests.harness.runner import ROOT

CONDITIONS = {
    "trainings": "float32, one process and one thread each",
    "links": "gloo, float32, one thread a rank",
}
PAGE, JSON = ROOT / "docs" / "moe.md", ROOT / "docs" / "measured" / "moe.json"

# --- Trainings: loss and load -----------------------------------------------------------------------------

LAYERS, EXPERTS, TOP_K, LENGTH, BATCH = 4, 8, 2, 64, 32
HIDDEN = 256  # units of ddp_gpt's MLPs, as many as those of the experts of a token together
MODEL = {"num-layers": LAYERS, "width": 96, "seq-len": LENGTH, "global-batch-size": BATCH}
DENSE, BALANCED, UNBALANCED = "ddp_gpt", "moe_gpt, balance loss", "moe_gpt, no balance"
BIASES = ("--router", "sigmoid", "--balance-loss", "0")
SETTINGS: dict[str, tuple[str, ...]] = {
    DENSE: ("--mlp-width", str(HIDDEN)),
    BALANCED: (),
    "moe_gpt, biases": BIASES,
    "moe_gpt, biases x 10": (*BIASES, "--bias-rate", "0.01"),
    UNBALANCED: ("--balance-loss", "0"),
}
EVERY = 10  # steps between two records of the load
PARTS = (1, 2, 4, 8, 16, 32)  # sequences whose balance is computed together
LAST = 100  # steps at the end whose largest load stands in the table


def flags_of(setting: str) -> list[str]:
    """What is trained."""
    experts = ("--mlp-width", str(HIDDEN // TOP_K), "--experts", str(EXPERTS), "--top-k", str(TOP_K))
    sizes = itertools.chain.from_iterable((f"--{name}", str(size)) for name, size in MODEL.items())
    return [*sizes, "--dtype", "float32", *(experts if setting != DENSE else ()), *SETTINGS[setting]]


def train(setting: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Train with one process and one thread: losses and loads by step, and the experts that a warning has named."""
    recipe = setting.partition(",")[0]
    flags = [*flags_of(setting), "--max-steps", str(steps), "--seed", str(seed), "--eval-every", "50"]
    flags += ["--log-every", str(EVERY), "--save-every", str(steps), "--out", str(out), "--name", "run"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / recipe / "train.py"), *flags],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    found: dict[str, Any] = {tag: runner.records(out / "run", tag) for tag in ("train/loss", "val/loss")}
    found["idle"] = re.findall(r"no token has chosen expert (.*?) in the last", done.stdout)
    if recipe == DENSE:
        return found
    found["load_max"] = runner.records(out / "run", "train/load_max")
    loads = [runner.records(out / "run", f"load/{i}/{j}") for i in range(LAYERS) for j in range(EXPERTS)]
    found["loads"] = {step: [round(one[step], 5) for one in loads] for step in loads[0]}
    return found


def built(setting: str) -> tuple[Any, Any, Any, text.Text, text.Text]:
    """The recipe's functions, its flags, the plain model, and its data."""
    recipe = setting.partition(",")[0]
    names = runpy.run_path(str(ROOT / "recipes" / recipe / "train.py"))
    words = flags_of(setting)
    known: dict[str, Any] = {field.name: type(field.default) for field in dataclasses.fields(names["Args"])}
    given = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    args = names["Args"](**{name: known[name](value) for name, value in given.items()})
    training, validation = names["make_data"](args)
    return names, args, names["make_model"](args, training), training, validation


def size_of(setting: str) -> dict[str, float]:
    """Parameters, those of them that compute a token, and the FLOPs of a token."""
    names, args, model, training, _ = built(setting)
    every = {name: parameter.numel() for name, parameter in model.named_parameters()}
    of_experts = sum(number for name, number in every.items() if ".experts." in name)
    sample = flops.count_sample(lambda plain, batch: names["forward"](args, plain, batch)["loss"], model, training)
    total = sum(every.values())
    active = total - of_experts + of_experts * TOP_K / EXPERTS
    return {"total": total, "active": active, "flops": sample.flops / LENGTH}


def parts_of(run: Path) -> dict[int, dict[str, float]]:
    """The usual balance loss of one trained model and one batch, where this is computed in parts of so many sequences.

    It is the mean over the parts of the balance of each; and the router's gradient of it beside that of the whole
    batch, as the length of their difference in lengths of the latter.
    """
    _, args, plain, _, validation = built(BALANCED)
    model: Any = initial.materialize(plain, args.seed, torch.device("cpu"), torch.float32)
    checkpoint.load(checkpoint.folder(run, checkpoint.newest(run)), keymap.model_tensors(model))
    tokens, targets = validation.read(np.zeros(BATCH, int), np.arange(BATCH) * (len(validation) // BATCH))
    routers = [layer.router.weight for layer in moe.layers(model).values()]
    found, gradients = {}, {}
    for size in PARTS:
        losses: list[torch.Tensor] = []
        for some, wanted in zip(tokens.split(size), targets.split(size), strict=True):
            model(some, wanted)
            here: Any = moe.routed(model)
            losses.append(moe.losses(here, here.counts, BATCH * LENGTH)["balance_loss"])
        loss = torch.stack(losses).sum()
        gradients[size] = torch.cat([one.flatten() for one in torch.autograd.grad(loss, routers)])
        found[size] = {"loss": loss.item()}
    for size, gradient in gradients.items():
        found[size]["off"] = ((gradient - gradients[BATCH]).norm() / gradients[BATCH].norm()).item()
    return found


def trainings(steps: int, seeds: int, folder: Path) -> dict[str, Any]:
    """Train all, two at a time."""
    jobs = [(setting, seed) for seed in range(seeds) for setting in SETTINGS]
    places = {job: folder / f"training-{i}" for i, job in enumerate(jobs)}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = dict(zip(jobs, pool.map(lambda job: train(job[0], job[1], steps, places[job]), jobs), strict=True))
    sizes = {setting: size_of(setting) for setting in SETTINGS}
    curves = {name: [found[name, seed] for seed in range(seeds)] for name in SETTINGS}
    parts = {name: parts_of(places[name, 0] / "run") for name in (BALANCED, UNBALANCED)}
    return {"sizes": sizes, "curves": curves, "parts": parts}


# --- Links: bytes and time --------------------------------------------------------------------------------

RANKS = (2, 4)
LINK = {"layers": 2, "width": 128, "length": 64, "batch": 16, "hidden": 192}
KINDS = {"exchange": ("--ep-kind", "exchange"), "gather": ("--ep-kind", "gather"), "ep 1": ("--ep", "1")}
RATE = ("100 Mbit/s", "100mbit")
FIRST, STEPS = 3, 8  # the first step that is measured, and how many
CALLS = {  # functions of torch.distributed that bring tokens to experts, and which argument is the whole tensor
    "all_to_all_single": ("all-to-all", 0),
    "all_gather_into_tensor": ("all-gather", 0),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
}


def link_flags(kind: str, ranks: int) -> list[str]:
    """A small model with experts on each rank; --ep of all ranks, except for "ep 1"."""
    sizes = {"num-layers": LINK["layers"], "width": LINK["width"], "seq-len": LINK["length"]}
    sizes |= {"global-batch-size": LINK["batch"], "mlp-width": LINK["hidden"], "experts": EXPERTS, "top-k": TOP_K}
    ep = () if "--ep" in KINDS[kind] else ("--ep", str(ranks))
    return [*itertools.chain.from_iterable((f"--{name}", str(size)) for name, size in sizes.items()), *ep, *KINDS[kind]]


def watch(path: str, argv: list[str], file: str) -> None:
    """In a rank: run the recipe; write the seconds of each step, and the bytes and seconds of its own calls."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    marks: list[float] = []
    calls: list[tuple[int, str, int, float]] = []  # step, kind, bytes, seconds
    now = 0

    def timed(name: str) -> None:
        call = getattr(dist, name)
        kind, whole = CALLS[name]

        def called(*args: Any, **more: Any) -> Any:
            if sys._getframe(1).f_code.co_filename != path:  # FSDP's
                return call(*args, **more)
            began = time.perf_counter()
            result = call(*args, **more)
            calls.append((now, kind, args[whole].nbytes, time.perf_counter() - began))
            return result

        setattr(dist, name, called)

    def before(step: int) -> None:
        nonlocal now
        now = step
        marks.append(time.perf_counter())
        if step == FIRST + STEPS:
            seconds = [b - a for a, b in itertools.pairwise(marks)][FIRST - 1 :]
            Path(file).write_text(json.dumps({"seconds": seconds, "calls": [one for one in calls if one[0] >= FIRST]}))

    for name in CALLS:
        timed(name)
    probes.run_until(path, argv, FIRST + STEPS - 1, before, Path(file))


def on_one_machine(kind: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Seconds of steps, those in dispatch and combine, and bytes of a step by kind of call and rank."""
    found = probes.in_ranks(watch, "moe_gpt", ranks, link_flags(kind, ranks), folder, timeout_s=1200)
    steps = range(FIRST, FIRST + STEPS)
    inside = [max(sum(call[3] for call in one["calls"] if call[0] == step) for one in found) for step in steps]
    sent: dict[str, list[float]] = {}
    for which, _ in CALLS.values():
        each = [sum(call[2] for call in one["calls"] if call[1] == which) / STEPS for one in found]
        sent |= {which: each} if any(each) else {}
    seconds = [max(one["seconds"][i] for one in found) for i in range(STEPS)]
    return {"seconds": seconds, "inside": inside, "sent": sent}


def on_machines(kind: str, ranks: int, folder: Path) -> dict[str, Any]:
    """MB that a machine sends in a step, and seconds of steps, on machines with one rank each and a shaped link."""
    folder.mkdir()
    run = folder / "runs" / "run"
    last = FIRST + STEPS
    with machines.joined(folder, ranks) as them:
        for one in them:
            one.shape(RATE[1])
        flags = [*link_flags(kind, ranks), "--max-steps", str(last + 1), "--warmup-steps", "2", "--log-every", "1"]
        flags += ["--check-every", "0", "--eval-every", "100000", "--save-every", "100000", "--dtype", "float32"]
        flags += ["--out", str(folder / "runs"), "--name", "run"]
        command = ["bash", str(ROOT / "launch/torchrun.sh"), str(ROOT / "recipes/moe_gpt"), *flags]
        where = {"NNODES": str(ranks), "MASTER_ADDR": them[0].address, "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
        where |= {"RUN_KEY": secrets.token_hex(32), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        environ = os.environ | where
        processes = [one.popen(command, folder / "output", environ | {"NODE_RANK": str(one.number)}) for one in them]
        sent: dict[int, int] = {}
        while None in [process.poll() for process in processes]:
            file = run / "metrics.jsonl"
            step = file.read_text().count("train/loss") if file.exists() else 0
            if step not in sent:
                sent[step] = them[0].bytes_sent()
            time.sleep(0.005)
        assert not any(process.returncode for process in processes), (folder / "output").read_text()
    rates = runner.records(run, "perf/samples_per_s")
    begin = max(step for step in sent if step <= FIRST)  # a fast step may have been missed
    end = max(step for step in sent if step <= last)
    mb = (sent[end] - sent[begin]) / (end - begin) / 1e6
    return {"mb": mb, "seconds": [LINK["batch"] / rates[step] for step in range(FIRST + 1, last + 1)]}


def theory(kind: str, ranks: int) -> dict[str, tuple[str, float]]:
    """A step's bytes of dispatch and combine by kind of call, in words and MB: the mean over the ranks."""
    layers, tokens, width = LINK["layers"], LINK["batch"] * LINK["length"], LINK["width"]
    if kind == "exchange":  # rows to experts, results, and the gradients of both; and who sends how many
        rows = 4 * layers * tokens * TOP_K * width * 4 / ranks
        return {"all-to-all": ("16 L B T k C / ep + 8 L E", (rows + layers * EXPERTS * 8) / 1e6)}
    if kind == "gather":
        every = {"all-gather": ("L B T (8 C + 12 k)", 12), "reduce-scatter": ("L B T (8 C + 4 k)", 4)}
        return {name: (words, layers * tokens * (8 * width + k * TOP_K) / 1e6) for name, (words, k) in every.items()}
    return {}


def links(rounds: int, folder: Path) -> dict[str, Any]:
    """Measure all by turns."""
    found: dict[str, Any] = {f"{ranks} {kind}": {"here": [], "link": []} for ranks in RANKS for kind in KINDS}
    for i, ranks, kind in itertools.product(range(rounds), RANKS, KINDS):
        one = found[f"{ranks} {kind}"]
        one["here"].append(on_one_machine(kind, ranks, folder / f"here-{i}-{ranks}-{kind}"))
        one["link"].append(on_machines(kind, ranks, folder / f"link-{i}-{ranks}-{kind}"))
        print(ranks, kind, [statistics.median(one[where][-1]["seconds"]) for where in one], flush=True)
    return found


# --- The page ---------------------------------------------------------------------------------------------


def final(curve: Mapping[str, Any], tag: str = "val/loss") -> Any:
    """The value of the last step."""
    return curve[tag][max(curve[tag], key=int)]


def largest_loads(curves: list[dict[str, Any]]) -> list[float]:
    """The fullest expert of any layer, in equal shares, in each of the last records."""
    return [value for curve in curves for value in [*curve["load_max"].values()][-LAST // EVERY :]]


def curve_rows(found: dict[str, Any]) -> Iterator[str]:
    """A row for each setting."""
    yield "| | parameters | of which a token computes with | MFLOPs a token | val/loss | off, % | fullest expert |"
    yield "|---|--:|--:|--:|---|--:|---|"
    first = statistics.mean(map(final, found["curves"][DENSE]))
    for name, curves in found["curves"].items():
        sizes, losses = found["sizes"][name], [*map(final, curves)]
        cells = [name, f"{sizes['total']:,}", f"{sizes['active']:,.0f}", f"{sizes['flops'] / 1e6:.2f}"]
        cells += [pages.spread(losses, ".3f"), f"{100 * (statistics.mean(losses) / first - 1):+.1f}"]
        cells += [pages.spread(largest_loads(curves), ".2f") if name != DENSE else ""]
        yield f"| {' | '.join(cells)} |"


def idle_lines(found: dict[str, Any]) -> Iterator[str]:
    """The experts that a warning has named, and the least load of the last record."""
    for name, curves in found["curves"].items():
        if name == DENSE:
            continue
        least = min(value for curve in curves for value in final(curve, "loads"))
        named = sorted({one for curve in curves for names in curve["idle"] for one in names.split(", ")})
        words = f"warnings named {', '.join(named)}" if named else "no warning"
        yield f"- {name}: {words}. The emptiest one of the last {EVERY} steps had {least:.2f} equal shares."


def part_rows(found: dict[str, Any]) -> Iterator[str]:
    """A row for each size of the parts."""
    names = [*found["parts"]]
    yield f"| sequences of a part | parts | {' | '.join(f'{name}: loss | router gradient off, %' for name in names)} |"
    yield f"|--:|--:|{'--:|--:|' * len(names)}"
    for size in PARTS:
        each = [found["parts"][name][str(size)] for name in names]
        cells = [f"{one['loss']:.3f} | {100 * one['off']:.1f}" for one in each]
        yield f"| {size} | {BATCH // size} | {' | '.join(cells)} |"


def byte_rows(found: dict[str, Any]) -> Iterator[str]:
    """Bytes by formula and as counted."""
    yield "| ranks | kind | call | formula, bytes | MB | counted, MB | unexplained, MB | fullest rank, MB |"
    yield "|--:|---|---|---|--:|--:|--:|--:|"
    for key, one in found.items():
        ranks, _, kind = key.partition(" ")
        for call, (words, wanted) in theory(kind, int(ranks)).items():
            each = [np.mean([run["sent"][call][rank] for run in one["here"]]) / 1e6 for rank in range(int(ranks))]
            mean = float(np.mean(each))
            cells = [ranks, kind, call, words, f"{wanted:.3f}", f"{mean:.3f}", f"{abs(mean - wanted):.3f}"]
            yield f"| {' | '.join([*cells, f'{max(each):.3f}'])} |"


def time_rows(found: dict[str, Any]) -> Iterator[str]:
    """Times, and the bytes of a shaped link."""
    yield (
        f"| ranks | kind | one machine: a step, ms | of it dispatch and combine, ms | {RATE[0]}: a step, ms | ratio to "
        "exchange | MB that a machine sends |"
    )
    yield "|--:|---|---|---|---|--:|--:|"
    for key, one in found.items():
        ranks, _, kind = key.partition(" ")
        here, inside = ([1e3 * x for run in one["here"] for x in run[what]] for what in ("seconds", "inside"))
        link, usual = (
            [1e3 * x for run in found[which]["link"] for x in run["seconds"]] for which in (key, f"{ranks} exchange")
        )
        times = [
            pages.spread(here, ".0f"),
            pages.spread(inside, ".0f") if any(inside) else "",
            pages.spread(link, ".0f"),
        ]
        ratio = statistics.median(link) / statistics.median(usual)
        mb = statistics.mean(run["mb"] for run in one["link"])
        name = f"{kind}, `--ep {ranks}`" if kind != "ep 1" else "`--ep 1`"
        yield f"| {' | '.join([ranks, name, *times, f'{ratio:.2f}', f'{mb:.2f}'])} |"


def draw_curves(found: dict[str, Any], file: Path) -> None:
    """The validation loss, and the load of the fullest expert."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for i, (name, curves) in enumerate(found["curves"].items()):
        color = "black" if name == DENSE else f"C{i - 1}"
        losses = {int(step): [curve["val/loss"][step] for curve in curves] for step in curves[0]["val/loss"]}
        for j in range(len(curves)):
            left.plot([*losses], [values[j] for values in losses.values()], color=color, lw=0.6, alpha=0.5)
        means = [*map(statistics.mean, losses.values())]
        left.plot([*losses], means, "o--" if name == DENSE else "o-", color=color, ms=3, lw=1.6, label=name)
        if name != DENSE:
            right.plot([*map(int, curves[0]["load_max"])], [*curves[0]["load_max"].values()], color=color, label=name)
    left.set_title("validation loss, nats a byte", fontsize=10)
    left.legend(frameon=False, fontsize=9)
    right.axhline(1, color="grey", lw=0.8, ls=":")
    right.annotate("all experts alike", (EVERY, 1.03), fontsize=8, color="grey")
    right.set_ylim(bottom=0.9)
    right.set_title("fullest expert of any layer, in equal shares", fontsize=10)
    right.legend(frameon=False, fontsize=9, loc=(0.62, 0.58))
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def draw_loads(found: dict[str, Any], file: Path) -> None:
    """A map for each setting: a row for each layer and expert, a column for each record; black for an idle expert."""
    names = [name for name in found["curves"] if name != DENSE]
    names.sort(key=lambda name: name != UNBALANCED)
    figure, panels = plt.subplots(
        1, len(names), figsize=(3.2 * len(names) + 1.6, 5.2), sharey=True, layout="constrained"
    )
    colors = plt.get_cmap("coolwarm").copy()  # its blue is not so dark as black
    colors.set_bad("black")
    for axes, name in zip(panels, names, strict=True):
        loads = found["curves"][name][0]["loads"]
        table = np.array([*loads.values()]).T  # (layers x experts, records)
        norm = TwoSlopeNorm(1, 0, EXPERTS / TOP_K)
        edges = [*range(0, max(map(int, loads)) + 1, EVERY)]
        picture = axes.pcolormesh(edges, range(len(table) + 1), np.ma.masked_equal(table, 0), cmap=colors, norm=norm)
        for layer in range(1, LAYERS):
            axes.axhline(layer * EXPERTS, color="black", lw=1.2)
        axes.set_title(name.removeprefix("moe_gpt, "), fontsize=10)
        axes.set_xlabel("step")
        axes.tick_params(axis="y", length=0)
    panels[0].invert_yaxis()
    panels[0].set_yticks(
        [layer * EXPERTS + EXPERTS / 2 for layer in range(LAYERS)],
        [f"layer {layer}\nexperts\n0 to {EXPERTS - 1}" for layer in range(LAYERS)],
    )
    ticks = {0: "0", 0.5: "1/2", 1: "1, an equal share", 2: "2", 4: f"{EXPERTS // TOP_K}, every token"}
    bar = figure.colorbar(
        picture, ax=panels, ticks=[*ticks], label="load of an expert, in equal shares; black: no token"
    )
    bar.set_ticklabels([*ticks.values()])
    figure.savefig(file, dpi=130)
    plt.close(figure)


def page(known: dict[str, Any]) -> None:
    """Write the page's figures, and the pictures."""
    if found := known.get("trainings"):
        draw_curves(found, ROOT / "docs/measured/moe_curves.png")
        draw_loads(found, ROOT / "docs/measured/moe_loads.png")
        pages.write(
            PAGE,
            trainings_measured=found["measured"],
            curves="\n".join(curve_rows(found)),
            idle="\n".join(idle_lines(found)),
            parts="\n".join(part_rows(found)),
        )
    if found := known.get("links"):
        rows = {key: one for key, one in found.items() if key != "measured"}
        pages.write(
            PAGE,
            links_measured=found["measured"],
            bytes="\n".join(byte_rows(rows)),
            times="\n".join(time_rows(rows)),
        )


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("trainings", "links", "page"), help='"page" writes it from the file again')
    parser.add_argument("--steps", type=int, default=400, help="of a training; a multiple of 50")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    makers = {
        "trainings": lambda folder: trainings(args.steps, args.seeds, folder),
        "links": lambda folder: links(args.rounds, folder),
    }
    sizes = {"trainings": f"--steps {args.steps} --seeds {args.seeds}", "links": f"--rounds {args.rounds}"}
    for name, make in makers.items():
        if args.only in (None, name):
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                found = make(Path(folder))
            command = f"uv run python -m benchmarks.moe --only {name} {sizes[name]}"
            found["measured"] = pages.measured(command, CONDITIONS[name], began=began)
            known = json.loads(JSON.read_text()) if JSON.exists() else {}
            JSON.write_text(json.dumps(known | {name: found}) + "\n")
    page(json.loads(JSON.read_text()))


if __name__ == "__main__":
    main()
