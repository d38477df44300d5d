"""Run one program after the other on all ranks of this world, each in new processes with a group of its own."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import printable, ranks
from tools import about
from tools.prove import layouts, rank

# A process that has imported torch once, without a process group, threads or a GPU in use; each rank is a fork of it.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torchvision", "tools.prove.preload"])
POLL_S = 0.02
MOST_READ = 2**24  # characters of a log


@dataclass(frozen=True)
class Job:
    """One run of a recipe, or of `target`.

    Attributes:
        name: of its log and its run, unique.
        layout: which recipe, and how.
        flags: of its train.py, besides --out and --name.
        folder: for runs, logs and notes; all machines see it.
        run: name of the run, if it is another job's.
        signal_at: the step before which the last rank signals itself, and the signal.
        rates: see `rank.run`.
        target: runs in place of a recipe, on all ranks, with `flags`, the environment and a log.
        timeout_s: seconds after which the ranks are killed.
    """

    name: str
    layout: layouts.Layout
    flags: tuple[str, ...]
    folder: Path
    run: str = ""
    signal_at: tuple[int, int] = (0, 0)
    rates: bool = False
    target: Callable[..., None] | None = None
    timeout_s: float = 120.0

    @property
    def notes(self) -> Path:
        """Where the ranks write down what they hold."""
        return self.folder / "notes" / self.name

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.folder / "runs" / (self.run or self.name)

    def log(self, number: int) -> Path:
        """What one rank prints."""
        return self.folder / "logs" / f"{self.name}-rank{number}.log"


@dataclass(frozen=True)
class Outcome:
    """How a job ended: of each rank that ran, its exit code (None: killed after the time limit), and when."""

    job: Job
    codes: list[int | None]
    ended: list[float]  # seconds since the epoch

    @property
    def ok(self) -> bool:
        """Whether all ranks have ended with 0."""
        return not any(code != 0 for code in self.codes)

    def lines(self, most: int = 4) -> str:
        """The last lines of the first rank that failed and says why."""
        failed = [number for number, code in enumerate(self.codes) if code != 0]
        texts = {number: self.output(number).strip().splitlines() for number in failed}
        number = next((number for number in failed if texts[number]), 0)
        last = " | ".join(texts.get(number, [])[-most:])
        return f"rank {number} ended with {self.codes[number]}: {last} (see {self.job.log(number)})"

    def output(self, number: int) -> str:
        """All that a rank has printed."""
        return printable(self.job.log(number).read_text(errors="replace"), MOST_READ)


def environment(alone: bool, config: str, run_key: str, gpus: str | None) -> dict[str, str]:
    """The environment of a rank that meets the others at a new port (all ranks take part)."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "ROLE_"))}
    for name in ("RUN_DIR_FILE", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_NUM_TASKS", "ACCELERATE_CONFIG", "LAUNCHED_AS"):
        given.pop(name, None)
    port = ranks.from_rank0(_free_port)
    several = ranks.env_int("GROUP_WORLD_SIZE", default=1) > 1
    given |= {"MASTER_ADDR": os.environ["MASTER_ADDR"] if several else "127.0.0.1", "MASTER_PORT": str(port)}
    given |= {"RUN_KEY": run_key} if run_key else {}
    given |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus is not None else {}
    given |= {"ACCELERATE_CONFIG": config} if config else {}
    if alone:
        given |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
    return given


def _free_port() -> int:
    """A port that the system chooses: between machines, a firewall may open no others."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def run(job: Job, run_key: str, gpus: str | None) -> Outcome:
    """Run a job to its end, or to its time limit (all ranks take part; they all get the outcome).

    Args:
        job: what to run.
        run_key: the launcher's secret, which the ranks share.
        gpus: CUDA_VISIBLE_DEVICES of the ranks; None for all.
    """
    me, last = ranks.rank(), ranks.size() - 1
    env = environment(job.layout.alone, job.layout.config, run_key, gpus)
    if job.layout.alone and me:
        return _outcome(job, None)
    job.notes.mkdir(parents=True, exist_ok=True)
    job.log(me).parent.mkdir(parents=True, exist_ok=True)
    job.log(me).touch()
    args: tuple[Any, ...] = (list(job.flags), env, str(job.log(me)))
    if job.target is None:
        path = about.ROOT / "recipes" / job.layout.recipe / "train.py"
        where = ["--out", str(job.run_dir.parent), "--name", job.run_dir.name]
        signal_at = job.signal_at if me == last or job.layout.alone else (0, 0)
        args = (str(path), [*job.flags, *where], env, str(job.log(me)), str(job.notes), signal_at, job.rates)
    process = _CONTEXT.Process(target=job.target or rank.run, args=args)
    process.start()
    end = time.monotonic() + job.timeout_s
    process.join(job.timeout_s)
    if late := time.monotonic() >= end and process.is_alive():
        process.kill()
        process.join()
    return _outcome(job, {"code": None if late else process.exitcode, "ended": time.time()})


def _outcome(job: Job, mine: dict[str, Any] | None) -> Outcome:
    found = [one for one in ranks.gather(mine) if one]
    return Outcome(job, [one["code"] for one in found], [one["ended"] for one in found])
