"""This process and its place among the ranks. Both travel from `exits.entry` through main to those who need them."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TextIO

import torch
import torch.distributed as dist

from common import devices, ranks, seal
from common.run.output import Output


class Rewind(Exception):  # noqa: N818 (a request, not an error)
    """All ranks begin again from the newest checkpoint: raised by all of them after the same collective."""


@dataclass(eq=False)
class Process:
    """What a process keeps from its start to its end, also where its ranks begin again.

    Attributes:
        name: of the run: --name, or date and time of this start.
        recipe: the train.py that runs, from `session.join` on.
        flags: of the recipe, without those of one run, from `session.join` on.
        output: its streams.
        world: its place among the ranks, from `process_group.start` to `finish`.
        met: where the ranks have met: their store, this rank, their number, and RUN_KEY.
        starts: how often the ranks have begun again.
        doubts: of the run, about steps that it may compute again; None before its first session.
        stop: the newest session's, because a request to stop must outlive a run that goes back; None before the first.
        watch: names the rank that fails; None if nobody watches.
        frees: flags that free activations, most first, with what they are now.
        owners: references to the model and its optimizer that do not keep them alive, once both are there.
        locks: files whose locks keep other jobs out of the run's folder until this process ends.
        background: closes what runs beside the training. A thread inside C++ at interpreter exit would abort.
    """

    name: str = field(default_factory=lambda: datetime.now().strftime("%Y%m%d-%H%M%S"))
    recipe: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    output: Output = field(default_factory=Output)
    world: "World | None" = None
    met: tuple[dist.Store, int, int, str] | None = None
    starts: int = 0
    doubts: Any = None
    stop: Any = None
    watch: Any = None
    frees: list[str] = field(default_factory=list)
    owners: tuple[Callable[[], Any], ...] = ()
    locks: list[TextIO] = field(default_factory=list)
    background: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def explain(self, error: BaseException) -> None:
        """Add to an error of a device without memory what holds it and what frees it."""
        devices.explain_out_of_memory(error, self.frees, self.owners)


@dataclass(frozen=True)
class World:
    """This process's place in the run, its device and its backend."""

    rank: int
    size: int
    local_size: int
    host: str
    device: torch.device
    backend: str
    store: seal.SealedStore  # small values that any rank can set and read, and nobody else
    process: Process = field(default_factory=Process)
    # Process that started this one. It may have died already, so the launcher says its number.
    parent: int = field(default_factory=lambda: int(os.environ.pop("LAUNCHER_PID", os.getppid())))

    def __str__(self) -> str:
        """One line for the terminal: how many processes, on which hosts and devices."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        hosts = ranks.env_int("GROUP_WORLD_SIZE", default=max(1, self.size // self.local_size))
        where = self.host if hosts == 1 else f"{hosts} hosts (first: {self.host})"
        threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} each"
        setup = f"{name}, {threads}, backend {self.backend}, torch {torch.__version__}"
        return f"{self.size} process{'es' * (self.size > 1)} on {where}: {setup}"
