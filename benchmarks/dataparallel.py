"""Replicas run by threads against replicas run by processes: `uv run python -m benchmarks.dataparallel`.

It writes docs/dataparallel.md. Two replicas of a model each do forward and backward passes on samples of their own, on
a core each: in two threads of one process, as nn.DataParallel runs its replicas, and in two processes, as
DistributedDataParallel does. Nothing is sent, so that what is left is Python's global lock. By turns with one replica
alone, which says what two could reach.
"""

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from common.workloads import resnet
from tests.harness import pages
from tests.harness.runner import ROOT
from torch import nn

PAGE = ROOT / "docs" / "dataparallel.md"
REPLICAS = 2
ROUNDS = 7
PASSES_S = 2.0


class ManySmall(nn.Module):
    """A hundred layers of 32 numbers: Python calls kernels that end in microseconds, as in a model with loops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 32) to (B, 32)."""
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class FewLarge(nn.Module):
    """Four layers of 2,048 numbers: the time is in the matrix products, in which Python's lock is free."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 2048) to (B, 2048)."""
        return self.layers(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "100 layers of 32 numbers, 8 samples": (ManySmall, (8, 32)),
    "ResNet-18, 16 images of 8x8": (lambda: resnet.make_resnet("resnet18", 1, 10, 8), (16, 1, 8, 8)),
    "4 layers of 2,048 numbers, 64 samples": (FewLarge, (64, 2048)),
}


def passes_per_s(name: str, start: Any, seconds: float = PASSES_S) -> float:
    """Forward and backward passes of one replica a second, after all have arrived at `start`, a barrier."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    inputs = torch.randn(shape)
    model(inputs).sum().backward()
    start.wait()
    began = time.perf_counter()
    number = 0
    while time.perf_counter() < began + seconds:
        model(inputs).sum().backward()
        number += 1
    return number / (time.perf_counter() - began)


def in_threads(name: str, replicas: int) -> float:
    """Passes a second of all replicas, each in a thread of this process."""
    start = threading.Barrier(replicas)
    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.append(passes_per_s(name, start))) for _ in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(found)


def in_processes(pool: Any, start: Any, name: str) -> float:
    """Passes a second of all replicas, each in a process of the pool."""
    waiting = [pool.apply_async(in_worker, (name,)) for _ in range(REPLICAS)]
    assert start.parties == REPLICAS
    return sum(one.get(timeout=60) for one in waiting)


def keep(start: Any) -> None:
    """In a worker: the barrier, which goes to it when it starts only."""
    global barrier  # noqa: PLW0603
    barrier = start


def in_worker(name: str) -> float:
    """One replica, in a process of the pool."""
    return passes_per_s(name, barrier)


barrier: Any = None


def main() -> None:
    """Measure each model by turns, and write the page."""
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(REPLICAS)
    found: dict[str, dict[str, list[float]]] = {name: {"one": [], "threads": [], "processes": []} for name in MODELS}
    with spawn.Pool(REPLICAS, keep, (start,)) as pool:
        for _ in range(ROUNDS):
            for name, rates in found.items():
                rates["one"].append(in_threads(name, 1))
                rates["threads"].append(in_threads(name, REPLICAS))
                rates["processes"].append(in_processes(pool, start, name))
    lines = [
        "| model | one replica, passes/s | two threads | two processes | threads gain | processes gain |",
        "|---|---|---|---|---|---|",
    ]
    for name, rates in found.items():
        medians = [statistics.median(values) for values in rates.values()]
        gains = []
        for way in ("threads", "processes"):
            ratios = [two / one for two, one in zip(rates[way], rates["one"], strict=True)]
            gains.append(pages.spread(ratios, ".2f"))
        cells = [name, *(f"{median:,.0f}" for median in medians), *gains]
        lines.append(f"| {' | '.join(cells)} |")
    measured = pages.measured("uv run python -m benchmarks.dataparallel", "a core a replica")
    pages.write(PAGE, measured=measured, threads="\n".join(lines))


if __name__ == "__main__":
    main()
