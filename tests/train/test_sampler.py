"""Which samples are read when: the stream depends on (seed, epoch) alone, whatever ranks, micro-batches and stops.

Every claim is checked for all combinations of a few awkward sizes.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
import torch
from common import UserError, seed
from common.train import sampler
from common.train.sampler import Request

SEED = 3
NUM_SAMPLES = (5, 37, 64)
# (batch, micro, dp_size) that divide_batch accepts: one micro-batch a step (micro 0) or up to four.
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


def make_plan(
    num_samples: int,
    division: tuple[int, int, int],
    *,
    epochs: int = 0,
    max_steps: int = 0,
    progress: Mapping[str, int] | None = None,
    least: int = 1,
) -> sampler.Plan:
    """A plan for (batch, micro, dp_size), of a model that needs `least` samples on each rank."""
    plan = sampler.make_plan(
        sampler.divide_batch(*division),
        num_samples,
        run_seed=SEED,
        epochs=epochs,
        max_steps=max_steps,
        progress=progress or {},
    )
    sampler.check_min_samples(plan, least)
    return plan


def read_steps(plan: sampler.Plan) -> list[list[list[Request]]]:
    """Requests of all dp ranks as [step][micro-batch][dp_rank]."""
    of_ranks = [list(sampler.training_requests(plan, dp_rank)) for dp_rank in range(plan.division.dp_size)]
    steps: list[list[list[Request]]] = [[]]
    for requests in zip(*of_ranks, strict=True):  # strict: all ranks make the same number of micro-batches
        steps[-1].append(list(requests))
        assert len({request.last for request in requests}) == 1, "ranks disagree on where a step ends"
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
        plan = make_plan(num_samples, (batch, micro, dp_size), max_steps=steps_wanted)
        order = stream(num_samples, steps_wanted * batch)
        steps = read_steps(plan)
        assert len(steps) == steps_wanted
        for t, step in enumerate(steps):
            assert samples(step) == order[t * batch : (t + 1) * batch], (batch, micro, dp_size, t)
            assert {request.step_samples for one in step for request in one} == {batch}
            assert len(step) == plan.division.num_micro_batches == (batch // (micro * dp_size) if micro else 1)
            if micro:
                assert {len(request.indices) for one in step for request in one} == {micro}


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
@pytest.mark.parametrize("epochs", [1, 3])
def test_epochs_read_every_sample_once_each(num_samples: int, epochs: int) -> None:
    accepted = 0
    for batch, micro, dp_size in DIVISIONS:
        try:
            plan = make_plan(num_samples, (batch, micro, dp_size), epochs=epochs)
        except UserError:
            continue
        accepted += 1
        steps = read_steps(plan)
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


def test_no_micro_batch_of_two_or_more_has_a_lone_sample() -> None:
    """BatchNorm over one value per channel raises: what is refused for a step must not happen in a micro-batch."""
    lone = []
    for (batch, micro, dp_size), num_samples in itertools.product(DIVISIONS, range(20, 60)):
        if micro == 1 or batch < 2 * dp_size:
            continue  # the user asked for single samples
        try:
            plan = make_plan(num_samples, (batch, micro, dp_size), epochs=1, least=2)
        except UserError:
            continue
        for one in read_steps(plan)[-1]:
            if min(len(request.indices) for request in one) < 2:
                lone.append(f"{num_samples} samples, batch {batch}, micro {micro}, {dp_size} ranks")
    assert not lone, f"{len(lone)} times, first: {lone[0]}"


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
def test_resume_reads_the_same_rest(num_samples: int) -> None:
    """From every step of a run, with the same and with other ranks, micro-batches and batches."""
    before = make_plan(num_samples, (12, 0, 2), max_steps=9)
    for done_steps, (batch, micro, dp_size) in itertools.product(range(10), DIVISIONS[::4]):
        progress = {"step": done_steps, "samples": before.position(done_steps)}
        assert progress["samples"] == done_steps * 12
        plan = make_plan(num_samples, (batch, micro, dp_size), max_steps=9, progress=progress)
        steps = read_steps(plan)
        assert len(steps) == 9 - done_steps, "max_steps is the length of the whole training"
        end = progress["samples"] + len(steps) * batch
        read = [sample for step in steps for sample in samples(step)]
        assert read == stream(num_samples, end)[progress["samples"] :]
        assert plan.position(9) == end


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
def test_resume_finishes_the_epochs(num_samples: int) -> None:
    total = 3 * num_samples
    before = make_plan(num_samples, (6, 0, 1), epochs=3)
    resumed = 0
    for done_steps, (batch, micro, dp_size) in itertools.product(range(before.max_steps + 1), DIVISIONS[::4]):
        progress = {"step": done_steps, "samples": before.position(done_steps)}
        try:
            plan = make_plan(num_samples, (batch, micro, dp_size), epochs=3, progress=progress)
        except UserError:
            continue
        resumed += 1
        steps = read_steps(plan)
        assert [s for step in steps for s in samples(step)] == stream(num_samples, total)[progress["samples"] :]
        assert plan.first_step == done_steps
        assert plan.max_steps == done_steps + len(steps)
        assert plan.position(plan.max_steps) == total
    assert resumed > before.max_steps


def test_plan_knows_what_the_ranks_read_in_each_step() -> None:
    """A position says which samples they are, so that a bad step can be named: by epoch and index, in this order."""
    plan = make_plan(37, (24, 4, 3), max_steps=9, progress={"step": 2, "samples": 30})
    for step, read in enumerate(read_steps(plan), start=3):
        epochs, indices = plan.samples(plan.position(step - 1), plan.position(step))
        assert list(zip(epochs.tolist(), indices.tolist(), strict=True)) == samples(read), step
    epochs, indices = plan.samples(35, 39)
    assert epochs.tolist() == [0, 0, 1, 1], "the fourth step went over the end of an epoch"
    assert [part.size for part in plan.samples(30, 30)] == [0, 0]


def test_position_stops_at_the_end() -> None:
    plan = make_plan(37, (10, 0, 2), epochs=1)
    assert [plan.position(step) for step in range(6)] == [0, 10, 20, 30, 37, 37]


def test_nothing_is_left_of_a_finished_training() -> None:
    plan = make_plan(37, (10, 0, 2), epochs=1, progress={"step": 4, "samples": 37})
    assert (plan.first_step, plan.max_steps) == (4, 4)
    assert not list(sampler.training_requests(plan, 0))
    plan = make_plan(37, (10, 0, 2), max_steps=3, progress={"step": 5, "samples": 50})
    assert plan.position(5) == 50
    assert not list(sampler.training_requests(plan, 0))


def test_plan_without_samples() -> None:
    """As of PPO, whose environments make them: it counts steps and samples, and has no epochs and no set to name."""
    plan = make_plan(0, (1024, 64, 4), max_steps=9, progress={"step": 2, "samples": 2048})
    assert plan.epoch_steps == 9, "an evaluation that is due once an epoch is due at the end"
    assert [plan.position(step) for step in (2, 3, 9, 10)] == [2048, 3072, 9216, 9216]
    assert str(plan) == "steps 3 to 9, 1,024 samples per step (4 data-parallel ranks x 4 micro-batches x 64 samples)"


@pytest.mark.parametrize(
    ("division", "num_micro_batches", "micro_batch_size", "text"),
    [
        ((128, 128, 1), 1, 128, "1 data-parallel rank x 1 micro-batch x 128 samples"),
        ((128, 128, 4), 1, 32, "4 data-parallel ranks x 1 micro-batch x 32 samples"),
        ((8192, 64, 4), 128, 16, "4 data-parallel ranks x 128 micro-batches x 16 samples"),
        ((128, 96, 3), 2, 32, "3 data-parallel ranks x 2 micro-batches x up to 32 samples"),  # 22, 21, 21
        ((7, 7, 2), 1, 4, "2 data-parallel ranks x 1 micro-batch x up to 4 samples"),
        ((64, 32, 2, "minibatch"), 2, 16, "2 data-parallel ranks x 2 minibatches x 16 samples"),
    ],
)
def test_division_in_numbers_and_words(
    division: tuple[int, int, int], num_micro_batches: int, micro_batch_size: int, text: str
) -> None:
    """What is derived from --micro-batch-size is printed, and is what `micro_batches` gives out."""
    found = sampler.Division(*division)
    assert (found.num_micro_batches, found.micro_batch_size) == (num_micro_batches, micro_batch_size)
    assert str(found) == text
    bounds = [[*sampler.micro_batches(0, division[0], found, dp_rank)] for dp_rank in range(division[2])]
    assert {len(of_rank) for of_rank in bounds} == {num_micro_batches}
    assert max(end - first for first, end in itertools.chain(*bounds)) <= micro_batch_size


def test_plan_in_words() -> None:
    plan = make_plan(12345, (10, 0, 2), max_steps=30)
    samples = "10 samples per step (2 data-parallel ranks x 1 micro-batch x 5 samples); 12,345 training samples"
    assert str(plan) == f"steps 1 to 30, {samples}"
    assert str(dataclasses.replace(plan, first_step=7)) == f"steps 8 to 30, {samples}"
    assert str(dataclasses.replace(plan, first_step=30)) == "training is complete: step 30 of 30 is done"
    assert str(dataclasses.replace(plan, first_step=31)) == "training is complete: step 31 of 30 is done"


def test_last_step_too_small_for_batchnorm() -> None:
    with pytest.raises(
        UserError,
        match=r"^the last step of --epochs has 3 of 33 samples: in micro-batches of up to 5, a rank ",
    ):
        make_plan(33, (10, 0, 2), epochs=1, least=2)
    assert make_plan(34, (10, 0, 2), epochs=1, least=2).max_steps == 4  # 4 samples left: 2 each
    assert make_plan(30, (10, 0, 2), epochs=1, least=2).max_steps == 3  # none left


def test_every_step_too_small_for_batchnorm() -> None:
    """Whichever flag makes it so: the smallest micro-batch of a step counts."""
    told = r"^--global-batch-size {} gives a rank only 1 of the 2 samples that this model needs per micro-batch"
    for division in ((2, 0, 2), (4, 1, 2), (10, 2, 2)):  # 10 = 4 + 3 + 3
        assert make_plan(99, division, max_steps=5).max_steps == 5, "a model without BatchNorm needs one"
        with pytest.raises(UserError, match=told.format(division[0])):
            make_plan(99, division, max_steps=5, least=2)
    assert make_plan(99, (12, 2, 2), max_steps=5, least=2).max_steps == 5


def test_samples_of_a_gpu_are_as_torch_deals_them() -> None:
    """Of every micro-batch of every rank; nn.DataParallel deals each by torch.chunk: 9 over 8 as 2, 2, 2, 2 and 1."""
    for samples, micro, dp_size, num_devices in itertools.product(range(1, 40), (0, 3, 8), (1, 2), (1, 2, 3, 8)):
        division = sampler.Division(40, (micro or 40) * dp_size, dp_size)
        parts = [
            stop - start
            for dp_rank in range(dp_size)
            for start, stop in sampler.micro_batches(0, samples, division, dp_rank)
        ]
        wanted = min(len(chunk) for part in parts for chunk in torch.empty(part).chunk(num_devices))
        assert sampler.fewest(samples, division, num_devices) == wanted, (samples, micro, dp_size, num_devices)


def test_proposed_length_is_accepted() -> None:
    """Taking the advice gives the steps before the refused one: also when there are none, and after a resume."""
    refusals = []
    cases = itertools.product(range(1, 40), (4, 8, 12), (1, 2, 4), ({}, {"step": 2, "samples": 7}))
    for num_samples, batch, dp_size, progress in cases:
        if batch < 2 * dp_size:
            continue  # no length helps
        try:
            make_plan(num_samples, (batch, 0, dp_size), epochs=1, progress=progress, least=2)
        except UserError as error:
            refusals.append((str(error), num_samples, batch, dp_size, progress))
    assert len(refusals) > 50
    for told, num_samples, batch, dp_size, progress in refusals:
        advice = re.search(r"--max-steps (\d+)", told)
        if advice:  # a set that is too small for a single step has none
            plan = make_plan(num_samples, (batch, 0, dp_size), max_steps=int(advice[1]), progress=progress, least=2)
            assert plan.max_steps - plan.first_step == (num_samples - progress.get("samples", 0)) // batch, told
        else:
            assert num_samples < batch, told


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 30, 64])
def test_evaluation_counts_each_sample_once(num_samples: int) -> None:
    for dp_size, global_micro_batch_size in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 6, 16, 100)):
        division = sampler.Division(global_micro_batch_size, global_micro_batch_size, dp_size)
        plan = sampler.make_plan(division, 99, run_seed=SEED, epochs=0, max_steps=1, progress={})
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
    def micro(*division: int) -> int:
        found = sampler.divide_batch(*division)
        assert (found.global_batch_size, found.dp_size) == (division[0], division[2])
        return found.global_micro_batch_size

    assert micro(128, 0, 4) == 128  # one micro-batch, 32 samples on each of 4
    assert micro(128, 16, 4) == 64  # two micro-batches
    assert micro(128, 32, 4) == 128
    assert micro(128, 32, 3) == 96  # at most: two micro-batches of 64
    assert micro(8, 16, 1) == 8
    assert micro(7, 0, 7) == 7
    with pytest.raises(UserError, match=r"--global-batch-size 10 does not divide by 4 data-parallel ranks: use 12"):
        sampler.divide_batch(10, 0, 4)
    with pytest.raises(UserError, match=r"--global-batch-size 2 does not divide by 3 data-parallel ranks: use 3"):
        sampler.divide_batch(2, 8, 3)


def test_every_batch_is_divided_or_one_is_proposed() -> None:
    """No micro-batch is larger than asked for, none is empty on a rank, and their number is the least."""
    refused = 0
    for batch, micro, dp_size in itertools.product(range(1, 40), range(6), range(1, 6)):
        try:
            division = sampler.divide_batch(batch, micro, dp_size)
        except UserError as error:
            refused += 1
            proposed = int(re.findall(r"use (\d+)", str(error))[0])
            assert batch < proposed < batch + dp_size, "the next one that divides"
            assert sampler.divide_batch(proposed, micro, dp_size)
            continue
        bounds = [[*sampler.micro_batches(0, batch, division, dp_rank)] for dp_rank in range(dp_size)]
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


# --- the order of a large set, which is never in memory ---


def permuted(num_samples: int, key: int) -> np.ndarray:
    return sampler.permuted(num_samples, seed.mix(key), np.arange(num_samples))


def shuffled(num_samples: int, key: int) -> np.ndarray:
    """NumPy's, to compare with."""
    return np.random.default_rng(key).permutation(num_samples)


def hash_own_digit(numbers: np.ndarray, key: np.ndarray, high_base: np.uint64, low_base: np.uint64) -> np.ndarray:
    """A mutant of `_place`: it changes a digit by a hash of itself, so two numbers can come to one place."""
    high, low = np.divmod(numbers, low_base)
    return (high + seed.mix(key, high) % high_base) % high_base * low_base + low


def not_permuted(sizes: Iterable[int]) -> list[int]:
    return [size for size in sizes if not np.array_equal(np.sort(permuted(size, size)), np.arange(size))]


def test_large_order_has_each_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_permuted(range(1, 3001)) == []
    last = np.arange(2**40 - 3, 2**40 - 1)
    found = sampler.permuted(2**40 - 1, seed.mix(0), last)
    assert len({*found.tolist()}) == 2
    assert found.max() < 2**40 - 1
    monkeypatch.setattr(sampler, "_place", hash_own_digit)
    squares = [49, 64, 81]  # nothing is outside of them, where such a mutant could walk for ever
    assert not_permuted(squares) == squares, "the mutant is found"


def excess(permute: Callable[[int, int], np.ndarray]) -> float:
    """How far samples' places and pairs are from equally often, over 6,000 keys: standard deviations of chi-square."""
    orders = np.stack([permute(12, key) for key in range(6000)])
    sizes, values = [], []
    for sample in range(12):
        sizes.append(12)
        values.append(orders[:, sample])
    for one, other in itertools.combinations((0, 1, 2, 5, 6, 11), 2):
        first, second = orders[:, one], orders[:, other]
        sizes.append(132)
        values.append(first * 11 + second - (second > first))
    worst = 0.0
    for size, value in zip(sizes, values, strict=True):
        expected = len(value) / size
        chi_square = float(((np.bincount(value, minlength=size) - expected) ** 2).sum() / expected)
        worst = max(worst, (chi_square - (size - 1)) / math.sqrt(2 * (size - 1)))
    return worst


def test_large_order_is_as_random_as_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert excess(shuffled) < 5
    assert excess(permuted) < 5
    monkeypatch.setattr(sampler, "ROUNDS", 2)
    assert excess(permuted) > 50, "the mutant of two rounds is found"


def test_order_of_a_large_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked at once, and nothing is sorted for it."""
    small = make_plan(100, (7, 0, 1), epochs=3)
    assert np.array_equal(small.samples(0, 100)[1], sampler.permutation(100, SEED, 0))
    monkeypatch.setattr(sampler, "MOST_SORTED", 99)
    monkeypatch.setattr(sampler, "permutation", lambda *_: pytest.fail("it was sorted"))
    plan = make_plan(100, (7, 0, 1), epochs=3)
    epochs, indices = plan.samples(0, 300)
    orders = indices.reshape(3, 100)
    assert np.array_equal(epochs, np.repeat([0, 1, 2], 100))
    assert np.array_equal(np.sort(orders), np.tile(np.arange(100), (3, 1)))
    assert len({tuple(order) for order in orders.tolist()}) == 3
    for start, stop in ((0, 1), (98, 103), (150, 290), (7, 7)):
        assert np.array_equal(plan.samples(start, stop)[1], indices[start:stop])
    # As it is today, and as every checkpoint's position relies on.
    assert sampler.ordered(100, 0, 0, np.arange(8)).tolist() == [9, 62, 60, 26, 18, 24, 64, 42]


def test_older_checkpoint_within_an_epoch_of_a_large_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its epoch would go on in another order: some samples twice, others never."""
    old = {"format": 1, "step": 3, "samples": 21}
    monkeypatch.setattr(sampler, "MOST_SORTED", 99)
    with pytest.raises(UserError, match=r"step 3 is in the middle of an epoch of 100 samples, .* of more than 99 has"):
        make_plan(100, (7, 0, 1), epochs=3, progress=old)
    for progress in (old | {"format": 2}, old | {"samples": 200}):
        make_plan(100, (7, 0, 1), epochs=3, progress=progress)
    make_plan(99, (7, 0, 1), epochs=3, progress=old)
