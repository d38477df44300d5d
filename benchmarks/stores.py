"""A save to an object store beside torch's own: `uv run python -m benchmarks.stores` writes docs/measured/survival.md.

As benchmarks.saves, by turns in one run, to moto's server in a process of its own on this machine, which keeps objects
in memory: a plain save, one in the background, and `dcp.save` with torch's FsspecWriter. Brigade's saves also compare
the replicas, write digests, renew the lease, and delete the checkpoint before. Then: how long it takes to load one.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from benchmarks import saves
from common.run import process_group
from common.run.process import Process
from common.state import checkpoint, saver, start, state_check
from common.store.objects import keeper, paths
from tests.harness import pages, runner
from tests.harness.runner import ROOT
from tests.store import server
from torch.distributed.device_mesh import init_device_mesh

ROUNDS = 7
PLAIN, BACKGROUND, DCP = "Brigade, plain", "Brigade, `--async-save`", "dcp.save, FsspecWriter"
LOAD, LOAD_DCP = "Brigade", "dcp.load, FsspecReader"
URL = f"s3://{server.BUCKET}"


def serve(told: Any) -> None:
    """A process's main function: the server, until the process is ended."""
    with server.run() as one:
        told.send(one.env)
        told.recv()


def measure(folder: str, env: dict[str, str]) -> None:
    """One rank's part; rank 0 leaves the tables."""
    os.environ |= env
    world = process_group.start(process=Process(recipe=__file__))
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    model, state = saves.make_state()
    check = state_check.StateCheck(model, compare=True)
    files = paths.filesystem("s3")
    savers = []
    for name in ("plain", "background"):
        place = keeper.Keeper(paths.parse("--out", f"{URL}/runs") / name, Path(folder) / name)
        place.claim(world.process)
        found = start.Found(place, {}, None, {}, newest=0)
        savers.append(saver.Saver(found, mesh, check, world.process, 1, name == "background"))
    plain, background = savers

    def save_dcp(i: int) -> None:
        dcp.save(dict(state), storage_writer=dcp.FsspecWriter(f"{URL}/dcp{i}"))
        if world.rank == 0 and files.exists(before := f"{URL}/dcp{i - 1}"):
            files.rm(before, recursive=True)

    ways = {
        PLAIN: lambda i: plain.save(i, state, i, last=False),
        DCP: save_dcp,
        BACKGROUND: lambda i: background.save(i, state, i, last=False),
    }
    rounds = [{name: saves.once(way, i, background) for name, way in ways.items()} for i in range(ROUNDS)]
    grown = {name: saves.peak_mb(way, background) for name, way in ways.items()}
    size = sum(tensor.nbytes for tensor in state.values()) / 1e6
    rows = [
        f"| {size:.0f} MB, 2 ranks | training held up, ms | done after, ms | of dcp.save | processor s | MB more |",
        "|---|---|---|---|---|---|",
        *(saves.row(name, DCP, rounds[1:], grown[name]) for name in ways),
    ]
    last: Any = checkpoint.folder(savers[0]._place.path, saves.ROUNDS)
    reads = {
        LOAD: lambda: checkpoint.load(last, state),
        LOAD_DCP: lambda: dcp.load(dict(state), storage_reader=dcp.FsspecReader(f"{URL}/dcp{saves.ROUNDS}")),
    }
    taken = [{name: read_once(read) for name, read in reads.items()} for _ in range(ROUNDS)]
    lines = ["| load of the same by each of 2 ranks | ms | processor s |", "|---|---|---|"]
    for name in reads:
        spread = pages.spread([1e3 * of[name][0] for of in taken[1:]], ",.0f")
        lines.append(f"| {name} | {spread} | {statistics.median(of[name][1] for of in taken[1:]):.2f} |")
    if world.rank == 0:
        Path(folder, "table").write_text("\n".join([*rows, "", *lines]))
    process_group.finish(world.process)


def read_once(read: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds until all ranks have it, and processor seconds of all ranks."""
    before = saves.processor_s()
    taken_s = saves.seconds(read)
    used = torch.tensor(saves.processor_s() - before, dtype=torch.float64)
    dist.all_reduce(used)
    return taken_s, float(used)


def main() -> None:
    """Measure on two ranks and write the page's part, or print it only (`--print`)."""
    began = time.monotonic()
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
    other.start()
    env = ours.recv()
    with tempfile.TemporaryDirectory() as folder:
        result = runner.spawn(measure, [(folder, env), (folder, env)], timeout_s=900.0)
        assert result.ok, str(result)
        table = Path(folder, "table").read_text()
    ours.send("end")
    other.join()
    print(table)
    if "--print" not in sys.argv:
        measured = pages.measured("uv run python -m benchmarks.stores", "2 ranks on gloo; moto 5", began=began)
        pages.write(ROOT / "docs" / "measured" / "survival.md", store_measured=measured, store=table)


if __name__ == "__main__":
    main()
