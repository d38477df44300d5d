"""What people see: console, progress bar, TensorBoard, run directory. Rank 0 speaks; elsewhere a call does nothing."""

import contextlib
import json
import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import metrics, run_dir, sampler, world

STOPPED = "stopped.json"  # in the run's folder: it left on request, with this step saved, and can be queued again


def say(message: str) -> None:
    """Print a line once, from rank 0, above the progress bar if there is one."""
    if world.rank() == 0:
        tqdm.write(message, file=sys.stdout)
        sys.stdout.flush()


class Run:
    """The record of one run: files in its folder, lines on the terminal. Only rank 0's has any effect.

    Attributes:
        path: the run's folder, with config.json, the copied train.py, metrics.jsonl (float64, one line for
            each record), TensorBoard's events, checkpoints/ and logs/.
    """

    def __init__(
        self,
        path: Path,
        recipe: str,
        args: Any,
        here: world.World,
        plan: sampler.Plan,
        flops: float,
        dtype: torch.dtype,
    ) -> None:
        """Begin, or continue after the plan's first step (all ranks), and say what runs where.

        Args:
            path: the folder, which `run_dir.claim` has claimed.
            recipe: the train.py that runs.
            args: its dataclass of flags.
            here: this process.
            plan: from which step to which.
            flops: of one training sample; 0 where they are not counted.
            dtype: what it is computed in.
        """
        self.path = path
        self._plan = plan
        self._step = self._counted = plan.first_step  # the last one shown, the last one in a rate
        self._here = here
        self._sums: metrics.Sums = {}
        self._ideal_s = flops and flops / metrics.peak_flops(here.device, dtype)  # of a sample, on one rank
        self._born = self._since = time.perf_counter()
        self._paused_s = self._trained_s = 0.0
        self._trained_samples = self._data_wait_s = 0.0
        self._tokens = getattr(args, "seq_len", 0)  # of a sample
        if here.rank != 0:
            run_dir.redirect_output(path, here.rank)
            return
        from torch.utils.tensorboard import SummaryWriter

        for change in run_dir.write_config(path, recipe, args, here):
            say(change)
        say(f"{here}\n{plan}, {dtype}")
        self._records = run_dir.open_records(path, plan.first_step)
        (path / STOPPED).unlink(missing_ok=True)
        self._tensorboard = SummaryWriter(str(path), purge_step=plan.first_step + 1)
        # disable=None: a bar on a terminal, none in a pipe or a file.
        self._bar = tqdm(total=plan.max_steps, initial=plan.first_step, unit="step", disable=None, dynamic_ncols=True)

    def add(self, sums: metrics.Sums) -> None:
        """Take this rank's sums of one step, for the next record."""
        self._sums = metrics.add(self._sums, sums)

    def train(self, step: int, data_wait_s: float, **more: float) -> dict[str, float]:
        """Record the global means of the steps since the last call (all ranks).

        Args:
            step: steps done.
            data_wait_s: seconds that this rank has waited for data so far.
            **more: what else to show under train/, such as lr; a name with a group of its own, rl/return, keeps it.

        Returns:
            What is recorded, by TensorBoard's tags.
        """
        shown = {**metrics.means(self._sums), **more}
        self._sums = {}
        now = time.perf_counter()
        seconds = now - self._since - self._paused_s
        self._since, self._paused_s = now, 0.0
        self._trained_s += seconds
        samples = self._plan.position(step) - self._plan.position(self._counted)
        self._counted = step
        self._trained_samples += samples
        rate = samples / seconds
        tagged = self._record(step, "train", shown)
        perf = {
            "samples_per_s": rate,
            **({"tokens_per_s": rate * self._tokens} if self._tokens else {}),
            **({"mfu": rate * self._ideal_s / self._here.size} if self._ideal_s else {}),
            "memory_gib": memory_gib(self._here.device),
            "data_wait_s": data_wait_s - self._data_wait_s,
        }
        self._data_wait_s = data_wait_s
        tagged |= self._record(step, "perf", perf)
        self._show(step, shown, f"{rate:,.0f} samples/s")
        return tagged

    def validation(self, step: int, means: Mapping[str, float]) -> dict[str, float]:
        """Record an evaluation: global means; returns what is recorded, by TensorBoard's tags."""
        tagged = self._record(step, "val", means)
        self._show(step, {f"val/{key}": value for key, value in means.items()})
        return tagged

    def frames(self, step: int, tag: str, make: Callable[[], Any]) -> None:
        """Show images, (N, H, W, 3) of bytes, in TensorBoard; only rank 0 makes them."""
        if self._here.rank == 0:
            self._tensorboard.add_images(tag, make(), step, dataformats="NHWC")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside out of the rate of training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - start

    def finish(self, stopped: str = "") -> None:
        """Say how it went, where the files are, and what to run next.

        Args:
            stopped: why the run left before its last step; "" if it did not.
        """
        if self._here.rank != 0:
            return
        self._bar.close()
        for file in (self._tensorboard, self._records):
            try:
                file.close()
            except OSError as error:
                say(f"warning: the last records are not in {self.path}: {error}")
        took = f"{time.perf_counter() - self._born:.1f} s"
        if self._trained_s:
            rate = self._trained_samples / self._trained_s
            took += f", {self._trained_s:.1f} s of it training at {rate:,.0f} samples/s"
        if stopped:
            say(f"left   on request, saved: {stopped}")
            left = {"step": self._step, "of": self._plan.max_steps, "reason": stopped}
            (self.path / STOPPED).write_text(json.dumps(left))
        say(f"done   step {self._step} of {self._plan.max_steps} in {took}")
        for tag, (value, step) in metrics.best(run_dir.records(self.path)).items():
            say(f"best   {tag} {value:.4f} at step {step}")
        say(f"files  {self.path}")
        say(f"plot   tensorboard --host localhost --logdir {shlex.quote(str(self.path.parent))}")
        more = "" if self._step < self._plan.max_steps else "  (with more --max-steps, or --epochs where that is 0)"
        say(f"go on  {run_dir.continuing(self.path, self._here.size)}{more}")

    def _record(self, step: int, group: str, values: Mapping[str, float]) -> dict[str, float]:
        tagged = {key if "/" in key else f"{group}/{key}": value for key, value in values.items()}
        if self._here.rank != 0:
            return tagged
        try:
            self._records.write(json.dumps({"step": step} | tagged) + "\n")
            self._records.flush()
            for tag, value in tagged.items():
                self._tensorboard.add_scalar(tag, value, step)
        except OSError as error:  # a full disk is no reason to end a training
            say(f"warning: step {step} is not recorded in {self.path}: {error}")
        return tagged

    def _show(self, step: int, values: Mapping[str, float], tail: str = "") -> None:
        before, self._step = self._step, step
        if self._here.rank != 0:
            return
        self._bar.update(step - before)
        text = "  ".join([*(f"{key} {value:.4g}" for key, value in values.items()), tail]).rstrip()
        if self._bar.disable or "val/loss" in values:
            say(f"step {step:>{len(str(self._plan.max_steps))}}/{self._plan.max_steps}  {text}")
        else:
            self._bar.set_postfix_str(text)


def memory_gib(device: torch.device) -> float:
    """Largest memory use of this process so far in GiB: allocated on the GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
