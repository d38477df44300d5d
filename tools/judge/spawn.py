"""Seams of scripts that start their own processes: here the ranks are there already, and each does its part."""

import multiprocessing.process
import sys
from collections.abc import Callable
from typing import Any

import torch.multiprocessing


def install(record: Any, place: Any) -> None:
    """Patch them."""
    torch_multiprocessing: Any = torch.multiprocessing
    mine = place.rank % place.per_machine

    def spawn(fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, **kwargs: Any) -> Any:
        """Run the part of this rank, in this process."""
        record.log("spawn", processes=nprocs)
        fn(mine, *args)
        return None if join else _Joined()

    names = ("torch.multiprocessing", "torch.multiprocessing.spawn")
    for module in (sys.modules[name] for name in names if name in sys.modules):
        module.spawn = spawn  # type: ignore[attr-defined]
    torch_multiprocessing.start_processes = spawn
    _processes(record, mine)


class _Joined:
    """The context of processes that have ended."""

    def join(self, *_: Any, **__: Any) -> bool:
        """As torch's own."""
        return True


def _processes(record: Any, mine: int) -> None:
    """Of the processes that a script makes by hand, this rank is the one whose number it has."""
    process: Any = multiprocessing.process.BaseProcess
    waiting: list[Any] = []
    count = [0]

    def start(self: Any) -> None:
        record.log("spawn", processes=count[0] + 1)
        waiting.extend([self] * (count[0] == mine))
        count[0] += 1

    def run(*_: Any, **__: Any) -> None:
        while waiting:
            waiting.pop().run()

    process.start, process.join = start, run
    process.is_alive = lambda self: self in waiting
    process.exitcode = property(lambda self: None if self in waiting else 0)
    process.terminate = process.kill = process.close = lambda self: None
    record.rest = run
