"""Which samples are read when: the stream depends on (seed, epoch) alone, whatever the ranks, micro_batches and interruptions.

Every claim is checked for all combinations of a few awkward sizes.
"""

import dataclasses
import itertools
import re
from collections import Counter

import numpy as np
import pytest

from common import UserError, sampler
from common.sampler import Request

SEED = 3
NUM_SAMPLES = (5, 37, 64)
# (batch, micro, dp_size) that divide_batch accepts: one pass a step (micro 0) or up to four.
DIVISIONS = sorted(
    {
        (max(1, micro) * dp_size * times, micro, dp_size)
        for micro, dp_size, times in itertools.product((0, 1, 2, 3, 5), (1, 2, 3, 4, 5), (1, 2, 4))
    }
)

Samples = list[tuple[int, int]]  # (epoch, index)


def stream(num_samples: int, length: int) -> Samples:
    """The start of the global order, epoch after epoch."""
    epochs = range(-(-length // num_samples))
    order = [(e, int(i)) for e in epochs for i in sampler.permutation(num_samples, SEED, e)]
    return order[:length]


def read_steps(plan: sampler.Plan, micro: int, dp_size: int) -> list[list[list[Request]]]:
    """Requests of all dp_size as [step][pass][dp_rank]."""
    plan = dataclasses.replace(
        plan, global_micro_batch_size=sampler.divide_batch(plan.global_batch_size, micro, dp_size), dp_size=dp_size
    )
    of_ranks = [list(sampler.training_requests(plan, dp_rank)) for dp_rank in range(dp_size)]
    steps: list[list[list[Request]]] = [[]]
    for requests in zip(*of_ranks, strict=True):  # strict: all dp_size make the same number of micro_batches
        steps[-1].append(list(requests))
        assert len({request.last for request in requests}) == 1, "dp_size disagree on where a step ends"
        if requests[0].last:
            steps.append([])
    assert not steps.pop(), "the last request ends a step"
    return steps


def samples(step: list[list[Request]]) -> Samples:
    """What a step reads, in order."""
    return [
        (int(epoch), int(index))
        for one in step
        for request in one
        for epoch, index in zip(request.epochs, request.indices, strict=True)
    ]


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
def test_step_t_is_the_t_th_run_of_the_order_on_any_number_of_ranks(num_samples: int) -> None:
    for batch, micro, dp_size in DIVISIONS:
        steps_wanted = -(-5 * num_samples // (2 * batch)) + 1  # beyond two and a half epochs
        plan = sampler.make_plan(num_samples, SEED, 0, steps_wanted, batch, micro * dp_size or batch, dp_size, {})
        order = stream(num_samples, steps_wanted * batch)
        steps = read_steps(plan, micro, dp_size)
        assert len(steps) == steps_wanted
        for t, step in enumerate(steps):
            assert samples(step) == order[t * batch : (t + 1) * batch], (batch, micro, dp_size, t)
            assert {request.step_samples for one in step for request in one} == {batch}
            assert len(step) == (batch // (micro * dp_size) if micro else 1), "micro_batches a step"
            if micro:
                assert {len(request.indices) for one in step for request in one} == {micro}


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
@pytest.mark.parametrize("epochs", [1, 3])
def test_epochs_read_every_sample_once_each(num_samples: int, epochs: int) -> None:
    accepted = 0
    for batch, micro, dp_size in DIVISIONS:
        try:
            plan = sampler.make_plan(num_samples, SEED, epochs, 0, batch, micro * dp_size or batch, dp_size, {})
        except UserError:
            continue
        accepted += 1
        steps = read_steps(plan, micro, dp_size)
        assert len(steps) == plan.max_steps == -(-epochs * num_samples // batch)
        read = [sample for step in steps for sample in samples(step)]
        assert read == stream(num_samples, epochs * num_samples), (batch, micro, dp_size)
        assert Counter(read) == Counter(itertools.product(range(epochs), range(num_samples)))
        for t, step in enumerate(steps):
            size = min(batch, epochs * num_samples - t * batch)  # only the last one is shorter
            assert {request.step_samples for one in step for request in one} == {size}
            for one in step:
                lengths = [len(request.indices) for request in one]
                assert max(lengths) - min(lengths) <= 1
                assert sum(lengths) <= (micro * dp_size or batch)
    assert accepted > 10


def test_no_pass_of_two_or_more_has_a_lone_sample() -> None:
    """BatchNorm over one value per channel raises: what make_plan refuses for a step must not happen in a pass."""
    lone = []
    for (batch, micro, dp_size), num_samples in itertools.product(DIVISIONS, range(20, 60)):
        if micro == 1 or batch < 2 * dp_size:
            continue  # the user asked for single samples
        try:
            plan = sampler.make_plan(num_samples, SEED, 1, 0, batch, micro * dp_size or batch, dp_size, {}, least=2)
        except UserError:
            continue
        for one in read_steps(plan, micro, dp_size)[-1]:
            if min(len(request.indices) for request in one) < 2:
                lone.append(f"{num_samples} samples, batch {batch}, micro {micro}, {dp_size} dp_size")
    assert not lone, f"{len(lone)} times, first: {lone[0]}"


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
def test_resume_reads_the_same_rest(num_samples: int) -> None:
    """From every step of a run, with the same and with other ranks, micro_batches and batches."""
    before = sampler.make_plan(num_samples, SEED, 0, 9, 12, 12, 2, {})
    for done_steps, (batch, micro, dp_size) in itertools.product(range(10), DIVISIONS[::4]):
        done = {"step": done_steps, "samples": before.position(done_steps)}
        assert done["samples"] == done_steps * 12
        plan = sampler.make_plan(num_samples, SEED, 0, 9, batch, micro * dp_size or batch, dp_size, done)
        steps = read_steps(plan, micro, dp_size)
        assert len(steps) == 9 - done_steps, "max_steps is the length of the whole training"
        end = done["samples"] + len(steps) * batch
        read = [sample for step in steps for sample in samples(step)]
        assert read == stream(num_samples, end)[done["samples"] :]
        assert plan.position(9) == end


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
def test_resume_finishes_the_epochs(num_samples: int) -> None:
    total = 3 * num_samples
    before = sampler.make_plan(num_samples, SEED, 3, 0, 6, 6, 1, {})
    resumed = 0
    for done_steps, (batch, micro, dp_size) in itertools.product(range(before.max_steps + 1), DIVISIONS[::4]):
        done = {"step": done_steps, "samples": before.position(done_steps)}
        try:
            plan = sampler.make_plan(num_samples, SEED, 3, 0, batch, micro * dp_size or batch, dp_size, done)
        except UserError:
            continue
        resumed += 1
        steps = read_steps(plan, micro, dp_size)
        assert [s for step in steps for s in samples(step)] == stream(num_samples, total)[done["samples"] :]
        assert plan.first_step == done_steps
        assert plan.max_steps == done_steps + len(steps)
        assert plan.position(plan.max_steps) == total
    assert resumed > before.max_steps


def test_plan_knows_what_the_shards_of_each_step_read() -> None:
    """A position says which samples they are, so that a bad step can be named: by epoch and index, in this order."""
    plan = sampler.make_plan(37, SEED, 0, 9, 24, 12, 3, {"step": 2, "samples": 30})
    for step, read in enumerate(read_steps(plan, 4, 3), start=3):
        epochs, indices = plan.samples(plan.position(step - 1), plan.position(step))
        assert list(zip(epochs.tolist(), indices.tolist(), strict=True)) == samples(read), step
    epochs, indices = plan.samples(35, 39)
    assert epochs.tolist() == [0, 0, 1, 1], "the fourth step went over the end of an epoch"
    assert [part.size for part in plan.samples(30, 30)] == [0, 0]


def test_position_stops_at_the_end() -> None:
    plan = sampler.make_plan(37, SEED, 1, 0, 10, 10, 2, {})
    assert [plan.position(step) for step in range(6)] == [0, 10, 20, 30, 37, 37]


def test_nothing_is_left_of_a_finished_training() -> None:
    plan = sampler.make_plan(37, SEED, 1, 0, 10, 10, 2, {"step": 4, "samples": 37})
    assert (plan.first_step, plan.max_steps) == (4, 4)
    assert not list(sampler.training_requests(plan, 0))
    plan = sampler.make_plan(37, SEED, 0, 3, 10, 10, 2, {"step": 5, "samples": 50})
    assert plan.position(5) == 50
    assert not list(sampler.training_requests(plan, 0))


def test_last_step_too_small_for_batchnorm() -> None:
    with pytest.raises(
        UserError, match=r"--epochs 1 of 33 samples leaves 3 .* too few for 2 ranks in micro_batches of 10"
    ):
        sampler.make_plan(33, SEED, 1, 0, 10, 10, 2, {}, least=2)
    assert sampler.make_plan(34, SEED, 1, 0, 10, 10, 2, {}, least=2).max_steps == 4  # 4 samples left: 2 each
    assert sampler.make_plan(30, SEED, 1, 0, 10, 10, 2, {}, least=2).max_steps == 3  # none left


def test_proposed_length_is_accepted() -> None:
    """Taking the advice gives the steps before the refused one: also when there are none, and after a resume."""
    refusals = []
    cases = itertools.product(range(1, 40), (4, 8, 12), (1, 2, 4), ({}, {"step": 2, "samples": 7}))
    for num_samples, batch, dp_size, done in cases:
        if batch < 2 * dp_size:
            continue  # no length helps
        try:
            sampler.make_plan(num_samples, SEED, 1, 0, batch, batch, dp_size, done, least=2)
        except UserError as error:
            refusals.append((str(error), num_samples, batch, dp_size, done))
    assert len(refusals) > 50
    for told, num_samples, batch, dp_size, done in refusals:
        advice = re.search(r"--max-steps (\d+)", told)
        if advice:  # a set that is too small for a single step has none
            plan = sampler.make_plan(num_samples, SEED, 1, int(advice[1]), batch, batch, dp_size, done, least=2)
            assert plan.max_steps - plan.first_step == (num_samples - done.get("samples", 0)) // batch, told
        else:
            assert num_samples < batch, told


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 30, 64])
def test_evaluation_counts_each_sample_once(num_samples: int) -> None:
    for dp_size, global_micro_batch_size in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 6, 16, 100)):
        plan = sampler.make_plan(99, SEED, 0, 1, global_micro_batch_size, global_micro_batch_size, dp_size, {}, least=0)
        of_ranks = [list(sampler.evaluation_requests(plan, num_samples, i)) for i in range(dp_size)]
        read: list[int] = []
        micro_batches = list(zip(*of_ranks, strict=True))
        for i, requests in enumerate(micro_batches):
            lengths = [len(request.indices) for request in requests]
            assert max(lengths) - min(lengths) <= 1
            assert sum(lengths) <= global_micro_batch_size
            assert {request.last for request in requests} == {i == len(micro_batches) - 1}
            assert {request.step_samples for request in requests} == {num_samples}
            for request in requests:
                assert request.epochs.shape == request.indices.shape
                read += request.indices.tolist()
        assert read == list(range(num_samples)), (dp_size, global_micro_batch_size)
        assert len(micro_batches) == -(-num_samples // global_micro_batch_size)


def test_divide_batch() -> None:
    assert sampler.divide_batch(128, 0, 4) == 128  # one pass, 32 samples on each of 4
    assert sampler.divide_batch(128, 16, 4) == 64  # two micro_batches
    assert sampler.divide_batch(128, 32, 4) == 128
    assert sampler.divide_batch(128, 32, 3) == 96  # at most: two micro_batches of 64
    assert sampler.divide_batch(8, 16, 1) == 8
    assert sampler.divide_batch(7, 0, 7) == 7
    with pytest.raises(UserError, match=r"--global-batch-size 10 does not divide by 4 ranks: 12 would"):
        sampler.divide_batch(10, 0, 4)
    with pytest.raises(UserError, match=r"--global-batch-size 2 does not divide by 3 ranks: 3 would"):
        sampler.divide_batch(2, 8, 3)


def test_every_batch_is_divided_or_one_is_proposed() -> None:
    """No pass of an accepted batch is larger than asked for, none is empty on a rank, and their number is the least."""
    refused = 0
    for batch, micro, dp_size in itertools.product(range(1, 40), range(6), range(1, 6)):
        try:
            global_micro_batch_size = sampler.divide_batch(batch, micro, dp_size)
        except UserError as error:
            refused += 1
            proposed = int(re.findall(r"(\d+) would", str(error))[0])
            assert batch < proposed < batch + dp_size, "the next one that divides"
            assert sampler.divide_batch(proposed, micro, dp_size)
            continue
        bounds = [
            [*sampler.micro_batches(0, batch, global_micro_batch_size, dp_rank, dp_size)] for dp_rank in range(dp_size)
        ]
        assert len(bounds[0]) == (-(-batch // (micro * dp_size)) if micro else 1)
        for first, end in itertools.chain(*bounds):
            assert end - first <= (micro or batch // dp_size)
            assert end - first >= (batch // len(bounds[0])) // dp_size
    assert refused > 100


def test_permutation() -> None:
    orders = {(s, e): sampler.permutation(64, s, e).tolist() for s in range(5) for e in range(5)}
    assert all(sorted(order) == list(range(64)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 25, "each seed and epoch has an order of its own"
    assert sampler.permutation(64, 2, 3).tolist() == orders[2, 3]
    # As it is today, and as every checkpoint's position relies on.
    assert sampler.permutation(10, 0, 0).tolist() == [2, 9, 5, 7, 8, 4, 6, 0, 1, 3]


def test_permutation_has_no_favourites() -> None:
    """Over many epochs each sample comes first, in the middle and last about equally often."""
    places = np.stack([np.argsort(sampler.permutation(8, 0, epoch)) for epoch in range(4000)])
    counts = np.stack([np.bincount(places[:, sample], minlength=8) for sample in range(8)])
    assert np.abs(counts - 500).max() < 110  # 5 standard deviations
