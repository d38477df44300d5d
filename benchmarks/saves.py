"""Time and memory of a save beside torch's own: `uv run python -m benchmarks.saves` writes docs/measured/survival.md.

The state of a training with Adam on 2 ranks (gloo, one thread each), the same on both, as under DDP. By turns in one
run, each after a `sync` of the whole machine: a plain save and one in the background, torch.save by rank 0 and
`dcp.save`, both flushed to the disk. Each way then deletes its checkpoint of the round before, as a training does that
keeps its newest ones. Brigade's saves also compare the replicas and write digests. Then: how long it takes to verify a
checkpoint, and to load it.
"""

import hashlib
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from common import keymap, manifest
from common.run import process_group, run_dir
from common.run.process import Process
from common.state import checkpoint, saver, start, state_check
from common.store import disk
from tests.harness import pages, runner
from tests.harness.runner import ROOT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

ROUNDS, LAYERS, WIDTH = 13, 10, 2024
PLAIN, BACKGROUND, TORCH, DCP = "Brigade, plain", "Brigade, `--async-save`", "torch.save, fsync", "dcp.save, fsync"


def make_state() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and all that a checkpoint keeps of it and of Adam, by canonical name."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    keymap.create_state(optimizer)
    state = keymap.model_tensors(model) | keymap.optimizer_tensors(model, optimizer)
    for tensor in state.values():
        if tensor.ndim:
            tensor.detach().normal_()
    return model, state


def peak_mb(save: Callable[[int], None], background: saver.Saver) -> float:
    """How much the memory of this process grew at most during one more save, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_mb("VmHWM")
    save(ROUNDS)
    background.drain()
    return memory_mb("VmHWM") - before


def memory_mb(kind: str) -> float:
    """A line of this process's status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024 / 1e6


def processor_s() -> float:
    """User and system seconds of this process, in all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(folder: str) -> None:
    """One rank's part; rank 0 leaves the tables."""
    world = process_group.start(process=Process(recipe=__file__))
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    model, state = make_state()
    check = state_check.StateCheck(model, compare=True)
    place = Path(folder)
    savers = []
    for in_background in (False, True):
        path = place / f"run{in_background}"
        run_dir.claim(path, world.process)
        dist.barrier()
        found = start.Found(disk.Disk(path), {}, None, {}, newest=0)
        savers.append(saver.Saver(found, mesh, check, world.process, 1, in_background))
    plain, background = savers

    def save_dcp(i: int) -> None:
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(place / f"dcp{i}", sync_files=True))
        delete(place / f"dcp{i - 1}")

    def save_torch(i: int) -> None:
        if world.rank == 0:
            (place / f"torch{i}").mkdir()
            with (place / f"torch{i}" / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        delete(place / f"torch{i - 1}")

    def save_in_background(i: int) -> None:
        background.save(i, state, i, last=False)

    ways = {
        PLAIN: lambda i: plain.save(i, state, i, last=False),
        DCP: save_dcp,
        BACKGROUND: save_in_background,
        TORCH: save_torch,
    }

    rounds = [{name: once(way, i, background) for name, way in ways.items()} for i in range(ROUNDS)]
    grown = {name: peak_mb(way, background) for name, way in ways.items()}
    size = sum(tensor.nbytes for tensor in state.values()) / 1e6
    rows = [
        f"| {size:.0f} MB, 2 ranks | training held up, ms | done after, ms | of dcp.save | processor s | MB more |",
        "|---|---|---|---|---|---|",
        *(row(name, DCP, rounds[1:], grown[name]) for name in ways),
    ]
    copy = statistics.median(copy_s(state) for _ in range(ROUNDS))
    rows.append(f"| a copy of the state, the limit of any stall | {1e3 * copy:,.0f} | | | | |")
    saved = checkpoint.folder(place / "runFalse", ROUNDS)
    reads: dict[str, Callable[[], object]] = {
        "verify, 2 ranks": lambda: checkpoint.choose(saved),
        "verify, 1 process": lambda: manifest.verify(saved) if world.rank == 0 else None,
        "load, 2 ranks": lambda: checkpoint.load(saved, state),
    }
    taken = [{name: seconds(read) for name, read in reads.items()} for _ in range(ROUNDS)]
    lines = [f"| {name}, ms | {1e3 * statistics.median(of[name] for of in taken[1:]):,.0f} |" for name in reads]
    if world.rank == 0:
        (place / "saves").write_text("\n".join(rows))
        (place / "reads").write_text(
            "\n".join([f"| {size:.0f} MB in the page cache | |", "|---|---|", *lines, *digest_rows()])
        )
    process_group.finish(world.process)


def row(name: str, peer: str, rounds: list[dict[str, tuple[float, float, float]]], grown_mb: float) -> str:
    """A way to save, beside that of a peer in the same round."""
    held, done = (pages.spread([1e3 * of[name][i] for of in rounds], ",.0f") for i in range(2))
    ratio = pages.spread([of[name][1] / of[peer][1] for of in rounds], ".2f")
    used = statistics.median(of[name][2] for of in rounds)
    return f"| {name} | {held} | {done} | {ratio} | {used:.2f} | {grown_mb:,.0f} |"


def delete(path: Path) -> None:
    """Delete an older checkpoint, if it is there (rank 0)."""
    if dist.get_rank() == 0 and path.exists():
        shutil.rmtree(path)


def once(save: Callable[[int], None], i: int, background: saver.Saver) -> tuple[float, float, float]:
    """Seconds that a save holds the training up, and until it is done; processor seconds of all ranks."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    before, start = processor_s(), time.perf_counter()
    save(i)
    held = time.perf_counter() - start
    background.drain()
    dist.barrier()
    done = time.perf_counter() - start
    used = torch.tensor(processor_s() - before, dtype=torch.float64)
    dist.all_reduce(used)
    return held, done, float(used)


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def copy_s(state: dict[str, torch.Tensor]) -> float:
    """Seconds to copy the state into memory that is new each time, as a background save does."""
    start = time.perf_counter()
    copies = [tensor.clone() for tensor in state.values()]
    assert copies
    return time.perf_counter() - start


def digest_rows() -> list[str]:
    """GB/s of one core, by digest."""
    content = os.urandom(2**27)
    rates = []
    for digest in (xxhash.xxh3_128, zlib.crc32, hashlib.sha256):
        start = time.process_time()
        digest(content)
        rates.append(
            f"| {digest.__name__}, GB/s of a core | {len(content) / 1e9 / (time.process_time() - start):.1f} |"
        )
    return rates


def main() -> None:
    """Measure on two ranks and write the page's part, or print it only (`--print`)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = runner.spawn(measure, [(folder,), (folder,)], timeout_s=500.0)
        assert result.ok, str(result)
        saves, reads = (Path(folder, name).read_text() for name in ("saves", "reads"))
    print(f"{saves}\n\n{reads}")
    if "--print" not in sys.argv:
        pages.write(
            ROOT / "docs" / "measured" / "survival.md",
            saves_measured=pages.measured("uv run python -m benchmarks.saves", "2 ranks on gloo", began=began),
            saves=saves,
            reads=reads,
        )


if __name__ == "__main__":
    main()
