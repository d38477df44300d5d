"""The planner beside real ranks of this machine: parts `counts`, `memory` and `links` of benchmarks/plan.py.

Links are between two network namespaces with one process each, which needs root.
"""

import ctypes
import json
import os
import re
import secrets
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import strategies
from tests.harness import machines, probes, runner, theory
from tools import about
from tools.plan import hardware, sweep
from tools.plan.calibrate import calibrate
from tools.plan.count import Case, count
from tools.plan.predict import predict
from tools.plan.work import Work

# Its figures do not matter where bytes are counted; the machine has a place for each rank.
ANY_CPU = hardware.Hardware("cpu", 1e12, 1e11, 16, 1e10, 8, 1e9, 1e9)
STEP = 3  # whose memory is looked at
FLOAT32 = ("--dtype", "float32")
NETWORKS = [one for one in about.RECIPES if about.workload(one) in ("gpt", "resnet")]


def planned(recipe: str, size: int, flags: tuple[str, ...], machine: hardware.Hardware = ANY_CPU) -> list[Work]:
    """What the planner counts."""
    return count(Case(about.ROOT / "recipes" / recipe, size, (*FLOAT32, *flags)), machine)


# Calls and bytes, by workload: the log's sums and the guard's figures, which a run reduces after the step.
RUNS_OWN = {"gpt": (2, 16), "resnet": (2, 20)}


# --- collectives -------------------------------------------------------------------------------------------------


def counted(layout: runner.Layout, folder: Path) -> list[tuple[str, int, int, float, int]]:
    """For each kind of collective: its name, calls and bytes of rank 0 in a real step, and both as planned."""
    sizes = {"--num-layers": theory.LAYERS, "--width": theory.WIDTH, "--seq-len": theory.LENGTH}
    sizes |= {"--global-batch-size": theory.BATCH}
    if "--pp" in layout.flags:
        sizes["--micro-batch-size"] = strategies.ROWS
    gpt = about.workload(layout.recipe) == "gpt"
    flags = tuple(str(word) for pair in (sizes.items() if gpt else ()) for word in pair) + layout.flags
    real = probes.in_ranks(probes.probe, layout.recipe, layout.size, list(flags), folder)[0]
    (first, *_) = planned(layout.recipe, layout.size, flags)
    found = []
    for kind in dict.fromkeys(kind for kind, _ in probes.KINDS.values() if kind != "receive"):
        ran = [size for which, size in real["calls"] if which == kind]
        mine = [one for one in first.traffic if one.kind == kind]
        if ran or mine:
            calls, bytes_ = sum(one.calls for one in mine), round(sum(one.bytes for one in mine))
            outside = RUNS_OWN[about.workload(layout.recipe)] if kind == "all-reduce" else (0, 0)
            found.append((kind, len(ran) - outside[0], 4 * sum(ran) - outside[1], calls, bytes_))
    return found


def of_counts() -> str:
    """Collectives of a step of each layout, as real ranks call them and as the planner counts them."""
    layouts = theory.gpt_layouts()
    layouts += [
        runner.Layout(one, 2, (), 2)
        for one in NETWORKS
        if about.workload(one) == "resnet" and not about.is_single(one) and not about.has_flag(one, "--sync")
    ]
    lines, equal, all_ = [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for i, layout in enumerate(layouts):
            for kind, calls, bytes_, own_calls, own_bytes in counted(layout, Path(folder) / str(i)):
                all_ += 1
                if (calls, bytes_) == (own_calls, own_bytes):
                    equal += 1
                else:
                    lines.append(
                        f"| {theory.title(layout)} | {kind} | {calls:,} | {bytes_:,} | {own_calls:,} | {own_bytes:,} |"
                    )
                    print(lines[-1], flush=True)
    text = f"Of {all_} kinds of collectives in {len(layouts)} layouts of 2 and 4 ranks, {equal} have the same calls and"
    text += " the same bytes, to the byte, as rank 0 of real ranks calls them."
    head = "| layout | ranks | kind | calls | bytes | planned calls | planned bytes |\n|---|--:|---|--:|--:|--:|--:|"
    return text + (f" The others:\n\n{head}\n" + "\n".join(lines) if lines else "")


# --- memory ------------------------------------------------------------------------------------------------------


def peak(path: str, argv: list[str], file: str) -> None:
    """In a rank: the most bytes that it holds in a step."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed leaves the process at once
    libc.mallopt(-1, 2**16)  # M_TRIM_THRESHOLD

    def before(step: int) -> None:
        if step == STEP:
            libc.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far: proc(5)
        elif step == STEP + 1:
            found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            assert found
            Path(file).write_text(json.dumps(1024 * int(found[1])))

    probes.run_until(path, argv, STEP, before, Path(file))


def large_and_small(recipe: str, size: int) -> list[tuple[str, ...]]:
    """Flags of two models that differ in what tensors hold, and in little else."""
    if about.workload(recipe) == "resnet":
        large, small = ("resnet50", "32", 8 * size), ("resnet18", "32", 2 * size)
        return [
            ("--model", model, "--image-size", side, "--global-batch-size", str(batch), "--max-steps", "10")
            for model, side, batch in (large, small)
        ]
    parts = next((flag for flag in sweep.PARTS if about.has_flag(recipe, flag)), "")
    more = (parts, str(size), *(("--micro-batch-size", "2") if parts == "--pp" else ())) if parts else ()
    batch = ("--global-batch-size", str(8 if parts else 2 * size), "--num-heads", "8", *more)
    return [
        ("--seq-len", "128", "--num-layers", "4", "--width", "512", *batch),
        ("--seq-len", "8", "--num-layers", "4", "--width", "32", *batch),
    ]


def compared(recipe: str, size: int, folder: Path) -> tuple[float, float]:
    """Bytes by which the peak of a step of the larger model exceeds that of the smaller one: measured, and planned."""
    real, plan = [], []
    for number, flags in enumerate(large_and_small(recipe, size)):
        real.append(
            max(probes.in_ranks(peak, recipe, size, list(flags), folder / f"{recipe}-{size}-{number}", timeout_s=600))
        )
        plan.append(max(work.peak_bytes for work in planned(recipe, size, flags)))
    return real[0] - real[1], plan[0] - plan[1]


def of_memory() -> str:
    """Peak memory of each recipe on 1, 2 and 4 ranks."""
    lines, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in NETWORKS:
            for size in (1,) if about.is_single(recipe) else (1, 2, 4):
                if size == 1 and about.has_flag(recipe, "--pp"):
                    continue
                real, plan = compared(recipe, size, Path(folder))
                errors.append(plan / real - 1)
                lines.append(f"| {recipe} | {size} | {real / 2**20:,.0f} | {plan / 2**20:,.0f} | {errors[-1]:+.1%} |")
                print(lines[-1], flush=True)
    text = "Peak of a step of a large model, less that of a small one (which takes away Python and the libraries), on"
    text += f" the rank that holds most: {summary(errors)}."
    head = "| recipe | ranks | measured, MiB | planned, MiB | |\n|---|--:|--:|--:|--:|"
    return "\n".join([text, "", head, *lines])


def summary(errors: list[float]) -> str:
    """Mean and worst of errors."""
    sizes = [abs(one) for one in errors]
    return f"mean {statistics.fmean(sizes):.1%}, worst {max(sizes):.1%} of {len(sizes)}"


# --- step time over links ----------------------------------------------------------------------------------------

RATES = {"not shaped": "", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
PAYLOAD = 1448 / 1514  # of an Ethernet frame: what TCP/IP's headers leave
LINKED: dict[str, tuple[str, ...]] = {  # other sizes than calibrate.RUNS
    "ddp_gpt": ("--global-batch-size", "16", "--num-layers", "5", "--width", "192", "--num-heads", "4"),
    "fsdp_gpt": ("--global-batch-size", "16", "--num-layers", "5", "--width", "192", "--num-heads", "4"),
    "tensor_gpt": ("--global-batch-size", "8", "--num-layers", "3", "--width", "128", "--num-heads", "4", "--tp", "2"),
    "pipeline_gpt": ("--global-batch-size", "16", "--num-layers", "6", "--width", "192", "--num-heads", "4"),
    "ddp_resnet": ("--global-batch-size", "64"),
}
STEPS, WARM = 24, 8


def over_link(recipe: str, flags: tuple[str, ...], rate: str, folder: Path) -> float:
    """Median seconds of a step between two machines that send no faster than this."""
    folder.mkdir()
    with machines.joined(folder, 2) as both:
        quiet = ("--save-every", "1000", "--check-every", "0", "--eval-every", "1000", "--log-every", "1")
        words = [f"recipes/{recipe}", "--max-steps", str(STEPS), *quiet, *FLOAT32, *flags]
        words += ["--out", str(folder / "runs"), "--name", "run"]
        command = ["bash", str(about.ROOT / "launch/torchrun.sh"), *words]
        environ = os.environ | {"NNODES": "2", "MASTER_ADDR": both[0].address, "RUN_KEY": secrets.token_hex(32)}
        environ |= {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
        processes = []
        for one in both:
            if rate:
                one.shape(rate)
            output = folder / f"output-{one.number}"
            processes.append(one.popen(command, output, environ | {"NODE_RANK": str(one.number)}))
        for process in processes:
            assert not process.wait(600), (folder / "output-0").read_text()[-2000:]
    lines = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    key = "perf/samples_per_s"
    rates = [line[key] for line in lines if line["step"] > WARM and key in line]
    return int(sweep.value(flags, sweep.BATCH, 0)) / statistics.median(rates)


def links(machine: hardware.Hardware) -> Iterator[tuple[str, str, float, float]]:
    """Recipe, link, seconds of a step: measured, and planned for two machines of one process each."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, rate) in enumerate(RATES.items()):
            bits = {"": 0.0, "1gbit": 1e9, "100mbit": 100e6}[rate]
            network = min(machine.link_bandwidth, bits / 8 * PAYLOAD) if bits else machine.link_bandwidth
            apart = replace(machine, local_size=1, network_bandwidth=network)
            apart = replace(apart, reach=replace(machine.reach, network=1.0))
            for recipe, flags in LINKED.items():
                plan = predict(planned(recipe, 2, flags, apart), apart).step_s
                yield recipe, name, over_link(recipe, flags, rate, Path(folder) / f"{recipe}-{number}"), plan


def of_links(known: str) -> tuple[str, list[tuple[str, str, float]]]:
    """Step times on links of three bandwidths; and recipe, link, error.

    Args:
        known: a file that --calibrate has written on this machine; "" to measure it now.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(known or Path(folder) / "mine.toml")
        if not known:
            calibrate(file)
        machine = hardware.find(str(file))
    lines, errors = [], []
    for recipe, link, real, plan in links(machine):
        errors.append((recipe, link, plan / real - 1))
        lines.append(f"| {recipe} | {link} | {real * 1e3:,.0f} | {plan * 1e3:,.0f} | {errors[-1][2]:+.0%} |")
        print(lines[-1], flush=True)
    text = "Two machines (network namespaces) of one process each, and links that `tc` shapes; fractions fitted by"
    text += f" `--calibrate` to other sizes, on one rank alone: {summary([error for *_, error in errors])}."
    head = "| recipe | link | step, ms | planned, ms | |\n|---|---|--:|--:|--:|"
    return "\n".join([text, "", head, *lines]), errors
