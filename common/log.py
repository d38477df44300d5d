"""What people see: console, progress bar, TensorBoard, run directory. Rank 0 speaks; elsewhere a call does nothing."""

import json
import resource
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import flops, metrics, process_group, ranks, run_dir, sampler

STOPPED = "stopped.json"  # in the run's folder: it left on request, with this step saved, and can be queued again


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
        world: process_group.World,
        plan: sampler.Plan,
        dtype: torch.dtype,
        sample: flops.Sample,
    ) -> None:
        """Begin, or continue after the plan's first step (all ranks), and print what runs where.

        Args:
            path: the folder, which `run_dir.claim` has claimed.
            recipe: the train.py that runs.
            args: its dataclass of flags.
            world: this process.
            plan: from which step to which.
            dtype: of the computation.
            sample: what a training sample counts as, for rates.
        """
        self.path = path
        self._plan = plan
        self._shown_step = plan.first_step  # the last one on the terminal
        self._rated_step = plan.first_step  # the last one that a rate of training has counted
        self._world = world
        self._sums: metrics.Sums = {}
        self._sample = sample
        # Seconds that a sample takes at best on one rank.
        self._ideal_s = sample.flops and sample.flops / flops.peak_flops(world.device, dtype)
        self._began = self._since = time.perf_counter()
        self._pause_began: float | None = None
        self._paused_s = 0.0
        self._trained_s = 0.0
        self._trained_samples = 0
        self._data_wait_s = 0.0
        if world.rank != 0:
            run_dir.redirect_output(path, world.rank)
            return
        from torch.utils.tensorboard import SummaryWriter

        for change in run_dir.write_config(path, recipe, args, world):
            ranks.print0(change)
        ranks.print0(f"{world}\n{plan}, {dtype}")
        self._records = run_dir.open_records(path, plan.first_step)
        (path / STOPPED).unlink(missing_ok=True)
        self._tensorboard = SummaryWriter(str(path), purge_step=plan.first_step + 1)
        # disable=None: a bar on a terminal, none in a pipe or a file.
        self._bar = tqdm(total=plan.max_steps, initial=plan.first_step, unit="step", disable=None, dynamic_ncols=True)

    def add(self, sums: metrics.Sums) -> None:
        """Take this rank's sums of one step, for the next record."""
        self._sums = metrics.add(self._sums, sums)

    def log_train(self, step: int, data_wait_s: float, **more: float) -> dict[str, float]:
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
        samples = self._plan.position(step) - self._plan.position(self._rated_step)
        self._rated_step = step
        self._trained_samples += samples
        rate = samples / seconds
        tagged = self._record(step, "train", shown)
        perf = {
            "samples_per_s": rate,
            **{f"{unit}_per_s": rate * number for unit, number in self._sample.units.items()},
            **({"mfu": rate * self._ideal_s / self._world.size} if self._ideal_s else {}),
            "memory_gib": memory_gib(self._world.device),
            "data_wait_s": data_wait_s - self._data_wait_s,
        }
        self._data_wait_s = data_wait_s
        tagged |= self._record(step, "perf", perf)
        self._show(step, shown, f"{rate:,.0f} samples/s")
        return tagged

    def log_validation(self, step: int, means: Mapping[str, float]) -> dict[str, float]:
        """Record an evaluation: global means; returns what is recorded, by TensorBoard's tags."""
        tagged = self._record(step, "val", means)
        self._show(step, {f"val/{key}": value for key, value in means.items()})
        return tagged

    def log_images(self, step: int, tag: str, images: Any) -> None:
        """Show images, (N, H, W, 3) of bytes, in TensorBoard."""
        if self._world.rank == 0:
            self._tensorboard.add_images(tag, images, step, dataformats="NHWC")

    def pause(self) -> None:
        """Keep what follows, until `unpause`, out of the rate of training."""
        self._pause_began = time.perf_counter()

    def unpause(self) -> None:
        """The training continues."""
        if self._pause_began is not None:
            self._paused_s += time.perf_counter() - self._pause_began
            self._pause_began = None

    def finish(self, stopped: str = "") -> None:
        """Say how it went, where the files are, and what to run next.

        Args:
            stopped: why the run left before its last step; "" if it did not.
        """
        if self._world.rank != 0:
            return
        self._bar.close()
        for file in (self._tensorboard, self._records):
            try:
                file.close()
            except OSError as error:
                ranks.print0(f"warning: the last records are not in {self.path}: {error}")
        took = f"{time.perf_counter() - self._began:.1f} s"
        if self._trained_s:
            rate = self._trained_samples / self._trained_s
            took += f", {self._trained_s:.1f} s of it training at {rate:,.0f} samples/s"
        if stopped:
            ranks.print0(f"left   on request, saved: {stopped}")
            left = {"step": self._shown_step, "of": self._plan.max_steps, "reason": stopped}
            (self.path / STOPPED).write_text(json.dumps(left))
        ranks.print0(f"done   step {self._shown_step} of {self._plan.max_steps} in {took}")
        for tag, (value, step) in metrics.best(run_dir.records(self.path)).items():
            ranks.print0(f"best   {tag} {value:.4f} at step {step}")
        ranks.print0(f"files  {self.path}")
        ranks.print0(f"plot   tensorboard --host localhost --logdir {shlex.quote(str(self.path.parent))}")
        more = (
            "" if self._shown_step < self._plan.max_steps else "  (with more --max-steps, or --epochs where that is 0)"
        )
        ranks.print0(f"go on  {run_dir.continuing(self.path, self._world.size)}{more}")

    def _record(self, step: int, group: str, values: Mapping[str, float]) -> dict[str, float]:
        tagged = {key if "/" in key else f"{group}/{key}": value for key, value in values.items()}
        if self._world.rank != 0:
            return tagged
        try:
            self._records.write(json.dumps({"step": step} | tagged) + "\n")
            self._records.flush()
            for tag, value in tagged.items():
                self._tensorboard.add_scalar(tag, value, step)
        except OSError as error:  # a full disk is no reason to end a training
            ranks.print0(f"warning: step {step} is not recorded in {self.path}: {error}")
        return tagged

    def _show(self, step: int, values: Mapping[str, float], tail: str = "") -> None:
        before, self._shown_step = self._shown_step, step
        if self._world.rank != 0:
            return
        self._bar.update(step - before)
        text = "  ".join([*(f"{key} {value:.4g}" for key, value in values.items()), tail]).rstrip()
        if self._bar.disable or "val/loss" in values:
            ranks.print0(f"step {step:>{len(str(self._plan.max_steps))}}/{self._plan.max_steps}  {text}")
        else:
            self._bar.set_postfix_str(text)


def memory_gib(device: torch.device) -> float:
    """Largest memory use of this process so far in GiB: allocated on the GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
