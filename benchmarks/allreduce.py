"""All-reduce by hand and by gloo, over bytes, ranks and links: `uv run python -m benchmarks.allreduce` (root).

It writes docs/measured/allreduce.md. Machines are network namespaces on a switch, with one process each; the ways are
the functions of recipes/allreduce_resnet, and their bytes are counted on each machine's interface. `--worker FILE`
runs on each machine.
"""

import argparse
import json
import math
import os
import runpy
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
import torch
import torch.distributed as dist
from matplotlib import patches
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from tests.harness import machines, mutants, pages, runner
from tests.harness.runner import ROOT

RECIPE = "allreduce_resnet"
WAYS = ("gloo", "ring", "tree", "rank0")
RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
FREE = "not shaped"
RANKS = (2, 4, 8)
MB = (0.001, 0.064, 1.0, 16.0, 64.0, 256.0)
SLOW_MB = (0.25, 1.0, 4.0, 16.0)  # on shaped links
BUDGET_S = 1.0
ROUNDS = 3
COLOURS = {"forward": "#9bb8d9", "backward": "#4a78b0", "sending": "#d9822b", "update": "#7f7f7f"}
FIRST, LAST = 3, 6  # steps that are measured

Timings = dict[str, dict[str, dict[str, float]]]  # by way and MB: "s", and "sent", the bytes of each rank


# --- On each machine ----------------------------------------------------------------------------------------


def sent_bytes() -> int:
    """What this machine's interface has sent so far."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def run_worker(file: Path, sizes_mb: list[float]) -> None:
    """Time each way at each size, by turns; rank 0 writes the medians of the slowest rank, and what each has sent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group
    recipe = runpy.run_path(str(ROOT / "recipes" / RECIPE / "train.py"))
    ways: dict[str, Callable[..., Any]] = {"gloo": dist.all_reduce, "ring": recipe["ring"], "tree": recipe["tree"]}
    ways["rank0"] = recipe["through_rank0"]
    found: Timings = {way: {} for way in ways}
    for size_mb in sizes_mb:
        flat = torch.ones(round(size_mb * 1e6 / 4))
        took: dict[str, list[float]] = {way: [] for way in ways}
        sent: dict[str, list[list[int]]] = {way: [] for way in ways}
        for turn in range(ROUNDS + 1):
            for way, add_up in ways.items():
                # The first turn opens connections, and says how often a way fits into its time.
                times = max(1, round(BUDGET_S / took[way][0])) if turn else 1
                times = min(times, 200)
                dist.barrier()
                before, began = sent_bytes(), time.perf_counter()
                for _ in range(times):
                    add_up(flat, group=group)
                mine_s = (time.perf_counter() - began) / times
                dist.barrier()  # until then, some bytes may be on their way
                mine = torch.tensor([mine_s, (sent_bytes() - before) / times], dtype=torch.float64)
                each = [torch.empty_like(mine) for _ in range(group.size())]
                dist.all_gather(each, mine)
                took[way].append(max(float(one[0]) for one in each))
                sent[way].append([round(float(one[1])) for one in each])
        for way in ways:
            found[way][str(size_mb)] = {"s": statistics.median(took[way][1:]), "sent": sent[way][-1]}  # type: ignore[dict-item]
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# --- All machines -------------------------------------------------------------------------------------------


def measure(num_ranks: int, rate: str, sizes_mb: tuple[float, ...], folder: Path) -> Timings:
    """What the workers on so many machines have found, on links of this rate."""
    folder.mkdir()
    with machines.joined(folder, num_ranks) as them:
        for one in them:
            if rate:
                one.shape(rate)
        command = [sys.executable, "-m", "benchmarks.allreduce", "--worker", str(folder / "found.json")]
        command += ["--mb", *map(str, sizes_mb)]
        where = {"MASTER_ADDR": them[0].address, "MASTER_PORT": "29517", "WORLD_SIZE": str(num_ranks)}
        environ = os.environ | where | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        processes = [one.popen(command, folder / "output", environ | {"RANK": str(one.number)}) for one in them]
        for process in processes:
            assert not process.wait(1200), (folder / "output").read_text()
    found: Timings = json.loads((folder / "found.json").read_text())
    return found


def theory(way: str, num_ranks: int) -> tuple[float, float]:
    """Messages one after the other, and bytes of them over those of the tensor (Thakur et al. 2005)."""
    n = num_ranks
    return {
        "gloo": (2 * (n - 1), 2 * (n - 1) / n),
        "ring": (2 * (n - 1), 2 * (n - 1) / n),
        "tree": (2 * math.log2(n), 2 * (n - 1) / n),
        "rank0": (2 * (n - 1), 2 * (n - 1)),
    }[way]


def most_sent(way: str, num_ranks: int) -> float:
    """Bytes that the busiest rank sends, over those of the tensor."""
    return num_ranks - 1.0 if way == "rank0" else 2 * (num_ranks - 1) / num_ranks


def fit(found: Timings, num_ranks: int, way: str) -> tuple[float, float]:
    """Seconds of a message's start and of a byte: the least squares of the relative errors over all sizes."""
    messages, share = theory(way, num_ranks)
    took = np.array([found[way][str(size)]["s"] for size in SLOW_MB])
    terms = np.array([[messages, share * size * 1e6] for size in SLOW_MB])
    start_s, byte_s = np.linalg.lstsq(terms / took[:, None], np.ones(len(took)), rcond=None)[0]
    return start_s, byte_s


def link_rows(found: Timings, num_ranks: int, rate: str) -> list[str]:
    """Time and bytes of each way beside theory."""
    rows = []
    for way in WAYS:
        start_s, byte_s = fit(found, num_ranks, way)
        for size_mb in SLOW_MB:
            one = found[way][str(size_mb)]
            messages, share = theory(way, num_ranks)
            predicted_s = messages * start_s + share * size_mb * 1e6 * byte_s
            sent_mb = max(one["sent"]) / 1e6  # type: ignore[call-overload]
            wanted_mb = most_sent(way, num_ranks) * size_mb
            cells = [rate, way, f"{size_mb:g}", f"{sent_mb:.3f}", f"{wanted_mb:.3f}", f"{sent_mb / wanted_mb:.3f}"]
            cells += [f"{1e3 * one['s']:,.0f}", f"{1e3 * predicted_s:,.0f}", f"{one['s'] / predicted_s:.2f}"]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def draw_step(axes: Axes, title: str, steps: list[list[tuple[str, float, float]]]) -> None:
    """Draw, for each rank, what it computes and what it sends."""
    begin = steps[0][0][1]
    for rank, ((_, start_s, _), *rest) in enumerate(steps):
        computed = ("forward", start_s, min(start for name, start, _ in rest if name == "backward"))
        for name, start, end in (computed, *rest):
            row = 2 * rank + (name == "sending")
            axes.barh(row, end - start, left=start - begin, height=0.8, color=COLOURS[name], edgecolor="white", lw=0.3)
    rows = [f"rank {rank} {does}" for rank in range(len(steps)) for does in ("computes", "sends")]
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_title(f"--sync {title}", loc="left", fontsize=9)
    axes.tick_params(labelsize=7)


def draw(folder: Path, rate: str, file: Path) -> None:
    """Run some steps of each way on two machines, and draw the last one of each."""
    kinds = runner.choices(RECIPE, "--sync")
    changes = {"": {"import dataclasses": "import dataclasses\nfrom benchmarks import timeline\ntimeline.watch()"}}
    found = {}
    for kind in kinds:
        recipe = mutants.mutate(RECIPE, folder / "timed", changes).parent
        step_seconds(kind, RATES[rate], folder / f"timed-{kind}", recipe)
        stamps = [folder / f"timed-{kind}" / f"timeline{rank}" for rank in range(2)]
        found[kind] = [json.loads(stamp.read_text()) for stamp in stamps]
    figure, every = plt.subplots(len(kinds), 1, figsize=(9, 1.3 * len(kinds)), sharex=True, layout="constrained")
    for axes, kind in zip(every, kinds, strict=True):
        draw_step(axes, kind, found[kind])
    every[-1].set_xlabel(f"seconds of a step of ResNet-18 on two machines, {rate}", fontsize=8)
    figure.legend(
        [patches.Patch(color=colour) for colour in COLOURS.values()],
        COLOURS,
        loc="outside upper right",
        ncols=4,
        fontsize=8,
    )
    figure.savefig(file, dpi=120)


def step_seconds(sync: str, rate: str, folder: Path, recipe: Path | None = None) -> float:
    """Seconds of a training step on two machines, median; "none" sends nothing, "ddp" is ddp_resnet."""
    folder.mkdir(parents=True)
    recipe = recipe or ROOT / "recipes" / ("ddp_resnet" if sync == "ddp" else RECIPE)
    if sync == "none":
        recipe = mutants.mutate(RECIPE, folder, {"forward_backward": {"sync_gradients(args, model)": "None"}}).parent
    run = folder / "runs" / "run"
    with machines.joined(folder, 2) as both:
        for one in both:
            one.shape(rate)
        flags = ["--max-steps", str(LAST + 1), "--log-every", "1", "--eval-every", "1000", "--save-every", "1000"]
        flags += ["--check-every", "0", "--out", str(folder / "runs"), "--name", "run", "--dtype", "float32"]
        flags += ["--model", "resnet18"]
        flags += [] if sync == "ddp" else ["--sync", "flat" if sync == "none" else sync]
        command = ["bash", str(ROOT / "launch/torchrun.sh"), str(recipe), *flags]
        where = {"NNODES": "2", "MASTER_ADDR": both[0].address, "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
        where |= {"RUN_KEY": secrets.token_hex(32), "TIMELINE": str(folder / "timeline")}
        environ = os.environ | where | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        processes = [one.popen(command, folder / "output", environ | {"NODE_RANK": str(one.number)}) for one in both]
        for process in processes:
            assert not process.wait(1200), (folder / "output").read_text()
    rates = runner.records(run, "perf/samples_per_s")
    return statistics.median(128 / rates[step] for step in range(FIRST, LAST + 1))


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--mb", type=float, nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if args.worker:
        run_worker(args.worker, args.mb)
        return
    began = time.monotonic()
    syncs = ("none", "ddp", *runner.choices(RECIPE, "--sync"))
    steps: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        free = {n: measure(n, "", MB, folder / f"free-{n}") for n in RANKS}
        links = {rate: measure(4, word, SLOW_MB, folder / word) for rate, word in RATES.items()}
        draw(folder, "1 Gbit/s", ROOT / "docs/measured/allreduce.png")
        for turn in range(args.rounds):
            for rate, word in RATES.items():
                for sync in syncs:
                    took = step_seconds(sync, word, folder / f"{turn}-{word}-{sync}")
                    steps.setdefault((sync, rate), []).append(took)
                    print(f"{rate:10}  {sync:10}  {took:.2f} s", flush=True)
    times = ["| ranks | way | " + " | ".join(f"{1e3 * mb:,.0f} kB" for mb in MB) + " |", "|---|---|" + "---|" * len(MB)]
    for n in RANKS:
        for way in WAYS:
            cells = [f"{1e3 * free[n][way][str(mb)]['s']:,.2f}" for mb in MB]
            times.append(f"| {n} | {way} | {' | '.join(cells)} |")
    head = "| link | way | MB | most sent by a rank, MB | formula, MB | ratio | ms | fit, ms | ratio |"
    bytes_rows = [head, "|---|---|---|---|---|---|---|---|---|"]
    for rate in RATES:
        bytes_rows += link_rows(links[rate], 4, rate)
    shown = ["| --sync | " + " | ".join(f"a step at {rate}, s | sending hidden, %" for rate in RATES) + " |"]
    shown.append("|---|" + "---|---|" * len(RATES))
    for sync in syncs:
        cells = []
        for rate in RATES:
            took, alone, flat = (statistics.mean(steps[one, rate]) for one in (sync, "none", "flat"))
            hidden = "" if sync == "none" else f"{100 * (flat - took) / (flat - alone):.0f}"
            cells += [f"{took:.2f}", hidden]
        label = {"none": "nothing is sent", "ddp": "ddp_resnet"}.get(sync, sync)
        shown.append(f"| {label} | {' | '.join(cells)} |")
    command = f"uv run python -m benchmarks.allreduce --rounds {args.rounds}"
    pages.write(
        ROOT / "docs/measured/allreduce.md",
        measured=pages.measured(command, "gloo", began=began),
        times="\n".join(times),
        links="\n".join(bytes_rows),
        steps="\n".join(shown),
    )


if __name__ == "__main__":
    main()
