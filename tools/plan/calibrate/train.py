"""Measures what a machine can do, in each rank at once: products, memory, and an all-reduce over sizes.

`python -m tools.plan --calibrate FILE` starts it with launch/torchrun.sh; to measure several machines, start it as any
recipe, on all of them. Rank 0 writes the figures as JSON to --name in --out.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from common import ranks
from common.protect import watch
from common.run import cli, exits, process_group
from common.run.process import Process

SIDES = (256, 512, 1024, 2048)  # of square matrices; GPUs take 8 times as many
COPY_BYTES = 2**27
SENT = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24)  # bytes of an all-reduce
ROUNDS = 5
ENOUGH_S = 2.0


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure this machine."""

    out: str = "runs/calibrate"  # folder for the figures
    name: str = "measured.json"  # file for the figures
    backend: str = "auto"  # auto (NCCL on GPUs, else gloo), gloo or nccl


def best(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some rounds, which all ranks begin together; of one, where a round takes long."""
    found, all_s = float("inf"), 0.0
    for _ in range(ROUNDS):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        found = min(found, took)
        all_s += max(ranks.gather(took))  # the same number on all ranks, so that they stop together
        if all_s > ENOUGH_S:
            break
    return found


def products(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest product of square matrices.

    A processor without instructions for bfloat16 may need minutes for a large one, so none follows one that took long.
    """
    found = 0.0
    for side in SIDES:
        n = side * (8 if device.type == "cuda" else 1)
        a = torch.randn(n, n, device=device).to(dtype)
        took = best(lambda a=a: a @ a, device)  # type: ignore[misc]
        found = max(found, 2 * n**3 / took)
        if max(ranks.gather(took)) > ENOUGH_S / 8:  # the next one takes eight times as long
            break
    return found


def line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of an empty message, and seconds a byte: the least of the small ones, and the slope of the large ones."""
    latency = min(seconds for _, seconds in points[:2])
    (small, first), (large, last) = points[-2], points[-1]
    return latency, max(last - first, 1e-9) / (large - small)


@exits.entry
def main(process: Process) -> None:
    """Measure, and write."""
    args = cli.parse(Args)
    world = process_group.start(args.backend, "float32", process)
    ranks.check_same(code=ranks.code_digests(__file__), version=ranks.versions())
    process.watch = watch.Watch(world)
    device = world.device
    # A cache's worth would be no memory: a copy reads and writes as many bytes as it has.
    source = torch.zeros(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    points = []
    for size in SENT:
        sent = torch.zeros(size // 4, device=device)
        points.append((size, best(lambda sent=sent: dist.all_reduce(sent), device)))  # type: ignore[misc]
    latency, byte_s = line(points)
    small = torch.zeros(8, device=device)
    found = {
        "peak_16bit": products(device, torch.bfloat16),
        "peak_float32": products(device, torch.float32),
        "memory_bandwidth": 2 * COPY_BYTES / best(lambda: target.copy_(source), device),
        "launch_s": best(lambda: [small.add_(1) for _ in range(1000)], device) / 1000,
        "latency_s": latency,
        "byte_s": byte_s,
        "world_size": world.size,
        "local_size": world.local_size,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
    }
    every = ranks.gather(found)
    if world.rank == 0:
        slowest = {key: min(one[key] for one in every) for key in ("peak_16bit", "peak_float32", "memory_bandwidth")}
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / args.name).write_text(json.dumps(found | slowest))
    process_group.finish(process)


if __name__ == "__main__":
    main()
