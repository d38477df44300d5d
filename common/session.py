"""One run from its folder to its last line: claims the folder, and holds what survives, watches, saves and logs.

The loop stays in the recipe, which calls its own step, evaluation and save; a session says when each is due, and
calls nothing back.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from common import (
    checkpoint,
    flops,
    guard,
    keymap,
    log,
    metrics,
    precision,
    process_group,
    run_dir,
    sampler,
    saver,
    seed,
    stop,
    sync_batchnorm,
    watch,
)


class Session:
    """Everything that lives from the first step of a run to its last.

    Attributes:
        finite: leaves out updates whose gradient is not finite; the recipe's train_step asks it before each.
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
        optimizer: Optimizer,
        sample: flops.Sample | None = None,
    ) -> None:
        """Claim the run's folder, and start what watches over the training (main thread, all ranks).

        Args:
            args: the recipe's flags, with the block that all recipes share.
            recipe: its train.py.
            world: this process.
            mesh: the ranks and their axes.
            found: what the run starts from, loaded already.
            plan: which samples each step reads.
            model: as the strategy has made it.
            optimizer: of its parameters.
            sample: what a sample counts as; without it, neither MFU nor tokens per second are shown.

        Raises:
            UserError: the folder is in use, or a micro-batch has too few samples for the model.
        """
        sampler.check_min_samples(plan, sync_batchnorm.min_samples(model))
        self._args = args
        self._plan = plan
        self._model = model
        self._optimizer = optimizer
        self._last_step = min(plan.max_steps, args.stop_after or plan.max_steps)
        self._done = plan.first_step
        self._stops = False
        # The order matters. No other job writes to the folder before it is claimed; signals are taken over before the
        # first loader worker is forked; from then on the watch names whoever fails; and the log speaks last, when
        # nothing can be refused any more.
        run_dir.claim(found.run_dir)
        self._stop = stop.Stop(world, args.deadline, plan.first_step)
        self._watch = watch.Watch(world, found.run_dir, plan.first_step, args.hang_timeout)
        self.finite = guard.FiniteGuard(model, optimizer, plan, args.max_skips)
        self._saver = saver.Saver(found.run_dir, recipe, mesh, found.fingerprint, args.keep, args.async_save)
        dtype = precision.compute_dtype(args.dtype, world.device)
        self._log = log.Run(found.run_dir, recipe, args, world, plan, dtype, sample or flops.Sample())

    def steps(self, dp_rank: int) -> Iterator[int]:
        """The steps to do, until the last one or a reason to stop; each begins with torch's generators seeded anew.

        Args:
            dp_rank: ranks with the same one draw the same numbers, as they read the same samples.
        """
        for step in range(self._plan.first_step + 1, self._last_step + 1):
            self._watch.step(step)
            seed.everything(self._args.seed, seed.STEP, step, dp_rank)
            self._log.unpause()
            yield step
            if self._is_last(step):
                break

    def _is_last(self, step: int) -> bool:
        """Whether nothing comes after `step`, which is done (all ranks): the first to ask closes the step."""
        if step != self._done:
            self._done = step
            self.finite.restore_if_skipped(step)
            self._stops = self._stop.after(step) or step == self._last_step
        return self._stops

    def logs(self, step: int) -> bool:
        """Whether a line of the log is due after `step`."""
        return step % self._args.log_every == 0 or self._is_last(step)

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after `step`; a run that stops before its end is not evaluated once more."""
        due = step % (self._args.eval_every or self._plan.epoch_steps) == 0 or step == self._last_step
        self._watch.note("evaluation" if due else "")  # what fails or hangs from here on does so in it
        return due

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`."""
        return step % (self._args.save_every or self._plan.epoch_steps) == 0 or self._is_last(step)

    def log_train(
        self, step: int, sums: metrics.Sums, *, grad_norm: torch.Tensor, data_wait_s: float, **more: float
    ) -> None:
        """Add a step's sums up, and log their means where a line is due (all ranks); what follows is not timed.

        Args:
            step: the step that is done.
            sums: of this rank, over the samples of the step.
            grad_norm: the global one, ().
            data_wait_s: seconds that this rank has waited for data so far.
            **more: what else to show under train/, such as lr; a name with a group of its own, rl/return, keeps it.
        """
        self._is_last(step)
        self._log.add(sums)
        if self.logs(step):
            self._log.log_train(step, data_wait_s, grad_norm=grad_norm.item(), **more)
            self.finite.report()
        self._log.pause()

    def log_validation(self, step: int, means: Mapping[str, float]) -> None:
        """Log an evaluation's global means."""
        self._log.log_validation(step, means)

    def log_images(self, step: int, tag: str, images: Any) -> None:
        """Show images, (N, H, W, 3) of bytes, in TensorBoard (rank 0; elsewhere they may be None)."""
        self._log.log_images(step, tag, images)

    def check_replicas(self, step: int) -> None:
        """Compare, where it is due, what the ranks should hold alike (all ranks); see `guard.check_replicas`."""
        every = self._args.check_every
        if every and (step % every == 0 or self._is_last(step)):
            guard.check_replicas(self._model, step)

    def save(self, step: int, more: saver.Tensors | None = None) -> None:
        """Write a checkpoint of model and optimizer, where one is due (all ranks).

        Args:
            step: the step that is done.
            more: what else this rank brings, by canonical name.
        """
        self._watch.note("")
        if self.saves(step):
            tensors = keymap.tensors(self._model, self._optimizer) | (more or {})
            self._saver.save(step, tensors, self._plan.position(step), self._is_last(step))

    def finish(self) -> None:
        """Print how the run went and what to run next, and end the process group (all ranks)."""
        self._log.finish(self._stop.reason)
        process_group.finish()
