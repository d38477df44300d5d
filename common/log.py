"""What people see: console, progress bar, TensorBoard, run directory. Rank 0 speaks; elsewhere a call does nothing."""

import contextlib
import dataclasses
import json
import os
import platform
import resource
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from common import UserError, sampler, world


def say(message: str) -> None:
    """Print a line once, from rank 0, above the progress bar if there is one."""
    if world.rank() == 0:
        tqdm.write(message, file=sys.stdout)
        sys.stdout.flush()


def run_dir(out: str, name: str) -> Path:
    """Folder of this run, `<out>/<name>`, the name by default date and time (all ranks). Creates nothing.

    Raises:
        UserError: the folder could not be created or written to.
    """

    def choose() -> Path:
        path = (Path(out).expanduser() / (name or datetime.now().strftime("%Y%m%d-%H%M%S"))).resolve()
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=existing):
                return path
        except OSError as error:
            raise UserError(f"--out {out}: {existing} cannot be written to ({error.strerror})") from error

    return world.from_rank0(choose)


class Run:
    """The record of one run: files in its folder, lines on the terminal. Only rank 0's has any effect.

    Attributes:
        path: the run's folder, with config.json, the copied train.py, metrics.jsonl (float64, one line for
            each record), TensorBoard's events, checkpoints/ and logs/.
    """

    def __init__(
        self, path: Path, recipe: str, args: Any, here: world.World, plan: sampler.Plan, ideal_s: float
    ) -> None:
        """Create the folder, or continue in it after the plan's first step (all ranks).

        Args:
            path: as `run_dir` chose it.
            recipe: the train.py that runs.
            args: its dataclass of flags.
            here: this process.
            plan: from which step to which.
            ideal_s: seconds per training sample on one rank, if it ran at the peak of its device.
        """
        self.path = path
        self._plan = plan
        self._step = plan.first_step
        self._best: dict[str, tuple[float, int]] = {}
        self._here = here
        self._born = self._since = time.perf_counter()
        self._paused_s = self._trained_s = 0.0
        self._trained_samples = self._data_wait_s = 0.0
        self._ideal_s = ideal_s
        path.joinpath("logs").mkdir(parents=True, exist_ok=True)
        if here.rank != 0:
            _redirect(path / "logs" / f"rank_{here.rank:05d}.log")
            return
        from torch.utils.tensorboard import SummaryWriter

        _write_config(path, recipe, args, here)
        shutil.copy(recipe, path / "train.py")
        self._records = _open_records(path / "metrics.jsonl", plan.first_step)
        self._tensorboard = SummaryWriter(str(path), purge_step=plan.first_step + 1)
        # disable=None: a bar on a terminal, none in a pipe or a file.
        self._bar = tqdm(total=plan.max_steps, initial=plan.first_step, unit="step", disable=None, dynamic_ncols=True)

    def train(self, step: int, means: Mapping[str, float], data_wait_s: float, **more: float) -> None:
        """Record the training steps since the last call.

        Args:
            step: steps done.
            means: global means over these steps, and their "count" of samples over all ranks.
            data_wait_s: seconds that this rank has waited for data so far.
            **more: what else to show under train/, such as lr.
        """
        now = time.perf_counter()
        seconds = now - self._since - self._paused_s
        self._since, self._paused_s = now, 0.0
        self._trained_s += seconds
        self._trained_samples += means["count"]
        rate = means["count"] / seconds
        shown = {key: value for key, value in means.items() if key != "count"} | more
        self._record(step, "train", shown)
        perf = {
            "samples_per_s": rate,
            "mfu": rate * self._ideal_s / self._here.size,
            "memory_gib": memory_gib(self._here.device),
            "data_wait_s": data_wait_s - self._data_wait_s,
        }
        self._data_wait_s = data_wait_s
        self._record(step, "perf", perf)
        self._show(step, shown, f"{rate:,.0f} samples/s")

    def validation(self, step: int, means: Mapping[str, float]) -> None:
        """Record an evaluation, and whether it is the best so far (loss: the lowest; others: the highest)."""
        shown = {key: value for key, value in means.items() if key != "count"}
        for key, value in shown.items():
            best = self._best.get(key)
            if best is None or (value < best[0] if key == "loss" else value > best[0]):
                self._best[key] = (value, step)
        self._record(step, "val", shown)
        self._show(step, {f"val/{key}": value for key, value in shown.items()}, f"{means['count']:,.0f} samples")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside out of the rate of training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - start

    def finish(self) -> None:
        """Say how it went, where the files are, and what to run next."""
        if self._here.rank != 0:
            return
        self._bar.close()
        self._tensorboard.close()
        self._records.close()
        took = f"{time.perf_counter() - self._born:.1f} s"
        if self._trained_s:
            took += (
                f", {self._trained_s:.1f} s of it training at {self._trained_samples / self._trained_s:,.0f} samples/s"
            )
        say(f"done   step {self._step} of {self._plan.max_steps} in {took}")
        for key, (value, step) in self._best.items():
            say(f"best   val/{key} {value:.4f} at step {step}")
        say(f"files  {self.path}")
        say(f"plot   tensorboard --host localhost --logdir {shlex.quote(str(self.path.parent))}")
        if self._step < self._plan.max_steps:
            say(f"go on  the same command with --name {shlex.quote(self.path.name)} continues")

    def _record(self, step: int, group: str, values: Mapping[str, float]) -> None:
        if self._here.rank != 0:
            return
        for key, value in values.items():
            self._tensorboard.add_scalar(f"{group}/{key}", value, step)
        self._records.write(json.dumps({"step": step} | {f"{group}/{key}": v for key, v in values.items()}) + "\n")
        self._records.flush()

    def _show(self, step: int, values: Mapping[str, float], tail: str) -> None:
        if self._here.rank != 0:
            return
        self._bar.update(step - self._step)
        self._step = step
        text = "  ".join([*(f"{key} {value:.4g}" for key, value in values.items()), tail])
        if self._bar.disable or "val/loss" in values:
            say(f"step {step:>{len(str(self._plan.max_steps))}}/{self._plan.max_steps}  {text}")
        else:
            self._bar.set_postfix_str(text)


def memory_gib(device: torch.device) -> float:
    """Largest memory use of this process so far in GiB: allocated on the GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _redirect(path: Path) -> None:
    """Send this process's output to a file, from the descriptors up, so that crashes in C++ are in it too."""
    with path.open("ab", buffering=0) as file:
        file.write(f"--- {datetime.now().isoformat(timespec='seconds')} {shlex.join(sys.argv)}\n".encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _write_config(path: Path, recipe: str, args: Any, here: world.World) -> None:
    """Write config.json; in a run that continues, say which flags have changed."""
    flags = dataclasses.asdict(args)
    config = {
        "recipe": Path(recipe).resolve().parent.name,
        "args": flags,
        "command": shlex.join(sys.argv),
        "world_size": here.size,
        "device": here.device.type,
        "backend": here.backend,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "code": world.code_digests(recipe),
    }
    file = path / "config.json"
    if file.exists():
        before = json.loads(file.read_text())["args"]
        for key, value in flags.items():
            if before.get(key) != value:
                say(f"continuing with --{key.replace('_', '-')} {value} (was {before.get(key)})")
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(config, indent=1))
    partial.replace(file)


def _open_records(path: Path, first_step: int) -> TextIO:
    """Open metrics.jsonl to append, without the records of steps that a resumed run does again."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= first_step]
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(kept))
        partial.replace(path)
    return path.open("a")
