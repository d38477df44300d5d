"""The learning rate: Goyal's scaling, a warm-up without a jump, a cosine that ends at zero."""

import itertools

import pytest
import torch
from common.train import schedule


def test_linear_scaling_as_in_goyal() -> None:
    # "0.1 * kn / 256": their ImageNet run of 8,192 images a step peaks at 3.2.
    assert schedule.linear_scaling(0.1, 8192, 256) == pytest.approx(3.2, rel=1e-12)
    assert schedule.linear_scaling(0.1, 256, 256) == 0.1
    assert schedule.linear_scaling(0.2, 64, 256) == pytest.approx(0.05, rel=1e-12)


@pytest.mark.parametrize("warmup_steps", [1, 5, 30])
def test_warmup_climbs_evenly_and_meets_the_cosine_at_one(warmup_steps: int) -> None:
    factors = [schedule.warmup_cosine(step, warmup_steps, 100) for step in range(warmup_steps + 1)]
    rises = [after - before for before, after in zip([0.0, *factors], factors, strict=False)]
    assert rises == pytest.approx([1 / (warmup_steps + 1)] * (warmup_steps + 1), rel=1e-9)
    assert factors[-1] == 1.0
    # The cosine starts flat: no jump on the other side either.
    assert 0.99 < schedule.warmup_cosine(warmup_steps + 1, warmup_steps, 100) < 1


def test_cosine_falls_through_half_to_zero() -> None:
    factors = [schedule.warmup_cosine(step, 20, 120) for step in range(20, 121)]
    assert all(after < before for before, after in itertools.pairwise(factors))
    assert factors[25] == pytest.approx(0.5 + 0.5**1.5, rel=1e-12)  # cos(45 degrees)
    assert factors[50] == pytest.approx(0.5, rel=1e-12)
    assert factors[99] > 0, "the last step still learns"
    assert factors[100] == pytest.approx(0, abs=1e-15)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert schedule.warmup_cosine(0, 0, 10) == 1.0


@pytest.mark.parametrize(("warmup_steps", "max_steps"), [(30, 10), (10, 10), (0, 1), (1, 1)])
def test_trainings_shorter_than_their_warmup(warmup_steps: int, max_steps: int) -> None:
    factors = [schedule.warmup_cosine(step, warmup_steps, max_steps) for step in range(max_steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors == sorted(factors)


def make_groups() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """Two parameters; the second group's peak rate is a tenth of the first one's, as for an output layer."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0, "lr": 0.05}]
    return weights, torch.optim.SGD(groups, lr=0.5)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_scale_rates_keeps_the_ratio_of_the_groups() -> None:
    """And nothing but the rates changes; the next step uses them."""
    weights, optimizer = make_groups()
    assert schedule.scale_rates(optimizer, 0.5) == 0.25, "the first group's"
    assert rates(optimizer) == [0.25, 0.025]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    assert [weight.tolist() for weight in weights] == [pytest.approx([0.725] * 2), pytest.approx([0.975] * 2)]


def test_scale_rates_starts_from_the_peak_each_time() -> None:
    """Factors do not multiply up, and 0 is not the end."""
    _, optimizer = make_groups()
    for factor in (0.5, 0.0, 1.0, 0.5):
        assert schedule.scale_rates(optimizer, factor) == 0.5 * factor
        assert rates(optimizer) == [0.5 * factor, 0.05 * factor]


def test_scale_rates_shares_the_peak_with_schedulers_of_torch() -> None:
    """An adopter's scheduler has noted the peak already, and has changed the rate since."""
    _, optimizer = make_groups()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert rates(optimizer) == [0.25, 0.025]
    schedule.scale_rates(optimizer, 1.0)
    assert rates(optimizer) == [0.5, 0.05]
