"""Look into recipes while real ranks run them, as they stand: what a rank holds, and what it calls.

Bytes held are added up over the tensors that a rank has between the backward pass and the optimizer's step. Calls are
read from torch's profiler, which sees every operator of torch.distributed, those that DDP and DTensor call too.
"""

import json
import math
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.harness import runner
from tests.harness.runner import ROOT

STEP = 3  # that `probe` looks at: DDP has formed its buckets, stages know their shapes
KINDS = {  # operators of torch.distributed, and which of their tensors is the whole one
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 0),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "recv_": ("receive", 0),
}
HELD = ("parameters", "gradients", "optimizer")


def run_until(path: str, argv: list[str], last_step: int, before: Callable[[int], None], report: Path) -> None:
    """In a rank: run a recipe, call `before` ahead of each step, and leave once `last_step` is done."""
    import torch.distributed as dist
    from common.protect import watch

    watching: Any = watch.Watch
    step = watching.step

    def watched(self: Any, number: int) -> None:
        before(number)
        if number > last_step:
            assert report.exists(), "`before` writes it"
            dist.barrier()
            os._exit(0)
        step(self, number)

    watching.step = watched
    sys.argv = [path, *argv]
    runpy.run_path(path, run_name="__main__")
    raise AssertionError(f"{path} ended before step {last_step}")


def in_ranks(
    target: Callable[..., None],
    recipe: str | Path,
    size: int,
    flags: list[str],
    folder: Path,
    *more: Any,
    timeout_s: float = runner.HANG_S,
) -> list[Any]:
    """What `target` reports from each rank, which it calls with the recipe's path and arguments, a file and `more`."""
    path = recipe if isinstance(recipe, Path) else ROOT / "recipes" / recipe / "train.py"
    folder.mkdir()
    argv = ["--out", str(folder), "--name", "run", "--log-every", "1", "--dtype", "float32", *flags]
    files = [folder / f"{rank}.json" for rank in range(size)]
    result = runner.spawn(target, [(str(path), argv, str(file), *more) for file in files], timeout_s)
    assert result.ok, str(result)
    return [json.loads(file.read_text()) for file in files]


def local_bytes(tensors: Any) -> int:
    """Of what this rank has of them."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def calls_of(trace: Path) -> list[tuple[str, int]]:
    """Kind of each call that a profile has, and number of its elements; an integer of 64 bit counts as two."""
    found = []
    for event in json.loads(trace.read_text())["traceEvents"]:
        name = event.get("name", "")
        if name.startswith("c10d::"):
            kind, whole = KINDS[name.removeprefix("c10d::")]  # a KeyError for an operator that is not known here
            sizes = event["args"]["Input Dims"][whole]
            for size in sizes if event["args"]["Input type"][whole] == "TensorList" else [sizes]:
                found.append((kind, math.prod(size) * (2 if event["args"]["Input type"][whole] == "long int" else 1)))
    return found


def probe(path: str, argv: list[str], file: str) -> None:
    """In a rank: run the recipe to STEP; write what it holds then, and what it calls."""
    import torch.distributed as dist
    from common.train import guard

    seen: dict[str, Any] = {"alone": []}
    finite: Any = guard.FiniteGuard
    init, skip_if_not_finite, all_reduce = finite.__init__, finite.skip_if_not_finite, dist.all_reduce
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
    now = 0

    def begin(self: Any, model: Any, *rest: Any) -> None:
        self.model = model
        init(self, model, *rest)

    def look(self: Any, grad_norm: torch.Tensor) -> None:  # between backward pass and update
        if now == STEP:
            parameters = list(self.model.parameters())
            states = [value for state in self._optimizer.state.values() for value in state.values()]
            held = (parameters, [parameter.grad for parameter in parameters], states)
            seen.update(zip(HELD, map(local_bytes, held), strict=True))
        skip_if_not_finite(self, grad_norm)

    def reduce(tensor: torch.Tensor, *args: Any, group: Any = None, **more: Any) -> Any:
        if now == STEP and group is not None and group.size() == 1:
            seen["alone"].append(("all-reduce", tensor.numel()))
        return all_reduce(tensor, *args, group=group, **more)  # type: ignore[call-overload]

    def before(step: int) -> None:
        nonlocal now
        now = step
        if step == STEP:
            profile.start()
        elif step == STEP + 1:
            profile.stop()
            profile.export_chrome_trace(f"{file}.trace")
            Path(file).write_text(json.dumps(seen | {"calls": calls_of(Path(f"{file}.trace"))}))

    finite.__init__, finite.skip_if_not_finite = begin, look
    dist.all_reduce = reduce
    run_until(path, argv, STEP, before, Path(file))
