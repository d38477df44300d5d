"""Which samples each step, pass and rank reads: a stream that depends on (seed, epoch) alone.

Epochs follow each other without a seam: step t consumes the t-th run of `global_batch_size` samples of the
stream, so every step is full but the last one of a training that is counted in epochs. The position of a run
is one number, the samples consumed, and it means the same on any number of ranks.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common import UserError, seed


class Request(NamedTuple):
    """What one rank reads for one forward pass."""

    epochs: np.ndarray  # (b,) epoch of each sample
    indices: np.ndarray  # (b,) its index in the data set
    step_samples: int  # samples of the whole step, over all ranks and passes
    last: bool  # whether this pass ends the step


@functools.lru_cache(maxsize=2)  # a run of the stream can straddle two epochs
def permutation(num_samples: int, run_seed: int, epoch: int) -> np.ndarray:
    """Order of the samples in an epoch, (num_samples,): sorted by their hash."""
    keys = seed.mix(run_seed, seed.ORDER, epoch, np.arange(num_samples))
    return np.argsort(keys, kind="stable")


def _part(start: int, stop: int, parts: int, part: int) -> tuple[int, int]:
    """Bounds of one of `parts` near-equal runs of [start, stop): the first ones are longer by one."""
    length, longer = divmod(stop - start, parts)
    first = start + part * length + min(part, longer)
    return first, first + length + (part < longer)


@dataclass(frozen=True)
class Plan:
    """Which samples of the stream of epochs each remaining step consumes.

    Attributes:
        num_samples: size of the training set.
        run_seed: decides, with the epoch, the order in it.
        first_step: steps done before this process began.
        max_steps: the last step of the training.
        start: samples consumed by the steps done.
        end: samples consumed after the last step.
        global_batch_size: samples of every step but possibly the last.
        pass_size: samples of a forward pass over all shards, at most.
        num_shards: how many read different samples.
    """

    num_samples: int
    run_seed: int
    first_step: int
    max_steps: int
    start: int
    end: int
    global_batch_size: int
    pass_size: int
    num_shards: int

    def __str__(self) -> str:
        """For the terminal."""
        steps = f"steps {self.first_step + 1} to {self.max_steps} of {self.global_batch_size} samples"
        return f"{steps} in passes of {self.pass_size // self.num_shards} on each rank, {self.num_samples} to train on"

    @property
    def epoch_steps(self) -> int:
        """Steps that an epoch takes, the last one perhaps in part."""
        return -(-self.num_samples // self.global_batch_size)

    def position(self, step: int) -> int:
        """Samples consumed once `step` is done."""
        return min(self.start + (step - self.first_step) * self.global_batch_size, self.end)

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and index in the data set of the positions [start, stop), both (stop - start,)."""
        epochs, offsets = np.divmod(np.arange(start, stop), self.num_samples)
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            order = permutation(self.num_samples, self.run_seed, int(epoch))
            indices[epochs == epoch] = order[offsets[epochs == epoch]]
        return epochs, indices


def make_plan(
    num_samples: int,
    run_seed: int,
    epochs: int,
    max_steps: int,
    global_batch_size: int,
    pass_size: int,
    num_shards: int,
    done: Mapping[str, int],
    least: int = 1,
) -> Plan:
    """Plan the training from its length and what a checkpoint has done of it.

    Args:
        num_samples: size of the training set.
        run_seed: of the order.
        epochs: length of the training if `max_steps` is 0.
        max_steps: length of the training in steps, or 0.
        global_batch_size: samples per step.
        pass_size: samples per forward pass over all shards.
        num_shards: how many read different samples.
        done: "step" and "samples" of the checkpoint, possibly in steps of another size; empty for a new run.
        least: samples that each shard needs in a pass.

    Raises:
        UserError: a pass, or one of the last step, would leave a shard with fewer.
    """
    step, start = done.get("step", 0), done.get("samples", 0)
    sizes = (global_batch_size, pass_size, num_shards)
    smallest = _smallest_pass(global_batch_size, pass_size)
    if smallest < least * num_shards:
        raise UserError(
            f"--global-batch-size {global_batch_size} gives a rank {smallest // num_shards} samples in a pass, "
            f"and this model needs {least}: use a larger one, or a larger --micro-batch-size"
        )
    if max_steps:
        end = start + max(0, max_steps - step) * global_batch_size
        return Plan(num_samples, run_seed, step, max_steps, start, end, *sizes)
    left = max(0, epochs * num_samples - start)
    steps, rest = divmod(left, global_batch_size)
    if rest and _smallest_pass(rest, pass_size) < least * num_shards:
        last = step + steps
        way_out = f"--max-steps {last} alone leaves them out" if last else "use a smaller --global-batch-size"
        raise UserError(
            f"--epochs {epochs} of {num_samples} samples leaves {rest} for the last step: "
            f"too few for {num_shards} ranks in passes of {pass_size}; {way_out}"
        )
    return Plan(num_samples, run_seed, step, step + steps + (rest > 0), start, start + left, *sizes)


def _smallest_pass(samples: int, pass_size: int) -> int:
    """Samples over all shards in the smallest of the near-equal passes that `passes` cuts `samples` into."""
    return samples // -(-samples // pass_size)


def passes(start: int, stop: int, pass_size: int, shard: int, num_shards: int) -> Iterator[tuple[int, int]]:
    """Split the positions [start, stop) into forward passes, and each pass over the shards.

    Every shard makes the same number of passes, because a pass may hold collectives; passes and shards
    are near-equal when nothing divides, and a shard may be empty. No position is lost or doubled.

    Args:
        start: first position.
        stop: one past the last position.
        pass_size: positions of a pass over all shards, at most.
        shard: whose bounds to yield.
        num_shards: shards that a pass is split into.

    Yields:
        (first, end) of this shard in each pass.
    """
    num_passes = -(-(stop - start) // pass_size)
    for i in range(num_passes):
        yield _part(*_part(start, stop, num_passes, i), num_shards, shard)


def training_requests(plan: Plan, shard: int) -> Iterator[Request]:
    """Everything this shard reads from now to the end of the plan."""
    for step in range(plan.first_step + 1, plan.max_steps + 1):
        start, stop = plan.position(step - 1), plan.position(step)
        bounds = list(passes(start, stop, plan.pass_size, shard, plan.num_shards))
        for i, (first, end) in enumerate(bounds):
            yield Request(*plan.samples(first, end), stop - start, i == len(bounds) - 1)


def evaluation_requests(plan: Plan, num_samples: int, shard: int) -> Iterator[Request]:
    """Every sample of a held-out set once over all shards, in its order, in passes as large as the training's."""
    bounds = list(passes(0, num_samples, plan.pass_size, shard, plan.num_shards))
    for i, (first, end) in enumerate(bounds):
        yield Request(np.zeros(end - first, int), np.arange(first, end), num_samples, i == len(bounds) - 1)


def divide_batch(global_batch_size: int, micro_batch_size: int, num_shards: int) -> int:
    """Samples of one forward pass over all shards, at most; `passes` makes those of a step near-equal.

    With a `micro_batch_size` any number of shards will do, so that a run goes on when it loses some of them.

    Args:
        global_batch_size: samples per optimizer step over all shards.
        micro_batch_size: most samples per forward pass of a shard; 0 for one pass a step, in equal parts.
        num_shards: how many read different samples.

    Raises:
        UserError: the numbers do not divide.
    """
    if global_batch_size < num_shards or (not micro_batch_size and global_batch_size % num_shards):
        whole = -(-global_batch_size // num_shards) * num_shards
        raise UserError(f"--global-batch-size {global_batch_size} does not divide by {num_shards} ranks: {whole} would")
    return min(global_batch_size, micro_batch_size * num_shards or global_batch_size)
