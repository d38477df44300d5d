"""Which samples each step, micro-batch and rank reads: a stream that depends on (seed, epoch) alone.

The stream is one epoch after the other. Step t consumes its t-th `global_batch_size` samples, also across the end of
an epoch, so every step is full except possibly the last one of a training measured in epochs. A run's position is one
number, the samples consumed, and it means the same on any number of ranks.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from common import UserError, seed


class Request(NamedTuple):
    """The samples that one rank reads for one micro-batch."""

    epochs: np.ndarray  # (b,) epoch of each sample
    indices: np.ndarray  # (b,) its index in the data set
    step_samples: int  # samples of the whole step, over all ranks and micro-batches
    last: bool  # whether this micro-batch ends the step


MOST_SORTED = 2**24  # samples of a set whose order is sorted in memory, which takes 24 bytes for each
ROUNDS = 8  # of `_place`


@functools.lru_cache(maxsize=2)  # a step can straddle two epochs
def permutation(num_samples: int, run_seed: int, epoch: int) -> np.ndarray:
    """Order of the samples in an epoch, (num_samples,): their indices sorted by hash."""
    keys = seed.mix(run_seed, seed.ORDER, epoch, np.arange(num_samples))
    return np.argsort(keys, kind="stable")


def ordered(num_samples: int, run_seed: int, epoch: int, offsets: np.ndarray) -> np.ndarray:
    """Indices in the data set of the samples at these offsets of an epoch's order, both (b,).

    The orders of sets of up to `MOST_SORTED` samples are older, and checkpoints rely on them; that of a larger set is
    computed for what is asked alone, because to sort 100 million hashes takes 40 s and 2.5 GB of each rank.
    """
    if num_samples <= MOST_SORTED:
        return permutation(num_samples, run_seed, epoch)[offsets]
    return permuted(num_samples, seed.mix(run_seed, seed.ORDER, epoch), offsets)


def permuted(num_samples: int, key: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """A random permutation of range(num_samples) at these offsets, (b,), without the others.

    A Feistel network over two digits, one of which is changed in each round by a hash of the other, and cycle walking:
    what falls outside of the range goes through again (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
    https://doi.org/10.1007/3-540-45760-7_9). The digits are so near the square root that hardly anything does.

    Args:
        num_samples: size of the range.
        key: (), uint64; each gives another permutation.
        offsets: integers of the range.
    """
    low_base = math.isqrt(num_samples - 1) + 1
    high_base = ceil_div(num_samples, low_base)
    found = np.array(offsets, np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():
        found[outside] = _place(found[outside], key, np.uint64(high_base), np.uint64(low_base))
        outside = found >= num_samples
    return found.astype(np.int64)


def _place(numbers: np.ndarray, key: np.ndarray, high_base: np.uint64, low_base: np.uint64) -> np.ndarray:
    """The Feistel network: a permutation of range(high_base * low_base), uint64."""
    high, low = np.divmod(numbers, low_base)
    for i in range(0, ROUNDS, 2):
        high = (high + seed.mix(int(key), i, low) % high_base) % high_base
        low = (low + seed.mix(int(key), i + 1, high) % low_base) % low_base
    return high * low_base + low


def ceil_div(a: int, b: int) -> int:
    """Quotient, rounded up."""
    return -(-a // b)


def _part(start: int, stop: int, parts: int, part: int) -> tuple[int, int]:
    """Bounds of one of `parts` near-equal parts of [start, stop): the first ones are longer by one."""
    length, longer = divmod(stop - start, parts)
    first = start + part * length + min(part, longer)
    return first, first + length + (part < longer)


@dataclass(frozen=True)
class Division:
    """How the samples of a step are divided into micro-batches and over ranks.

    Attributes:
        global_batch_size: samples of every step, except possibly the last of a training.
        global_micro_batch_size: samples of a micro-batch over all dp ranks, at most.
        dp_size: ranks, or groups of ranks, that read different samples.
        part: the name of what a step is divided into, for the terminal.
    """

    global_batch_size: int
    global_micro_batch_size: int
    dp_size: int
    part: str = "micro-batch"

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a whole step on each rank."""
        return ceil_div(self.global_batch_size, self.global_micro_batch_size)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch on a rank, at most."""
        return ceil_div(self.global_micro_batch_size, self.dp_size)

    def __str__(self) -> str:
        """A step's samples as a product, for the terminal."""
        number = self.num_micro_batches
        equal = self.dp_size * number * self.micro_batch_size == self.global_batch_size
        ranks = f"{self.dp_size} data-parallel rank{'s' * (self.dp_size > 1)}"
        parts = f"{number} {self.part}{'es' * (number > 1)}"
        return f"{ranks} x {parts} x {'' if equal else 'up to '}{self.micro_batch_size:,} samples"


@dataclass(frozen=True)
class Plan:
    """Which samples of the stream each remaining step consumes.

    Attributes:
        num_samples: size of the training set; 0 for a stream, or if samples are generated, as by an environment.
        run_seed: decides, with the epoch, the order of the samples.
        first_step: steps done before this process began.
        max_steps: the last step of the training.
        start: samples consumed before the next step.
        end: samples consumed after the last step.
        division: how each step's samples are divided.
        order: of the training set, if it has one of its own, as a mixture has: `samples(positions)` gives epochs and
            indices, `facts()` what a checkpoint keeps, `logged(position)` values by TensorBoard tag.
    """

    num_samples: int
    run_seed: int
    first_step: int
    max_steps: int
    start: int
    end: int
    division: Division
    order: Any = None

    def __str__(self) -> str:
        """The steps to do and their samples, for the terminal."""
        if self.first_step >= self.max_steps:
            return f"training is complete: step {self.first_step} of {self.max_steps} is done"
        steps = f"steps {self.first_step + 1} to {self.max_steps}"
        samples = f"; {self.num_samples:,} training samples" if self.num_samples else ""
        if 0 < self.num_samples < self.division.global_batch_size:
            samples += ", fewer than a step reads: it reads some of them several times"
        return f"{steps}, {self.division.global_batch_size:,} samples per step ({self.division}){samples}"

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch, rounded up; all steps of the training if there is no set of samples."""
        return ceil_div(self.num_samples, self.division.global_batch_size) if self.num_samples else self.max_steps

    def position(self, step: int) -> int:
        """Samples consumed after `step`."""
        return min(self.start + (step - self.first_step) * self.division.global_batch_size, self.end)

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and index in the data set of the positions [start, stop), both (stop - start,).

        In a stream, the position is the index.
        """
        if self.order:
            return self.order.samples(np.arange(start, stop))
        if not self.num_samples:
            return np.zeros(stop - start, int), np.arange(start, stop)
        epochs, offsets = np.divmod(np.arange(start, stop), self.num_samples)
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            own = epochs == epoch
            indices[own] = ordered(self.num_samples, self.run_seed, int(epoch), offsets[own])
        return epochs, indices


def make_plan(
    division: Division, train: Any, *, run_seed: int, max_steps: int, epochs: int = 0, progress: Mapping[str, Any]
) -> Plan:
    """Plan the training from its length and a checkpoint's progress.

    Args:
        division: how each step's samples are divided.
        train: the training set, which may have `make_order(run_seed, progress)` for an order of its own; or its size:
            0 for a stream, or if samples are generated.
        run_seed: decides the order of the samples.
        epochs: length of the training if `max_steps` is 0.
        max_steps: length of the training in steps, or 0.
        progress: the checkpoint's manifest, with "step" and "samples", whose steps may have had another size; empty for
            a new run.

    Raises:
        UserError: neither the number of steps nor that of samples is known; or the checkpoint is of an older format, in
            the middle of an epoch of a set whose order was another then.
    """
    num_samples = train if isinstance(train, int) else len(train)
    if not num_samples and not max_steps:
        raise UserError("--max-steps 0 is for --epochs, and nobody knows how long a stream is: set --max-steps")
    step = progress.get("step", 0)
    start = progress.get("samples", 0)
    if progress.get("format") == 1 and num_samples > MOST_SORTED and start % num_samples:
        raise UserError(
            f"the checkpoint of step {step} is in the middle of an epoch of {num_samples:,} samples, and the order of "
            f"more than {MOST_SORTED:,} has changed since it was written: continue with the code that wrote it until "
            "the epoch ends, or begin an epoch with its weights (--init)"
        )
    remaining = max(0, max_steps - step) * division.global_batch_size
    if not max_steps:
        remaining = max(0, epochs * num_samples - start)
        max_steps = step + ceil_div(remaining, division.global_batch_size)
    order = train.make_order(run_seed, progress) if hasattr(train, "make_order") else None
    return Plan(num_samples, run_seed, step, max_steps, start, start + remaining, division, order)


def check_min_samples(plan: Plan, least: int, num_devices: int = 1) -> None:
    """Check that every rank gets enough samples in each micro-batch for its model: BatchNorm needs 2.

    Args:
        plan: the steps of the training.
        least: samples that each device needs in a micro-batch.
        num_devices: devices of a rank, over which its model deals each micro-batch as torch.chunk does.

    Raises:
        UserError: a micro-batch, of any step or of the last one, gives a device fewer.
    """
    division = plan.division
    least_there = fewest(division.global_batch_size, division, num_devices)
    device = "a rank" if num_devices == 1 else f"one of {num_devices} GPUs"
    if least_there < least:
        multiple = f", to a multiple of {num_devices}" if num_devices > 1 else ""
        raise UserError(
            f"--global-batch-size {division.global_batch_size} gives {device} only {least_there} "
            f"of the {least} samples that this model needs per micro-batch: raise --global-batch-size or "
            f"--micro-batch-size{multiple}"
        )
    rest = (plan.end - plan.start) % division.global_batch_size
    if rest and fewest(rest, division, num_devices) < least:
        last = plan.max_steps - 1
        advice = f"use --max-steps {last} to drop that step" if last else "lower --global-batch-size"
        who = f"{device} (of {division.dp_size})" if num_devices == 1 else device
        raise UserError(
            f"the last step of --epochs has {rest} of {plan.num_samples} samples: in micro-batches of up to "
            f"{division.micro_batch_size}, {who} would get fewer than the {least} that this model needs: {advice}"
        )


def fewest(samples: int, division: Division, num_devices: int = 1) -> int:
    """Samples that a device gets at least, of the micro-batches that `micro_batches` cuts `samples` into."""
    number = ceil_div(samples, division.global_micro_batch_size)
    of_rank = (samples // number // division.dp_size, ceil_div(ceil_div(samples, number), division.dp_size))
    if not of_rank[0]:
        return 0
    # Near-equal over micro-batches and ranks, but torch.chunk gives the last device what the others leave.
    return min((size - 1) % ceil_div(size, num_devices) + 1 for size in range(of_rank[0], of_rank[1] + 1))


def micro_batches(start: int, stop: int, division: Division, dp_rank: int) -> Iterator[tuple[int, int]]:
    """Split the positions [start, stop) into micro-batches, and each of these over the dp ranks.

    Every rank gets the same number of micro-batches, because each may need collectives. Where the numbers do not
    divide, micro-batches and their parts are near-equal, and a part may be empty. Each position is in one part.

    Args:
        start: first position.
        stop: one past the last position.
        division: size of a micro-batch, and number of ranks to split it over.
        dp_rank: the rank whose bounds to yield.

    Yields:
        (first, end) of this rank's part of each micro-batch.
    """
    number = ceil_div(stop - start, division.global_micro_batch_size)
    for i in range(number):
        first, end = _part(start, stop, number, i)
        yield _part(first, end, division.dp_size, dp_rank)


def training_requests(plan: Plan, dp_rank: int) -> Iterator[Request]:
    """All requests of this rank from the plan's first step to its last."""
    for step in range(plan.first_step + 1, plan.max_steps + 1):
        start, stop = plan.position(step - 1), plan.position(step)
        bounds = list(micro_batches(start, stop, plan.division, dp_rank))
        for i, (first, end) in enumerate(bounds):
            yield Request(*plan.samples(first, end), stop - start, i == len(bounds) - 1)


def evaluation_requests(plan: Plan, num_samples: int, dp_rank: int) -> Iterator[Request]:
    """Requests of this rank that, over all ranks, read a held-out set once, in the training's micro-batch size.

    Raises:
        UserError: the set is a stream, which may never end.
    """
    if not num_samples:
        raise UserError(
            "make_data gives a stream to validate on, which may never end: give the same samples for each evaluation, "
            "such as dataset.MapStyle([*itertools.islice(stream, 1000)], args.seed)"
        )
    whole = replace(plan.division, global_batch_size=num_samples)
    return training_requests(Plan(0, 0, 0, 1, 0, num_samples, whole), dp_rank)  # one step of a stream


def divide_batch(global_batch_size: int, micro_batch_size: int, dp_size: int) -> Division:
    """Divide a step into micro-batches and over dp ranks.

    With a `micro_batch_size`, any number of ranks can divide a step, so a run can continue after losing some.

    Args:
        global_batch_size: samples per optimizer step over all ranks.
        micro_batch_size: most samples per forward pass of a rank; 0 for one micro-batch per step, in equal parts.
        dp_size: ranks, or groups of ranks, that read different samples.

    Raises:
        UserError: the batch does not divide by the ranks.
    """
    if global_batch_size < dp_size or (not micro_batch_size and global_batch_size % dp_size):
        divisible = ceil_div(global_batch_size, dp_size) * dp_size
        raise UserError(
            f"--global-batch-size {global_batch_size} does not divide by {dp_size} data-parallel ranks: use {divisible}"
        )
    return Division(global_batch_size, min(global_batch_size, micro_batch_size * dp_size or global_batch_size), dp_size)
