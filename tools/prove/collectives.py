"""Bytes a second of each collective on this world, over sizes; and whether what arrives is right."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LEAST = 2**16  # bytes
TIMES = 5


def run(flags: list[str], env: dict[str, str], log: str) -> None:
    """Measure on this rank; rank 0 writes the file.

    Args:
        flags: the file, and the largest size in bytes.
        env: the whole environment of this rank.
        log: file for what it prints.
    """
    with Path(log).open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    from common.run import process_group

    world = process_group.start()
    rows = []
    size = LEAST
    while size <= int(flags[1]):
        for name, (call, moved, right) in calls(world, size).items():
            times = []
            for _ in range(TIMES + 1):  # the first one connects
                dist.barrier()
                wait(world)
                began = time.perf_counter()
                call()
                wait(world)
                times.append(time.perf_counter() - began)
            # The slowest rank's time: a collective is over when it is over everywhere.
            slowest = torch.tensor([sorted(times[1:])[TIMES // 2], 0.0 if right() else 1.0], device=world.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds, wrong = slowest.tolist()
            rows.append({"collective": name, "bytes": size, "bytes_per_s": moved / seconds, "right": wrong == 0.0})
        size *= 16
    if world.rank == 0:
        Path(flags[0]).write_text(json.dumps(rows))
    process_group.finish(world.process)


def wait(world: Any) -> None:
    """Wait until this rank's device has done what it was asked to do."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def calls(world: Any, size: int) -> dict[str, tuple[Callable[[], Any], int, Callable[[], bool]]]:
    """Each collective on `size` bytes: the call, the bytes that leave each rank at least, and whether it was right.

    Bytes are those of the best algorithm, as in https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    ("bus bandwidth"), so the figures of different collectives and numbers of ranks can be compared with the link's.
    """
    n, rank = world.size, world.rank
    count = size // 4 // n * n
    part, size = count // n, count * 4

    def full(number: int, value: float) -> torch.Tensor:
        return torch.full((number,), float(value), device=world.device)

    def parts(values: list[float]) -> torch.Tensor:
        return torch.cat([full(part, value) for value in values])

    every = [float(other) for other in range(n)]
    reduced, whole, sent, shared = full(count, 1), full(count, 0), full(count, rank + 1), full(count, rank)
    mine, scattered, pieces, got = full(part, rank), full(part, 0), parts(every), full(count, 0)
    source, came = parts([rank * n + other for other in every]), full(count, -1)

    def all_reduce() -> None:
        reduced.fill_(1.0)
        dist.all_reduce(reduced)

    def neighbours() -> None:
        send = dist.P2POp(dist.isend, sent, (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, got, (rank - 1) % n)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    ring = size * (n - 1) // n
    return {
        "all-reduce": (all_reduce, 2 * ring, lambda: bool((reduced == n).all())),
        "all-gather": (
            lambda: dist.all_gather_into_tensor(whole, mine),
            ring,
            lambda: torch.equal(whole, parts(every)),
        ),
        "reduce-scatter": (
            lambda: dist.reduce_scatter_tensor(scattered, pieces),
            ring,
            lambda: bool((scattered == rank * n).all()),
        ),
        "broadcast": (lambda: dist.broadcast(shared, 0), size, lambda: bool((shared == 0).all())),
        "all-to-all": (
            lambda: dist.all_to_all_single(came, source),
            ring,
            lambda: torch.equal(came, parts([other * n + rank for other in every])),
        ),
        "send to the next rank": (neighbours, size, lambda: bool((got == (rank - 1) % n + 1).all())),
    }


def read(file: Path) -> list[dict[str, Any]]:
    """What rank 0 has written."""
    return list(json.loads(file.read_text()))
