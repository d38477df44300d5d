"""Spectral efficiency and speed of recipes/cellfree_mimo: `uv run python -m benchmarks.mimo`.

It writes docs/measured/mimo.md and its plot. Two runs of 200 drops in the two networks of the paper; a run that is
complete in --out is not repeated. Then the bytes of the all-reduces, counted in the ranks, and the time of a coherence
block on one and two ranks, by turns. `--large` measures time and memory of the network of `--setup large` alone, once.
"""

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
import torch
from benchmarks.curves import ROOT, cpu_name
from matplotlib import pyplot as plt
from tests.harness import module, pages, runner

MIMO = "cellfree_mimo"
DROPS = 200
HALF = 10  # drops that are repeated with half the blocks
RESAMPLES = 1000
USERS, MATES = 40, 4  # of a drop, and of a pilot
BLOCKS = 100  # of a drop, by default
NETWORKS = {  # access points, antennas of each, coherence blocks of a drop
    "100 access points with 4 antennas each": (100, 4, 200),
    "400 access points with 1 antenna each": (400, 1, 400),
}
WAYS = {  # ranks and flags, for speed
    "1 process": (1, ()),
    "2 processes, `--split users`": (2, ("--split", "users")),
    "2 processes, `--split antennas`": (2, ("--split", "antennas")),
}
LARGE = {  # ranks and flags, with 128 access points and 1,000 users
    "1 process": (1, ()),
    "2 processes, `--split antennas`": (2, ("--split", "antennas")),
}
FEW, MORE = 2, 18  # blocks of a drop of the large network: the difference is the time of sixteen
LEVELS = {
    "l4": "4, centralised",
    "l3": "3, large-scale fading decoding",
    "l2": "2, averaging",
    "l1": "1, small cells",
}


def simulate(out: Path, drops: int, access_points: int, antennas: int, blocks: int) -> np.ndarray:
    """Spectral efficiencies (drops, 8, K) of a run of the recipe's own command."""
    name = f"{access_points}x{antennas}x{blocks}"
    flags = ["--access-points", str(access_points), "--antennas", str(antennas), "--global-batch-size", str(blocks)]
    words = ["bash", "launch/torchrun.sh", f"recipes/{MIMO}", *flags, "--max-steps", str(drops), "--keep", "1"]
    subprocess.run([*words, "--out", str(out), "--name", name], cwd=ROOT, check=True)
    from safetensors.torch import load_file

    (file,) = out.glob(f"{name}/checkpoints/step_{drops:08d}/*.safetensors")
    return load_file(file)["spectral_efficiency"].numpy()


def statistics_of(found: np.ndarray) -> np.ndarray:
    """Mean, 5 %, 50 % and 95 % point (4, 8) of the users of some drops (S, 8, K)."""
    users = found.swapaxes(0, 1).reshape(found.shape[1], -1)
    return np.stack([users.mean(1), *np.quantile(users, (0.05, 0.5, 0.95), axis=1)])


def table(found: np.ndarray, half: np.ndarray, series: tuple[str, ...]) -> str:
    """With standard errors: the drops are independent, so they are drawn again, with replacement.

    Args:
        found: (drops, 8, K).
        half: the same of the first drops, with half as many blocks each.
        series: names of the 8.
    """
    generator = np.random.default_rng(0)
    again = [statistics_of(found[generator.integers(len(found), size=len(found))]) for _ in range(RESAMPLES)]
    values, errors = statistics_of(found), np.std(again, axis=0)
    differences = (half - found[: len(half)]).mean(2)
    biases, doubts = differences.mean(0), differences.std(0, ddof=1) / len(half) ** 0.5
    lines = ["| level | combining | mean | 5 % | median | 95 % | bias |", "|---|---|--:|--:|--:|--:|--:|"]
    for i, name in enumerate(series):
        level, kind = name.split("_")
        local = "L-" * (kind == "mmse" and level != "l4")
        cells = [f"{value:.3f} ± {error:.3f}" for value, error in zip(values[:, i], errors[:, i], strict=True)]
        lines.append(
            f"| {LEVELS[level]} | {local}{kind.upper()} | {' | '.join(cells)} | {biases[i]:+.3f} ± {doubts[i]:.3f} |"
        )
    return "\n".join(lines)


def draw(found: dict[str, np.ndarray], series: tuple[str, ...]) -> None:
    """The distributions: a row for each network, a column for each kind of combining."""
    figure, rows = plt.subplots(2, 2, figsize=(10, 7), sharex=True, sharey=True, layout="constrained")
    for (title, drops), row in zip(found.items(), rows, strict=True):
        users = np.sort(drops.swapaxes(0, 1).reshape(len(series), -1))
        height = np.arange(1, users.shape[1] + 1) / users.shape[1]
        for axes, kind in zip(row, ("mmse", "mr"), strict=True):
            for name, values in zip(series, users, strict=True):
                if name.endswith(f"_{kind}"):
                    axes.plot(values, height, label=f"level {LEVELS[name[:2]]}")
            axes.set(title=f"{title}, {'(L-)' * (kind == 'mmse')}{kind.upper()}", xlim=(0, 15), ylim=(0, 1))
            axes.grid(alpha=0.3)
    for axes in rows[1]:
        axes.set_xlabel("spectral efficiency of a user, bit/s/Hz")
    for row in rows:
        row[0].set_ylabel("CDF")
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LEVELS))
    figure.savefig(ROOT / "docs" / "measured" / "mimo.png", dpi=110)


def counted(path: str, argv: list[str], file: str) -> None:
    """In a rank: run the recipe, and write the bytes that it gives to all-reduces over several ranks, by function."""
    import torch.distributed as dist

    real: Any = dist.all_reduce
    sums: dict[str, int] = {}

    def all_reduce(tensor: torch.Tensor, *args: Any, group: Any = None, **more: Any) -> Any:
        caller = sys._getframe(1).f_code.co_name
        if group is not None and group.size() > 1:
            sums[caller] = sums.get(caller, 0) + tensor.numel() * tensor.element_size()
        return real(tensor, *args, group=group, **more)

    dist.all_reduce = all_reduce
    try:
        runner.run_path(path, argv)
    finally:
        dist.all_reduce = real
    Path(file).write_text(json.dumps(sums))


def fronthaul(folder: Path) -> str:
    """Bytes given to all-reduces per block and at the end of a drop, beside the formulas, on 2 and 4 ranks."""
    blocks, points = 20, 100
    pairs = 2 * points * USERS * (2 * MATES + 2) + 2 * USERS
    means = 2 * USERS * (2 * MATES + 1 + 2 * MATES**2) + 2 * USERS
    lines = [
        "| | ranks | a block, bytes | K (2 K + 1) numbers | a drop's end, bytes | the formula |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for size, split in ((2, "users"), (2, "antennas"), (4, "antennas"), (4, "both")):
        file = folder / f"{size}-{split}.json"
        flags = ["--split", split, "--max-steps", "1", "--global-batch-size", str(blocks), "--out", str(folder)]
        path = str(ROOT / "recipes" / MIMO / "train.py")
        argv = [path, *flags, "--name", file.stem]
        others = [(path, argv, str(folder / f"{file.stem}-{rank}")) for rank in range(1, size)]
        result = runner.rerun(counted, [(path, argv, str(file)), *others], 300)
        assert result.ok, str(result)
        sums = json.loads(file.read_text())
        antennas = {"users": 1, "both": 2}.get(split, size)
        mine = -(-points // antennas)
        local = 2 * USERS + (pairs - 2 * USERS) * mine // points
        end = 8 * (local * (size > antennas) + means * (antennas > 1))
        block = 4 * USERS * (2 * USERS + 1) * (antennas > 1)
        measured = sums.pop("fronthaul", 0) // (blocks // (size // antennas))
        lines.append(f"| `--split {split}` | {size} | {measured:,} | {block:,} | {sum(sums.values()):,} | {end:,} |")
    return "\n".join(lines)


def timed(path: str, argv: list[str], file: str) -> None:
    """In a rank: run the recipe, and write the processor's seconds of a step, from the second step on."""
    from common.protect import watch

    real = watch.Watch.step
    times: list[float] = []

    def step(self: watch.Watch, number: int) -> None:
        times.append(time.process_time())
        real(self, number)

    watch.Watch.step = step  # type: ignore[method-assign,assignment]
    try:
        runner.run_path(path, argv)
    finally:
        watch.Watch.step = real  # type: ignore[method-assign]
    Path(file).write_text(str((times[-1] - times[1]) / (len(times) - 2)))


def rate(way: str, drops: int, folder: Path) -> tuple[float, float]:
    """Time of a coherence block in the default network in ms, and the processor's time in the busiest rank."""
    size, flags = WAYS[way]
    name = f"rate-{time.monotonic_ns()}"
    more = ["--max-steps", str(drops), "--log-every", str(drops), "--eval-every", str(drops), "--save-every"]
    path = str(ROOT / "recipes" / MIMO / "train.py")
    argv = [path, *flags, *more, str(drops), "--out", str(folder), "--name", name]
    files = [folder / f"{name}-{rank}" for rank in range(size)]
    result = runner.rerun(timed, [(path, argv, str(file)) for file in files], 900)
    assert result.ok, str(result)
    (found,) = runner.records(folder / name, "perf/samples_per_s").values()
    return 1000 / found, 1000 * max(float(file.read_text()) for file in files) / BLOCKS


def speed(repeats: int, drops: int, folder: Path) -> str:
    """Median and range of repeats that take turns."""
    rates: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(repeats):
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            rates[way].append(rate(way, drops, folder))
            print(f"{way}: {rates[way][-1]} ms", flush=True)
    lines = [
        "| | a block by the clock, ms | speed-up | processor, busiest rank, ms | speed-up |",
        "|---|--:|--:|--:|--:|",
    ]
    for way, found in rates.items():
        cells = []
        for times, alone in zip(zip(*found, strict=True), zip(*rates["1 process"], strict=True), strict=True):
            cells.append(pages.spread(times, ".2f"))
            ups = [one / time_ for one, time_ in zip(alone, times, strict=True)]
            cells.append(pages.spread(ups, ".2f"))
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def weighed(path: str, argv: list[str], file: str) -> None:
    """In a rank: run the recipe, and write its seconds by the clock, those of the processor, and its peak in bytes."""
    began = time.monotonic(), time.process_time()
    runner.run_path(path, argv)
    ended = time.monotonic(), time.process_time()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(file).write_text(json.dumps([ended[0] - began[0], ended[1] - began[1], peak]))


def drop(way: str, blocks: int, folder: Path) -> tuple[list[float], float]:
    """The most of each number that a rank has `weighed` in a drop of the large network, and level 4's mean of it."""
    size, flags = LARGE[way]
    name = f"large-{size}-{blocks}"
    path = str(ROOT / "recipes" / MIMO / "train.py")
    argv = [path, "--setup", "large", *flags, "--max-steps", "1", "--global-batch-size", str(blocks)]
    argv += ["--micro-batch-size", "1", "--out", str(folder), "--name", name]
    files = [folder / f"{name}-{rank}" for rank in range(size)]
    result = runner.spawn(weighed, [(path, argv, str(file)) for file in files], 1800)
    assert result.ok, str(result)
    (found,) = runner.records(folder / name, "se/l4_mmse").values()
    return [max(numbers) for numbers in zip(*(json.loads(file.read_text()) for file in files), strict=True)], found


def large(folder: Path) -> str:
    """Time of a block of the large network, of all the rest of a drop, and memory."""
    lines = [
        "| | a block by the clock, s | processor, busiest rank, s | the rest of a drop by the clock, s | processor, s "
        "| peak memory of a rank, GiB | mean of level 4 with MMSE, bit/s/Hz |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for way in LARGE:
        (few, _), (more, mean) = (drop(way, blocks, folder) for blocks in (FEW, MORE))
        block = [(b - a) / (MORE - FEW) for a, b in zip(few[:2], more[:2], strict=True)]
        rest = [a - FEW * one for a, one in zip(few, block, strict=False)]
        lines.append(
            f"| {way} | {block[0]:.1f} | {block[1]:.1f} | {rest[0]:.1f} | {rest[1]:.1f} "
            f"| {more[2] / 2**30:.2f} | {mean:.2f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs") / "mimo", help="folder of the two long runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drops", type=int, default=3, help="drops of a run that is timed")
    parser.add_argument("--large", action="store_true", help="measure 128 access points and 1,000 users, and no more")
    args = parser.parse_args()
    if args.large:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found_large = large(Path(folder))
        busy = f"other programs ran beside it: {os.getloadavg()[0]:.0f} processes wanted the cores"
        pages.write(
            ROOT / "docs" / "measured" / "mimo.md",
            large=pages.measured("uv run python -m benchmarks.mimo --large", "float32", busy, began=began)
            + f"\n\n{found_large}",
        )
        return
    series = module.load(MIMO).SERIES
    found = {title: simulate(args.out.resolve(), DROPS, *sizes) for title, sizes in NETWORKS.items()}
    halves = [simulate(args.out.resolve(), HALF, *sizes[:2], sizes[2] // 2) for sizes in NETWORKS.values()]
    draw(found, series)
    tables = [table(one, half, series) for one, half in zip(found.values(), halves, strict=True)]
    blocks = [str(sizes[-1]) for sizes in NETWORKS.values()]
    with tempfile.TemporaryDirectory() as folder:
        sent = fronthaul(Path(folder))
        fast = speed(args.repeats, args.drops, Path(folder))
    pages.write(
        ROOT / "docs" / "measured" / "mimo.md",
        measured=f"`uv run python -m benchmarks.mimo --repeats {args.repeats} --drops {args.drops}`,\n"
        f"{datetime.date.today()}, {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, float32.\n"
        f"{DROPS} drops of {USERS} users; {' and '.join(blocks)} coherence blocks a drop.",
        many=tables[0],
        single=tables[1],
        fronthaul=sent,
        speed=fast,
    )


if __name__ == "__main__":
    main()
