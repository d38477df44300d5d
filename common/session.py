"""One run: its flags, and the objects that stop, watch, guard, save and log it, made and closed in the right order.

The training loop stays in the recipe, which calls its own step and evaluation. A session answers which of them is due,
and calls no code of the recipe.

A line that ends in "# protect", "# measure" or "# track" goes with that floor, if somebody deletes it (docs/adapt.md).
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.profiler import record_function

from common import BadStateError, bounds, devices, keymap, marks, precision, ranks, seed
from common.measure import pace, profile, verdict  # measure
from common.protect import health, watch  # protect
from common.run import cli, log, process_group, stop
from common.run.process import Process, Rewind, World
from common.state import average, best, doubts, saver, start, state_check
from common.track import tracker  # track
from common.train import flops, guard, metrics, sampler, sync_batchnorm
from common.workloads import rates


@dataclasses.dataclass(frozen=True)
class RunArgs(
    profile.ProfileArgs,  # measure
    watch.WatchArgs,  # protect
    tracker.TrackArgs,  # track
):
    """Flags of every run."""

    # every run
    out: str = "runs"  # folder that holds the runs
    name: str = ""  # name of the run, "" for date and time; the same name again resumes that run
    resume: str = ""  # start from this run or checkpoint, of any recipe with the same model
    seed: bounds.Seed = 0  # seed of all random numbers, such as initial weights and order of samples
    backend: str = "auto"  # auto (NCCL on GPUs, else gloo), gloo or nccl
    stop_after: bounds.NonNegativeInt = 0  # save and stop after this step; 0 for never
    deadline: bounds.NonNegativeFloat = 0.0  # save and stop after this many minutes; 0 for never
    log_every: bounds.PositiveInt = 10  # steps between log lines
    eval_every: bounds.NonNegativeInt = 0  # steps between evaluations; 0 for once per epoch
    save_every: bounds.NonNegativeInt = 0  # steps between checkpoints; 0 for once per epoch
    keep: bounds.PositiveInt = 2  # number of newest checkpoints to keep
    async_save: bool = False  # write checkpoints while the run continues
    check_every: bounds.NonNegativeInt = 100  # steps between comparisons of the replicas; 0 for never
    on_bad_state: Literal["stop", "rewind"] = "stop"  # if a state is not finite or replicas differ: stop, or go back
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32; high is TF32 on GPUs
    deterministic: bool = False  # the same bits each time on GPUs too, if slower; a CPU gives them anyway


@dataclasses.dataclass(frozen=True)
class TrainArgs(RunArgs):
    """Flags of every training."""

    # every training
    init: str = ""  # start from weights that fit: a checkpoint, folder, .safetensors, .pth, torchvision:NAME
    ema: bounds.Fraction = 0.0  # evaluate and save an average of the weights with this decay, such as 0.999; 0 for none
    keep_best: str = ""  # also keep the checkpoint that is best in this metric, such as loss; "" for none
    patience: bounds.NonNegativeInt = 0  # stop after so many evaluations without a better keep_best (or loss); 0: never
    inexact: bool = False  # accept random numbers that a resumed run cannot repeat
    max_skips: bounds.NonNegativeInt = 3  # updates in a row that may be skipped because a gradient is not finite
    dtype: str = "auto"  # auto (bfloat16 if the hardware computes in it), float32, bfloat16, float16 or float64
    compile: bool = False  # torch.compile the model


def join(args: Any, recipe: str, process: Process) -> World:
    """Join the other ranks, and check that all can run together (all ranks).

    Args:
        args: the recipe's flags.
        recipe: its train.py, which is compared over the ranks with all of common/.
        process: this one.

    Raises:
        UserError: the ranks have other flags, code or versions, or a device is missing or computes wrongly.
    """
    devices.configure(args.matmul_precision, args.deterministic)
    process.name = args.name or process.name
    process.recipe = recipe
    cli.keep_for_errors(args, process)
    world = process_group.start(args.backend, args.dtype, process)
    ranks.check_same(flag=dataclasses.asdict(args), code=ranks.code_digests(recipe), version=ranks.versions())
    health.check(world.device)  # protect
    tracker.check(args.tracker)  # track
    process.watch = watch.Watch(world, args.hang_timeout)  # protect
    return world


class Session:
    """Everything that a run needs from its first step to its last.

    Attributes:
        finite: skips updates whose gradient is not finite; the recipe's train_step calls it before each update. There
            is none without an optimizer.
    """

    def __init__(
        self,
        args: Any,
        world: World,
        mesh: DeviceMesh,
        found: start.Found,
        plan: sampler.Plan,
        model: nn.Module,
        optimizer: Optimizer | None,
        sample: flops.Sample | None = None,
    ) -> None:
        """Claim the run's folder, and start to handle signals, watch the ranks and log (main thread, all ranks).

        Args:
            args: the recipe's flags, with those of `RunArgs`.
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
        computes_on = devices.used_by(model, world.device)
        sampler.check_min_samples(plan, sync_batchnorm.min_samples(model), len(computes_on))
        self._args = args
        self._process = world.process
        self._plan = plan
        self._model = model
        self._optimizer = optimizer
        self._last_step = min(plan.max_steps, args.stop_after or plan.max_steps)
        self._done = plan.first_step
        self._stops = False
        self._no_better = ""  # why --patience ends the run
        self._doubts = world.process.doubts = world.process.doubts or doubts.Doubts(args.on_bad_state)
        # The order matters: claim the folder before anything is written to it, take over signals before the first
        # loader worker is forked, watch before the first training collective, log when nothing can be refused any more.
        self._profile = profile.Profile(args, plan.first_step, self._last_step, world, found.place.run_dir)  # measure
        self._pace = pace.Pace(world.device, f"rank {world.rank} on {world.host}")  # measure
        found.place.claim(world.process)
        self._best = best.Best(vars(args), found.place.run_dir, plan.first_step)
        found = start.check_newest(found, plan.order)
        self._stop = stop.Stop(world, args.deadline, plan.first_step, self._last_step)
        process_group.set_timeout(mesh, args.hang_timeout)  # protect
        self._watch = world.process.watch  # protect
        self._watch.begin(found.place.run_dir, plan.first_step, args.hang_timeout)  # protect
        dtype = precision.compute_dtype(args.dtype, world.device)
        if optimizer:
            rates.name_unheld(model, optimizer)
            # Before the optimizer has a state, for which memory may be missing.
            world.process.owners = weakref.ref(model), weakref.ref(optimizer)
            self.finite = guard.FiniteGuard(model, optimizer, plan, args.max_skips, dtype, found.progress)
        self._average = average.Average(model, vars(args).get("ema", 0.0), found.path)
        self._check = state_check.StateCheck(model, compare=args.check_every > 0)
        self._saver = saver.Saver(found, mesh, self._check, world.process, args.keep, args.async_save)
        self._log = log.Run(found.place.run_dir, args, world, plan, dtype, sample or flops.Sample(), computes_on)
        tracker.start(args.tracker, found.place.run_dir, world)  # track
        if optimizer:
            rates.show(optimizer, vars(args).get("warmup_steps", 0), plan.max_steps)

    def steps(self, dp_rank: int) -> Iterator[int]:
        """Yield the steps to do, until the last one or a request to stop; seed all generators before each.

        Args:
            dp_rank: ranks with the same dp_rank draw the same random numbers, because they read the same samples.
        """
        for step in range(self._plan.first_step + 1, self._last_step + 1):
            self._watch.step(step)  # protect
            seed.everything(self._args.seed, seed.STEP, step, dp_rank)
            self._profile.begin(step)  # measure
            self._log.unpause()
            self._pace.begin()  # measure
            yield step
            is_last = self._is_last(step)
            self._profile.end(step, is_last, self._log.ideal())  # measure
            if is_last:
                break

    def _is_last(self, step: int) -> bool:
        """Whether the run ends after `step` (all ranks). The first call after a step also completes that step."""
        if step != self._done:
            self._done = step
            if self._optimizer:
                self.finite.restore_if_skipped(step)
            self._average.update()
            self._stops = self._stop.after(step) or step == self._last_step
        return self._stops

    def logs(self, step: int) -> bool:
        """Whether a log line is due after `step`."""
        return step % self._args.log_every == 0 or self._is_last(step)

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after `step`; a request to stop does not cause one.

        If so, and with --ema, the model has the average of its weights until `log_validation`.
        """
        due = self._evaluation_is_due(step)
        self._average.swap(due)
        with record_function(marks.EVALUATES if due else marks.BESIDE):
            pass
        self._watch.note("evaluation" if due else "")  # of a failure or hang from here on  # protect
        return due

    def _evaluation_is_due(self, step: int) -> bool:
        return step % (self._args.eval_every or self._plan.epoch_steps) == 0 or step == self._plan.max_steps

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`."""
        due = step % (self._args.save_every or self._plan.epoch_steps) == 0 or step == self._best.step
        return self._is_last(step) or due

    def log_train(
        self, step: int, sums: metrics.Sums, *, grad_norm: torch.Tensor | None, data_wait_s: float, **more: float
    ) -> None:
        """Add up a step's sums; log their means and compare the replicas, each if it is due (all ranks).

        It stops the clock until the next step. Every save compares more than the replicas of the parameters.

        Args:
            step: the step that has just been done.
            sums: this rank's sums over its samples of the step.
            grad_norm: the global gradient norm, (); None if nothing is trained.
            data_wait_s: seconds that this rank has waited for data so far.
            **more: other values for train/, such as lr; a name that has a group already, such as rl/return, keeps it.

        Raises:
            BadStateError: replicas differ, or a parameter is not finite; see `state_check.StateCheck`.
        """
        self._pace.end()  # measure
        self._is_last(step)
        self._log.add(sums)
        compares = self._args.check_every > 0 and step % self._args.check_every == 0
        with self._rewinds(), record_function(marks.BESIDE):
            if self.logs(step):
                norm = {} if grad_norm is None else {"grad_norm": grad_norm.item()}
                logged = self._log.log_train(step, data_wait_s, **norm, **more)
                self._report_skips()
                self._doubts.check_loss(step, abs(logged.get("train/loss", 0.0)))
            self._log.pause(self._evaluation_is_due(step) or compares or self.saves(step))
            if compares:
                self._check.compare(keymap.to_save(self._model, None), step)

    def log_validation(self, step: int, sums: metrics.Sums, metrics_of: metrics.MetricsOf = dict) -> None:
        """Log an evaluation's global means, note whether it is the best so far, and stop at the end of --patience.

        Args:
            step: the step that has just been done.
            sums: this rank's sums (all ranks take part).
            metrics_of: gives the metrics to log of the means, as `BatchReader.metrics` does.

        Raises:
            UserError: --keep-best names none of the metrics.
        """
        self._average.swap(False)
        means = metrics_of(metrics.means(sums))
        with record_function(marks.EVALUATED):
            self._log.log_validation(step, means)
        no_better = self._best.add(step, means)
        if no_better and not self._stops:
            self._stops = True
            self._no_better = no_better
            ranks.print0(f"{no_better}: saving and stopping after step {step}")

    def log_images(self, step: int, tag: str, images: Any) -> None:
        """Show images, (N, H, W, 3) uint8, in TensorBoard; only rank 0 needs them, others may pass None."""
        self._log.records.draw(step, lambda board: board.add_images(tag, images, step, dataformats="NHWC"))

    def save(self, step: int, more: saver.Tensors | None = None) -> None:
        """Write a checkpoint of model and optimizer, if one is due (all ranks).

        Args:
            step: the step that has just been done.
            more: this rank's other tensors to save, by canonical name. An adopter's own begin with "extra.", such as
                "extra.queue"; give them to `start.restore` as well.

        Raises:
            UserError: a name of `more` has none of the prefixes that `keymap.NO_WEIGHTS` lists, so nothing could load
                it; or it has other numbers on another rank.
            BadStateError: the state must not be kept; see `state_check.StateCheck`.
        """
        self._watch.note("")  # protect
        if not self.saves(step):
            return
        state_check.check_own(more or {})
        with self._rewinds(), record_function(marks.BESIDE):
            self._pace.begin_save()  # measure
            self._report_skips()  # first: a checkpoint must not hide what has led to it
            tensors = keymap.to_save(self._model, self._optimizer) | self._average.to_save() | (more or {})
            scale = self.finite.scale_state() if self._optimizer else []
            self._saver.save(step, tensors, self._plan.position(step), self._is_last(step), self._best.step, scale)
            self._pace.end_save()  # measure
        self._doubts.confirm(step, self._is_last(step))

    def _report_skips(self) -> None:
        """Report skipped updates (all ranks)."""
        if self._optimizer and (skipped := self.finite.report()):
            self._doubts.suspect(skipped, "the gradient was not finite")

    @contextlib.contextmanager
    def _rewinds(self) -> Iterator[None]:
        """After a bad state, end the run, or let all ranks begin again from the newest checkpoint, as the user asked.

        The checkpoint may be of any step before: what was computed since is computed again.
        """
        try:
            yield
        except BadStateError as error:
            self._doubts.judge(error, self._log.path)
            self._profile.close()  # measure
            self._saver.wait()  # what it writes is from before
            self._log.close()
            raise Rewind from None

    def finish(self) -> None:
        """Print the result and the command that continues the run, and end the process group (all ranks)."""
        judged = ""
        judged = verdict.of_run(vars(self._args), self._log.spent(), self._pace.saved_s, *self._pace.slow)  # measure
        self._log.finish(self._stop.reason, self._no_better, judged)
        process_group.finish(self._process)
