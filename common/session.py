"""One run: its folder, and the objects that stop, watch, guard, save and log it, made and closed in the right order.

The training loop stays in the recipe, which calls its own step and evaluation. A session answers which of them is due,
and calls no code of the recipe.
"""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from common import UserError, keymap, precision, ranks, seed
from common.measure import pace, profile, timeline
from common.protect import watch
from common.run import exits, log, process_group, run_dir, stop
from common.state import checkpoint, saver
from common.train import flops, guard, metrics, sampler, sync_batchnorm

SPIKE = 10  # times the largest loss so far, as Megatron-Core's rerun state machine has it
largest_losses: list[tuple[int, float]] = []  # up to each step that this process has logged
went_back_from: list[int] = []  # steps with a bad state, which this process has computed again since


class Session:
    """Everything that a run needs from its first step to its last.

    Attributes:
        finite: skips updates whose gradient is not finite; the recipe's train_step calls it before each update. There
            is none without an optimizer.
    """

    def __init__(
        self,
        args: Any,
        recipe: str,
        world: process_group.World,
        mesh: DeviceMesh,
        *,
        found: checkpoint.Found,
        plan: sampler.Plan,
        model: nn.Module,
        optimizer: Optimizer | None,
        sample: flops.Sample | None = None,
    ) -> None:
        """Claim the run's folder, and start to handle signals, watch the ranks and log (main thread, all ranks).

        Args:
            args: the recipe's flags, including the block that all recipes share.
            recipe: its train.py.
            world: this process.
            mesh: the ranks and their axes.
            found: the checkpoint that the run starts from, already loaded.
            plan: which samples each step reads.
            model: the model under its strategy.
            optimizer: the optimizer of its parameters; None if nothing is trained, and the model only holds results.
            sample: FLOPs and units of a sample; without it, neither MFU nor tokens per second are shown.

        Raises:
            UserError: the folder is in use, or another job has saved there since `found`; or a micro-batch has too few
                samples for the model.
        """
        # A model that drives several GPUs from one process, as nn.DataParallel does, has this attribute.
        indices = getattr(model, "device_ids", None) or []
        devices = [torch.device(world.device.type, index) for index in indices[1:]]
        devices.insert(0, world.device)
        sampler.check_min_samples(plan, sync_batchnorm.min_samples(model), len(devices))
        self._args = args
        self._plan = plan
        self._model = model
        self._optimizer = optimizer
        self._last_step = min(plan.max_steps, args.stop_after or plan.max_steps)
        self._done = plan.first_step
        self._stops = False
        self._no_better = ""  # why --patience ends the run
        self._doubted = went_back_from[-1] if went_back_from else 0
        # For --keep-best and --patience: the metric at each evaluation so far, and the step of the checkpoint to keep.
        self._keep_best = vars(args).get("keep_best", "")
        self._patience = vars(args).get("patience", 0)
        self._tag = f"val/{self._keep_best or 'loss'}"
        self._evaluations = ranks.from_rank0(lambda: _evaluations(found.run_dir, self._tag, plan.first_step))
        self._best_step = -1
        # The order matters: claim the folder before anything is written to it, take over signals before the first
        # loader worker is forked, watch before the first training collective, log when nothing can be refused any more.
        self._profile = profile.Profile(args.profile, plan.first_step, self._last_step, world.device, found.run_dir)
        run_dir.claim(found.run_dir)
        checkpoint.check_newest(found)
        self._stop = stop.Stop(world, args.deadline, plan.first_step, self._last_step)
        assert watch.alive, "process_group.start has made it"
        self._watch = watch.alive
        process_group.set_timeout(mesh, args.hang_timeout)
        self._watch.begin(found.run_dir, plan.first_step, args.hang_timeout)
        dtype = precision.compute_dtype(args.dtype, world.device)
        self._scale = precision.LossScale(dtype, world.device, found.progress.get("loss_scale"))
        if optimizer:
            self.finite = guard.FiniteGuard(model, optimizer, plan, args.max_skips, self._scale)
        self._check = guard.StateCheck(model, compare=args.check_every > 0)
        self._saver = saver.Saver(
            found.run_dir,
            recipe,
            mesh,
            self._check,
            found.fingerprint,
            args.keep,
            args.async_save,
            has_one=found.newest >= 0,
        )
        rates = [group["lr"] for group in optimizer.param_groups] if optimizer else []
        sample = sample or flops.Sample()
        self._log = log.Run(found.run_dir, recipe, args, world, plan, dtype, sample, rates, devices)
        self._name = f"rank {world.rank} on {world.host}"
        self._pace = pace.Pace(world.device)
        self._slow = (0.0, "")  # what of the training the others waited for one rank, and that rank
        self._saved_s = 0.0

    def steps(self, dp_rank: int) -> Iterator[int]:
        """Yield the steps to do, until the last one or a request to stop; seed all generators before each.

        Args:
            dp_rank: ranks with the same dp_rank draw the same random numbers, because they read the same samples.
        """
        for step in range(self._plan.first_step + 1, self._last_step + 1):
            self._watch.step(step)
            seed.everything(self._args.seed, seed.STEP, step, dp_rank)
            self._profile.begin(step)
            self._log.unpause()
            self._pace.begin()
            yield step
            if found := self._profile.end(step, self._name):
                self._log.log_profile(step, found)
            if self._is_last(step):
                break

    def _is_last(self, step: int) -> bool:
        """Whether the run ends after `step` (all ranks). The first call after a step also completes that step."""
        if step != self._done:
            self._done = step
            if self._optimizer:
                self.finite.restore_if_skipped(step)
            self._stops = self._stop.after(step) or step == self._last_step
        return self._stops

    def logs(self, step: int) -> bool:
        """Whether a log line is due after `step`."""
        return step % self._args.log_every == 0 or self._is_last(step)

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after `step`; a request to stop does not cause one."""
        due = self._evaluation_is_due(step)
        with profile.mark(timeline.EVALUATES if due else timeline.BESIDE):
            pass
        self._watch.note("evaluation" if due else "")  # a failure or hang from here on is in the evaluation
        return due

    def _evaluation_is_due(self, step: int) -> bool:
        return step % (self._args.eval_every or self._plan.epoch_steps) == 0 or step == self._last_step

    def _comparison_is_due(self, step: int) -> bool:
        return self._args.check_every > 0 and step % self._args.check_every == 0

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`."""
        due = step % (self._args.save_every or self._plan.epoch_steps) == 0 or step == self._best_step
        return due or self._is_last(step)

    def log_train(
        self, step: int, sums: metrics.Sums, *, grad_norm: torch.Tensor | None, data_wait_s: float, **more: float
    ) -> None:
        """Add up a step's sums, and log their means if a line is due (all ranks); stops the clock until the next step.

        Args:
            step: the step that has just been done.
            sums: this rank's sums over its samples of the step.
            grad_norm: the global gradient norm, (); None if nothing is trained.
            data_wait_s: seconds that this rank has waited for data so far.
            **more: other values for train/, such as lr; a name that has a group already, such as rl/return, keeps it.
        """
        self._pace.end()
        self._is_last(step)
        self._log.add(sums)
        with profile.mark(timeline.BESIDE):
            if self.logs(step):
                norm = {} if grad_norm is None else {"grad_norm": grad_norm.item()}
                logged = self._log.log_train(step, data_wait_s, **norm, **more)
                self._report_skips()
                self._look_at_loss(step, abs(logged.get("train/loss", 0.0)))
            self._log.pause(self._evaluation_is_due(step) or self._comparison_is_due(step) or self.saves(step))

    def log_validation(self, step: int, means: Mapping[str, float]) -> None:
        """Log an evaluation's global means, note whether it is the best so far, and stop when --patience is at an end.

        Raises:
            UserError: --keep-best names none of them.
        """
        with profile.mark(timeline.EVALUATED):
            self._log.log_validation(step, means)
        if not self._keep_best and not self._patience:
            return
        metric = self._tag.removeprefix("val/")
        if metric not in means:
            flag = f"--keep-best {metric}" if self._keep_best else f"--patience {self._patience}"
            raise UserError(f"{flag}: an evaluation gives {', '.join(means)}; name one of them with --keep-best")
        self._evaluations.append({"step": step, self._tag: means[metric]})
        value, best_step = metrics.best(self._evaluations).get(self._tag, (math.nan, 0))
        if self._keep_best and best_step == step:
            self._best_step = step
        since = sum(one["step"] > best_step for one in self._evaluations)
        if since >= self._patience > 0 and not self._stops:
            self._stops = True
            self._no_better = (
                f"--patience {self._patience}: no better {self._tag} for {since} evaluations, best {value:.4g} at "
                f"step {best_step}"
            )
            ranks.print0(f"{self._no_better}: saving and stopping after step {step}")

    def log_images(self, step: int, tag: str, images: Any) -> None:
        """Show images, (N, H, W, 3) uint8, in TensorBoard; only rank 0 needs them, others may pass None."""
        self._log.log_images(step, tag, images)

    def check_replicas(self, step: int) -> None:
        """Compare the replicas of each parameter, if a comparison is due (all ranks); every save compares more.

        Raises:
            BadStateError: they differ, or one is not finite; see `guard.StateCheck`.
        """
        self._is_last(step)
        if self._comparison_is_due(step):
            with self._goes_back(), profile.mark(timeline.BESIDE):
                self._check.compare(keymap.to_save(self._model, None), step)

    def save(self, step: int, more: saver.Tensors | None = None) -> None:
        """Write a checkpoint of model and optimizer, if one is due (all ranks).

        Args:
            step: the step that has just been done.
            more: this rank's other tensors to save, by canonical name. An adopter's own begin with "extra.", such as
                "extra.average.conv1.weight"; give them to `start.restore` as well.

        Raises:
            UserError: a name of `more` has none of the prefixes that `keymap.NO_WEIGHTS` lists: nothing could load it.
            BadStateError: the state must not be kept; see `guard.StateCheck`.
        """
        self._watch.note("")
        if not self.saves(step):
            return
        for name in more or {}:
            if not name.startswith(keymap.NO_WEIGHTS):
                raise UserError(f"run.save got {name!r}, which is no part of the model: call it {f'extra.{name}'!r}")
        self._report_skips()  # first: a checkpoint must not hide what has led to it
        began = time.perf_counter()
        with self._goes_back(), profile.mark(timeline.BESIDE):
            tensors = keymap.to_save(self._model, self._optimizer) | (more or {})
            self._saver.save(
                step, tensors, self._plan.position(step), self._is_last(step), self._best_step, self._scale.state()
            )
            self._compare_paces()
        self._saved_s += time.perf_counter() - began
        if self._doubted and (step > self._doubted or self._is_last(step)):
            ranks.print0(f"step {self._doubted} was computed again, without the fault: it was a passing one")
            self._doubted = 0

    def _report_skips(self) -> None:
        """Report skipped updates (all ranks)."""
        with self._goes_back():
            if self._optimizer and (skipped := self.finite.report()):
                self._look_again(skipped, "the gradient was not finite")

    def _look_at_loss(self, step: int, loss: float) -> None:
        """Notice a loss that is far larger than each before (all ranks)."""
        while largest_losses and largest_losses[-1][0] >= step:  # of before it went back
            largest_losses.pop()
        largest = largest_losses[-1][1] if largest_losses else 0.0
        with self._goes_back():
            if loss > SPIKE * largest > 0:
                self._look_again(step, f"the loss was over {SPIKE} times the largest before")
        largest_losses.append((step, max(largest, loss)))  # in this order, NaN counts for nothing

    def _look_again(self, step: int, what: str) -> None:
        """A step is suspicious, but its numbers may be right: with --on-bad-state rewind, compute it again, once."""
        if went_back_from and step <= went_back_from[-1]:
            ranks.print0(f"note: {what} in step {step} again: this is no passing fault")
            self._doubted = 0
        elif self._args.on_bad_state == "rewind":
            raise guard.BadStateError(f"{what} in step {step}", step)

    @contextlib.contextmanager
    def _goes_back(self) -> Iterator[None]:
        """After a bad state, end the run, or let all ranks begin again from the newest checkpoint, as the user asked.

        A run computes the same again, on some devices up to rounding. What is right when it is computed again was a
        passing fault. What is wrong again is a lasting one, of the data, the program or a device: then the run ends.
        """
        try:
            yield
        except guard.BadStateError as error:
            if self._args.on_bad_state == "stop" or (went_back_from and error.step <= went_back_from[-1]):
                again = "; this is no passing fault, because the run went back from there before" * bool(went_back_from)
                command = run_dir.resume_command(self._log.path, dist.get_world_size())
                message = f"{error}{again}; to continue from the newest checkpoint, run: {command}"
                raise guard.BadStateError(message, error.step) from None
            went_back_from.append(error.step)
            ranks.print0(f"warning: {error}; going back to the newest checkpoint (--on-bad-state rewind)")
            profile.close()
            self._saver.wait()  # what it writes is from before
            self._log.close()
            if not self._args.name:  # else the run would begin again in a new folder
                sys.argv += ["--name", self._log.path.name]
            raise exits.Rewind from None

    def _compare_paces(self) -> None:
        """Report a rank that has worked longer than the others (all ranks)."""
        everyone = ranks.gather([self._pace.worked_s, self._pace.took_s, self._name])
        rank, share = pace.slow_rank([(worked_s, took_s) for worked_s, took_s, _ in everyone])
        name = everyone[rank][2] if share else ""
        if name and name != self._slow[1]:
            ranks.print0(f"note: {name} works longer than the others: they wait for it in {share:.0%} of the training")
        self._slow = (share, name)

    def finish(self) -> None:
        """Print the result and the command that continues the run, and end the process group (all ranks)."""
        profile.close()  # a request to stop may have come before its last step
        self._log.finish(self._stop.reason, self._no_better, self._saved_s, *self._slow)
        process_group.finish()


def _evaluations(path: Path, tag: str, last_step: int) -> list[dict[str, float]]:
    """What a run has recorded of one metric up to a step (rank 0)."""
    return [
        {"step": one["step"], tag: one[tag]} for one in run_dir.records(path) if tag in one and one["step"] <= last_step
    ]
