"""Overhead of fault tolerance: `uv run python -m benchmarks.survival` writes docs/measured/survival.md.

On 2 ranks (gloo, one thread each) with a ResNet-18 under DDP: the calls that a recipe makes per step, timed one
by one, and the processor time of the threads beside the training. `benchmarks.saves` measures saves.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import keymap
from common.protect import watch
from common.run import process_group, run_dir, stop
from common.state import state_check
from common.train import guard, sampler
from common.workloads.resnet import make_resnet
from tests.harness import pages, runner
from tests.harness.runner import ROOT
from torch.nn.parallel import DistributedDataParallel

CALLS, STEPS, STEP_S = 200, 100, 0.1


def timed(work: Callable[[], object]) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def beside_s(begin_step: Callable[[int], object]) -> float:
    """Processor time of the threads beside the main one in a step.

    The main one computes meanwhile: a processor that sleeps would have to wake up for each of them.
    """
    matrix = torch.zeros(128, 128)
    before = time.process_time() - time.thread_time()
    for step in range(STEPS):
        begin_step(step + 2)
        end = time.perf_counter() + STEP_S
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)
    return (time.process_time() - time.thread_time() - before) / STEPS


def measure(folder: str) -> None:
    """One rank's part; rank 0 prints the rows of the tables."""
    world = process_group.start()
    torch.manual_seed(0)
    model = DistributedDataParallel(make_resnet("resnet18", 3, 10, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    path = Path(folder, "run")
    run_dir.claim(path, world.process)
    division = sampler.Division(100, 100, world.size)
    plan = sampler.make_plan(division, 10000, run_seed=0, epochs=0, max_steps=10**6, progress={})
    before = beside_s(lambda step: None)
    stopping = stop.Stop(world, 0, 0, plan.max_steps)
    watching = watch.Watch(world)
    watching.begin(path, 0, 60.0)
    finite = guard.FiniteGuard(model, optimizer, plan, 3)
    check = state_check.StateCheck(model, compare=True)
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
    rows["threads of Watch and Stop, their processor time"] = beside_s(watching.step) - before

    if world.rank == 0:
        total = sum(rows.values())
        lines = [f"| {name} | {1e6 * seconds:,.1f} |" for name, seconds in rows.items()]
        lines.append(f"| **sum, of a step of {1e3 * STEP_S:.0f} ms** | **{1e6 * total:,.0f} = {total / STEP_S:.2%}** |")
        Path(folder, "rows").write_text("\n".join(lines))
    process_group.finish(world.process)


def main() -> None:
    """Measure on two ranks and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        result = runner.spawn(measure, [(folder,), (folder,)], timeout_s=300.0)
        assert result.ok, str(result)
        calls = Path(folder, "rows").read_text()
    print(calls)
    pages.write(
        ROOT / "docs" / "measured" / "survival.md",
        measured=pages.measured("uv run python -m benchmarks.survival", "2 ranks on gloo"),
        calls=f"| per step | microseconds |\n|---|---|\n{calls}",
    )


if __name__ == "__main__":
    main()
