"""Overhead of fault tolerance: `uv run python -m benchmarks.survival` writes docs/survival.md.

On 2 ranks (gloo, one thread each) with a ResNet-18 under DDP: the calls that a recipe makes per step, timed one
by one; the processor time of the threads beside the training; and how long a save holds the training up, written
at once and in the background, in alternation.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import guard, keymap, process_group, run_dir, sampler, saver, stop, watch
from common.workloads.resnet import make_resnet
from tests.harness import pages, runner
from tests.harness.runner import ROOT
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

CALLS, SAVES, IDLE_STEPS, STEP_S = 200, 7, 100, 0.1


def timed(work: Callable[[], object]) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def idle_s(begin_step: Callable[[int], object]) -> float:
    """Processor time of this process in a step that does nothing: of the threads beside the main one."""
    before = time.process_time()
    for step in range(IDLE_STEPS):
        begin_step(step + 2)
        time.sleep(STEP_S)
    return (time.process_time() - before) / IDLE_STEPS


def measure(folder: str) -> None:
    """One rank's part; rank 0 prints the rows of the tables."""
    world = process_group.start()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = DistributedDataParallel(make_resnet("resnet18", 3, 10, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    path = Path(folder, "run")
    run_dir.claim(path)
    division = sampler.Division(100, 100, world.size)
    plan = sampler.make_plan(division, 10000, run_seed=0, epochs=0, max_steps=10**6, progress={})
    idle_before = idle_s(lambda step: None)
    stopping = stop.Stop(world, 0, 0, plan.max_steps)
    watching = watch.alive
    assert watching, "process_group.start has made it"
    watching.begin(path, 0, 60.0)
    finite = guard.FiniteGuard(model, optimizer, plan, 3)
    check = guard.StateCheck(model, compare=True)
    norm = torch.ones(())
    finite.skip_if_not_finite(norm)
    step = iter(range(10**9))
    rows = {
        "Watch.step": timed(lambda: watching.step(1)),
        "Stop.after": timed(lambda: stopping.after(next(step))),
        "FiniteGuard.skip_if_not_finite": timed(lambda: finite.skip_if_not_finite(norm)),
        "FiniteGuard.restore_if_skipped": timed(lambda: finite.restore_if_skipped(1)),
        "StateCheck, every 100 steps": timed(lambda: check.compare(keymap.model_tensors(model), 1)) / 100,
    }
    rows["threads of Watch and Stop, their processor time"] = idle_s(watching.step) - idle_before

    savers = {flag: saver.Saver(path, __file__, mesh, check, {}, 1, flag, has_one=True) for flag in (False, True)}
    tensors = keymap.model_tensors(model) | keymap.optimizer_tensors(model, optimizer)
    stalls: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * SAVES + 2):
        in_background = bool(i % 2)
        dist.barrier()
        start = time.perf_counter()
        savers[in_background].save(i, tensors, i, last=False)
        stalls[in_background].append(time.perf_counter() - start)
        savers[in_background].drain()
    if world.rank == 0:
        total = sum(rows.values())
        lines = [f"| {name} | {1e6 * seconds:,.0f} |" for name, seconds in rows.items()]
        lines.append(f"| **sum, of a step of {1e3 * STEP_S:.0f} ms** | **{1e6 * total:,.0f} = {total / STEP_S:.2%}** |")
        plain, background = (statistics.median(stalls[flag][1:]) for flag in (False, True))
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        save = f"| {size:.0f} MB | {1e3 * plain:.0f} | {1e3 * background:.0f} | {background / plain:.1%} |"
        Path(folder, "rows").write_text("\n".join(lines) + "\0" + save)
    process_group.finish()


def main() -> None:
    """Measure on two ranks and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        result = runner.spawn(measure, [(folder,), (folder,)], timeout_s=300.0)
        assert result.ok, str(result)
        calls, save = Path(folder, "rows").read_text().split("\0")
    print(f"{calls}\n{save}")
    pages.write(
        ROOT / "docs" / "survival.md",
        measured=pages.measured("uv run python -m benchmarks.survival", "2 ranks on gloo"),
        calls=f"| per step | microseconds |\n|---|---|\n{calls}",
        saves=f"| state | plain save, ms | background save, ms | ratio |\n|---|---|---|---|\n{save}",
    )


if __name__ == "__main__":
    main()
