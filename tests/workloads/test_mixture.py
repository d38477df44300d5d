"""The order of a mixture, against one that is dealt sample by sample, on any number of ranks and after any stop."""

import functools
import json
import math
import tracemalloc
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from common import UserError, seed
from common.train import sampler
from common.workloads import mixture

SIZES = {"code": 7, "web": 40, "books": 1}
WEIGHTS = {"code": "0.3", "web": "0.6", "books": "0.1"}
BATCH = 6


class Mixed:
    """A set of samples of three sources, as `sampler.make_plan` takes it."""

    def __init__(self, **weights: str) -> None:
        given = WEIGHTS | weights
        self.sources = [mixture.Source(name, size, Fraction(given[name])) for name, size in SIZES.items()]

    def __len__(self) -> int:
        return sum(SIZES.values())

    def make_order(self, run_seed: int, progress: dict[str, Any]) -> mixture.Mixture:
        return mixture.continued(self.sources, run_seed, progress)


def plan_of(
    mixed: Mixed, dp_size: int, micro: int = 0, steps: int = 40, run_seed: int = 3, **progress: Any
) -> sampler.Plan:
    division = sampler.divide_batch(BATCH, micro, dp_size)
    return sampler.make_plan(division, mixed, run_seed=run_seed, max_steps=steps, progress=progress)


def steps_of(mixed: Mixed, dp_size: int, stop_after: int, micro: int = 0, **progress: Any) -> list[list]:
    """Epoch and index of the samples of each step, of all ranks."""
    plan = plan_of(mixed, dp_size, micro, stop_after, **progress)
    found: list[list] = [[] for _ in range(plan.first_step, stop_after)]
    for rank in range(dp_size):
        step = 0
        for request in sampler.training_requests(plan, rank):
            if step == len(found):
                break
            found[step] += zip(request.epochs.tolist(), request.indices.tolist(), strict=True)
            step += request.last
    return [sorted(step) for step in found]


def saved(mixed: Mixed, after: int, **progress: Any) -> dict[str, Any]:
    """What the checkpoint of a step keeps, as JSON gives it back."""
    plan = plan_of(mixed, 1, steps=10**6, **progress)
    facts: dict[str, Any] = json.loads(json.dumps(order_in(plan).facts()))
    return facts | {"step": after, "samples": plan.position(after)}


def order_in(plan: sampler.Plan) -> mixture.Mixture:
    assert isinstance(plan.order, mixture.Mixture)
    return plan.order


def dealt_one_by_one(steps: int, stages: dict[int, dict[str, str]], run_seed: int = 3) -> list[tuple[int, int]]:
    """Epoch and index of the samples, as one would deal them for one process, with counters instead of formulas."""
    firsts = dict(zip(SIZES, np.cumsum([0, *SIZES.values()]).tolist(), strict=False))
    read: Counter = Counter()
    found = []
    for position in range(steps * BATCH):
        if position % BATCH == 0 and position // BATCH in stages:
            tenths = {name: int(10 * float(weight)) for name, weight in stages[position // BATCH].items()}
            divisor = math.gcd(*tenths.values())
            shares = {name: share // divisor for name, share in tenths.items() if share}
            names = sorted(shares, key=lambda name: (-shares[name], name))
            wholes = {name: sum(shares[one] for one in names[i:]) for i, name in enumerate(names)}
            due = {name: seed.mix_ints(run_seed, seed.MIXTURE, i) % wholes[name] for i, name in enumerate(names)}
        for name in names:
            due[name] += shares[name]
            if due[name] >= wholes[name]:
                due[name] -= wholes[name]
                break
        epoch, offset = divmod(read[name], SIZES[name])
        read[name] += 1
        found.append((epoch, firsts[name] + order_of(name, run_seed, epoch)[offset]))
    return found


@functools.cache
def order_of(name: str, run_seed: int, epoch: int) -> list[int]:
    key = seed.mix(run_seed, seed.MIXTURE, mixture._key(name), epoch)
    return sampler.permuted(SIZES[name], key, np.arange(SIZES[name])).tolist()


def in_steps(samples: list[tuple[int, int]]) -> list[list]:
    return [sorted(samples[i : i + BATCH]) for i in range(0, len(samples), BATCH)]


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_the_same_samples_on_any_number_of_ranks(dp_size: int, micro: int) -> None:
    wanted = dealt_one_by_one(40, {0: WEIGHTS})
    plan = plan_of(Mixed(), 1)
    assert list(zip(*(part.tolist() for part in plan.samples(0, 240)), strict=True)) == wanted
    assert steps_of(Mixed(), dp_size, 40, micro) == in_steps(wanted)


def test_a_stop_at_any_step_and_other_ranks() -> None:
    wanted = in_steps(dealt_one_by_one(40, {0: WEIGHTS}))
    for stop in range(1, 40):
        progress = saved(Mixed(), stop)
        for dp_size in (1, 2, 4):
            assert steps_of(Mixed(), dp_size, min(40, stop + 4), 2, **progress) == wanted[stop : stop + 4]


@pytest.mark.parametrize("stop", [1, 7, 20, 39])
def test_other_weights_count_from_the_resume_on(stop: int, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"code": "2", "web": "1", "books": "0"}
    wanted = in_steps(dealt_one_by_one(40, {0: WEIGHTS, stop: other}))
    progress = saved(Mixed(), stop)
    for dp_size in (1, 2, 4):
        assert steps_of(Mixed(**other), dp_size, 40, 1, **progress) == wanted[stop:]
    said = f"mixed from sample {6 * stop} on: code 0.6667, web 0.3333, books 0; before: code 0.3, web 0.6, books 0.1"
    assert said in capsys.readouterr().out
    # Once more, with the weights of the beginning: three stages, of which the record tells.
    later = saved(Mixed(**other), 40, **progress)
    assert [stage[:2] for stage in later["mixture"]] == [
        [0, {name: float(weight) for name, weight in WEIGHTS.items()}],
        [6 * stop, {name: float(weight) for name, weight in other.items()}],
    ]
    wanted = in_steps(dealt_one_by_one(60, {0: WEIGHTS, stop: other, 40: WEIGHTS}))
    assert steps_of(Mixed(), 2, 60, **later) == wanted[40:]


def test_weights_that_are_the_same_are_no_change(capsys: pytest.CaptureFixture[str]) -> None:
    progress = saved(Mixed(), 5)
    assert steps_of(Mixed(code="3", web="6", books="1.0"), 2, 40, **progress) == steps_of(Mixed(), 1, 40)[5:]
    assert capsys.readouterr().out == ""


def test_sources_that_come_and_go() -> None:
    """Their epochs go on where they were, also after a time without them."""
    mixed = Mixed()
    gone = Mixed()
    gone.sources = gone.sources[1:]
    middle = saved(gone, 20, **saved(mixed, 10))
    read = order_in(plan_of(mixed, 1, **middle)).read(120)
    assert read["code"] == order_in(plan_of(mixed, 1)).read(60)["code"]
    assert sum(read.values()) == 120


def test_whole_epochs_of_each_source() -> None:
    plan = plan_of(Mixed(), 1)
    epochs, indices = plan.samples(0, 3000)
    first = 0
    for size in SIZES.values():
        own = (indices >= first) & (indices < first + size)
        assert (np.diff(epochs[own]) >= 0).all(), "an epoch begins when the one before has ended"
        orders = [indices[own & (epochs == epoch)].tolist() for epoch in range(epochs[own].max())]
        assert all(sorted(order) == list(range(first, first + size)) for order in orders)
        assert size == 1 or len({*map(tuple, orders)}) > 0.9 * len(orders)
        first += size


def test_the_seed_and_the_name_decide_the_order() -> None:
    one, other = (plan_of(Mixed(), 1, run_seed=run_seed).samples(0, 240)[1] for run_seed in (3, 4))
    assert (one != other).mean() > 0.5
    turned = Mixed()
    turned.sources = turned.sources[::-1]
    found = []
    for mixed in (Mixed(), turned):
        order = order_in(plan_of(mixed, 1))
        firsts = np.cumsum([0, *(source.size for source in order.sources)])
        _, indices = order.samples(np.arange(240))
        source = np.searchsorted(firsts, indices, "right") - 1
        found.append([(order.sources[s].name, i - firsts[s]) for s, i in zip(source, indices, strict=True)])
    assert found[0] == found[1]


def test_shares() -> None:
    """After any number of samples, each source has its share, give or take what roundings add up to."""
    for number in range(60):
        size = 1 + seed.mix_ints(number, 0) % 12
        shares = sorted((1 + seed.mix_ints(number, 1, i) % 10 ** (1 + number % 4) for i in range(size)), reverse=True)
        positions = np.arange(5000)
        chosen, before = mixture.deal(shares, number, positions)
        for i, share in enumerate(shares):
            counts = np.concatenate([[0], np.cumsum(chosen == i)])
            assert before[chosen == i].tolist() == list(range(counts[-1]))
            off = counts - np.arange(5001) * share / sum(shares)
            assert abs(off).max() <= 1 + math.log(size), (shares, i)
            assert [mixture.count(shares, number, n)[i] for n in (0, 1, 77, 5000)] == counts[[0, 1, 77, 5000]].tolist()


def test_far_positions() -> None:
    """As exact as integers of any size, where 64 bits would not hold the product."""
    shares = [999_999_999, 999_999_937, 7]
    for position in (10**15, 10**15 + 1, 2**62):
        left = position
        for i in range(3):
            total = sum(shares[i:])
            wanted = (left * shares[i] + seed.mix_ints(5, seed.MIXTURE, i) % total) // total
            assert mixture.count(shares, 5, position)[i] == wanted
            left -= wanted
        assert left == 0


def test_five_million_samples_without_memory() -> None:
    """Of positions far behind, only what is asked for is computed."""
    mixed = Mixed()
    mixed.sources = [one._replace(size=one.size * 10**7) for one in mixed.sources]
    progress = saved(mixed, 5_000_000 // BATCH)
    tracemalloc.start()
    plan = plan_of(mixed, 1, steps=10**6, **progress)
    epochs, indices = plan.samples(plan.start, plan.start + 64)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**18
    shares = np.histogram(indices, np.cumsum([0, *(one.size for one in mixed.sources)]))[0] / 64
    assert shares == pytest.approx([0.3, 0.6, 0.1], abs=2 / 64)
    assert epochs.max() == 0
    # None comes twice before the end of an epoch.
    assert len(np.unique(plan.samples(4_900_000, 5_000_000)[1])) == 100_000


def test_too_many_digits() -> None:
    with pytest.raises(UserError, match=r"the weights code 0\.1499, web 0\.7286, books 0\.1214 have too many digits"):
        plan_of(Mixed(code="0.12345678901"), 1)
