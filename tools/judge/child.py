"""One rank of a judged run: a fork of the judge that becomes `python script flags` under torchrun, and is observed."""

import faulthandler
import os
import random
import runpy
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.judge import data, device, files, group, guard, model, scales, spawn, step, waits
from tools.judge.record import Recorder

OURS = ("common", "tools", "tests", "benchmarks", "recipes", "launch")
PIPELINES = "torch.distributed.pipelining"  # a script that imports it splits a model by layers


@dataclass(frozen=True)
class Place:
    """A rank in its world, and where it works.

    Attributes:
        rank: among all.
        size: of the world.
        machines: 1, or as many as ranks, so that each rank is the first of its machine.
        port: where the ranks meet.
        script: the file that runs, in the copy.
        cwd: the folder that it runs in, in the copy.
        own: the folder of this run's logs.
        folder: the temporary folder that all writes stay in: that of this run, or of the one that it continues.
        roots: folders of the user's code, in the copy.
        gpu: whether torch.cuda.is_available() says True.
        steps: see `Recorder`.
    """

    rank: int
    size: int
    machines: int
    port: int
    script: Path
    cwd: Path
    own: Path
    folder: Path
    roots: tuple[str, ...]
    gpu: bool
    steps: int

    @property
    def per_machine(self) -> int:
        """Ranks of a machine, and its GPUs."""
        return self.size // self.machines

    def environment(self) -> dict[str, str]:
        """What torchrun sets."""
        local, group = self.rank % self.per_machine, self.rank // self.per_machine
        numbers = {"RANK": self.rank, "LOCAL_RANK": local, "WORLD_SIZE": self.size, "MASTER_PORT": self.port}
        numbers |= {"LOCAL_WORLD_SIZE": self.per_machine, "GROUP_RANK": group, "GROUP_WORLD_SIZE": self.machines}
        numbers |= {"ROLE_RANK": self.rank, "ROLE_WORLD_SIZE": self.size, "TORCHELASTIC_RESTART_COUNT": 0}
        numbers |= {"TORCHELASTIC_MAX_RESTARTS": 0, "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
        names = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "judge", "WANDB_MODE": "disabled"}
        return {name: str(value) for name, value in numbers.items()} | names

    def log(self) -> Path:
        """The events."""
        return self.own / f"rank{self.rank}.jsonl"

    def output(self) -> Path:
        """What the script prints."""
        return self.own / f"rank{self.rank}.out"

    def stack(self) -> Path:
        """Where faulthandler writes the stack when the judge asks for it."""
        return self.own / f"rank{self.rank}.stack"


def serve(place: Place, argv: list[str], pipe: Any) -> None:
    """Run the script to its end, or until it has been seen for long enough, and exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    out = os.open(place.output(), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    stack = place.stack().open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    os.environ.update(place.environment())
    os.chdir(place.cwd)
    torch.set_num_threads(1)
    random.seed()
    np.random.seed()
    torch.seed()  # each process of a launcher begins at another place
    forget()

    def enough() -> None:
        pipe.send("enough")
        signal.pause()  # until the judge ends all ranks

    record = Recorder(place.log(), place.roots, place.steps, enough)
    guard.install(place.folder, place.own)
    for seams in (device, spawn, group, model, step, scales, data, files, waits):
        seams.install(record, place)
    sys.argv = [str(place.script), *argv]
    sys.path[0:1] = [str(place.script.parent)]
    code = run(record, place)
    pipe.send("end")
    sys.stdout.flush()
    os._exit(code)  # a group that still waits would keep the process


def run(record: Recorder, place: Place) -> int:
    """Run the script, write its end down, and return its exit code."""
    code, error, text, at = 0, "", "", str(place.script) + ":1"
    try:
        runpy.run_path(str(place.script), run_name="__main__")
        record.rest()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        error, text = ("SystemExit", str(exit_.code)) if code else ("", "")
    except BaseException as caught:
        frames = traceback.extract_tb(caught.__traceback__)
        own = [one for one in frames if one.filename.startswith(place.roots) and "site-packages" not in one.filename]
        at = f"{own[-1].filename}:{own[-1].lineno}" if own else at
        code, error, text = 1, type(caught).__name__, str(caught)[:2000]
        traceback.print_exception(caught)
    record.log("start", at=str(place.script) + ":1", pipelines=PIPELINES in sys.modules)
    record.log("end", at=at, code=code, error=error, text=text, group_open=group.is_open())
    return code


def forget() -> None:
    """Let the script import its own modules where they are called as ours, and see warnings as ever."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS or name.startswith(PIPELINES)]:
        del sys.modules[name]
    warnings.resetwarnings()
