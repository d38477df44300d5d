"""What a run prints and records, and at which rate it trains. Rank 0 does so; elsewhere a call does nothing."""

import json
import resource
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import devices, manifest, ranks
from common.run import output, run_dir
from common.run.process import World
from common.train import flops, metrics, sampler

STOPPED = "stopped.json"  # in the run's folder: the run was asked to stop, saved this step, and can be queued again


@dataclass(frozen=True)
class Spent:
    """Seconds of a run.

    Attributes:
        took_s: from its first step on.
        trained_s: of them, in training.
        data_share: the share of the training that waited for data.
    """

    took_s: float
    trained_s: float
    data_share: float


class Run:
    """Records one run: files in its folder, lines on the terminal. Only rank 0 writes.

    Attributes:
        records: its metrics.jsonl and TensorBoard's events.
        path: the run's folder, with config.json, the copied train.py, metrics.jsonl (float64, one line for
            each record), TensorBoard's events, checkpoints/ and logs/.
    """

    def __init__(
        self,
        path: Path,
        args: Any,
        world: World,
        plan: sampler.Plan,
        dtype: torch.dtype,
        sample: flops.Sample,
        computes_on: Sequence[torch.device],
    ) -> None:
        """Begin, or continue after the plan's first step (all ranks), and print the setup.

        Args:
            path: the run's folder, claimed by `run_dir.claim`.
            args: the recipe's dataclass of flags.
            world: this process.
            plan: its steps and their samples.
            dtype: of the computation.
            sample: FLOPs and units of a training sample, for rates.
            computes_on: the devices of this process, the world's first.
        """
        self.path = path
        self._plan = plan
        self._shown_step = plan.first_step  # the latest step on the terminal
        self._num_samples = 0  # until the latest record
        self._world = world
        self._sums: metrics.Sums = {}
        self._sample = sample
        self._length_flag = "--max-steps" if args.max_steps else "--epochs"
        self._devices = computes_on
        self._num_devices = world.size * len(computes_on)
        # Seconds that a sample would take on one device at its peak.
        peak_flops, source = flops.peak_flops(world.device, dtype) if sample.flops else (0.0, "")
        self._ideal_s = peak_flops and sample.flops / peak_flops
        mfu_is_of = f"{peak_flops / 1e12:,.6g} TFLOP/s a device, {source}" if peak_flops else ""
        self._began = self._since = time.perf_counter()
        self._seconds = 0.0  # of training, until `_since`
        self._trained_s = 0.0  # until the latest record, and of waiting for data until then
        self._data_wait_s = 0.0
        self._first: tuple[float, float] | None = None  # these two at the first record, after the start of the workers
        self.records = run_dir.Records(path, plan.first_step, world.rank)
        # disable=None shows a bar on a terminal, and none in a pipe or a file.
        off = True if world.rank else None
        self._bar = tqdm(total=plan.max_steps, initial=plan.first_step, unit="step", disable=off, dynamic_ncols=True)
        log = path / "logs" / f"rank_{world.rank:05d}.log"
        if world.rank != 0:
            output.redirect(log)
            return
        world.process.output.spare = log
        try:
            (path / STOPPED).unlink(missing_ok=True)
            for change in run_dir.write_config(path, world.process.recipe, args, world, mfu_is_of):
                ranks.print0(change)
            self.records.open()
        except OSError as error:
            ranks.print0(f"warning: not all files of this start were written to {path}: {error}")
        details = "".join(f", {number:,} {unit} each" for unit, number in sample.units.items())
        details += f"; {str(dtype).removeprefix('torch.')}"
        setup = [str(world), f"{plan}{details if plan.first_step < plan.max_steps else ''}"]
        setup += devices.notes(world.device, dtype, bool(vars(args).get("compile")))
        if world.device.type == "cuda" and mfu_is_of:
            setup.append(f"MFU is of {mfu_is_of}")
        ranks.print0("\n".join(setup))

    def add(self, sums: metrics.Sums) -> None:
        """Add this rank's sums of one step to the next record."""
        self._sums = metrics.add(self._sums, sums)

    def log_train(self, step: int, data_wait_s: float, **more: float) -> dict[str, float]:
        """Record the global means of the steps since the last call (all ranks).

        Args:
            step: steps done.
            data_wait_s: seconds that this rank has waited for data so far.
            **more: other values for train/, such as lr; a name that has a group already, such as rl/return, keeps it.

        Returns:
            The recorded values by TensorBoard tag.
        """
        shown = {**metrics.means(self._sums), **more}
        self._sums = {}
        self.pause(False)
        self.unpause()
        num_samples = self._plan.position(step) - self._plan.start
        rate = (num_samples - self._num_samples) / (self._seconds - self._trained_s)
        self._num_samples = num_samples
        self._trained_s = self._seconds
        self._first = self._first or (self._trained_s, data_wait_s)
        of_order = self._plan.order.logged(self._plan.position(step)) if self._plan.order else {}
        tagged = self._record(step, "train", shown | of_order)
        perf = {
            "samples_per_s": rate,
            **{f"{unit}_per_s": rate * number for unit, number in self._sample.units.items()},
            **({"mfu": rate * self._ideal_s / self._num_devices} if self._ideal_s else {}),
            "memory_gib": sum(map(memory_gib, self._devices)),
            "data_wait_s": data_wait_s - self._data_wait_s,
        }
        self._data_wait_s = data_wait_s
        tagged |= self._record(step, "perf", perf)
        self._show(step, shown, f"{rate:,.0f} samples/s")
        return tagged

    def log_validation(self, step: int, means: Mapping[str, float]) -> None:
        """Record an evaluation's global means."""
        self._show(step, self._record(step, "val", means))

    def pause(self, something_is_due: bool) -> None:
        """Exclude the time until `unpause` from the rate of training.

        Args:
            something_is_due: an evaluation, a comparison or a save comes next. It would wait for the steps that GPUs
                have not done yet, so that their time is waited for here, and counts as training.
        """
        for device in self._devices if something_is_due else ():
            torch.get_device_module(device).synchronize(device)
        self._seconds += time.perf_counter() - self._since

    def unpause(self) -> None:
        """Count time towards the rate of training again."""
        self._since = time.perf_counter()

    def ideal(self) -> dict[str, float]:
        """Of a step: "flops" of each device, and "ideal_s", which they take at its peak; 0 if not counted (rank 0)."""
        samples = self._plan.division.global_batch_size / self._num_devices
        return {"flops": samples * self._sample.flops, "ideal_s": samples * self._ideal_s}

    def spent(self) -> Spent:
        """Where the time from the first step until now went."""
        trained_s, data_wait_s = self._first or (0.0, 0.0)
        steady_s = self._trained_s - trained_s
        share = (self._data_wait_s - data_wait_s) / steady_s if steady_s else 0.0
        return Spent(time.perf_counter() - self._began, self._trained_s, share)

    def finish(self, stopped: str = "", no_better: str = "", verdict: str = "") -> None:
        """Print the result, where the files are, and the command that continues the run.

        Args:
            stopped: why the run was stopped before its last step; "" if it was not.
            no_better: why --patience ended it; "" if it did not. Then Slurm must not start it again, even if a signal
                came in the same step.
            verdict: a line on the largest part of the time that could be less; "" for none.
        """
        self.close()
        if self._world.rank != 0:
            return
        took = f"{self.spent().took_s:.1f} s"
        if self._trained_s:
            rate = self._num_samples / self._trained_s
            took += f", of which {self._trained_s:.1f} s training at {rate:,.0f} samples/s"
        if stopped or no_better:
            ranks.print0(f"stopped  checkpoint saved ({no_better or stopped})")
        if stopped and not no_better:
            facts = {"step": self._shown_step, "of": self._plan.max_steps, "reason": stopped}
            try:
                manifest.replace(self.path / STOPPED, json.dumps(facts))
            except OSError as error:
                ranks.print0(f"warning: without {STOPPED}, launch/slurm.sh does not requeue the job: {error}")
        complete = self._shown_step >= self._plan.max_steps
        verb = "done    " if complete else "reached "
        ranks.print0(f"{verb} step {self._shown_step} of {self._plan.max_steps} in {took}")
        if verdict:
            ranks.print0(verdict)
        for tag, (value, step) in metrics.best(run_dir.records(self.path)).items():
            ranks.print0(f"best     {tag} {value:.4f} at step {step}")
        ranks.print0(f"files    {self.path}")
        ranks.print0(f"plot     tensorboard --host localhost --logdir {shlex.quote(str(self.path.parent))}")
        note = f"  (training is complete; raise {self._length_flag} to train longer)" if complete else ""
        ranks.print0(f"resume   {run_dir.resume_command(self.path, self._world.size)}{note}")

    def close(self) -> None:
        """Close the progress bar and the records."""
        self._bar.close()
        self.records.close()

    def _record(self, step: int, group: str, values: Mapping[str, float]) -> dict[str, float]:
        # A name has a group already, such as rl/return, or it is that of a part of a value, such as loss/NAME.
        own = {key for key in values if "/" in key and key.partition("/")[0] not in values}
        tagged = {key if key in own else f"{group}/{key}": value for key, value in values.items()}
        self.records.write(step, tagged)
        return tagged

    def _show(self, step: int, values: Mapping[str, float], tail: str = "") -> None:
        self._bar.update(step - self._shown_step)
        self._shown_step = step
        # One of many, such as the load of each expert, is recorded only; that of a source stands beside that of all.
        many = {key for key in values if key.count("/") > 1 and key.rpartition("/")[0] not in values}
        text = "  ".join([*(f"{key} {one:.4g}" for key, one in values.items() if key not in many), tail]).rstrip()
        if self._bar.disable or "val/loss" in values:
            ranks.print0(f"step {step:>{len(str(self._plan.max_steps))}}/{self._plan.max_steps}  {text}")
        else:
            self._bar.set_postfix_str(text)


def memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far in GiB: allocated on the GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
