"""Gradient compression, cost and benefit: `uv run python -m benchmarks.compress` (root).

It writes docs/measured/compress.md. Two machines, network namespaces on a switch, with one process each, on links that
are shaped to 1 Gbit/s and to 100 Mbit/s; bytes are counted on the interface of machine 0. Accuracy is that of a whole
training of the digits.
"""

import argparse
import os
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.harness import machines, mutants, pages, runner
from tests.harness.runner import ROOT

RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
# Of a training whose accuracy counts.
LENGTH = ("--model", "resnet18", "--lr", "0.2", "--max-steps", "202", "--warmup-steps", "30")
FIRST, LAST = 4, 8  # steps that are measured: with --warmup-steps 2, powersgd compresses from the third on
MULTINODE = "recipes/multinode_resnet"
SETTINGS = {
    "ddp_resnet: one micro-batch a step": ("recipes/ddp_resnet",),
    "ddp_resnet: two micro-batches, gradients sent after each": ("every_one", "--micro-batch-size", "32"),
    "multinode_resnet: two micro-batches, gradients sent after the last": (MULTINODE,),
    "--compress bf16": (MULTINODE, "--compress", "bf16"),
    "--compress powersgd --powersgd-rank 2": (MULTINODE, "--compress", "powersgd", "--powersgd-rank", "2"),
    "--compress powersgd --powersgd-rank 4": (MULTINODE, "--compress", "powersgd", "--powersgd-rank", "4"),
}


def recipe_of(setting: tuple[str, ...], folder: Path) -> Path:
    """Folder of its train.py; "every_one" is ddp_resnet without no_sync."""
    if setting[0] != "every_one":
        return ROOT / setting[0]
    changed = {"contextlib.nullcontext() if batch.last else model.no_sync()": "contextlib.nullcontext()"}
    return mutants.mutate("ddp_resnet", folder, {"forward_backward": changed}).parent


def measure(setting: tuple[str, ...], rate: str, folder: Path) -> tuple[float, float]:
    """Bytes that a machine sends in a step, and seconds of one, median, on a shaped link."""
    folder.mkdir()
    run = folder / "runs" / "run"
    with machines.joined(folder, 2) as both:
        for one in both:
            one.shape(rate)
        flags = ["--max-steps", str(LAST + 1), "--warmup-steps", "2", "--log-every", "1", "--eval-every", "1000"]
        flags += ["--save-every", "1000", "--out", str(folder / "runs"), "--name", "run", "--model", "resnet18"]
        flags += setting[1:]
        command = ["bash", str(ROOT / "launch/torchrun.sh"), str(recipe_of(setting, folder)), *flags]
        where = {"NNODES": "2", "MASTER_ADDR": both[0].address, "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
        where |= {"RUN_KEY": secrets.token_hex(32)}
        environ = os.environ | where | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        processes = [one.popen(command, folder / "output", environ | {"NODE_RANK": str(one.number)}) for one in both]
        sent: dict[int, int] = {}
        while None in [process.poll() for process in processes]:
            file = run / "metrics.jsonl"
            step = file.read_text().count("train/loss") if file.exists() else 0
            if step not in sent:
                sent[step] = both[0].bytes_sent()
            time.sleep(0.01)
        assert not any(process.returncode for process in processes), (folder / "output").read_text()
    rates = runner.records(run, "perf/samples_per_s")
    seconds = [128 / rates[step] for step in range(FIRST, LAST + 1)]
    return (sent[LAST] - sent[FIRST - 1]) / (LAST - FIRST + 1), statistics.median(seconds)


def accuracy(setting: tuple[str, ...], folder: Path) -> float:
    """val/top1 of a whole training with two processes."""
    flags = ["--out", str(folder), "--name", "whole", "--eval-every", "100000", *LENGTH, *setting[1:]]
    result = runner.run_recipe(recipe_of(setting, folder) / "train.py", 2, *flags, timeout_s=1800)
    assert result.ok, str(result)
    (value,) = runner.records(folder / "whole", "val/top1").values()
    return value


def main() -> None:
    """Measure in turns, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    sent: dict[str, list[float]] = {name: [] for name in SETTINGS}
    seconds: dict[tuple[str, str], list[float]] = {(name, rate): [] for name in SETTINGS for rate in RATES}
    top1: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds):
            for rate, argument in RATES.items():
                for j, (name, setting) in enumerate(SETTINGS.items()):
                    megabytes, took = measure(setting, argument, Path(folder) / f"{i}-{argument}-{j}")
                    sent[name].append(megabytes / 1e6)
                    seconds[name, rate].append(took)
                    print(f"{rate:10}  {name:50}  {megabytes / 1e6:6.1f} MB  {took:5.2f} s", flush=True)
        for j, (name, setting) in enumerate(SETTINGS.items()):
            whole = Path(folder) / f"whole-{j}"
            whole.mkdir()
            top1[name] = accuracy(setting, whole)
            print(f"{name:50}  val/top1 {top1[name]:.4f}", flush=True)

    first = next(iter(SETTINGS))
    lines = []
    for name in SETTINGS:
        times = [statistics.mean(seconds[name, rate]) for rate in RATES]
        ratios = [statistics.mean(seconds[first, rate]) / took for rate, took in zip(RATES, times, strict=True)]
        cells = [f"{took:.2f} s ({ratio:.1f}x)" for took, ratio in zip(times, ratios, strict=True)]
        lines.append(f"| {name} | {statistics.mean(sent[name]):.1f} | {' | '.join(cells)} | {100 * top1[name]:.1f} |")
    head = f"| | MB sent by a machine in a step | a step at {' | a step at '.join(RATES)} | accuracy, % |"
    rule = f"|---|---|{'---|' * len(RATES)}---|"
    pages.write(
        ROOT / "docs/measured/compress.md",
        measured=pages.measured(f"uv run python -m benchmarks.compress --rounds {rounds}", "gloo"),
        table="\n".join([head, rule, *lines]),
    )


if __name__ == "__main__":
    main()
